//! Processes (kinds of work) and lanes (mutual exclusion per machine).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A lane: work in the same lane of one machine excludes other work in it. At most one live work item exists per
/// (machine, lane), by the primary key of `machine_due`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Work that touches the machine.
    Access,
    /// Work that only observes, through the provider.
    Observe,
}

impl Lane {
    /// Every lane, in lock order.
    pub const ALL: [Self; 2] = [Self::Access, Self::Observe];

    /// The name used in the database, in logs and on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Access => "access",
            Self::Observe => "observe",
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that this release does not know.
#[derive(Debug, thiserror::Error)]
#[error("{name:?} is not a known {what}; this release knows {known}")]
pub struct UnknownName {
    /// The kind of name, such as `lane`.
    pub what: &'static str,
    /// The name that was found.
    pub name: String,
    /// The known ones, for the person who reads the error.
    pub known: &'static str,
}

impl FromStr for Lane {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|lane| lane.as_str() == name).ok_or_else(|| UnknownName {
            what: "lane",
            name: name.to_owned(),
            known: "access, observe",
        })
    }
}

/// A kind of work on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Process {
    /// Enrol the role server on the machine.
    AgentStart,
    /// Recover a machine that fell silent.
    Recovery,
    /// Refresh what the provider reports of the machine.
    Update,
    /// Release the machine to its provider.
    Retirement,
    /// Carry out an operator's power order.
    Power,
}

impl Process {
    /// All processes that this release works on.
    pub const ALL: [Self; 5] =
        [Self::AgentStart, Self::Recovery, Self::Update, Self::Retirement, Self::Power];

    /// The name used in the database, in logs and as a metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AgentStart => "AgentStart",
            Self::Recovery => "Recovery",
            Self::Update => "Update",
            Self::Retirement => "Retirement",
            Self::Power => "Power",
        }
    }

    /// The lane it runs in.
    #[must_use]
    pub const fn lane(self) -> Lane {
        match self {
            Self::AgentStart | Self::Recovery | Self::Retirement | Self::Power => Lane::Access,
            Self::Update => Lane::Observe,
        }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Process {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|process| process.as_str() == name).ok_or_else(|| UnknownName {
            what: "process",
            name: name.to_owned(),
            known: "AgentStart, Recovery, Update, Retirement, Power",
        })
    }
}
