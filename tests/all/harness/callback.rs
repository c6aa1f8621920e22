//! A shepherd that only receives heartbeats, and agents with heartbeats that a test defines.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::{FactChange, NewAgent};
use shepherd::bmdb::engine::session::Sessions;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::bmdb::metrics::Metrics;
use shepherd::curator_client::identity::Identity;
use shepherd::model::ids::{MachineId, ProcessId};
use shepherd::proto::agent::v1::agent_callback_client::AgentCallbackClient;
use shepherd::proto::agent::v1::{EnrollRequest, HeartbeatRequest, HeartbeatResponse};
use shepherd::roleserver::boot_clock::HostClock;
use shepherd::roleserver::connection::{client_config, connect_server};
use shepherd::roleserver::trusted_time::TrustedTime;
use shepherd::server::callback::callback_server::{CallbackServer, CallbackSettings, serve_agents};
use shepherd::server::tls::server_certificate::{CertificateSource, RenewalClock};
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use sqlx::PgPool;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::harness::postgres::TestDatabase;
use crate::roleserver::Machine;

/// Settings for a free port of the loopback address, with the secrets key in `directory`.
pub(crate) fn settings(directory: &Path) -> anyhow::Result<CallbackSettings> {
    let key = Arc::new(SecretsKey::open(&directory.join("secrets.key"))?);
    Ok(CallbackSettings {
        listen_address: SocketAddr::from(([127, 0, 0, 1], 0)),
        endpoints: Vec::new(),
        certificate: CertificateSource::CallbackCa(key.clone()),
        secrets: Some(key),
        renewal: RenewalClock::default(),
        agent_rate: "1ms,1000".parse()?,
        limits: GateLimits::for_listener(ListenerKind::Callback, 1 << 20),
        signing: Arc::default(),
    })
}

/// A shepherd that only receives heartbeats.
pub(crate) struct Listener {
    pub(crate) bmdb: Bmdb,
    pub(crate) server: CallbackServer,
    pub(crate) metrics: Metrics,
    stop: CancellationToken,
    keep: CancellationToken,
    keeper: JoinHandle<()>,
}

impl Listener {
    pub(crate) async fn start(database: &TestDatabase, settings: CallbackSettings) -> anyhow::Result<Self> {
        let bmdb = database.bmdb().await?;
        bmdb.migrate().await?;
        let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), Duration::from_secs(30));
        let (stop, keep) = (CancellationToken::new(), CancellationToken::new());
        let keeper = tokio::spawn(keeper.run(&keep)?);
        let metrics = Metrics::new();
        let server = serve_agents(bmdb.clone(), sessions, settings, metrics.clone(), stop.clone()).await?;
        Ok(Self { bmdb, server, metrics, stop, keep, keeper })
    }

    /// Stops it in order.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.server.wait_until_stopped().await;
        self.keep.cancel();
        Ok(self.keeper.await?)
    }

    /// The value of a metric, by the beginning of its line.
    pub(crate) fn counted(&self, line: &str) -> anyhow::Result<u64> {
        let text = self.metrics.encode()?;
        let found = text.lines().find_map(|shown| shown.strip_prefix(line)?.trim().parse().ok());
        Ok(found.unwrap_or(0))
    }
}

/// An agent with heartbeats that a test defines.
pub(crate) struct TestAgent {
    pub(crate) machine: MachineId,
    pub(crate) identity: Arc<Identity>,
    pub(crate) boot_id: String,
    pub(crate) incarnation: String,
}

pub(crate) type Client = AgentCallbackClient<Channel>;

impl TestAgent {
    /// Adds a machine of a provider, with this agent started on it.
    pub(crate) async fn new(pool: &PgPool, bmdb: &Bmdb) -> anyhow::Result<Self> {
        Self::enroll(provided(pool).await?, bmdb).await
    }

    /// Starts an agent with a key of its own on a machine.
    pub(crate) async fn enroll(machine: MachineId, bmdb: &Bmdb) -> anyhow::Result<Self> {
        let identity = Identity::generate()?;
        let agent = NewAgent {
            public_key: identity.public_key().to_vec(),
            boot_id: None,
            version: "1".to_owned(),
            supervision: "systemd".to_owned(),
            fence: 1,
        };
        record_agent(bmdb, machine, agent).await?;
        Ok(Self {
            machine,
            identity: Arc::new(identity),
            boot_id: Uuid::new_v4().to_string(),
            incarnation: Uuid::new_v4().to_string(),
        })
    }

    /// A heartbeat without further reports.
    pub(crate) fn heartbeat(&self, seq: u64) -> HeartbeatRequest {
        HeartbeatRequest {
            machine_id: self.machine.to_string(),
            boot_id: self.boot_id.clone(),
            incarnation: self.incarnation.clone(),
            seq,
            agent_version: "1".to_owned(),
            access_fence: 1,
            ..HeartbeatRequest::default()
        }
    }

    /// Opens a new connection, as the role server does.
    pub(crate) async fn connect(&self, server: &CallbackServer) -> anyhow::Result<Client> {
        let config = client_config(&self.identity, &server.current_ca_certificates(), &untold()?)?;
        Ok(connect_server(server.endpoints.first().context("no endpoint")?, config).await?)
    }
}

/// The time of a machine to which no shepherd has reported the time.
pub(crate) fn untold() -> anyhow::Result<Arc<TrustedTime>> {
    Ok(Arc::new(TrustedTime::new(Arc::new(HostClock::read()?), None)))
}

