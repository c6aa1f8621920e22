//! The reconciler leader's state machine: status, releases, passes; no I/O.
//!
//! [`Leadership::next_step`] returns the next step, and the caller reports its result. So the same steps run against
//! etcd, against a table and in a simulated cluster.
//!
//! # The order of steps
//!
//! The status promises two things to all controllers ([`status`](crate::status)). L is this release, A the
//! lowest release whose API servers its objects do not break, V and C are the version and the lowest compatible release
//! in the status:
//!
//! | status | before objects are changed | why |
//! | --- | --- | --- |
//! | none | nothing | no controller has started yet, because each waits for a status |
//! | what this program would write | nothing | objects may only become what was promised |
//! | V ≤ L, C ≥ A | state: working | it promises no more than will hold, and excludes all that would break |
//! | V > L, or C < A | V = min(V, L), C = max(C, A), **with proof** | neither may start: what needs V, what L breaks |
//!
//! The last write needs proof that **no controller is newer than L or older than A**: controllers that need the objects
//! of V must not start, and neither must those that this program's objects break. The releases of all controllers are
//! read, and etcd writes the status only if none of their records was written since. A controller that joins, or
//! reports another release, invalidates the proof.
//!
//! If a status existed, another leader reconciled before, and its requests may be under way, which no lease can call
//! back. They get a [settle time](ReconcileTiming::settle_time) to arrive. Then passes are made until the first one
//! succeeds. Then the status of this program is written, which may promise more, or exclude less, only now. After that
//! a pass is made every thirty seconds, and when others have changed objects or the configuration of the cluster has
//! changed.
//!
//! Before each of these later passes the status is read again, as the leader. A program that is no longer the leader
//! learns it here, and a status that was deleted or replaced restarts the whole sequence.
//!
//! A status that cannot be read is none of the rows. It may exclude what this program would let start, so nothing is
//! done until it can be read, or is deleted.

use std::time::Duration;

use backoff::ExponentialBackoff;
use etcd::guard::{ExpectedRevision, KeyChange, UnchangedKeys};
use etcd::key_space::{NODES, RECONCILER_STATUS};
use etcd::namespace::KeySelector;

use crate::controller_releases::{ControllerReleases, ReleaseBlock};
use crate::program::Program;
use crate::status::{ReconcilerState, ReconcilerStatus};

/// Minimum time between two passes, even if others change objects all the time.
const MIN_RECONCILE_INTERVAL: Duration = Duration::from_secs(1);
/// Time until a step that cannot be done is tried again, if no event triggers it.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How long the first pass may fail before that is logged as a warning: an API server takes a moment to start.
const FAILURE_REPORT_DELAY: Duration = Duration::from_secs(2);
/// Time between two such warnings.
const FAILURE_REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// The delays after failures of the first pass.
const FIRST_PASS_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(100), factor: 1.5, max: Duration::from_mins(1) };

/// The waiting times of a leadership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReconcileTiming {
    /// How long requests of a former leader get to arrive.
    pub settle_time: Duration,
    /// Time between two passes when no change of an object is observed.
    pub interval: Duration,
}

impl Default for ReconcileTiming {
    /// 5 s of settle time, a pass every 30 s.
    fn default() -> Self {
        Self { settle_time: Duration::from_secs(5), interval: Duration::from_secs(30) }
    }
}

/// What can end a wait before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeSource {
    /// Only the time ends the wait.
    Nothing,
    /// A change of node records: see [`Leadership::on_nodes_changed`].
    NodeChanges,
    /// A change of objects: see [`Leadership::on_objects_changed`].
    ObjectChanges,
}

