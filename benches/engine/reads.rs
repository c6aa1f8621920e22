//! What operators ask, through the API as they ask it: over TLS, with a token.

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::ExposeSecret as _;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::bmdb::metrics::Metrics;
use shepherd::bmdb::orders::credential::NewAccessCredential;
use shepherd::bmdb::orders::order::{Actor, Order, request_digest};
use shepherd::model::access::{AccessRole, AccessScope};
use shepherd::proto::fleet::v1;
use shepherd::proto::fleet::v1::machines_client::MachinesClient;
use shepherd::proto::fleet::v1::statistics_client::StatisticsClient;
use shepherd::server::api::listener::api_server::{ApiServer, ApiSettings, serve_api};
use shepherd::server::api::listener::auth::ApiRates;
use shepherd::server::tls::server_certificate::{CertificateSource, RenewalClock};
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

use crate::Plan;
use crate::fleet::Fleet;
use crate::report::{Report, Target, progress, quantile};

/// Machines on a page.
const PAGE: i32 = 100;
/// Machines of the fleet that have a label, a place and a hold of their own.
const MARKED: i64 = 200;

/// Some machines that selectors find: spread over the fleet, so that a page of them is not found at its beginning.
const MARK: &str = "
    WITH marked AS (
        SELECT machine_id FROM bench_machine
        WHERE n % GREATEST((SELECT count(*) FROM bench_machine) / $1, 1) = 0),
    located_machine AS (
        UPDATE machine_provided SET location = 'row 7' WHERE machine_id IN (SELECT machine_id FROM marked)),
    labelled AS (
        INSERT INTO machine_labels (machine_id, labels) SELECT machine_id, '{\"row\": \"7\"}' FROM marked
        ON CONFLICT DO NOTHING)
    INSERT INTO machine_hold (machine_id, scope, reason, held_by, held_at)
    SELECT machine_id, 'power', 'measured', 'bench', now() FROM marked
    ON CONFLICT DO NOTHING";

/// An API and somebody who asks it.
pub(crate) struct ApiFixture {
    pub(crate) server: ApiServer,
    pub(crate) stop: CancellationToken,
    /// The CA of every listener of the fleet is sealed with it.
    pub(crate) key: Arc<SecretsKey>,
    endpoint: Endpoint,
    channel: Channel,
    token: MetadataValue<Ascii>,
    _directory: tempfile::TempDir,
}

impl ApiFixture {
    /// Starts an API with these limits on connections.
    pub(crate) async fn start(fleet: &Fleet, limits: GateLimits) -> Result<Self> {
        // What the server of the real agents sealed went with its key.
        sqlx::query("DELETE FROM sealed_secret").execute(fleet.bmdb.pool()).await?;
        let directory = tempfile::tempdir()?;
        let key = Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?);
        let rate = || "1ms,10000".parse();
        let settings = ApiSettings {
            listen_address: SocketAddr::from(([127, 0, 0, 1], 0)),
            endpoints: Vec::new(),
            certificate: CertificateSource::CallbackCa(key.clone()),
            renewal: RenewalClock::default(),
            rates: ApiRates { source: rate()?, credential: rate()? },
            limits,
            max_watches: 20,
            read_pool_connections: 4,
            auth_pool_connections: 2,
            signing: Arc::default(),
        };
        let (stop, metrics) = (CancellationToken::new(), Metrics::new());
        let server =
            serve_api(fleet.bmdb.clone(), fleet.sessions.clone(), settings, metrics, stop.clone()).await?;
        let pem = authority_pem(&server)?;
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem));
        let endpoint = Endpoint::from_shared(format!("https://{}", server.local_addr))?;
        let endpoint = endpoint.tls_config(tls)?;
        let channel = endpoint.connect().await?;
        Ok(Self { server, stop, key, endpoint, channel, token: token(fleet).await?, _directory: directory })
    }

    /// Writes a context of this API for a `shepherdctl` with this home directory.
    pub(crate) fn write_context(&self, home: &Path) -> Result<()> {
        let directory = home.join(".config/shepherd");
        fs::create_dir_all(&directory)?;
        let (authority, token) = (directory.join("bench.ca.pem"), directory.join("bench.token"));
        fs::write(&authority, authority_pem(&self.server)?)?;
        let secret = self.token.to_str()?.strip_prefix("Bearer ").context("a token")?;
        fs::write(&token, secret)?;
        // shepherdctl refuses a token that others can read.
        fs::set_permissions(&token, Permissions::from_mode(0o600))?;
        let context = format!(
            "current = \"bench\"\n[contexts.bench]\nservers = [\"{}\"]\nca_certificate_path = \"{}\"\n\
             token_path = \"{}\"\n",
            self.server.local_addr,
            authority.display(),
            token.display()
        );
        Ok(fs::write(directory.join("contexts.toml"), context)?)
    }

    /// A page of machines over a new connection.
    pub(crate) async fn page_over_new_connection(&self) -> Result<()> {
        let request = v1::ListMachinesRequest { page_size: 1, ..v1::ListMachinesRequest::default() };
        let channel = self.endpoint.connect().await?;
        MachinesClient::new(channel).list(self.with_token(request)).await?;
        Ok(())
    }

    /// A page of machines over the connection that is open.
    pub(crate) async fn page_over_open_connection(&self) -> Result<()> {
        self.page("").await.map(drop)
    }

    /// A request with the token.
    fn with_token<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", self.token.clone());
        request
    }

    /// A page of machines.
    async fn page(&self, selector: &str) -> Result<usize> {
        let request = v1::ListMachinesRequest {
            selector: selector.to_owned(),
            page_size: PAGE,
            ..v1::ListMachinesRequest::default()
        };
        let answer = MachinesClient::new(self.channel.clone()).list(self.with_token(request)).await?;
        Ok(answer.into_inner().machines.len())
    }
}

