//! The fleet API as callers use it: the real server on a real database, called over TLS by gRPC and as JSON.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::engine::session::Sessions;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::bmdb::metrics::Metrics;
use shepherd::bmdb::orders::credential::NewAccessCredential;
use shepherd::bmdb::orders::order::{Actor, Expiry, Order, request_digest};
use shepherd::model::access::{AccessRole, AccessScope};
use shepherd::model::ids::ProcessId;
use shepherd::model::time::Span;
use shepherd::server::api::listener::api_server::{ApiServer, ApiSettings, serve_api};
use shepherd::server::api::listener::auth::ApiRates;
use shepherd::server::tls::server_certificate::{CertificateSource, RenewalClock};
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::harness::postgres::TestDatabase;
use crate::harness::program::PATIENCE;

mod access;
mod approvals;
mod artefacts;
mod bundle;
mod command_line;
mod completion;
mod confirmations;
mod crowd;
mod documents;
mod exit_codes;
mod exit_table;
mod habits;
mod hidden_text;
mod in_process;
mod ipv6;
mod kinds;
mod list_watches;
mod lists;
mod logs;
mod named_machines;
mod orders;
mod recorded;
mod rejections;
mod restore;
mod roles;
mod routine;
mod rule_bypasses;
mod same_answers;
mod scope;
mod selectors;
mod signed_declarations;
mod top;
mod top_pages;
mod two_person_rule;
mod waiting;
mod watch;
mod widths;
mod worst_uses;

/// A shepherd that only serves operators.
struct Api {
    database: TestDatabase,
    bmdb: Bmdb,
    pool: PgPool,
    sessions: Sessions,
    server: ApiServer,
    http: reqwest::Client,
    stop: CancellationToken,
    keep: CancellationToken,
    keeper: JoinHandle<()>,
    directory: tempfile::TempDir,
    metrics: Metrics,
}

/// A credential that the test created.
pub(crate) struct Key {
    id: uuid::Uuid,
    pub(crate) token: String,
}

/// An answer: the HTTP status and the JSON.
#[derive(Debug)]
struct Answer {
    code: u16,
    json: Value,
}

impl Answer {
    /// The answer, if it is a success.
    fn ok(self) -> anyhow::Result<Value> {
        anyhow::ensure!(self.code == 200, "{}: {}", self.code, self.json);
        Ok(self.json)
    }

    /// The message of a rejection.
    fn message(&self) -> &str {
        self.json["error"]["message"].as_str().unwrap_or_default()
    }