/// The next step of the leader. Times are measured from any fixed moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderStep {
    /// Read the status, if this is still the leader; then [`Leadership::on_status_read`].
    ReadStatus,
    /// Read the releases of all controllers; then [`Leadership::on_releases_read`].
    ReadReleases,
    /// Write this; then [`Leadership::on_status_written`] or [`Leadership::on_write_conflict`].
    WriteStatus(StatusWrite),
    /// Make a pass; then [`Leadership::on_pass_finished`].
    Reconcile,
    /// Wait until this time, or until an event of its [wake source](Leadership::wake_source).
    Wait(Duration),
}

/// A write of the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusWrite {
    /// The status to write.
    pub status: ReconcilerStatus,
    /// The revision that the status must have until then.
    pub expected: ExpectedRevision,
    /// No record of a node may have been written since this revision. `None` if the write does not rely on them.
    pub nodes_unchanged_since: Option<i64>,
}

impl StatusWrite {
    /// The change in terms of etcd.
    #[must_use]
    pub fn to_change(&self) -> KeyChange {
        let key = RECONCILER_STATUS.to_owned();
        KeyChange::Put { key, value: self.status.encode(), expected: self.expected }
    }

    /// The keys that must not have changed, if any.
    #[must_use]
    pub fn unchanged_keys(&self) -> Option<UnchangedKeys> {
        self.nodes_unchanged_since
            .map(|since| UnchangedKeys { keys: KeySelector::Prefix(NODES.range().start), revision: since })
    }
}

/// A status as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredStatus {
    /// The decoded status record.
    pub status: ReconcilerStatus,
    /// The store's revision of the record.
    pub revision: i64,
}

/// The level at which a failed pass is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureLogLevel {
    /// Logged at debug level: the failure may pass soon.
    Debug,
    /// Logged as a warning: an operator should know.
    Warn,
}

/// The state of one leadership, from a won election on.
#[derive(Clone, Debug)]
pub struct Leadership {
    program: Program,
    timing: ReconcileTiming,
    phase: LeadershipPhase,
}

#[derive(Clone, Debug)]
enum LeadershipPhase {
    /// The status was not read yet.
    Unread,
    /// The status cannot be read, or etcd did not answer.
    Retry { until: Duration },
    /// This status must be written before any object is changed.
    WriteStatus(StatusWrite),
    /// This status must be written once the releases of the nodes allow it.
    AwaitNodes { status: ReconcilerStatus, revision: i64, blocked: Option<(ReleaseBlock, Duration)> },
    /// Requests of a former leader may still arrive.
    AwaitOldRequests { stored: StoredStatus, until: Duration },
    /// No pass has succeeded yet.
    FirstPass(FirstPass),
    /// All objects are as they should be, but the status does not show it yet.
    WriteDone { stored: Option<StoredStatus> },
    /// All objects were as they should be, and the status shows it.
    Steady { stored: StoredStatus, next_pass: Duration, last_pass: Duration, checked: bool },
}

#[derive(Clone, Debug)]
struct FirstPass {
    stored: Option<StoredStatus>,
    started_at: Duration,
    last_reported: Option<Duration>,
    failures: u32,
    not_before: Duration,
}

impl Leadership {
    /// The state after an election was won.
    #[must_use]
    pub const fn new(program: Program, timing: ReconcileTiming) -> Self {
        Self { program, timing, phase: LeadershipPhase::Unread }
    }