/// The CA of the server, as PEM.
fn authority_pem(server: &ApiServer) -> Result<String> {
    let authority = server.ca_certificates.first().context("a CA")?;
    Ok(format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(authority)))
}

/// Gives some machines of the fleet a label, a location and a hold. Returns how many have the label.
pub(crate) async fn mark_machines(fleet: &Fleet) -> Result<usize> {
    let mut connection = fleet.patient().await?;
    sqlx::query(MARK).bind(MARKED).execute(&mut *connection).await?;
    let labelled: i64 =
        sqlx::query_scalar("SELECT count(*) FROM machine_labels").fetch_one(&mut *connection).await?;
    connection.close().await?;
    Ok(usize::try_from(labelled)?)
}

async fn token(fleet: &Fleet) -> Result<MetadataValue<Ascii>> {
    let order = Order {
        actor: Actor { name: "bench".to_owned(), credential: None },
        rpc: "bench".to_owned(),
        target: "credential".to_owned(),
        reason: "measured".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    };
    let new = NewAccessCredential {
        name: "bench".to_owned(),
        role: AccessRole::Viewer,
        scope: AccessScope::Fleet,
        expiry: None,
        certificate: None,
    };
    let made = fleet.bmdb.create_credential(order, new).await?;
    let token = made.token.context("a token")?;
    let mut value: MetadataValue<Ascii> = format!("Bearer {}", token.expose_secret()).parse()?;
    value.set_sensitive(true);
    Ok(value)
}

/// What a page is of, and which machines that means.
const SELECTORS: [(&str, &str); 6] = [
    ("all machines", ""),
    ("one phase", "phase=Ready"),
    ("one provider", "provider=rack-3"),
    ("one place", "location=row 7*"),
    ("those that are held", "fact=hold"),
    ("one label", "label.row=7"),
];

/// Measures every question in turns with the others.
pub(crate) async fn measure(plan: &Plan, fleet: &Fleet, report: &mut Report) -> Result<()> {
    report.section(
        "What operators ask",
        "Calls of the API over TLS with a token, one after the other, on the fleet of the sections above. Two hundred of its \
         machines, spread over all of it, are held, have a label and stand at one place. A page has a hundred machines at \
         the most, and ends before that when enough was looked at for one.",
    )?;
    mark_machines(fleet).await?;
    let limits = GateLimits::for_listener(ListenerKind::Api, 1 << 20);
    let requested = ApiFixture::start(fleet, limits).await?;
    let machine: uuid::Uuid =
        sqlx::query_scalar("SELECT machine_id FROM bench_machine ORDER BY n LIMIT 1 OFFSET 7")
            .fetch_one(fleet.bmdb.pool())
            .await?;
    let mut took: Vec<(String, Vec<f64>)> = Vec::new();
    for (name, _) in SELECTORS {
        took.push((format!("a page of {name}"), Vec::new()));
    }
    for name in ["why one is as it is", "what happened to one", "the fleet in figures"] {
        took.push((name.to_owned(), Vec::new()));
    }
    progress("asking what operators ask")?;
    for _ in 0..plan.polls {
        let mut slots = took.iter_mut();
        let mut put = |began: Instant| {
            if let Some((_, took)) = slots.next() {
                took.push(began.elapsed().as_secs_f64() * 1000.0);
            }
        };
        for (name, selector) in SELECTORS {
            let began = Instant::now();
            let found = requested.page(selector).await?;
            put(began);
            ensure!(found > 0 || name != "all machines", "a page of {name} is empty");
        }
        let mut machines = MachinesClient::new(requested.channel.clone());
        let began = Instant::now();
        machines.why(requested.with_token(v1::WhyRequest { machine: machine.to_string() })).await?;
        put(began);
        let request = v1::TimelineRequest { machine: machine.to_string(), ..v1::TimelineRequest::default() };
        let began = Instant::now();
        machines.timeline(requested.with_token(request)).await?;
        put(began);
        let began = Instant::now();
        let mut statistics = StatisticsClient::new(requested.channel.clone());
        statistics.get(requested.with_token(v1::GetStatisticsRequest {})).await?;
        put(began);
    }
    for (name, took) in &took {
        report.add(format!("{name}, median"), "ms", &[quantile(took, 0.5)], Target::None)?;
        report.add(format!("{name}, 99 of 100 within"), "ms", &[quantile(took, 0.99)], Target::None)?;
    }
    requested.stop.cancel();
    requested.server.wait_until_stopped().await;
    Ok(())
}
