//! Two plans beside each other: what a change of the policy would change for whom.
//!
//! The work items of one machine and process are matched in their order, so that one that comes later
//! is told as moved and not as gone and come.

use std::collections::BTreeMap;

use serde::Serialize;
use uuid::Uuid;

use crate::model::machine_view::MachineName;
use crate::model::plan::{Plan, Row};
use crate::model::time::Timestamp;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// On which machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// By which process.
    pub process: &'static str,
    /// What it does: in the new plan, where it is in that.
    pub what: String,
    /// When, as things are; `null` for what the new plan adds.
    pub before: Option<Timestamp>,
    /// When, by the new plan; `null` for what it leaves out.
    pub after: Option<Timestamp>,
}

/// What differs, in the order of time. What either plan leaves out because there was too much of it
/// takes part in neither.
#[must_use]
pub fn differences(before: &Plan, after: &Plan) -> Vec<Difference> {
    let until = before.until.min(after.until);
    let (mut old, new) = (by_work(before, until), by_work(after, until));
    let mut found = Vec::new();
    for (work, rows) in new {
        let old_rows = old.remove(&work).unwrap_or_default();
        for number in 0..rows.len().max(old_rows.len()) {
            let (was, is) = (old_rows.get(number), rows.get(number));
            found.extend(difference(was.copied(), is.copied()));
        }
    }
    for rows in old.into_values() {
        found.extend(rows.into_iter().filter_map(|row| difference(Some(row), None)));
    }
    found.sort_by_key(|one| (one.before.into_iter().chain(one.after).min(), one.name.machine, one.process));
    found
}

fn by_work(plan: &Plan, until: Timestamp) -> BTreeMap<(Uuid, &'static str), Vec<&Row>> {
    let mut rows: BTreeMap<_, Vec<&Row>> = BTreeMap::new();
    for row in plan.rows.iter().filter(|row| row.at <= until) {
        rows.entry((row.name.machine, row.process)).or_default().push(row);
    }
    rows
}

fn difference(was: Option<&Row>, is: Option<&Row>) -> Option<Difference> {
    let told = is.or(was)?;
    let same = was.zip(is).is_some_and(|(was, is)| was.at == is.at && was.what == is.what);
    (!same).then(|| Difference {
        name: told.name.clone(),
        process: told.process,
        what: told.what.clone(),
        before: was.map(|row| row.at),
        after: is.map(|row| row.at),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn plan(rows: &[(i64, u128, &'static str)]) -> Plan {
        let row = |&(seconds, machine, process): &(i64, u128, &'static str)| Row {
            at: at(seconds),
            name: MachineName { machine: Uuid::from_u128(machine), provider: None, provider_id: None },
            process,
            what: "do it".to_owned(),
            under_way: false,
        };
        Plan {
            at: at(0),
            until: at(100),
            cut: false,
            rows: rows.iter().map(row).collect(),
            paused: Vec::new(),
        }
    }

    #[test]
    fn work_is_matched_in_its_order_by_machine_and_process() {
        let before = plan(&[(1, 1, "Update"), (5, 2, "Update"), (6, 1, "Update"), (7, 3, "Recovery")]);
        let after = plan(&[(1, 1, "Update"), (9, 1, "Update"), (5, 2, "Update"), (50, 1, "Update")]);
        let told: Vec<_> = differences(&before, &after)
            .into_iter()
            .map(|one| (one.name.machine.as_u128(), one.before, one.after))
            .collect();
        assert_eq!(
            told,
            [(1, Some(at(6)), Some(at(9))), (3, Some(at(7)), None), (1, None, Some(at(50)))],
            "moved, gone, come"
        );
        assert!(differences(&before, &before).is_empty());
    }

    #[test]
    fn what_only_one_plan_had_room_for_is_no_difference() {
        let whole = plan(&[(1, 1, "Update"), (90, 2, "Update")]);
        let cut = Plan { until: at(50), ..plan(&[(1, 1, "Update")]) };
        assert!(differences(&whole, &cut).is_empty() && differences(&cut, &whole).is_empty());
    }
}
