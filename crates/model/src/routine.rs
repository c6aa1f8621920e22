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
    /// The fold as a phrase: `Update ×24, last 06:33, nothing new`. The time has its date if it is on another day than the
    /// earliest line. `format_time` formats a time in the zone of the reader, in the form of
    /// [`absolute_time`][crate::humanize::absolute_time].
    #[must_use]
    pub fn describe(&self, process: &str, format_time: impl Fn(Timestamp) -> String) -> String {
        let (first, last) = (format_time(self.first_at), format_time(self.last_at));
        let (date, clock) = last.split_once('T').unwrap_or(("", last.as_str()));
        let minute = clock.get(..5).unwrap_or(clock);
        let end = if first.starts_with(date) { minute.to_owned() } else { format!("{date} {minute}") };
        format!("{process} ×{}, last {end}, nothing new", self.work_items)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::humanize::absolute_time;
    use crate::time::after;

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
            assert_eq!(fold.describe(ROUTINE_PROCESS.as_str(), absolute_time), expected);
        }
    }

    #[test]
    fn fold_ends_at_the_time_of_the_reader() {
        let (first_at, last_at) =
            ("2026-03-01T22:48:00Z".parse().unwrap(), "2026-03-02T06:33:00Z".parse().unwrap());
        let fold = RoutineFold { first_at, last_at, work_items: 24, lines: 48 };
        let later = |at| absolute_time(after(at, Duration::from_hours(2)));
        assert_eq!(fold.describe("Update", later), "Update ×24, last 08:33, nothing new");
    }
}
