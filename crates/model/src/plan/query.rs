//! Plan query: one machine, one process, or a policy change.
//!
//! Clients of the database and clients of a shepherd both get the result of [`run_plan_query`], so the two cannot
//! differ. The whole fleet is always planned, because all machines share its budgets and brakes. A restriction only
//! leaves out rows, and only what is left is folded. Differences by a policy change are never folded.

use std::sync::Arc;

use crate::access::AccessScope;
use crate::ids::MachineId;
use crate::machine_view::MachineName;
use crate::pause::Pause;
use crate::plan::diff::{PlanDifference, diff_plans};
use crate::plan::fold::{PlanLine, fold_rows};
use crate::plan::{FleetPlan, FleetView, plan_fleet};
use crate::policy_flags::PolicyFlags;
use crate::process::{Lane, Process};
use crate::schedule::next_due;
use crate::time::{Span, Timestamp};

/// Parameters of a plan query.
#[derive(Clone, Debug)]
pub struct PlanQuery {
    /// Only what happens to this machine; `None` for all.
    pub machine: Option<MachineId>,
    /// Only what this process does; `None` for all.
    pub process: Option<Process>,
    /// How far to plan ahead.
    pub horizon: Span,
    /// Policy flags whose effect to show, instead of the plan itself.
    pub change: Option<PolicyFlags>,
    /// Whether routine work is folded into one line.
    pub without_routine: bool,
    /// Only machines of this scope.
    pub scope: AccessScope,
}

/// Result of a plan query.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanResult {
    /// Start of the plan.
    pub at: Timestamp,
    /// End of the plan: it is complete up to this moment.
    pub until: Timestamp,
    /// Whether it ends earlier than requested, because it has too many rows.
    pub truncated: bool,
    /// The planned work, or the differences.
    pub content: PlanContent,
    /// Why nothing happens, for each lane: only for a query of one machine without planned work.
    pub lane_waits: Vec<LaneWait>,
    /// Pauses in force. Work of a paused loop is left out.
    pub pauses: Vec<Pause>,
}

/// The planned work, or the differences by a policy change.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanContent {
    /// Planned work, in the order of time.
    Lines(Vec<PlanLine>),
    /// Differences, in the order of time.
    Differences(Vec<PlanDifference>),
}

/// Why nothing happens in a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneWait {
    /// Name of the lane.
    pub lane: String,
    /// Why, as in the lane's schedule.
    pub reason: String,
}

/// Runs a plan query on `fleet`.
#[must_use]
pub fn run_plan_query(fleet: FleetView, query: &PlanQuery) -> PlanResult {
    let only = |whole: FleetPlan| {
        let mut some = whole.restrict_to(query.machine, query.process);
        some.rows.retain(|row| is_in_scope(&query.scope, &row.name));
        some
    };
    let present = only(plan_fleet(&fleet, query.horizon));
    let Some(flags) = &query.change else {
        let waits = if present.rows.is_empty() { lane_waits(&fleet, query) } else { Vec::new() };
        let FleetPlan { at, until, truncated: cut, rows, pauses: mut paused } = present;
        paused.retain(|pause| {
            pause.provider.is_none() || query.scope.includes_provider(pause.provider.as_deref())
        });
        let lines = if query.without_routine {
            fold_rows(rows)
        } else {
            rows.into_iter().map(PlanLine::Work).collect()
        };
        return PlanResult {
            at,
            until,
            truncated: cut,
            content: PlanContent::Lines(lines),
            lane_waits: waits,
            pauses: paused,
        };
    };
    let mut policy = (*fleet.policy).clone();
    flags.apply(&mut policy);
    let changed = only(plan_fleet(&FleetView { policy: Arc::new(policy), ..fleet }, query.horizon));
    PlanResult {
        at: present.at,
        until: present.until.min(changed.until),
        truncated: present.truncated || changed.truncated,
        content: PlanContent::Differences(diff_plans(&present, &changed)),
        lane_waits: Vec::new(),
        pauses: Vec::new(),
    }
}

fn is_in_scope(scope: &AccessScope, name: &MachineName) -> bool {
    scope.includes_provider(name.provider.as_deref())
}

