//! Whose turn comes first: what a person says of a machine, above what the engine says by itself.
//!
//! Due work has three classes, shared by weight (`priority_weights` of the policy). The engine puts a machine on
//! which the work failed again and again behind the others. A person may put one first, or last, for a while or
//! until they say otherwise; as long as that holds, the engine's own yielding does not count.
//!
//! When its time is over it counts no more from that moment on, and nobody writes that down at that moment: the
//! stored class lags until the machine's schedule is computed next, by whatever happens to it or by the sweeper.
//! That is no drift, as a hold that ends by itself is none.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::model::process::UnknownName;
use crate::model::telling::both;
use crate::model::time::Timestamp;

/// How a machine's work stands to that of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Before that of the others.
    Urgent,
    /// As the engine decides.
    Normal,
    /// Behind that of the others.
    Low,
}

impl Level {
    /// All of them, the first first.
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

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Level {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|level| level.as_str() == name).ok_or_else(|| UnknownName {
            what: "priority",
            name: name.to_owned(),
            known: "urgent, normal, low",
        })
    }
}

/// Tag `machine_priority`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Priority {
    /// Which.
    pub level: Level,
    /// Why, in the person's words.
    pub reason: String,
    /// Who said so.
    pub by: String,
    /// Since when.
    pub since: Timestamp,
    /// When it ends by itself.
    pub until: Option<Timestamp>,
}

impl Priority {
    /// Whether it still counts at `now`.
    #[must_use]
    pub fn holds_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| until > now)
    }

    /// What it means, as a sentence.
    #[must_use]
    pub fn sentence(&self, now: Timestamp) -> String {
        let until = self.until.map_or_else(
            || "until somebody says otherwise".to_owned(),
            |at| format!("until {}", both(at, now)),
        );
        let place = match self.level {
            Level::Urgent => "comes before that of other machines",
            Level::Normal => "comes as that of other machines",
            Level::Low => "comes behind that of other machines",
        };
        format!("its work {place} ({}, by {}) {until}: {}", self.level, self.by, self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_the_classes_of_due_work_and_read_back() {
        for (level, class) in Level::ALL.into_iter().zip(0..) {
            assert_eq!((level.class(), level.as_str().parse().unwrap()), (class, level));
        }
        assert!("first".parse::<Level>().is_err());
    }

    #[test]
    fn it_holds_until_its_end_and_says_so() {
        let at = |seconds: i64| Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        let urgent = |until| Priority {
            level: Level::Urgent,
            reason: "a customer waits".to_owned(),
            by: "kim".to_owned(),
            since: at(0),
            until,
        };
        for (until, now, holds) in [(None, 9, true), (Some(at(9)), 8, true), (Some(at(9)), 9, false)] {
            assert_eq!(urgent(until).holds_at(at(now)), holds, "{until:?} {now}");
        }
        assert_eq!(
            urgent(None).sentence(at(0)),
            "its work comes before that of other machines (urgent, by kim) until somebody says otherwise: a customer \
             waits"
        );
        assert!(
            urgent(Some(at(60))).sentence(at(0)).contains("until in 1m ("),
            "{}",
            urgent(Some(at(60))).sentence(at(0))
        );
    }
}
