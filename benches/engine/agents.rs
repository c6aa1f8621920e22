//! Real agents over mutual TLS: what a connection costs each side.
//!
//! The agents are the role server's own loop. They run in a separate process, so that the memory and the
//! processor time of a shepherd and of its agents are measured separately. The callback server runs in this
//! process, as in a shepherd that does nothing else.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::bmdb::metrics::Metrics;
use shepherd::curator_client::identity::Identity;
use shepherd::model::ids::MachineId;
use shepherd::proto::hardware::v1::HardwareReport;
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::agent::{Agent, ignore_events, no_cluster};
use shepherd::roleserver::boot_clock::{BootClock as _, HostClock};
use shepherd::roleserver::trusted_time::TrustedTime;
use shepherd::server::callback::callback_server::{CallbackServer, CallbackSettings, serve_agents};
use shepherd::server::tls::server_certificate::{CertificateSource, RenewalClock};
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::Plan;
use crate::fleet::Fleet;
use crate::report::{Report, Target, progress};
use crate::server::processor_seconds;

/// Size of the fleet that the measured figures are extrapolated to, in machines.
const LARGE: f64 = 100_000.0;
const RESIDENT: &str = "VmRSS:";
/// Longest time until every agent has reported once.
const PATIENCE: Duration = Duration::from_mins(5);

/// Input file of the process that runs the agents, as JSON.
#[derive(Serialize, Deserialize)]
struct Crew {
    endpoint: String,
    authorities: Vec<String>,
    /// Machine id, and key pair as PKCS#8 in hex.
    agents: Vec<(Uuid, String)>,
}

/// Runs agents until standard input ends.
pub(crate) async fn run(crew: &Path) -> Result<()> {
    let crew: Crew = serde_json::from_slice(&fs::read(crew)?)?;
    let authorities = crew.authorities.iter().map(hex::decode).collect::<Result<Vec<_>, _>>()?;
    let settings = AgentSettings::new(&[crew.endpoint], &authorities, 0);
    let settings = settings.map_err(anyhow::Error::msg)?;
    let clock = Arc::new(HostClock::read()?);
    let stop = CancellationToken::new();
    let mut agents = JoinSet::new();
    for (machine, key) in crew.agents {
        let agent = Agent {
            machine_id: MachineId(machine),
            identity: Arc::new(Identity::from_pkcs8(&hex::decode(key)?)?),
            settings: settings.clone(),
            fallback: None,
            access_fence: 1,
            incarnation: Uuid::new_v4(),
            agent_version: "bench".to_owned(),
            clock: clock.clone(),
            time: Arc::new(TrustedTime::new(clock.clone(), None)),
            hardware: Arc::new(HardwareReport::default),
            cluster: no_cluster(),
            release: shepherd::roleserver::agent::no_release(),
            uploads_logs: false,
            server_pool: None,
            observer: ignore_events(),
        };
        agents.spawn(agent.run(stop.clone()));
    }
    tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
    stop.cancel();
    while agents.join_next().await.is_some() {}
    Ok(())
}

pub(crate) async fn measure(plan: &Plan, fleet: &Fleet, report: &mut Report) -> Result<()> {
    progress(&format!("{} agents", plan.agents))?;
    report.section(
        "Real agents over mutual TLS",
        "The role server's own loop, so many times in a process of its own, against a callback server with \
         nothing else to do; both on this host, a heartbeat each half minute. Memory is what grew by (of the agents: all that their \
         process holds), processor time is that of the steady state. What a hundred thousand would come to \
         is extrapolated in a straight line, and was not measured.",
    )?;
    allow_files(u64::from(plan.agents) * 2 + 512)?;
    let directory = tempfile::tempdir()?;
    let agents = give_keys(fleet, plan.agents).await?;
    let before = memory(Path::new("/proc/self"), RESIDENT)?;
    let stop = CancellationToken::new();
    let key = Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?);
    let limits = GateLimits::for_listener(ListenerKind::Callback, 1 << 20);
    let server = serve(fleet, key, limits, stop.clone()).await?;
    let mut crew = start(&server, directory.path(), agents)?;
    let measured = observe(plan, fleet, &mut crew, before, report).await;
    drop(crew.stdin.take());
    crew.wait().await?;
    stop.cancel();
    server.wait_until_stopped().await;
    restore(fleet).await?;
    measured
}

