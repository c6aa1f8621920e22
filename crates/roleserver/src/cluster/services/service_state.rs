//! State of a service: phase, health, run record, exit.
//!
//! Moments are durations since an arbitrary start, by a monotonic clock.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::child::exit::ChildExit;
use crate::child::spec::ResourceLimits;
use crate::cluster::services::desired::{DesiredService, ServiceId};

/// A service that ran for this long is stable: its next exit counts as the first failure.
const STABLE_AFTER: Duration = Duration::from_mins(1);

/// A moment of the monotonic clock, as the duration since its start.
pub type Moment = Duration;

/// How a service ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServiceExit {
    /// It exited with this status.
    Exited(i32),
    /// It was killed by this signal.
    Killed(i32),
    /// It ended while it was not observed, so the status is unknown.
    Unknown,
    /// It could not be started.
    NotStarted,
}

impl From<ChildExit> for ServiceExit {
    fn from(ending: ChildExit) -> Self {
        match ending {
            ChildExit::Exited(status) => Self::Exited(status),
            ChildExit::Killed(signal) => Self::Killed(signal),
            ChildExit::Unknown => Self::Unknown,
        }
    }
}

impl ServiceExit {
    /// The exit status; `None` if it did not exit by itself.
    #[must_use]
    pub const fn exit_code(self) -> Option<i32> {
        match self {
            Self::Exited(status) => Some(status),
            Self::Killed(_) | Self::Unknown | Self::NotStarted => None,
        }
    }
}

/// The exit of a service, as the run record stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// UUID of the boot in which it ended.
    pub boot_id: String,
    /// How it ended, by itself or by a signal.
    #[serde(rename = "how")]
    pub exit: ServiceExit,
    /// Description of the exit, as a sentence.
    #[serde(rename = "said")]
    pub message: String,
}

/// The run record, `service.json`: what a service was started with. A loss of power can damage it, so a later boot must
/// need nothing of it that is in no other file ([`record_files`][super::record_files]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// Role and name of the service.
    pub id: ServiceId,
    /// Digest of what it was started with; empty if it is lost.
    pub digest: String,
    /// Digest of what that followed from ([`DesiredService::declared`]). Earlier releases do not write or read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<String>,
    /// Revision of the declaration that it runs with.
    pub revision: u64,
    /// Services that it depends on; they are stopped after it.
    pub depends_on: BTreeSet<ServiceId>,
    /// Time that it has to exit, in milliseconds.
    pub stop_time_ms: u64,
    /// Limits of its control group.
    pub limits: ResourceLimits,
    /// Paths of the files that were written for it.
    pub files: BTreeSet<String>,
    /// When it was started, by the node's clock, in milliseconds since 1970.
    pub started_at_ms: i64,
    /// How often it was restarted after an exit since its digest or revision changed.
    pub restarts: u32,
    /// Its exit; `None` while it runs.
    pub ended: Option<ExitRecord>,
}

impl RunRecord {
    /// The record of a service whose file is lost.
    #[must_use]
    pub fn missing(id: ServiceId) -> Self {
        Self {
            id,
            digest: String::new(),
            declared: None,
            revision: 0,
            depends_on: BTreeSet::new(),
            stop_time_ms: 10_000,
            limits: ResourceLimits::default(),
            files: BTreeSet::new(),
            started_at_ms: 0,
            restarts: 0,
            ended: None,
        }
    }

    /// Time that it has to exit.
    #[must_use]
    pub const fn stop_time(&self) -> Duration {
        Duration::from_millis(self.stop_time_ms)
    }

    /// Whether the service, as it was started, is the desired one, and need not be restarted. False if the desired one
    /// cannot be rendered.
    #[must_use]
    pub fn satisfies(&self, wanted: &DesiredService) -> bool {
        let same_declaration = match &self.declared {
            Some(declared) => wanted.declared.as_ref() == Some(declared),
            // A release before these digests started it.
            None => wanted.former.as_ref() == Some(&self.digest),
        };
        wanted.digest().is_some_and(|digest| same_declaration || digest == self.digest)
    }

