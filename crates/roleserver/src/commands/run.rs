//! `roleserver run`: run the agent and everything below it.
//!
//! Builds the heartbeat loop from the host's parts, stores what responses bring, and logs what happens: the first
//! delivery, each change, and a failure when it begins, when its reason changes, and then ever more rarely, because a
//! shepherd may be away for days and the log is on the machine's own disk.
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
use std::sync::{Arc, Mutex, PoisonError};
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

use crate::agent::settings::AgentSettings;
use crate::agent::{Agent, AgentEvent, ReadRelease};
use crate::boot_clock::{BootClock, HostClock};
use crate::cluster;
use crate::cluster::cluster_node::run_cluster_node;
use crate::cluster::curator_gate;
use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::order_inbox::OrderInbox;
use crate::commands::CommandError;
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
use crate::state_directory::{LastHeartbeat, Lock, StateDirectory, StateError};
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

/// Stores and logs the events of the heartbeat loop.
struct AgentEventHandler {
    /// Writes the files. The heartbeat loop, which calls this handler, never waits for the disk.
    writer: StateWriter,
    delivered: WatchCell<()>,
    logs: LogUploads,
    order_inbox: OrderInbox,
    release: SelfUpdater,
    state: StateDirectory,
    clock: HostClock,
    incarnation: Uuid,
    settings_store: SettingsStore,
    memory: Mutex<HandlerState>,
    /// The record of this process while it could not be written. Only the writer waits for its lock.
    unsaved_record: Arc<Mutex<Option<ProcessRecord>>>,
}

struct HandlerState {
    settings: AgentSettings,
    delivered_at: Option<u64>,
    last_error: Option<String>,
}

impl AgentEventHandler {
    fn handle_event(&self, event: &AgentEvent) {
        // Before anything else of the response: an order that comes with it is taken behind the end of the trial.
        if matches!(event, AgentEvent::Delivered { .. }) {
            self.confirm_trial();
            self.store_signing();
        }
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        self.save_record();
        match event {
            AgentEvent::Delivered { endpoint, ack: delivered, .. } => {
                self.delivered.set(());
                let recovered = memory.last_error.take().is_some();
                if delivered.first || recovered {
                    tracing::info!(%endpoint, "heartbeat delivered");
                }
                if delivered.with_report {
                    tracing::info!(%endpoint, "hardware report delivered");
                }
                if let Some(generation) = delivered.rejected_installation {
                    tracing::error!(
                        generation,
                        "the shepherd requests the installation of an operating system, which this release \
                         of the role server cannot do"
                    );
                }
                memory.delivered_at = Some(self.clock.milliseconds());
                self.save_heartbeat(endpoint, None, memory.delivered_at);
            }
            AgentEvent::Failed { endpoint, error, failures, pause } => {
                let changed = memory.last_error.as_ref() != Some(error);
                if changed || failures.is_power_of_two() {
                    let pause = format!("{:.1} s", pause.as_secs_f64());
                    tracing::warn!(%endpoint, error, failures, %pause, "heartbeat not delivered");
                }
                memory.last_error = Some(error.clone());
                self.save_heartbeat(endpoint, Some(error.clone()), memory.delivered_at);
            }
            AgentEvent::SettingsChanged { settings, fallback } => {
                tracing::info!(endpoints = ?settings.endpoints, "the shepherd changed the settings");
                memory.settings = settings.clone();
                self.settings_store.save(settings, fallback.clone());
            }
            AgentEvent::SettingsConfirmed => self.settings_store.save(&memory.settings, None),
            AgentEvent::SettingsRejected { reason } => {
                tracing::error!(reason, "the shepherd sent settings that cannot be used; the old ones stay");
            }
            AgentEvent::ClusterOrder { order } => {
                let (inbox, order) = (self.order_inbox.clone(), order.clone());
                self.writer.enqueue("order", move || inbox.accept(&order));
            }
            AgentEvent::SigningKeys { keys, rotations, requires_signed_declarations } => {
                let signing = self.release.signing();
                if *requires_signed_declarations {
                    signing.require_signed_declarations();
                }
                if signing.accept_offer(keys, rotations) {
                    self.store_signing();
                }
            }
            AgentEvent::ReleaseOrder { order } => {
                // During a trial an order is ignored, so it is taken behind the end of one.
                let (release, order) = (self.release.clone(), order.clone());
                self.writer.enqueue("release-order", move || release.set_order(&order));
            }
            AgentEvent::LogRequests { requests } => self.logs.set_requests(requests),
            AgentEvent::TimeSampled { sample } => {
                let (state, sample) = (self.state.clone(), sample.clone());
                self.writer.enqueue("time", move || log_failure(state.write_time_sample(&sample)));
            }
        }
    }