/// Sends one heartbeat to the shepherd.
pub(crate) async fn say(client: &mut Client, request: HeartbeatRequest) -> Result<HeartbeatResponse, Status> {
    Ok(client.heartbeat(request).await?.into_inner())
}

/// Adds a machine of a provider, without an agent.
pub(crate) async fn provided(pool: &PgPool) -> anyhow::Result<MachineId> {
    let machine = MachineId::generate();
    sqlx::query("INSERT INTO machine VALUES ($1, clock_timestamp())").bind(machine.0).execute(pool).await?;
    sqlx::query(
        "INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, unchanged)
         VALUES ($1, 'rack', $1::TEXT, '192.0.2.1', 'Running', clock_timestamp(), FALSE)",
    )
    .bind(machine.0)
    .execute(pool)
    .await?;
    sqlx::query(
        "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at,
             phase_index, phase_since, rules_version, policy_version, version, fence, losses)
         SELECT $1, lane, 'rack', 1, 0, FALSE, 'newly provided', '', 'New', clock_timestamp(), 1, 0, 0, 0, 0
         FROM (VALUES ('access'), ('observe')) l (lane)",
    )
    .bind(machine.0)
    .execute(pool)
    .await?;
    Ok(machine)
}

/// Records that an agent was started on a machine, as the work that enrols it does.
pub(crate) async fn record_agent(bmdb: &Bmdb, machine: MachineId, agent: NewAgent) -> anyhow::Result<()> {
    bmdb.change_machine(machine, move |_| Decision {
        changes: vec![FactChange::AgentStarted(agent.clone())],
        events: Vec::new(),
        output: (),
    })
    .await?;
    Ok(())
}

/// Adds a machine of a provider. Its role server calls this shepherd every second. `create` makes the machine.
pub(crate) async fn enrolled(
    listener: &Listener,
    pool: &PgPool,
    create: fn() -> anyhow::Result<Machine>,
) -> anyhow::Result<(MachineId, Arc<Machine>)> {
    enrolled_with_keys(listener, pool, create, Vec::new()).await
}

/// The same for a machine that pins these signing keys at its enrolment.
pub(crate) async fn enrolled_with_keys(
    listener: &Listener,
    pool: &PgPool,
    create: fn() -> anyhow::Result<Machine>,
    signing_keys: Vec<String>,
) -> anyhow::Result<(MachineId, Arc<Machine>)> {
    let machine = provided(pool).await?;
    let request = EnrollRequest {
        machine_id: machine.to_string(),
        endpoints: listener.server.endpoints.clone(),
        ca_certificates: listener.server.current_ca_certificates(),
        lane: "access".to_owned(),
        fence: 1,
        bmdb_id: Uuid::new_v4().to_string(),
        heartbeat_interval_seconds: 1,
        session_id: String::new(),
        shepherd_time_ms: 0,
        signing_keys,
        key_rotations: Vec::new(),
        replace_signing_keys: false,
        require_signed_declarations: false,
    };
    let (host, success) = tokio::task::spawn_blocking(move || {
        let host = create()?;
        let success = host.enroll(&request)?;
        anyhow::Ok((host, success))
    })
    .await??;
    let agent = NewAgent {
        public_key: success.public_key,
        boot_id: None,
        version: success.agent_version,
        supervision: "detached".to_owned(),
        fence: 1,
    };
    record_agent(&listener.bmdb, machine, agent).await?;
    Ok((machine, Arc::new(host)))
}

/// Everything that a heartbeat of a machine may change, as text to compare.
pub(crate) async fn rows(pool: &PgPool, machine: MachineId) -> anyhow::Result<String> {
    let parts: Vec<Option<String>> = sqlx::query_scalar(
        "SELECT (SELECT jsonb_agg(to_jsonb(h))::TEXT FROM machine_agent_heartbeat h WHERE machine_id = $1)
         UNION ALL SELECT (SELECT to_jsonb(r)::TEXT FROM machine_hardware_report r WHERE machine_id = $1)
         UNION ALL SELECT (SELECT to_jsonb(r)::TEXT FROM machine_os_installation_report r WHERE machine_id = $1)
         UNION ALL SELECT (SELECT jsonb_agg(to_jsonb(d) ORDER BY lane)::TEXT FROM machine_due d WHERE machine_id = $1)
         UNION ALL SELECT (SELECT count(*)::TEXT FROM history WHERE machine_id = $1)",
    )
    .bind(machine.0)
    .fetch_all(pool)
    .await?;
    Ok(format!("{parts:#?}"))
}

/// The indexed phase of a machine.
pub(crate) async fn phase(pool: &PgPool, machine: MachineId) -> anyhow::Result<String> {
    let text = "SELECT phase_index FROM machine_due WHERE machine_id = $1 AND lane = 'access'";
    Ok(sqlx::query_scalar(text).bind(machine.0).fetch_one(pool).await?)
}

/// Lines of history of a machine that are not about work, in the order in which they were written.
pub(crate) async fn events(pool: &PgPool, machine: MachineId) -> anyhow::Result<Vec<String>> {
    let text = "SELECT event FROM history WHERE machine_id = $1 AND edge IS NULL ORDER BY at, event";
    Ok(sqlx::query_scalar(text).bind(machine.0).fetch_all(pool).await?)
}

/// Waits until a condition holds, for longer than any host needs.
pub(crate) async fn until<F, W>(what: &str, mut holds: F) -> anyhow::Result<()>
where
    F: FnMut() -> W,
    W: Future<Output = anyhow::Result<bool>>,
{
    let waiting = async {
        while !holds().await? {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    };
    tokio::time::timeout(Duration::from_mins(5), waiting)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("waited in vain until {what}")))?
}