    /// The next step at this time.
    #[must_use]
    pub fn next_step(&self, now: Duration) -> LeaderStep {
        let from = |at: Duration, step: LeaderStep| if now < at { LeaderStep::Wait(at) } else { step };
        match &self.phase {
            LeadershipPhase::Unread => LeaderStep::ReadStatus,
            LeadershipPhase::Retry { until } => from(*until, LeaderStep::ReadStatus),
            LeadershipPhase::WriteStatus(write) => LeaderStep::WriteStatus(write.clone()),
            LeadershipPhase::AwaitNodes { blocked: None, .. } => LeaderStep::ReadReleases,
            LeadershipPhase::AwaitNodes { blocked: Some((_, until)), .. } => {
                from(*until, LeaderStep::ReadReleases)
            }
            LeadershipPhase::AwaitOldRequests { until, .. } => from(*until, LeaderStep::Reconcile),
            LeadershipPhase::FirstPass(first) => from(first.not_before, LeaderStep::Reconcile),
            LeadershipPhase::WriteDone { stored: known } => {
                let expected = known
                    .as_ref()
                    .map_or(ExpectedRevision::Absent, |known| ExpectedRevision::At(known.revision));
                let status = ReconcilerStatus::completed_by(&self.program);
                LeaderStep::WriteStatus(StatusWrite { status, expected, nodes_unchanged_since: None })
            }
            LeadershipPhase::Steady { checked: true, .. } => LeaderStep::Reconcile,
            LeadershipPhase::Steady { next_pass: next, .. } => from(*next, LeaderStep::ReadStatus),
        }
    }

    /// Why the leadership waits for nodes to change; `None` if it does not.
    #[must_use]
    pub const fn blocked(&self) -> Option<&ReleaseBlock> {
        match &self.phase {
            LeadershipPhase::AwaitNodes { blocked: Some((blocked, _)), .. } => Some(blocked),
            _ => None,
        }
    }

    /// The event that can end a wait before its time.
    #[must_use]
    pub fn wake_source(&self) -> WakeSource {
        match &self.phase {
            LeadershipPhase::AwaitNodes { .. } => WakeSource::NodeChanges,
            // If a pass is due soon anyway, an event would change nothing.
            LeadershipPhase::Steady { next_pass: next, last_pass: last, .. }
                if *next > *last + MIN_RECONCILE_INTERVAL =>
            {
                WakeSource::ObjectChanges
            }
            _ => WakeSource::Nothing,
        }
    }

    /// The status was read; `None` if it does not exist. The error is that it cannot be decoded.
    pub fn on_status_read<E>(&mut self, now: Duration, read: Result<Option<StoredStatus>, E>) {
        let Ok(read) = read else {
            self.phase = LeadershipPhase::Retry { until: now + RETRY_INTERVAL };
            return;
        };
        if let LeadershipPhase::Steady { stored: known, checked, .. } = &mut self.phase
            && read.as_ref().is_some_and(|read| read == known)
        {
            *checked = true;
            return;
        }
        self.phase = self.phase_after_read(now, read);
    }

    fn phase_after_read(&self, now: Duration, read: Option<StoredStatus>) -> LeadershipPhase {
        let Some(stored) = read else { return LeadershipPhase::FirstPass(FirstPass::new(None, now)) };
        if stored.status == ReconcilerStatus::completed_by(&self.program) {
            return LeadershipPhase::AwaitOldRequests { stored, until: now + self.timing.settle_time };
        }
        let mut status = stored.status.clone();
        status.state = ReconcilerState::Working;
        let (own, wanted) = (self.program.release(), self.program.breaks_api_servers_below);
        if status.version.release() <= own && status.lowest_compatible >= wanted {
            if status == stored.status {
                return LeadershipPhase::AwaitOldRequests { stored, until: now + self.timing.settle_time };
            }
            let expected = ExpectedRevision::At(stored.revision);
            return LeadershipPhase::WriteStatus(StatusWrite {
                status,
                expected,
                nodes_unchanged_since: None,
            });
        }
        if status.version.release() >= own {
            status.version = self.program.version.clone();
        }
        status.lowest_compatible = status.lowest_compatible.max(wanted);
        LeadershipPhase::AwaitNodes { status, revision: stored.revision, blocked: None }
    }

    /// The releases of all controllers were read.
    pub fn on_releases_read(&mut self, now: Duration, releases: &ControllerReleases) {
        let LeadershipPhase::AwaitNodes { status, revision, blocked } = &mut self.phase else { return };
        if let Err(why) = releases.check_exclusion(&self.program) {
            *blocked = Some((why, now + RETRY_INTERVAL));
            return;
        }
        let (status, expected) = (status.clone(), ExpectedRevision::At(*revision));
        self.phase = LeadershipPhase::WriteStatus(StatusWrite {
            status,
            expected,
            nodes_unchanged_since: Some(releases.revision),
        });
    }