    fn save_heartbeat(&self, endpoint: &str, error: Option<String>, delivered_at: Option<u64>) {
        let last = LastHeartbeat {
            boot_id: self.clock.boot_id(),
            at_milliseconds: self.clock.milliseconds(),
            incarnation: self.incarnation,
            endpoint: endpoint.to_owned(),
            error,
            delivered_at_milliseconds: delivered_at,
        };
        let state = self.state.clone();
        self.writer.enqueue("heartbeat", move || log_failure(state.write_last_heartbeat(&last)));
    }

    /// Ends the trial of this release, if it is on trial.
    fn confirm_trial(&self) {
        let Some(trial) = self.release.acknowledge_trial() else { return };
        let (release, directory) = (self.release.clone(), self.state.path().to_owned());
        self.writer.enqueue("trial", move || disk::run_beside(&directory, || release.promote_release(trial)));
    }

    /// Stores the pinned signing keys and the lowest accepted version, if that has not been done.
    fn store_signing(&self) {
        if self.release.has_unsaved_signing() {
            let release = self.release.clone();
            self.writer.enqueue("signing", move || release.store_signing());
        }
    }

    /// Writes the record of this process, if that has failed before.
    fn save_record(&self) {
        if self.unsaved_record.try_lock().is_ok_and(|record| record.is_some()) {
            let (state, unsaved) = (self.state.clone(), self.unsaved_record.clone());
            self.writer.enqueue("agent", move || {
                let mut unsaved = unsaved.lock().unwrap_or_else(PoisonError::into_inner);
                unsaved.take_if(|record| state.record_agent(record).is_ok());
            });
        }
    }
}

/// Logs a failure to write. It ends nothing: a machine with a full disk still sends heartbeats.
fn log_failure(written: Result<(), StateError>) {
    if let Err(error) = written {
        tracing::warn!(%error, "a state file could not be written; the agent continues");
    }
}

#[cfg(test)]
#[cfg(debug_assertions)]
mod tests {
    use std::sync::mpsc;

    use model::ids::MachineId;
    use proto::agent::v1 as wire;

    use super::*;
    use crate::agent::heartbeat_session::HeartbeatAck;
    use crate::process::ProcessInstance;
    use crate::settings_store;
    use crate::settings_store::tests::settings;
    use crate::update::decision::Trial;
    use crate::update::files::UpdateFiles;

    const PATIENCE: Duration = Duration::from_mins(1);

    /// A handler in the program with this digest.
    fn handler(state: &StateDirectory, digest: &str) -> AgentEventHandler {
        let clock = HostClock::read().unwrap();
        let incarnation = Uuid::new_v4();
        let writer = StateWriter::default();
        AgentEventHandler {
            settings_store: settings_store::tests::store(state, &writer, "127.0.0.1:9"),
            writer,
            delivered: WatchCell::new(),
            logs: LogUploads::new(
                LogSources::of_state_directory(state.log_path(), state.path()),
                ServerPool::default(),
                incarnation,
            ),
            order_inbox: OrderInbox::new(
                MachineId(Uuid::new_v4()),
                ClusterFiles::in_state_directory(state.path()),
                NodeFacts::default(),
            ),
            release: SelfUpdater::resume_update(
                state.path(),
                digest,
                &clock,
                SigningStore::open(state.clone()),
            ),
            state: state.clone(),
            clock,
            incarnation,
            memory: Mutex::new(HandlerState {
                settings: settings("127.0.0.1:9"),
                delivered_at: None,
                last_error: None,
            }),
            unsaved_record: Arc::default(),
        }
    }

