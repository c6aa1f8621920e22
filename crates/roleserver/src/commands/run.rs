//! `roleserver run`: run the agent and everything below it.
//!
//! Builds the heartbeat loop from the host's parts. `agent_event_handler.rs` stores and logs what happens there.
//!
//! The parts run as a tree of runnables, so that a part that fails is restarted without the others:
//!
//! * `callback`: the heartbeat loop. Its state is *new* until a heartbeat was delivered.
//! * `cluster`: the node's part in a cluster, once it is ordered to have one.
//! * `status`: serves the tree to `roleserver status`.
//! * `logs`: uploads the logs that shepherds request ([`crate::logs`]).
//! * `metrics`: serves the metrics to `roleserver metrics`.
//! * `file-systems`: measures the file systems that the role server and its programs write to
//!   ([`crate::file_systems`]).
//! * `update`: fetches another release when one is ordered; this process is then replaced by it
//!   ([`crate::update`]).
//! * `unit`: brings the unit file up to date, and checks the unit, if systemd started this process
//!   ([`crate::init_system::own_unit`]).

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use curator::node_address::AddressRule;
use curator::service::gate_monitor::GateMonitor;
use curator_client::clock::Clock;
use proto::agent::v1 as wire;
use supervisor::context::{Runnable, Starting};
use supervisor::report::TreeReport;
use supervisor::supervise::{self, Supervisor};
use supervisor::watch_cell::WatchCell;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::agent::{Agent, ReadRelease};
use crate::boot_clock::HostClock;
use crate::cluster;
use crate::cluster::cluster_node::run_cluster_node;
use crate::cluster::curator_gate;
use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::order_inbox::OrderInbox;
use crate::commands::CommandError;
use crate::commands::agent_event_handler::{AgentEventHandler, HandlerState, log_failure};
use crate::disk;
use crate::file_systems::watch_file_systems;
use crate::hardware::{self, Sources};
use crate::host_findings::HostFindings;
use crate::init_system::own_unit::{OwnUnit, run_own_unit};
use crate::leftovers;
use crate::logs::LogUploads;
use crate::logs::log_queue::LogQueue;
use crate::logs::sources::LogSources;
use crate::metrics::{self, MetricsInputs};
use crate::process::{ProcessRecord, program_digest};
use crate::server_pool::ServerPool;
use crate::settings_store::SettingsStore;
use crate::signing_store::SigningStore;
use crate::state_directory::{Lock, StateDirectory};
use crate::state_writer::StateWriter;
use crate::status_socket;
use crate::trusted_time::TrustedTime;
use crate::update::self_updater::{Handover, SelfUpdater};

/// How long the parts of a role server may take to end before the handover to another release.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end waits for state files that are being written. On a disk that is slower, the old files stay.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits until what is queued is written, as long as a healthy disk needs.
fn finish_writes(writer: &StateWriter, log: Option<&LogQueue>) {
    if !writer.flush(FLUSH_TIMEOUT) {
        tracing::warn!("the disk is slow, and the newest state files are not written; the former ones stay");
    }
    // A release that replaces this process takes no queued lines over.
    if let Some(log) = log {
        log.finish(FLUSH_TIMEOUT);
    }
}