    /// When to retry, if the answer states it (`RetryInfo`).
    fn again_after(&self) -> Option<Duration> {
        let details = self.json["error"]["details"].as_array()?;
        let retry = details
            .iter()
            .find(|detail| detail["@type"].as_str().is_some_and(|of| of.ends_with(".RetryInfo")))?;
        let seconds = retry["retryDelay"].as_str()?.strip_suffix('s')?.parse().ok()?;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

fn settings(directory: &Path) -> anyhow::Result<ApiSettings> {
    let key = SecretsKey::open(&directory.join("secrets.key"))?;
    Ok(ApiSettings {
        listen_address: SocketAddr::from(([127, 0, 0, 1], 0)),
        endpoints: Vec::new(),
        certificate: CertificateSource::CallbackCa(Arc::new(key)),
        renewal: RenewalClock::default(),
        rates: ApiRates { source: "1ms,10000".parse()?, credential: "1ms,10000".parse()? },
        limits: GateLimits::for_listener(ListenerKind::Api, 1 << 20),
        max_watches: 20,
        read_pool_connections: 4,
        auth_pool_connections: 2,
        signing: Arc::default(),
    })
}

impl Api {
    async fn start(name: &str) -> anyhow::Result<Self> {
        Self::start_with(name, |_| ()).await
    }

    async fn start_with(name: &str, change: impl FnOnce(&mut ApiSettings)) -> anyhow::Result<Self> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let database = TestDatabase::create(name).await?;
        let bmdb = database.bmdb().await?;
        bmdb.migrate().await?;
        bmdb.read_policy().await?;
        let pool = database.pool().await?;
        let directory = tempfile::tempdir()?;
        // Sessions are not renewed while a test lasts: if transactions are SERIALIZABLE, a renewal may cost the claimer
        // a second attempt, and tests count attempts.
        let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), Duration::from_hours(10));
        let (stop, keep) = (CancellationToken::new(), CancellationToken::new());
        let keeper = tokio::spawn(keeper.run(&keep)?);
        let mut settings = settings(directory.path())?;
        change(&mut settings);
        let metrics = Metrics::new();
        let server =
            serve_api(bmdb.clone(), sessions.clone(), settings, metrics.clone(), stop.clone()).await?;
        let authority = server.ca_certificates.first().context("a CA")?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([reqwest::Certificate::from_der(authority)?])
            .timeout(Duration::from_mins(2))
            .build()?;
        Ok(Self { database, bmdb, pool, sessions, server, http, stop, keep, keeper, directory, metrics })
    }

    /// Stops it in order.
    async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.server.wait_until_stopped().await;
        self.keep.cancel();
        Ok(self.keeper.await?)
    }

    /// A token, created directly in the database.
    async fn key(&self, role: AccessRole, providers: &[&str], life: Option<Span>) -> anyhow::Result<Key> {
        key_in(&self.bmdb, role, providers, life).await
    }

    /// A call in JSON.
    async fn call(&self, key: Option<&str>, rpc: &str, body: Value) -> anyhow::Result<Answer> {
        self.call_at(self.server.local_addr, key, rpc, body).await
    }

    /// A call in JSON to one of the servers on this database.
    async fn call_at(
        &self,
        server: SocketAddr,
        key: Option<&str>,
        rpc: &str,
        body: Value,
    ) -> anyhow::Result<Answer> {
        self.call_with_body(server, key, &format!("shepherd.fleet.v1.{rpc}"), &body.to_string()).await
    }

    /// A call with a body that is declared as JSON, by the full name of the call. While the server is too busy, the
    /// call is repeated as docs/api.md describes: every order has a key.
    async fn call_with_body(
        &self,
        server: SocketAddr,
        key: Option<&str>,
        rpc: &str,
        body: &str,
    ) -> anyhow::Result<Answer> {
        let end = Instant::now() + PATIENCE;
        loop {
            let mut request = self
                .http
                .post(format!("https://{server}/api/{rpc}"))
                .header("content-type", "application/json")
                .body(body.to_owned());
            if let Some(token) = key {
                request = request.bearer_auth(token);
            }
            let response = request.send().await?;
            let code = response.status().as_u16();
            let streams = response.headers().get("content-type").is_some_and(|is| is == "text/event-stream");
            let json = if streams { events_of(&response.text().await?)? } else { response.json().await? };
            let answer = Answer { code, json };
            match answer.again_after() {
                Some(delay) if answer.code == 503 && Instant::now() < end => tokio::time::sleep(delay).await,
                _ => return Ok(answer),
            }
        }
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.server.local_addr)
    }

    /// Another server on the same database, until its token is cancelled.
    async fn another(&self) -> anyhow::Result<(ApiServer, CancellationToken)> {
        let (settings, stop) = (settings(self.directory.path())?, CancellationToken::new());
        let (bmdb, sessions) = (self.bmdb.clone(), self.sessions.clone());
        Ok((serve_api(bmdb, sessions, settings, Metrics::new(), stop.clone()).await?, stop))
    }

    /// A gRPC connection, with or without a client certificate.
    async fn channel(&self, identity: Option<Identity>) -> anyhow::Result<Channel> {
        self.channel_to(self.server.local_addr, identity).await
    }

    /// A gRPC connection to one of the servers on this database.
    async fn channel_to(&self, server: SocketAddr, identity: Option<Identity>) -> anyhow::Result<Channel> {
        let authority = self.server.ca_certificates.first().context("a CA")?;
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem(authority)));
        if let Some(identity) = identity {
            tls = tls.identity(identity);
        }
        let endpoint = Endpoint::from_shared(format!("https://{server}"))?;
        Ok(endpoint.tls_config(tls)?.connect().await?)
    }

    async fn count(&self, statement: &'static str) -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar(statement).fetch_one(&self.pool).await?)
    }
}

/// The messages of a stream that has ended.
fn events_of(text: &str) -> anyhow::Result<Value> {
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.map(|event| Ok(serde_json::from_str(event)?)).collect::<anyhow::Result<_>>()?;
    Ok(Value::Array(events))
}

pub(crate) async fn key_in(
    bmdb: &Bmdb,
    role: AccessRole,
    providers: &[&str],
    life: Option<Span>,
) -> anyhow::Result<Key> {
    let order = Order {
        actor: Actor { name: "test".to_owned(), credential: None },
        rpc: "test".to_owned(),
        target: "credential".to_owned(),
        reason: "a test".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    };
    let new = NewAccessCredential {
        name: format!("{role}'s"),
        role,
        scope: AccessScope::from_providers(providers.iter().map(|&provider| provider.to_owned())),
        expiry: life.map(Expiry::After),
        certificate: None,
    };
    let made = bmdb.create_credential(order, new).await?;
    let token = made.token.context("a token")?.expose_secret().to_owned();
    Ok(Key { id: made.credential.context("a credential")?.id, token })
}

fn pem(der: &[u8]) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
}

/// An order as JSON.
fn order(reason: &str, key: &str) -> Value {
    json!({ "reason": reason, "idempotencyKey": key })
}