    #[test]
    fn heartbeats_go_on_while_the_disk_does_not_answer() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let handler = handler(&state, "digest");
        let disk = disk::fault::block_syncs(state.path());
        let order = wire::ClusterOrder {
            generation: 1,
            operation: Some(wire::cluster_order::Operation::Leave(wire::LeaveCluster {})),
            ..wire::ClusterOrder::default()
        };
        // Each of these is called by the heartbeat loop. A call that waits for the disk would never return here.
        for heartbeat in 0..50 {
            let ack = HeartbeatAck { first: heartbeat == 0, with_report: false, rejected_installation: None };
            handler.handle_event(&AgentEvent::Delivered { endpoint: "a".to_owned(), seq: heartbeat, ack });
            let endpoint = format!("127.0.0.1:{}", 1000 + heartbeat);
            handler
                .handle_event(&AgentEvent::SettingsChanged { settings: settings(&endpoint), fallback: None });
            handler.handle_event(&AgentEvent::ClusterOrder { order: order.clone() });
        }
        assert!(!handler.writer.flush(Duration::ZERO), "the disk has written everything");
        assert_eq!(state.read_learned_settings(1).unwrap(), None);
        let next_run = handler.settings_store.load();
        assert_eq!(next_run, (settings("127.0.0.1:1049"), None), "a loop that starts again has the newest");
        assert_eq!(
            handler.order_inbox.report().generation,
            0,
            "an order is not reported before it is durable"
        );

        drop(disk);
        assert!(handler.writer.flush(PATIENCE));
        let learned = state.read_learned_settings(1).unwrap().unwrap();
        assert_eq!(learned.settings, settings("127.0.0.1:1049"), "the newest settings are stored");
        assert!(state.read_last_heartbeat().unwrap().unwrap().delivered_at_milliseconds.is_some());
        assert!(ClusterFiles::in_state_directory(state.path()).read_order().unwrap().is_some());
    }

    /// The file of the outcome of an update is written when the first heartbeat of the new release is acknowledged.
    #[test]
    fn heartbeat_that_ends_a_trial_does_not_wait_for_the_disk() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let [stable, candidate] = ["roleserver", "roleserver.candidate"].map(|name| state.path().join(name));
        std::fs::write(&stable, "old").unwrap();
        std::fs::write(&candidate, "new").unwrap();
        let (clock, digest) = (HostClock::read().unwrap(), program_digest(&candidate).unwrap());
        let patience_ms = 3_600_000;
        let trial = Trial {
            generation: 3,
            sha256: digest.clone(),
            former: program_digest(&stable).unwrap(),
            stable: stable.clone(),
            candidate,
            boot_id: clock.boot_id(),
            until_ms: clock.milliseconds() + patience_ms,
            patience_ms,
            instance: ProcessInstance::current().unwrap(),
            minimum_version: None,
            failure: None,
        };
        let files = UpdateFiles::in_state_directory(state.path());
        files.write_trial(&trial).unwrap();
        let handler = Arc::new(handler(&state, &digest));

        let disk = disk::fault::block_syncs(state.path());
        let (sender, returned) = mpsc::channel();
        let heartbeats = handler.clone();
        std::thread::spawn(move || {
            let ack = HeartbeatAck { first: true, with_report: false, rejected_installation: None };
            heartbeats.handle_event(&AgentEvent::Delivered { endpoint: "a".to_owned(), seq: 0, ack });
            let order = wire::ReleaseOrder { generation: 4, ..wire::ReleaseOrder::default() };
            heartbeats.handle_event(&AgentEvent::ReleaseOrder { order });
            let _ = sender.send(());
        });
        let waited = returned.recv_timeout(PATIENCE);
        assert!(waited.is_ok(), "a heartbeat waits for the disk");
        assert!(handler.release.acknowledge_trial().is_none(), "the time of the trial can still end");
        assert_eq!(handler.release.report().generation, 0, "an outcome is not reported before it is durable");
        assert!(handler.release.latest_order().is_none(), "an order overtakes the end of the trial");

        drop(disk);
        assert!(handler.writer.flush(PATIENCE));
        assert_eq!(handler.release.report().generation, 3);
        assert_eq!((std::fs::read(&stable).unwrap(), files.read_trial()), (b"new".to_vec(), None));
        let order = handler.release.latest_order().unwrap();
        assert_eq!(order.generation, 4, "an order that came with the acknowledgement is lost");
    }
}