/// Runs the agent until SIGTERM or SIGINT. `log` is where it logs.
pub fn execute(state_directory: &Path, log: Option<&LogQueue>) -> Result<(), CommandError> {
    let state = StateDirectory::open(state_directory).map_err(CommandError::from_error)?;
    let held = state.acquire_lock(Lock::Agent).map_err(CommandError::from_error)?;
    leftovers::remove_all(state.path());
    let not_enrolled = || {
        CommandError::Failed(format!(
            "this machine is not enrolled: {} holds no enrolment with its key; a shepherd enrols it",
            state.path().display()
        ))
    };
    let enrolment = state.read_enrolment().map_err(CommandError::from_error)?.ok_or_else(not_enrolled)?;
    let identity = state.read_identity().map_err(CommandError::from_error)?.ok_or_else(not_enrolled)?;
    let writer = StateWriter::default();
    let settings_store = SettingsStore::new(state.clone(), writer.clone(), &enrolment);
    let (settings, fallback) = settings_store.load();
    let clock = HostClock::read().map_err(CommandError::from_error)?;
    let time = resume_time(&state, &clock);
    let digest = program_digest(Path::new("/proc/self/exe")).map_err(CommandError::from_error)?;
    let signing = SigningStore::open(state.clone());
    let release = SelfUpdater::resume_update(state.path(), &digest, &clock, signing);
    let record = ProcessRecord::current(enrolment.revision, digest).map_err(CommandError::from_error)?;
    // An enrolment finds the agent by its record. On a full or read-only disk the machine sends heartbeats all the
    // same, and writing the record is retried with each heartbeat.
    let recorded = state.record_agent(&record);
    let unrecorded = recorded.is_err().then_some(record);
    log_failure(recorded);

    let incarnation = Uuid::new_v4();
    let (watch_cell, facts) = (WatchCell::new(), NodeFacts::default());
    let findings = facts.host_findings.clone();
    let inbox =
        OrderInbox::new(enrolment.machine_id, ClusterFiles::in_state_directory(state.path()), facts.clone());
    let standing = inbox.clone();
    let server_pool = ServerPool::default();
    let logs = LogUploads::new(
        LogSources::of_state_directory(state.log_path(), state.path()),
        server_pool.clone(),
        incarnation,
    );
    let keeper = AgentEventHandler {
        writer: writer.clone(),
        logs: logs.clone(),
        delivered: watch_cell.clone(),
        order_inbox: inbox,
        release: release.clone(),
        state: state.clone(),
        clock: clock.clone(),
        incarnation,
        settings_store: settings_store.clone(),
        memory: Mutex::new(HandlerState { settings: settings.clone(), delivered_at: None, last_error: None }),
        unsaved_record: Arc::new(Mutex::new(unrecorded)),
    };
    let agent = Agent {
        machine_id: enrolment.machine_id,
        identity: Arc::new(identity),
        settings,
        fallback,
        access_fence: enrolment.access_fence(),
        incarnation,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        clock: Arc::new(clock),
        time,
        hardware: Arc::new(|| hardware::read_hardware(&Sources::host())),
        cluster: Arc::new(move || standing.report()),
        release: release_reader(&release, &findings, &facts.curator_gate),
        uploads_logs: true,
        server_pool: Some(server_pool.clone()),
        observer: Arc::new(move |event| keeper.handle_event(event)),
    };
    tracing::info!(machine = %enrolment.machine_id, %incarnation, "the agent runs");

    let leaving = CancellationToken::new();
    let settings = cluster_settings(&state, &agent, &leaving, &server_pool, release.signing());
    let cluster = run_cluster_node(&settings, &facts);

    let runtime = build_runtime().map_err(CommandError::from_error)?;
    let watch = watch_file_systems(state.path(), findings.clone(), facts.file_systems.clone());
    let counted = move |tree: &TreeReport| metrics::render_text(tree, &MetricsInputs::from_facts(&facts));
    let mut others = vec![
        ("cluster", cluster),
        ("file-systems", watch),
        ("logs", logs.run_uploads()),
        ("metrics", status_socket::serve_report(state.path(), status_socket::METRICS_SOCKET, counted)),
        ("update", release.run_updates(server_pool)),
    ];
    if let Some(own) = OwnUnit::detect_host(std::env::home_dir().as_deref()) {
        others.push(("unit", run_own_unit(own, findings)));
    }
    let root = root_runnable((agent, watch_cell), (state.clone(), settings_store), others);
    let ended = runtime.block_on(async {
        let slow_writes = tokio::spawn(disk::log_slow_writes(state.path().to_owned()));
        let ended = run_until_signal(root, &leaving, &release).await;
        slow_writes.abort();
        ended
    });
    // A disk that hangs under the hardware reader must not delay the end.
    runtime.shutdown_timeout(Duration::from_millis(100));
    finish_writes(&writer, log);
    match ended.map_err(CommandError::from_error)? {
        None => Ok(()),
        Some(handover) => {
            // The release that replaces this process takes the agent's lock itself.
            drop(held);
            Err(CommandError::from_error(release.exec_release(&handover)))
        }
    }
}