fn lane_waits(fleet: &FleetView, query: &PlanQuery) -> Vec<LaneWait> {
    let Some(machine) = query.machine else { return Vec::new() };
    let Some(facts) = fleet.machines.iter().map(|state| &state.facts).find(|facts| facts.machine == machine)
    else {
        return Vec::new();
    };
    let lanes = Lane::ALL.into_iter().filter(|lane| query.process.is_none_or(|of| of.lane() == *lane));
    lanes
        .map(|lane| LaneWait {
            lane: lane.to_string(),
            reason: next_due(facts, lane, &fleet.policy, fleet.at).reason,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{fleet_view, provided_machine, reporting_machine};
    use crate::policy::Policy;

    #[test]
    fn scope_hides_rows_of_other_providers() {
        let mut other = provided_machine(2);
        if let Some(provided) = &mut other.provider_record {
            provided.provider = "rack-b".to_owned();
        }
        let requested = |scope: &[&str], change: Option<&str>| {
            let question = PlanQuery {
                machine: None,
                process: None,
                horizon: Span::minutes(5),
                change: change.map(|text| PolicyFlags::from_configuration(text).unwrap()),
                without_routine: false,
                scope: AccessScope::from_providers(scope.iter().map(|&provider| provider.to_owned())),
            };
            let found = run_plan_query(
                fleet_view(vec![provided_machine(1), other.clone()], Policy::default()),
                &question,
            );
            let of = |name: &MachineName| name.provider.clone().unwrap();
            let mut providers: Vec<String> = match &found.content {
                PlanContent::Lines(lines) => lines
                    .iter()
                    .map(|line| match line {
                        PlanLine::Work(row) => of(&row.name),
                        PlanLine::Routine(rows) => panic!("{rows:?}"),
                    })
                    .collect(),
                PlanContent::Differences(found) => found.iter().map(|one| of(&one.name)).collect(),
            };
            providers.sort_unstable();
            providers.dedup();
            providers
        };
        assert_eq!(requested(&[], None), ["rack-a", "rack-b"]);
        assert_eq!(requested(&["rack-b"], None), ["rack-b"]);
        assert!(requested(&["rack-c"], None).is_empty());
        let sooner = Some("update_interval_stable = \"1m\"\nupdate_interval_unstable = \"30s\"");
        assert_eq!(requested(&["rack-a"], sooner), ["rack-a"]);
        assert!(
            requested(&[], Some("")).is_empty(),
            "a file that says nothing of the policy changes nothing"
        );
    }

    #[test]
    fn idle_machine_gets_a_wait_reason() {
        let mut question = PlanQuery {
            machine: Some(MachineId(uuid::Uuid::from_u128(1))),
            process: None,
            horizon: Span::minutes(5),
            change: None,
            without_routine: false,
            scope: AccessScope::Fleet,
        };
        let view = || fleet_view(vec![reporting_machine(1, 5)], Policy::default());
        let lanes = |question: &PlanQuery| {
            run_plan_query(view(), question).lane_waits.into_iter().map(|wait| wait.lane).collect::<Vec<_>>()
        };
        assert_eq!(lanes(&question), ["access", "observe"]);
        question.process = Some(Process::Recovery);
        assert_eq!(lanes(&question), ["access"]);
        question.machine = None;
        assert!(lanes(&question).is_empty(), "only a question about one machine gets wait reasons");
    }

    #[test]
    fn routine_is_folded_on_request_and_differences_never_are() {
        let lines = |change: Option<&str>, without_routine| {
            let question = PlanQuery {
                machine: None,
                process: Some(Process::Update),
                horizon: Span::hours(2),
                change: change.map(|text| PolicyFlags::from_configuration(text).unwrap()),
                without_routine,
                scope: AccessScope::Fleet,
            };
            let machines = vec![provided_machine(1), provided_machine(2)];
            match run_plan_query(fleet_view(machines, Policy::default()), &question).content {
                PlanContent::Lines(lines) => lines.len(),
                PlanContent::Differences(found) => found.len(),
            }
        };
        assert_eq!((lines(None, false), lines(None, true)), (8, 1));
        let sooner = Some("update_interval_stable = \"10m\"\nupdate_interval_unstable = \"30s\"");
        assert!(lines(sooner, true) > 8);
        assert_eq!(lines(sooner, true), lines(sooner, false));
    }
}