    /// This record once `wanted` applies to the running service without a restart.
    #[must_use]
    pub fn adjusted(&self, wanted: &DesiredService) -> Self {
        Self {
            revision: wanted.revision,
            declared: wanted.declared.clone(),
            depends_on: wanted.depends_on.clone(),
            stop_time_ms: u64::try_from(wanted.stop_time.as_millis()).unwrap_or(u64::MAX),
            limits: wanted.limits,
            restarts: if self.revision == wanted.revision { self.restarts } else { 0 },
            ..self.clone()
        }
    }
}

/// Health of a running service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// No probe has decided yet.
    Unknown,
    /// The last probe succeeded, or too few have failed since.
    Healthy,
    /// Probes fail; the sentence gives the reason.
    Unhealthy(String),
}

/// Phase of a service: what it does, or what is being done with it.
#[derive(Clone, Debug, PartialEq)]
pub enum ServicePhase {
    /// It does not run, and can be started.
    Stopped,
    /// It is being started.
    Starting,
    /// Its main process runs.
    Running {
        /// Moment of its start or adoption.
        since: Moment,
        /// Result of its health check; `Unknown` without one.
        health: Health,
    },
    /// It ended, or could not be started.
    Ended {
        /// How it ended, or that it did not start.
        exit: ServiceExit,
        /// Description of the exit, as a sentence.
        message: String,
        /// Moment of the exit.
        at: Moment,
        /// A number from 0 to 1 for the jitter of its backoff.
        random: f64,
    },
    /// It is being stopped.
    Stopping,
    /// Stopping or removing it failed.
    Stuck {
        /// Why stopping or removing it failed.
        message: String,
        /// Moment of the failure.
        at: Moment,
    },
    /// Its files are being removed.
    Removing,
}

impl ServicePhase {
    /// Whether one of its processes may run.
    #[must_use]
    pub const fn is_live(&self) -> bool {
        matches!(self, Self::Starting | Self::Running { .. } | Self::Stopping | Self::Stuck { .. })
    }
}

impl fmt::Display for ServicePhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stopped => "is down",
            Self::Starting => "is being started",
            Self::Running { .. } => "runs",
            Self::Ended { .. } => "has ended",
            Self::Stopping => "is being stopped",
            Self::Stuck { .. } => "does not stop",
            Self::Removing => "is being removed",
        })
    }
}

/// A service that exists on this host.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedService {
    /// The run record of its last start.
    pub record: RunRecord,
    /// What it does at the moment.
    pub phase: ServicePhase,
    /// Number of quick exits in a row.
    pub failures: u32,
}

impl ObservedService {
    /// Records that it ended, or could not be started.
    pub fn record_exit(&mut self, how: ServiceExit, text: String, now: Moment, random: f64) {
        let steady = matches!(self.phase, ServicePhase::Running { since, .. } if now.saturating_sub(since) >= STABLE_AFTER);
        self.failures = if steady { 1 } else { self.failures.saturating_add(1) };
        self.phase = ServicePhase::Ended { exit: how, message: text, at: now, random };
    }

    /// Whether it is healthy, so that services that depend on it can start; `wanted` is the desired service.
    ///
    /// A one-shot that succeeded and is not restarted by its policy stays healthy. Otherwise services that depend on it
    /// could start only while it happens to run.
    #[must_use]
    pub fn is_healthy(&self, wanted: &DesiredService) -> bool {
        if !self.record.satisfies(wanted) {
            return false;
        }
        match &self.phase {
            ServicePhase::Running { .. } if wanted.is_task => false,
            ServicePhase::Running { health, .. } => wanted.check.is_none() || *health == Health::Healthy,
            ServicePhase::Ended { exit: how, .. } => {
                how.exit_code() == Some(0) && !wanted.restart.restarts_after(Some(0))
            }
            _ => false,
        }
    }
}
