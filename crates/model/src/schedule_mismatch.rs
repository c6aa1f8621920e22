//! Schedule mismatch: does a stored schedule contradict the machine's facts? The issue `drift` reports it.
//!
//! Everything that changes a fact writes the schedule in the same transaction. So a row that contradicts the facts is a
//! defect of ours: the sweeper repairs and counts it, and an issue reports it. A changed policy and newer rules are no
//! mismatch: the sweeper recomputes all rows for them.

use crate::process::{Lane, Process};
use crate::schedule::{DueWork, RULES_VERSION};

/// The part of a stored lane that can contradict the facts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredDecision<'a> {
    /// Lane of the stored row.
    pub lane: Lane,
    /// What it is due for.
    pub process: Option<&'a str>,
    /// Priority class, 0 first.
    pub priority: i64,
    /// Why it is due, as stored.
    pub reason: &'a str,
    /// Version of the rules it was computed by.
    pub rules_version: i64,
    /// Version of the policy it was computed by.
    pub policy_version: i64,
}

/// Describes how a stored lane contradicts what its facts demand (`due`) under the same rules and the policy of
/// `policy_version`, as the rest of a sentence. Returns `None` if it does not.
///
/// Times are not compared. A timer row comes due earlier by design. A row that was armed late is no mismatch as long as
/// it comes due. A priority that an operator set for a time that has passed is no mismatch either.
#[must_use]
pub fn describe_mismatch(stored: &StoredDecision<'_>, due: &DueWork, policy_version: i64) -> Option<String> {
    if stored.rules_version != i64::from(RULES_VERSION) || stored.policy_version != policy_version {
        return None;
    }
    let wanted = due.process.map(Process::as_str);
    if stored.process != wanted {
        return Some(format!(
            "its stored schedule says {} in lane {} ({}), and its facts demand {} ({})",
            stored.process.unwrap_or("nothing"),
            stored.lane,
            stored.reason,
            wanted.unwrap_or("nothing"),
            due.reason
        ));
    }
    let lagging = due.expired_priority.map(i64::from) == Some(stored.priority);
    (stored.priority != i64::from(due.priority) && !lagging).then(|| {
        format!(
            "its stored schedule gives {} priority {} in lane {}, and its facts demand priority {} ({})",
            wanted.unwrap_or("nothing"),
            stored.priority,
            stored.lane,
            due.priority,
            due.reason
        )
    })
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::phase::Phase;

    fn due_work(process: Option<Process>, priority: i16) -> DueWork {
        DueWork {
            process,
            priority,
            ready_at: None,
            timer: false,
            reason: "it was found".to_owned(),
            decided_at: Location::caller(),
            deadline: None,
            phase: Phase::Provided,
            expired_priority: None,
        }
    }

    fn stored(process: Option<&'static str>, priority: i64) -> StoredDecision<'static> {
        StoredDecision {
            lane: Lane::Access,
            process,
            priority,
            reason: "it waits",
            rules_version: i64::from(RULES_VERSION),
            policy_version: 7,
        }
    }

    #[test]
    fn only_decisions_of_the_same_rules_and_policy_can_drift() {
        let begin = due_work(Some(Process::AgentStart), 1);
        let nothing = due_work(None, 1);
        let same = stored(Some("AgentStart"), 1);
        let says_nothing = stored(None, 1);
        let table = [
            ("the same", same, &begin, None),
            ("nothing, twice", says_nothing, &nothing, None),
            (
                "another process",
                stored(Some("Recovery"), 1),
                &begin,
                Some(
                    "its stored schedule says Recovery in lane access (it waits), and its facts demand AgentStart (it was found)",
                ),
            ),
            (
                "nothing for something",
                says_nothing,
                &begin,
                Some(
                    "its stored schedule says nothing in lane access (it waits), and its facts demand AgentStart (it was found)",
                ),
            ),
            (
                "something for nothing",
                same,
                &nothing,
                Some(
                    "its stored schedule says AgentStart in lane access (it waits), and its facts demand nothing (it was found)",
                ),
            ),
            (
                "priority alone",
                stored(Some("AgentStart"), 2),
                &begin,
                Some(
                    "its stored schedule gives AgentStart priority 2 in lane access, and its facts demand priority \
                     1 (it was found)",
                ),
            ),
            (
                "a priority that is over",
                stored(Some("AgentStart"), 0),
                &DueWork { expired_priority: Some(0), ..begin.clone() },
                None,
            ),
            (
                "another than the one that is over",
                stored(Some("AgentStart"), 0),
                &DueWork { expired_priority: Some(2), ..begin.clone() },
                Some(
                    "its stored schedule gives AgentStart priority 0 in lane access, and its facts demand priority \
                     1 (it was found)",
                ),
            ),
            ("older policy", StoredDecision { policy_version: 6, ..says_nothing }, &begin, None),
            (
                "older rules",
                StoredDecision { rules_version: i64::from(RULES_VERSION) - 1, ..says_nothing },
                &begin,
                None,
            ),
        ];
        for (name, stored, due, expected) in table {
            assert_eq!(describe_mismatch(&stored, due, 7).as_deref(), expected, "{name}");
        }
    }
}
