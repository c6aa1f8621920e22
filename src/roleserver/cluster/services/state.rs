//! How a service is, and what its events make of that.
//!
//! Moments are durations since some beginning, by a clock that never jumps.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::roleserver::child::ending::Ending;
use crate::roleserver::child::spec::Limits;
use crate::roleserver::cluster::services::wanted::{Id, Wanted};

/// A service that ran for so long was not ended by what it was started with: its next end counts as its first.
pub const STEADY: Duration = Duration::from_mins(1);

/// When something is, since some beginning.
pub type Moment = Duration;

/// How a service ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// By itself, with this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
    /// Nobody was told.
    Unknown,
    /// It could not be started.
    NotStarted,
}

impl From<Ending> for How {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Exited(status) => Self::Exited(status),
            Ending::Killed(signal) => Self::Killed(signal),
            Ending::Unknown => Self::Unknown,
        }
    }
}

impl How {
    /// The status that it ended with by itself.
    #[must_use]
    pub const fn status(self) -> Option<i32> {
        match self {
            Self::Exited(status) => Some(status),
            Self::Killed(_) | Self::Unknown | Self::NotStarted => None,
        }
    }
}

/// That a service ended, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// In which boot.
    pub boot_id: String,
    /// How.
    pub how: How,
    /// All that is to be said of it, as a sentence.
    pub said: String,
}

/// What is written down of a service beside the process it is: by what it was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// Which service.
    pub id: Id,
    /// What it was started with; empty where that is lost.
    pub digest: String,
    /// Revision of the declaration that it runs by.
    pub revision: u64,
    /// Those that it needs, and that outlast it.
    pub depends_on: BTreeSet<Id>,
    /// Milliseconds that it has to end.
    pub stop_time_ms: u64,
    /// What it may use.
    pub limits: Limits,
    /// Files that were written for it.
    pub files: BTreeSet<String>,
    /// When it was started, by the node's clock, milliseconds since 1970.
    pub started_at_ms: i64,
    /// How often it was started again since its declaration took effect.
    pub restarts: u32,
    /// That it ended, if it did.
    pub ended: Option<Ended>,
}

impl Note {
    /// What is known of one of which nothing is written down.
    #[must_use]
    pub fn lost(id: Id) -> Self {
        Self {
            id,
            digest: String::new(),
            revision: 0,
            depends_on: BTreeSet::new(),
            stop_time_ms: 10_000,
            limits: Limits::default(),
            files: BTreeSet::new(),
            started_at_ms: 0,
            restarts: 0,
            ended: None,
        }
    }

    /// How long it has to end.
    #[must_use]
    pub const fn stop_time(&self) -> Duration {
        Duration::from_millis(self.stop_time_ms)
    }

    /// This note as it is once `wanted` holds for what runs, without its being started again.
    #[must_use]
    pub fn adjusted(&self, wanted: &Wanted) -> Self {
        Self {
            revision: wanted.revision,
            depends_on: wanted.depends_on.clone(),
            stop_time_ms: u64::try_from(wanted.stop_time.as_millis()).unwrap_or(u64::MAX),
            limits: wanted.limits,
            restarts: if self.revision == wanted.revision { self.restarts } else { 0 },
            ..self.clone()
        }
    }
}

/// Whether a service that runs is well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// No check has said so yet.
    Unknown,
    /// It is.
    Well,
    /// It is not; the sentence says why.
    Ill(String),
}

/// What a service does, or what is being done with it.
#[derive(Clone, Debug, PartialEq)]
pub enum Doing {
    /// Nothing runs, and nothing speaks against starting it.
    Down,
    /// It is being started.
    Starting,
    /// It runs.
    Up {
        /// Since when.
        since: Moment,
        /// Whether it is well.
        health: Health,
    },
    /// It ended, or could not be started.
    Ended {
        /// How.
        how: How,
        /// All that is to be said of it.
        said: String,
        /// When.
        at: Moment,
        /// From 0 to 1: what makes its pause differ from others'.
        random: f64,
    },
    /// It is being stopped.
    Stopping,
    /// Stopping or removing it failed.
    Stuck {
        /// Why.
        said: String,
        /// When.
        at: Moment,
    },
    /// What it left is being removed.
    Forgetting,
}

impl Doing {
    /// Whether something of it may run.
    #[must_use]
    pub const fn is_live(&self) -> bool {
        matches!(self, Self::Starting | Self::Up { .. } | Self::Stopping | Self::Stuck { .. })
    }
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Down => "is down",
            Self::Starting => "is being started",
            Self::Up { .. } => "runs",
            Self::Ended { .. } => "has ended",
            Self::Stopping => "is being stopped",
            Self::Stuck { .. } => "does not stop",
            Self::Forgetting => "is being removed",
        })
    }
}

/// One service, as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Present {
    /// By what it was started.
    pub note: Note,
    /// What it does.
    pub doing: Doing,
    /// Quick ends in a row.
    pub deaths: u32,
}

impl Present {
    /// It ended, or could not be started.
    pub fn end(&mut self, how: How, said: String, now: Moment, random: f64) {
        let steady = matches!(self.doing, Doing::Up { since, .. } if now.saturating_sub(since) >= STEADY);
        self.deaths = if steady { 1 } else { self.deaths.saturating_add(1) };
        self.doing = Doing::Ended { how, said, at: now, random };
    }

    /// Whether it is well, and so what depends on it may start; `wanted` is what it is to be.
    ///
    /// One that has done its work, and by its policy is not started again, is well for good: what depends on it could
    /// otherwise start only while it happens to run.
    #[must_use]
    pub fn is_well(&self, wanted: &Wanted) -> bool {
        if wanted.digest() != Some(self.note.digest.as_str()) {
            return false;
        }
        match &self.doing {
            Doing::Up { .. } if wanted.is_task => false,
            Doing::Up { health, .. } => wanted.check.is_none() || *health == Health::Well,
            Doing::Ended { how, .. } => how.status() == Some(0) && !wanted.restart.again(Some(0)),
            _ => false,
        }
    }
}
