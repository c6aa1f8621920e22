//! The agent: calls a shepherd with a heartbeat each interval, and passes on what comes with the responses.
//!
//! One task per machine builds a heartbeat, sends it, and waits until the next one is due. It never ends by itself and
//! never gives up. Everything that it needs comes as a value in [`Agent`]: the clock, the hardware, the identity, an
//! observer. It applies the settings of a response itself, and reports everything else as an [`AgentEvent`]. So the
//! program on a machine and a simulated machine run the same code, the latter thousands of times in one process.
//!
//! # How the files fit
//!
//! * `heartbeat_loop.rs`: the loop: which server is called, which settings are used, and what happens after a failure.
//! * [`heartbeat_session`][]: builds the next heartbeat, and remembers what a server has acknowledged. Pure.
//! * [`heartbeat_backoff`][]: the pauses between heartbeats and between retries. Pure.
//! * [`settings`][]: how to reach a shepherd.
//!
//! # Invariants
//!
//! * A heartbeat waits at most twenty seconds for the hardware to be read, and for nothing else on the machine. A full
//!   disk delays nothing.
//! * Retries never end. The longest pause between two of them is a minute.
//! * Settings that a response brings never cut the machine off: the former ones stay as a fallback until the new ones
//!   have worked.
//! * The observer and the readers of reports run in the loop, and must return quickly.
//!
//! # Notes for the next implementor
//!
//! A new field of the heartbeat response becomes a variant of [`AgentEvent`]. `commands::agent_event_handler` and the
//! simulator handle it. An order is repeated with each response until the machine has reported on it, so handling it
//! twice must be harmless.

use std::sync::Arc;
use std::time::Duration;

use curator_client::identity::Identity;
use model::ids::MachineId;
use proto::agent::v1 as wire;
use proto::hardware::v1::HardwareReport;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::agent::heartbeat_loop::HeartbeatLoop;
use crate::agent::heartbeat_session::HeartbeatAck;
use crate::agent::settings::AgentSettings;
use crate::boot_clock::BootClock;
use crate::server_pool::ServerPool;
use crate::trusted_time::{TimeSample, TrustedTime};

pub mod heartbeat_backoff;
mod heartbeat_loop;
pub mod heartbeat_session;
pub mod settings;

/// Reads the hardware of the machine; may block.
pub type ReadHardware = Arc<dyn Fn() -> HardwareReport + Send + Sync>;
/// Returns the machine's state in its cluster. Called in the loop, so it must be quick.
pub type ReadClusterReport = Arc<dyn Fn() -> wire::ClusterReport + Send + Sync>;
/// Returns the release of the role server; `None` if it does not replace itself. Must be quick, too.
pub type ReadRelease = Arc<dyn Fn() -> Option<wire::ReleaseReport> + Send + Sync>;
/// Receives the events of the loop. Called in the loop, so it must be quick.
pub type EventObserver = Arc<dyn Fn(&AgentEvent) + Send + Sync>;

/// One agent: everything the loop needs.
#[derive(Clone)]
pub struct Agent {
    /// The identity of the machine in the database.
    pub machine_id: MachineId,
    /// The key that the machine proves to own.
    pub identity: Arc<Identity>,
    /// The settings in use: how to reach the shepherd.
    pub settings: AgentSettings,
    /// Settings to fall back to while `settings` have not worked yet.
    pub fallback: Option<AgentSettings>,
    /// Highest fence of the access lane that enrolled the machine.
    pub access_fence: i64,
    /// The id of this start of the agent; every start has another one.
    pub incarnation: Uuid,
    /// Value of the heartbeat field `agent_version`.
    pub agent_version: String,
    /// The boot and the milliseconds since it began.
    pub clock: Arc<dyn BootClock>,
    /// The current time, as a shepherd last reported it.
    pub time: Arc<TrustedTime>,
    /// Reads the hardware for the report.
    pub hardware: ReadHardware,
    /// Reads the machine's state in its cluster; [`no_cluster`] for a machine that can have none.
    pub cluster: ReadClusterReport,
    /// Reads the release that runs; [`no_release`] where it cannot be changed.
    pub release: ReadRelease,
    /// Whether this agent uploads logs on request. If so, the observer must handle [`AgentEvent::LogRequests`].
    pub uploads_logs: bool,
    /// Receives the endpoints of the shepherds, if other parts of the role server connect to them.
    pub server_pool: Option<ServerPool>,
    /// Receives the events; [`ignore_events`] if nobody needs them.
    pub observer: EventObserver,
}

/// An event of the heartbeat loop.
#[derive(Clone, Debug)]
pub enum AgentEvent {
    /// A heartbeat is durable at the shepherd.
    Delivered {
        /// The endpoint that acknowledged it.
        endpoint: String,
        /// The heartbeat's position in time, in milliseconds of the boot.
        seq: u64,
        /// What the shepherd acknowledged with it.
        ack: HeartbeatAck,
    },
    /// Sending a heartbeat failed; it is retried after a pause.
    Failed {
        /// The endpoint that it failed at.
        endpoint: String,
        /// The cause, as one sentence.
        error: String,
        /// Failures in a row, including this one.
        failures: u32,
        /// The time until the next attempt.
        pause: Duration,
    },
    /// A response brought other settings, which are used from now on.
    SettingsChanged {
        /// The settings in use from now on.
        settings: AgentSettings,
        /// The settings to fall back to until the new ones have worked; `None` if the endpoint in use is one of the new
        /// ones.
        fallback: Option<AgentSettings>,
    },
    /// The settings in use have worked; no fallback is needed any more.
    SettingsConfirmed,
    /// A response brought settings that cannot be used; the old ones stay.
    SettingsRejected {
        /// The field, and what is wrong with it.
        reason: String,
    },
    /// A response reported the current time, and it is worth storing.
    TimeSampled {
        /// The time, and where in the boot it was reported.
        sample: TimeSample,
    },
    /// A response carried an order about a cluster.
    ClusterOrder {
        /// The order to found a cluster, to join one or to leave it.
        order: wire::ClusterOrder,
    },
    /// A response brought keys that releases must be signed with, or rotations of them. It comes before an order for a
    /// release.
    SigningKeys {
        /// The line of each key.
        keys: Vec<String>,
        /// Lists of keys that replace pinned ones.
        rotations: Vec<wire::KeyRotation>,
        /// Whether declarations that give root must be signed, too.
        requires_signed_declarations: bool,
    },
    /// A response ordered another release of the role server.
    ReleaseOrder {
        /// The release to run, and its order.
        order: wire::ReleaseOrder,
    },
    /// A response requested logs.
    LogRequests {
        /// All open requests, including those of earlier responses.
        requests: Vec<wire::LogRequest>,
    },
}

/// The cluster report of a machine that can have no cluster.
#[must_use]
pub fn no_cluster() -> ReadClusterReport {
    Arc::new(wire::ClusterReport::default)
}

/// The release of a role server that does not replace itself.
#[must_use]
pub fn no_release() -> ReadRelease {
    Arc::new(|| None)
}

/// An observer that ignores every event.
#[must_use]
pub fn ignore_events() -> EventObserver {
    Arc::new(|_| {})
}

impl Agent {
    /// Heartbeats until `shutdown`; never ends otherwise.
    pub async fn run(self, shutdown: CancellationToken) {
        let work = HeartbeatLoop::new(self);
        tokio::select! {
            () = shutdown.cancelled() => {}
            never = work.run() => match never {},
        }
    }
}
