//! Routine: observations that find nothing new.
//!
//! The updater queries each machine's provider again and again, and nearly always learns nothing. Such a work item says
//! nothing to the reader of a timeline or of a plan, and hides what does. So both fold it into one line:
//! [`crate::timeline`][] folds what happened, [`crate::plan::fold`][] what will happen. Here is what both share: which work
//! is routine, and the text of the line.

use crate::process::Process;
use crate::time::Timestamp;

/// The process of work items that only observe.
pub const ROUTINE_PROCESS: Process = Process::Update;
/// With this detail the history records the end of an observation that found nothing new. No other end has it.
pub const NOTHING_CHANGED: &str = "nothing changed";
/// What a plan states about an observation, before the priority of its machine.
pub const ROUTINE_ACTION: &str = "ask its provider about it";

/// Routine that is folded into one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutineFold {
    /// Time of the earliest line.
    pub first_at: Timestamp,
    /// Time of the latest line.
    pub last_at: Timestamp,
    /// Number of work items. In a timeline: those that end in the fold.
    pub work_items: u64,
    /// Number of lines that there would be without the fold.
    pub lines: u64,
}

impl RoutineFold {
    /// The fold as a phrase: `Update ×24, last 06:33, nothing new`. The time is in UTC, and has its date if it is on
    /// another day than the earliest line.
    #[must_use]
    pub fn describe(&self, process: &str) -> String {
        let same_day = self.first_at.date_naive() == self.last_at.date_naive();
        let last = self.last_at.format(if same_day { "%H:%M" } else { "%Y-%m-%d %H:%M" });
        format!("{process} ×{}, last {last}, nothing new", self.work_items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fold_is_described_by_its_number_and_its_end() {
        for (first, last, expected) in [
            ("2026-03-02T00:48:00Z", "2026-03-02T06:33:59Z", "Update ×24, last 06:33, nothing new"),
            (
                "2026-03-01T18:48:00Z",
                "2026-03-02T06:33:00Z",
                "Update ×24, last 2026-03-02 06:33, nothing new",
            ),
        ] {
            let (first_at, last_at) = (first.parse().unwrap(), last.parse().unwrap());
            let fold = RoutineFold { first_at, last_at, work_items: 24, lines: 48 };
            assert_eq!(fold.describe(ROUTINE_PROCESS.as_str()), expected);
        }
    }
}
