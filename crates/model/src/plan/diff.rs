//! Plan diff: what a policy change would change.
//!
//! The work items of one machine and process are matched in their order, so that an item that moves later is one
//! difference, not a removal and an addition.

use std::collections::BTreeMap;

use serde::Serialize;
use uuid::Uuid;

use crate::machine_view::MachineName;
use crate::plan::{FleetPlan, PlanRow};
use crate::time::Timestamp;

/// One difference between two plans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlanDifference {
    /// Names of the machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// Name of the process.
    pub process: &'static str,
    /// The action, as the new plan has it; as the old plan has it for a removed item.
    pub action: String,
    /// When it happens by the present policy; `null` for an item that the new plan adds.
    pub before: Option<Timestamp>,
    /// When it happens by the new policy; `null` for an item that it removes.
    pub after: Option<Timestamp>,
}

/// The differences, in the order of time. Only the time that both plans cover is compared, as either may be truncated.
#[must_use]
pub fn diff_plans(before: &FleetPlan, after: &FleetPlan) -> Vec<PlanDifference> {
    let until = before.until.min(after.until);
    let (mut old, new) = (group_by_work(before, until), group_by_work(after, until));
    let mut found = Vec::new();
    for (work, rows) in new {
        let old_rows = old.remove(&work).unwrap_or_default();
        for number in 0..rows.len().max(old_rows.len()) {
            let (was, is) = (old_rows.get(number), rows.get(number));
            found.extend(diff_row(was.copied(), is.copied()));
        }
    }
    for rows in old.into_values() {
        found.extend(rows.into_iter().filter_map(|row| diff_row(Some(row), None)));
    }
    found.sort_by_key(|one| (one.before.into_iter().chain(one.after).min(), one.name.machine, one.process));
    found
}

fn group_by_work(plan: &FleetPlan, until: Timestamp) -> BTreeMap<(Uuid, &'static str), Vec<&PlanRow>> {
    let mut rows: BTreeMap<_, Vec<&PlanRow>> = BTreeMap::new();
    for row in plan.rows.iter().filter(|row| row.at <= until) {
        rows.entry((row.name.machine, row.process)).or_default().push(row);
    }
    rows
}

fn diff_row(was: Option<&PlanRow>, is: Option<&PlanRow>) -> Option<PlanDifference> {
    let plan_row = is.or(was)?;
    let same = was.zip(is).is_some_and(|(was, is)| was.at == is.at && was.action == is.action);
    (!same).then(|| PlanDifference {
        name: plan_row.name.clone(),
        process: plan_row.process,
        action: plan_row.action.clone(),
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

    fn plan(rows: &[(i64, u128, &'static str)]) -> FleetPlan {
        let row = |&(seconds, machine, process): &(i64, u128, &'static str)| PlanRow {
            at: at(seconds),
            name: MachineName { machine: Uuid::from_u128(machine), provider: None, provider_id: None },
            process,
            action: "do it".to_owned(),
            in_progress: false,
        };
        FleetPlan {
            at: at(0),
            until: at(100),
            truncated: false,
            rows: rows.iter().map(row).collect(),
            pauses: Vec::new(),
        }
    }

    #[test]
    fn work_is_matched_in_order_by_machine_and_process() {
        let before = plan(&[(1, 1, "Update"), (5, 2, "Update"), (6, 1, "Update"), (7, 3, "Recovery")]);
        let after = plan(&[(1, 1, "Update"), (9, 1, "Update"), (5, 2, "Update"), (50, 1, "Update")]);
        let reported: Vec<_> = diff_plans(&before, &after)
            .into_iter()
            .map(|one| (one.name.machine.as_u128(), one.before, one.after))
            .collect();
        assert_eq!(
            reported,
            [(1, Some(at(6)), Some(at(9))), (3, Some(at(7)), None), (1, None, Some(at(50)))],
            "moved, gone, come"
        );
        assert!(diff_plans(&before, &before).is_empty());
    }

    #[test]
    fn truncated_rows_are_no_difference() {
        let whole = plan(&[(1, 1, "Update"), (90, 2, "Update")]);
        let cut = FleetPlan { until: at(50), ..plan(&[(1, 1, "Update")]) };
        assert!(diff_plans(&whole, &cut).is_empty() && diff_plans(&cut, &whole).is_empty());
    }
}
