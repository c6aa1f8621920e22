//! Handler of the heartbeat loop's events: stores what responses bring, and logs what happens.
//!
//! It logs the first delivery, each change, and a failure when it begins, when its reason changes, and then ever more
//! rarely, because a shepherd may be away for days and the log is on the machine's own disk.

use std::sync::{Arc, Mutex, PoisonError};

use supervisor::watch_cell::WatchCell;
use uuid::Uuid;

use crate::agent::AgentEvent;
use crate::agent::settings::AgentSettings;
use crate::boot_clock::{BootClock, HostClock};
use crate::cluster::order_inbox::OrderInbox;
use crate::disk;
use crate::logs::LogUploads;
use crate::process::ProcessRecord;
use crate::settings_store::SettingsStore;
use crate::state_directory::{LastHeartbeat, StateDirectory};
use crate::state_error::StateError;
use crate::state_writer::StateWriter;
use crate::update::self_updater::SelfUpdater;

/// Stores and logs the events of the heartbeat loop.
pub(super) struct AgentEventHandler {
    /// Writes the files. The heartbeat loop, which calls this handler, never waits for the disk.
    pub(super) writer: StateWriter,
    pub(super) delivered: WatchCell<()>,
    pub(super) logs: LogUploads,
    pub(super) order_inbox: OrderInbox,
    pub(super) release: SelfUpdater,
    pub(super) state: StateDirectory,
    pub(super) clock: HostClock,
    pub(super) incarnation: Uuid,
    pub(super) settings_store: SettingsStore,
    pub(super) memory: Mutex<HandlerState>,
    /// The record of this process while it could not be written. Only the writer waits for its lock.
    pub(super) unsaved_record: Arc<Mutex<Option<ProcessRecord>>>,
}

pub(super) struct HandlerState {
    pub(super) settings: AgentSettings,
    pub(super) delivered_at: Option<u64>,
    pub(super) last_error: Option<String>,
}

impl AgentEventHandler {
    pub(super) fn handle_event(&self, event: &AgentEvent) {
        // Before anything else of the response: an order that comes with it waits for the end of the trial.
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
                // It waits for the disk only if it came with the acknowledgement of a trial.
                self.release.set_order(order);
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
pub(super) fn log_failure(written: Result<(), StateError>) {
    if let Err(error) = written {
        tracing::warn!(%error, "a state file could not be written; the agent continues");
    }
}

#[cfg(test)]
#[cfg(debug_assertions)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use model::ids::MachineId;
    use proto::agent::v1 as wire;

    use super::*;
    use crate::agent::heartbeat_session::HeartbeatAck;
    use crate::cluster::files::ClusterFiles;
    use crate::cluster::node_facts::NodeFacts;
    use crate::logs::sources::LogSources;
    use crate::process::{ProcessInstance, program_digest};
    use crate::server_pool::ServerPool;
    use crate::settings_store;
    use crate::settings_store::tests::settings;
    use crate::signing_store::SigningStore;
    use crate::update::decision::Trial;
    use crate::update::files::{UpdateFiles, claim_trial};

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
        let release = wire::ReleaseOrder { generation: 4, ..wire::ReleaseOrder::default() };
        handler.handle_event(&AgentEvent::ReleaseOrder { order: release.clone() });
        assert_eq!(
            handler.release.latest_order(),
            Some(release),
            "an order waits for the disk without a trial"
        );
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
        assert!(!claim_trial(&files.open_trial().unwrap()), "the watchdog can still end the trial");
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