/// The time that this machine trusted last, on its clock.
fn resume_time(state: &StateDirectory, clock: &HostClock) -> Arc<TrustedTime> {
    let sample = state.read_time_sample().unwrap_or_else(|error| {
        tracing::warn!(%error, "the stored time cannot be read; using this machine's own clock");
        None
    });
    Arc::new(TrustedTime::new(Arc::new(clock.clone()), sample))
}

/// One thread at a time runs the tasks. While it waits for the disk, another one takes them over.
fn build_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}

fn cluster_settings(
    state: &StateDirectory,
    agent: &Agent,
    leaving: &CancellationToken,
    server_pool: &ServerPool,
    signing: &SigningStore,
) -> cluster::cluster_node::ClusterNodeSettings {
    cluster::cluster_node::ClusterNodeSettings {
        state_directory: state.path().to_owned(),
        launcher: "/proc/self/exe".into(),
        etcd: cluster::etcd_program::program(),
        boot_id: agent.clock.boot_id(),
        clock: Clock::system(),
        shutdown: leaving.clone(),
        server_pool: server_pool.clone(),
        signing: signing.clone(),
        ports: cluster::kubernetes::components::ComponentPorts::default(),
        address_rule: AddressRule::verified(),
    }
}

/// Reads the report on the running release and how it runs, for heartbeats.
fn release_reader(release: &SelfUpdater, findings: &HostFindings, gate: &GateMonitor) -> ReadRelease {
    let (release, findings, gate) = (release.clone(), findings.clone(), gate.clone());
    Arc::new(move || {
        curator_gate::update_finding(&gate, &findings);
        Some(wire::ReleaseReport { findings: findings.report(), ..release.report() })
    })
}

/// The root runnable: the heartbeat loop and the other parts as its children.
fn root_runnable(
    (agent, watch_cell): (Agent, WatchCell<()>),
    (state, settings_store): (StateDirectory, SettingsStore),
    others: Vec<(&'static str, Runnable)>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let callback = run_heartbeats(agent.clone(), settings_store.clone(), watch_cell.clone());
        let status =
            status_socket::serve_report(state.path(), status_socket::STATUS_SOCKET, TreeReport::to_string);
        let others = others.clone();
        async move {
            starting.start("callback", callback)?;
            for (name, other) in others {
                starting.start(name, other)?;
            }
            starting.start("status", status)?;
            Err(starting.mark_healthy().scope().cancelled().await.into())
        }
    })
}

/// The heartbeat loop; each run starts with the settings that the one before has learned.
fn run_heartbeats(agent: Agent, settings_store: SettingsStore, watch_cell: WatchCell<()>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (settings, fallback) = settings_store.load();
        let agent = Agent { settings, fallback, ..agent.clone() };
        let mut watcher = watch_cell.watch();
        async move {
            let scope = starting.scope().clone();
            let mut run = std::pin::pin!(agent.run(scope.token()));
            tokio::select! {
                () = &mut run => return Err(scope.cancelled().await.into()),
                () = watcher.next() => {}
            }
            let healthy = starting.mark_healthy();
            run.await;
            Err(healthy.scope().cancelled().await.into())
        }
    })
}

/// Runs until SIGTERM or SIGINT, or until another release takes over, which is returned then.
async fn run_until_signal(
    root: Runnable,
    leaving: &CancellationToken,
    release: &SelfUpdater,
) -> std::io::Result<Option<Handover>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let tree = Supervisor::start(root, supervise::SupervisorSettings::default());
    let handover = loop {
        tokio::select! {
            _ = terminate.recv() => break None,
            _ = interrupt.recv() => break None,
            handover = release.wait_for_handover() => break Some(handover),
            // The end of a terminal is not the end of the machine.
            _ = hangup.recv() => {}
        }
    };
    // Children go on; the next role server adopts them.
    leaving.cancel();
    match &handover {
        None => tree.stop().await,
        // What does not end in time ends with this program.
        Some(_) => drop(tokio::time::timeout(HANDOVER_TIMEOUT, tree.stop()).await),
    }
    Ok(handover)
}
