//! Priority of a machine's work, set by an operator.
//!
//! Due work has three classes, shared by weight (`priority_weights` of the policy). The engine puts a machine on which
//! work failed repeatedly behind the others. An operator may put a machine first or last, for a while or until further
//! notice. As long as that is in force, the engine's own class does not count.
//!
//! When its time is over it no longer counts, but nothing is written at that moment: the stored class lags until the
//! machine's schedule is computed next, by any change of the machine or by the sweeper. That is no mismatch, just as a
//! hold that ends by itself is none.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::humanize::remaining_time;
use crate::process::UnknownName;
use crate::time::Timestamp;

/// The rank of a machine's work among that of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PriorityLevel {
    /// Before the work of other machines.
    Urgent,
    /// In the class that the engine decides.
    Normal,
    /// Behind the work of other machines.
    Low,
}

impl PriorityLevel {
    /// All levels, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Urgent, Self::Normal, Self::Low];

    /// The name used in the database, on the command line and in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Urgent => "urgent",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// The class of due work: 0 before 1 before 2.
    #[must_use]
    pub const fn class(self) -> i16 {
        match self {
            Self::Urgent => 0,
            Self::Normal => 1,
            Self::Low => 2,
        }
    }
}

impl fmt::Display for PriorityLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PriorityLevel {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|level| level.as_str() == name).ok_or_else(|| UnknownName {
            what: "priority",
            name: name.to_owned(),
            known: "urgent, normal, low",
        })
    }
}

/// Tag `machine_priority`: the operator's priority for a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Priority {
    /// Rank of the machine's work.
    pub level: PriorityLevel,
    /// Why, in the operator's words.
    pub reason: String,
    /// The operator who set it.
    pub by: String,
    /// When it was set.
    pub since: Timestamp,
    /// When it ends by itself; `None` for no end.
    pub until: Option<Timestamp>,
}

impl Priority {
    /// Whether it is still in force at `now`.
    #[must_use]
    pub fn is_active_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| until > now)
    }

    /// The priority as a sentence.
    #[must_use]
    pub fn describe(&self, now: Timestamp) -> String {
        let until = self
            .until
            .map_or_else(|| "until somebody says otherwise".to_owned(), |at| remaining_time(at, now));
        let place = match self.level {
            PriorityLevel::Urgent => "comes before that of other machines",
            PriorityLevel::Normal => "comes as that of other machines",
            PriorityLevel::Low => "comes behind that of other machines",
        };
        format!("its work {place} ({}, by {}) {until}: {}", self.level, self.by, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_map_to_classes_and_round_trip() {
        for (level, class) in PriorityLevel::ALL.into_iter().zip(0..) {
            assert_eq!((level.class(), level.as_str().parse().unwrap()), (class, level));
        }
        assert!("first".parse::<PriorityLevel>().is_err());
    }

    #[test]
    fn priority_is_active_until_its_end() {
        let at = |seconds: i64| Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        let urgent = |until| Priority {
            level: PriorityLevel::Urgent,
            reason: "a customer waits".to_owned(),
            by: "kim".to_owned(),
            since: at(0),
            until,
        };
        for (until, now, holds) in [(None, 9, true), (Some(at(9)), 8, true), (Some(at(9)), 9, false)] {
            assert_eq!(urgent(until).is_active_at(at(now)), holds, "{until:?} {now}");
        }
        assert_eq!(
            urgent(None).describe(at(0)),
            "its work comes before that of other machines (urgent, by kim) until somebody says otherwise: a customer \
             waits"
        );
        assert!(
            urgent(Some(at(60))).describe(at(0)).contains("for 1m (until "),
            "{}",
            urgent(Some(at(60))).describe(at(0))
        );
    }
}
