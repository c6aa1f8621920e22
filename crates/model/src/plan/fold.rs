//! Fold of a plan: all of its routine as one line.
//!
//! A plan assumes that every observation succeeds and finds nothing new ([`crate::plan::ASSUMPTIONS`][]). So there is no
//! failure and no change between them, and [`fold_rows`][] makes one line of those of all machines, at the time of the
//! first. It shows the priority of machines that have one: work items with another action have a line of their own. What
//! is under way has not found anything yet, and is never folded.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use crate::machine_view::MachineName;
use crate::plan::PlanRow;
use crate::routine::{ROUTINE_ACTION, ROUTINE_PROCESS, RoutineFold};
use crate::time::Timestamp;

/// A line of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanLine {
    /// A work item that starts, as it is.
    Work(PlanRow),
    /// At least two routine work items, folded.
    Routine(RoutineRows),
}

/// Routine work items of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutineRows {
    /// Their times and their number.
    pub fold: RoutineFold,
    /// Their machine; `None` if they are of several machines.
    pub name: Option<MachineName>,
    /// Number of their machines.
    pub machines: u64,
    /// Name of the process.
    pub process: &'static str,
    /// The action of each, with the priority of the machine.
    pub action: String,
}

impl RoutineRows {
    /// The fold as a phrase, with the priority of the machines. `format_time` is that of [`RoutineFold::describe`].
    #[must_use]
    pub fn describe(&self, format_time: impl Fn(Timestamp) -> String) -> String {
        let priority = self.action.strip_prefix(ROUTINE_ACTION).unwrap_or_default();
        self.fold.describe(self.process, format_time) + priority
    }
}

/// Folds the routine of a plan. The other rows stay as they are, in their order.
#[must_use]
pub fn fold_rows(rows: Vec<PlanRow>) -> Vec<PlanLine> {
    let mut groups: BTreeMap<String, RoutineGroup> = BTreeMap::new();
    for (index, row) in rows.iter().enumerate().filter(|(_, row)| is_routine(row)) {
        match groups.get_mut(&row.action) {
            Some(group) => group.add(row),
            None => {
                groups.insert(row.action.clone(), RoutineGroup::new(index, row));
            }
        }
    }
    let line = |(index, row): (usize, PlanRow)| {
        let group = groups.get(&row.action).filter(|group| is_routine(&row) && group.fold.lines > 1);
        match group {
            None => Some(PlanLine::Work(row)),
            Some(group) if group.first_index == index => Some(PlanLine::Routine(group.to_rows(row))),
            Some(_) => None,
        }
    };
    rows.into_iter().enumerate().filter_map(line).collect()
}

/// Whether a row is an observation that is expected to find nothing new.
fn is_routine(row: &PlanRow) -> bool {
    row.process == ROUTINE_PROCESS.as_str() && !row.in_progress
}

/// The routine work items with one action.
struct RoutineGroup {
    /// Index of the first row.
    first_index: usize,
    fold: RoutineFold,
    machines: BTreeSet<Uuid>,
}

impl RoutineGroup {
    fn new(first_index: usize, row: &PlanRow) -> Self {
        let fold = RoutineFold { first_at: row.at, last_at: row.at, work_items: 1, lines: 1 };
        Self { first_index, fold, machines: BTreeSet::from([row.name.machine]) }
    }

    fn add(&mut self, row: &PlanRow) {
        self.fold.first_at = self.fold.first_at.min(row.at);
        self.fold.last_at = self.fold.last_at.max(row.at);
        self.fold.work_items += 1;
        self.fold.lines += 1;
        self.machines.insert(row.name.machine);
    }

    /// The line of the group. `first` is its first row.
    fn to_rows(&self, first: PlanRow) -> RoutineRows {
        RoutineRows {
            fold: self.fold,
            name: (self.machines.len() == 1).then_some(first.name),
            machines: self.machines.len() as u64,
            process: first.process,
            action: first.action,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::humanize::absolute_time;

    const LOOK: &str = "ask its provider about it";
    const URGENT_LOOK: &str = "ask its provider about it (urgent, by kim)";

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn row(seconds: i64, machine: u128, process: &'static str, action: &str) -> PlanRow {
        PlanRow {
            at: at(seconds),
            name: MachineName { machine: Uuid::from_u128(machine), provider: None, provider_id: None },
            process,
            action: action.to_owned(),
            in_progress: false,
        }
    }

    /// A line in short: its second, its number of work items and of machines, or its process.
    fn summarize(line: &PlanLine) -> String {
        match line {
            PlanLine::Work(row) => format!("{} {}", (row.at - at(0)).num_seconds(), row.process),
            PlanLine::Routine(rows) => {
                let (fold, first) = (rows.fold, (rows.fold.first_at - at(0)).num_seconds());
                assert_eq!((fold.lines, rows.name.is_some()), (fold.work_items, rows.machines == 1));
                let last = (fold.last_at - at(0)).num_seconds();
                format!("{first} to {last} {} of {}", fold.work_items, rows.machines)
            }
        }
    }

    #[test]
    fn routine_of_all_machines_is_one_line() {
        for (rows, expected) in [
            (vec![], &[][..]),
            (vec![row(1, 1, "Update", LOOK)], &["1 Update"]),
            (vec![row(1, 1, "Update", LOOK), row(9, 1, "Update", LOOK)], &["1 to 9 2 of 1"]),
            (
                vec![
                    row(1, 1, "AgentStart", "put the role server on it"),
                    row(2, 1, "Update", LOOK),
                    row(3, 2, "Recovery", "reboot the machine (try 1 of 1)"),
                    row(4, 2, "Update", LOOK),
                    row(5, 2, "Recovery", "end its recovery: it reported"),
                    row(6, 1, "Update", LOOK),
                ],
                &["1 AgentStart", "2 to 6 3 of 2", "3 Recovery", "5 Recovery"],
            ),
            // A priority stays visible.
            (
                vec![
                    row(1, 1, "Update", URGENT_LOOK),
                    row(2, 2, "Update", LOOK),
                    row(3, 1, "Update", URGENT_LOOK),
                    row(4, 2, "Update", LOOK),
                ],
                &["1 to 3 2 of 1", "2 to 4 2 of 1"],
            ),
            // What is under way has found nothing yet.
            (
                vec![
                    PlanRow { in_progress: true, ..row(1, 1, "Update", LOOK) },
                    row(2, 1, "Update", LOOK),
                    row(3, 1, "Update", LOOK),
                ],
                &["1 Update", "2 to 3 2 of 1"],
            ),
        ] {
            let count = rows.len();
            let lines = fold_rows(rows);
            assert_eq!(lines.iter().map(summarize).collect::<Vec<_>>(), expected);
            let lines = lines.iter().map(|line| match line {
                PlanLine::Work(_) => 1,
                PlanLine::Routine(rows) => rows.fold.lines,
            });
            assert_eq!(lines.sum::<u64>(), count as u64, "{expected:?}");
        }
    }

    #[test]
    fn fold_is_described_with_the_priority() {
        for (action, expected) in [
            (LOOK, "Update ×2, last 08:00, nothing new"),
            (URGENT_LOOK, "Update ×2, last 08:00, nothing new (urgent, by kim)"),
        ] {
            let lines = fold_rows(vec![row(1, 1, "Update", action), row(2, 1, "Update", action)]);
            let described = match &lines[..] {
                [PlanLine::Routine(rows)] => rows.describe(absolute_time),
                other => panic!("{other:?}"),
            };
            assert_eq!(described, expected);
        }
    }
}