    /// A record of a node has changed.
    pub fn on_nodes_changed(&mut self) {
        if let LeadershipPhase::AwaitNodes { blocked, .. } = &mut self.phase {
            *blocked = None;
        }
    }

    /// The status was written, and this is its revision.
    pub fn on_status_written(&mut self, now: Duration, status: ReconcilerStatus, revision: i64) {
        let known = StoredStatus { status, revision };
        self.phase = match &self.phase {
            LeadershipPhase::WriteDone { .. } => LeadershipPhase::Steady {
                stored: known,
                next_pass: now + self.timing.interval,
                last_pass: now,
                checked: false,
            },
            _ => LeadershipPhase::AwaitOldRequests { stored: known, until: now + self.timing.settle_time },
        };
    }

    /// The status was not written, because it or a node's record has changed since it was read. Everything is decided
    /// again.
    pub fn on_write_conflict(&mut self) {
        self.phase = LeadershipPhase::Unread;
    }

    /// etcd did not answer. It may have carried out the request.
    pub fn on_etcd_error(&mut self, now: Duration) {
        self.phase = LeadershipPhase::Retry { until: now + RETRY_INTERVAL };
    }

    /// A pass succeeded or failed. Returns the level at which a failure is logged. `random` is from 0 to 1, for the
    /// backoff.
    pub fn on_pass_finished(&mut self, now: Duration, succeeded: bool, random: f64) -> FailureLogLevel {
        if let LeadershipPhase::AwaitOldRequests { stored: known, .. } = &self.phase {
            self.phase = LeadershipPhase::FirstPass(FirstPass::new(Some(known.clone()), now));
        }
        match &mut self.phase {
            LeadershipPhase::FirstPass(first) if succeeded => {
                let known = first.stored.take();
                let done = ReconcilerStatus::completed_by(&self.program);
                self.phase = match known {
                    Some(known) if known.status == done => LeadershipPhase::Steady {
                        stored: known,
                        next_pass: now + self.timing.interval,
                        last_pass: now,
                        checked: false,
                    },
                    known => LeadershipPhase::WriteDone { stored: known },
                };
                FailureLogLevel::Debug
            }
            LeadershipPhase::FirstPass(first) => first.on_failure(now, random),
            LeadershipPhase::Steady { next_pass: next, last_pass: last, checked, .. } => {
                (*next, *last, *checked) = (now + self.timing.interval, now, false);
                FailureLogLevel::Warn
            }
            _ => FailureLogLevel::Warn,
        }
    }

    /// Another client has changed objects.
    pub fn on_objects_changed(&mut self) {
        if let LeadershipPhase::Steady { next_pass: next, last_pass: last, .. } = &mut self.phase {
            *next = (*next).min(*last + MIN_RECONCILE_INTERVAL);
        }
    }
}

impl FirstPass {
    const fn new(known: Option<StoredStatus>, now: Duration) -> Self {
        Self { stored: known, started_at: now, last_reported: None, failures: 0, not_before: now }
    }

    fn on_failure(&mut self, now: Duration, random: f64) -> FailureLogLevel {
        self.failures = self.failures.saturating_add(1);
        self.not_before = now + FIRST_PASS_BACKOFF.delay(self.failures, random);
        let due = self
            .last_reported
            .map_or(self.started_at + FAILURE_REPORT_DELAY, |duration| duration + FAILURE_REPORT_INTERVAL);
        if now < due {
            return FailureLogLevel::Debug;
        }
        self.last_reported = Some(now);
        FailureLogLevel::Warn
    }
}

#[cfg(test)]
mod tests;