async fn observe(
    plan: &Plan,
    fleet: &Fleet,
    crew: &mut Child,
    before: f64,
    report: &mut Report,
) -> Result<()> {
    let count = f64::from(plan.agents);
    let theirs = Path::new("/proc").join(crew.id().context("the agents have ended")?.to_string());
    let began = Instant::now();
    let boot = HostClock::read()?.boot_id();
    let reported =
        "SELECT count(*) FROM machine_agent_heartbeat JOIN machine_hardware_report USING (machine_id)
         WHERE boot_id = $1";
    loop {
        let received: i64 = sqlx::query_scalar(reported).bind(&boot).fetch_one(fleet.bmdb.pool()).await?;
        if received >= i64::from(plan.agents) {
            break;
        }
        ensure!(crew.try_wait()?.is_none(), "the agents ended");
        ensure!(began.elapsed() < PATIENCE, "{received} of {} agents reported", plan.agents);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    report.add(
        "until all have connected and sent their hardware",
        "s",
        &[began.elapsed().as_secs_f64()],
        Target::None,
    )?;

    let seconds = |process: &Path| processor_seconds(process, false).context("no such process");
    let own = Path::new("/proc/self");
    let (ours, of_agents, began) = (seconds(own)?, seconds(&theirs)?, Instant::now());
    tokio::time::sleep(plan.agents_for).await;
    let lasted = began.elapsed().as_secs_f64();
    let (ours, of_agents) = ((seconds(own)? - ours) / lasted, (seconds(&theirs)? - of_agents) / lasted);
    let (grew, held) = (memory(own, RESIDENT)? - before, memory(&theirs, RESIDENT)?);
    report.add("agents", "", &[count], Target::None)?;
    report.add("memory of the callback server, for each", "KiB", &[grew / count], Target::None)?;
    report.add("memory of the agents, for each", "KiB", &[held / count], Target::None)?;
    report.add("processor time of the callback server", "s each s", &[ours], Target::None)?;
    report.add("processor time of the agents", "s each s", &[of_agents], Target::None)?;
    report.add(
        "memory for 100,000, extrapolated",
        "GiB",
        &[grew / count * LARGE / 1_048_576.0],
        Target::None,
    )?;
    report.add("processor time for 100,000, extrapolated", "s each s", &[ours / count * LARGE], Target::None)
}

/// Gives `count` machines their own agent keys.
pub(crate) async fn give_keys(fleet: &Fleet, count: u32) -> Result<Vec<(Uuid, String)>> {
    let machines: Vec<Uuid> = sqlx::query_scalar("SELECT machine_id FROM bench_machine ORDER BY n LIMIT $1")
        .bind(i64::from(count))
        .fetch_all(fleet.bmdb.pool())
        .await?;
    ensure!(machines.len() == count as usize, "the fleet has only {} machines", machines.len());
    let (mut public, mut agents) = (Vec::new(), Vec::new());
    for machine in &machines {
        let identity = Identity::generate()?;
        public.push(identity.public_key().to_vec());
        agents.push((*machine, hex::encode(identity.pkcs8())));
    }
    sqlx::query(
        "UPDATE machine_agent_started a SET public_key = k.public_key
         FROM unnest($1::UUID[], $2::BYTEA[]) k (machine_id, public_key) WHERE a.machine_id = k.machine_id",
    )
    .bind(&machines)
    .bind(&public)
    .execute(fleet.bmdb.pool())
    .await?;
    Ok(agents)
}

/// Restores the machines to the facts that the fleet was filled with.
async fn restore(fleet: &Fleet) -> Result<()> {
    let mut connection = fleet.bmdb.pool().acquire().await?;
    sqlx::raw_sql(
        "DELETE FROM machine_hardware_report;
         UPDATE machine_agent_started SET public_key = decode(repeat('00', 32), 'hex')
         WHERE public_key <> decode(repeat('00', 32), 'hex');
         UPDATE machine_agent_heartbeat
         SET boot_id = 'b', incarnation = 'i', sequence = 1, previous_boot_id = NULL WHERE boot_id <> 'b'",
    )
    .execute(&mut *connection)
    .await?;
    Ok(())
}

/// Starts a callback server with these limits, the CA of which is sealed with `key`.
pub(crate) async fn serve(
    fleet: &Fleet,
    key: Arc<SecretsKey>,
    limits: GateLimits,
    stop: CancellationToken,
) -> Result<CallbackServer> {
    let settings = CallbackSettings {
        listen_address: ([127, 0, 0, 1], 0).into(),
        endpoints: Vec::new(),
        certificate: CertificateSource::CallbackCa(key),
        secrets: None,
        renewal: RenewalClock::default(),
        // One agent sends all heartbeats of a measurement.
        agent_rate: "1ms,1000".parse().context("a rate")?,
        limits,
        signing: Arc::default(),
    };
    Ok(serve_agents(fleet.bmdb.clone(), fleet.sessions.clone(), settings, Metrics::new(), stop).await?)
}

fn start(server: &CallbackServer, directory: &Path, agents: Vec<(Uuid, String)>) -> Result<Child> {
    let crew = Crew {
        endpoint: server.endpoints.first().context("an endpoint")?.clone(),
        authorities: server.current_ca_certificates().iter().map(hex::encode).collect(),
        agents,
    };
    let file = directory.join("crew.json");
    // In a directory that only we can enter: it holds private keys.
    fs::write(&file, serde_json::to_vec(&crew)?)?;
    let mut command = Command::new(std::env::current_exe()?);
    // Its standard input is a pipe from us, so it ends even if we crash.
    command.arg("--agents").arg(file).stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
    Ok(command.spawn()?)
}

/// Memory of a process in KiB: `VmRSS:` is the current value, `VmHWM:` the highest.
pub(crate) fn memory(process: &Path, field: &str) -> Result<f64> {
    let status = fs::read_to_string(process.join("status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("no such field")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// Raises the limit of open files, which children inherit.
pub(crate) fn allow_files(wanted: u64) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
        setrlimit(Resource::Nofile, raised).with_context(|| format!("{wanted} open files are needed"))?;
    }
    Ok(())
}
