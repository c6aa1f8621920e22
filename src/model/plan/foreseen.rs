//! A plan as somebody asked for it: of one machine, of one process, or beside the plan by another policy.
//!
//! Whoever asks the database itself and whoever asks a shepherd get what [`foresee`] says, so the two cannot
//! differ. The whole fleet is looked at whatever was asked for, because its budgets and brakes are everybody's;
//! a scope only leaves out rows.

use std::sync::Arc;

use crate::model::access::Scope;
use crate::model::ids::MachineId;
use crate::model::machine_view::MachineName;
use crate::model::pause::Pause;
use crate::model::plan::diff::{Difference, differences};
use crate::model::plan::{FleetView, Plan, Row, plan};
use crate::model::policy_flags::PolicyFlags;
use crate::model::process::{Lane, Process};
use crate::model::schedule::next_due;
use crate::model::time::{Span, Timestamp};

/// What is asked.
#[derive(Clone, Debug)]
pub struct Question {
    /// Only what happens to this machine.
    pub machine: Option<MachineId>,
    /// Only what this process does.
    pub process: Option<Process>,
    /// How far to look ahead.
    pub horizon: Span,
    /// What these flags would change, instead of what happens.
    pub change: Option<PolicyFlags>,
    /// Only machines of this scope.
    pub scope: Scope,
}

/// The answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Foreseen {
    /// The moment that it begins at.
    pub at: Timestamp,
    /// The moment up to which it tells everything.
    pub until: Timestamp,
    /// Whether it ends earlier than was asked for, because there is so much of it.
    pub cut: bool,
    /// What happens, or what would differ.
    pub what: What,
    /// Of a machine that was asked about and that nothing happens to: why, for each lane.
    pub waits: Vec<Wait>,
    /// Pauses of loops that hold: what those would begin is left out.
    pub paused: Vec<Pause>,
}

/// What happens, or what would differ.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// In the order of time.
    Rows(Vec<Row>),
    /// In the order of time.
    Differences(Vec<Difference>),
}

/// Why nothing happens in a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The lane.
    pub lane: String,
    /// Why.
    pub reason: String,
}

/// Answers a question about the future of `fleet`.
#[must_use]
pub fn foresee(fleet: FleetView, asked: &Question) -> Foreseen {
    let only = |whole: Plan| {
        let mut some = whole.only(asked.machine, asked.process);
        some.rows.retain(|row| reached(&asked.scope, &row.name));
        some
    };
    let present = only(plan(&fleet, asked.horizon));
    let Some(flags) = &asked.change else {
        let waits = if present.rows.is_empty() { waits(&fleet, asked) } else { Vec::new() };
        let Plan { at, until, cut, rows, mut paused } = present;
        paused.retain(|pause| pause.provider.is_none() || asked.scope.holds(pause.provider.as_deref()));
        return Foreseen { at, until, cut, what: What::Rows(rows), waits, paused };
    };
    let mut policy = (*fleet.policy).clone();
    flags.apply(&mut policy);
    let changed = only(plan(&FleetView { policy: Arc::new(policy), ..fleet }, asked.horizon));
    Foreseen {
        at: present.at,
        until: present.until.min(changed.until),
        cut: present.cut || changed.cut,
        what: What::Differences(differences(&present, &changed)),
        waits: Vec::new(),
        paused: Vec::new(),
    }
}

fn reached(scope: &Scope, name: &MachineName) -> bool {
    scope.holds(name.provider.as_deref())
}

fn waits(fleet: &FleetView, asked: &Question) -> Vec<Wait> {
    let Some(machine) = asked.machine else { return Vec::new() };
    let Some(facts) = fleet.machines.iter().map(|state| &state.facts).find(|facts| facts.machine == machine)
    else {
        return Vec::new();
    };
    let lanes = Lane::ALL.into_iter().filter(|lane| asked.process.is_none_or(|of| of.lane() == *lane));
    lanes
        .map(|lane| Wait {
            lane: lane.to_string(),
            reason: next_due(facts, lane, &fleet.policy, fleet.at).reason,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::plan::tests::{fleet, heard, provided};
    use crate::model::policy::Policy;

    #[test]
    fn scope_leaves_out_rows_and_says_nothing_of_others() {
        let mut other = provided(2);
        if let Some(provided) = &mut other.provided {
            provided.provider = "rack-b".to_owned();
        }
        let asked = |scope: &[&str], change: Option<&str>| {
            let question = Question {
                machine: None,
                process: None,
                horizon: Span::minutes(5),
                change: change.map(|text| PolicyFlags::of_configuration(text).unwrap()),
                scope: Scope::of(scope.iter().map(|&provider| provider.to_owned())),
            };
            let found = foresee(fleet(vec![provided(1), other.clone()], Policy::default()), &question);
            let of = |name: &MachineName| name.provider.clone().unwrap();
            let mut providers: Vec<String> = match &found.what {
                What::Rows(rows) => rows.iter().map(|row| of(&row.name)).collect(),
                What::Differences(found) => found.iter().map(|one| of(&one.name)).collect(),
            };
            providers.sort_unstable();
            providers.dedup();
            providers
        };
        assert_eq!(asked(&[], None), ["rack-a", "rack-b"]);
        assert_eq!(asked(&["rack-b"], None), ["rack-b"]);
        assert!(asked(&["rack-c"], None).is_empty());
        let sooner = Some("update_interval_stable = \"1m\"\nupdate_interval_unstable = \"30s\"");
        assert_eq!(asked(&["rack-a"], sooner), ["rack-a"]);
        assert!(asked(&[], Some("")).is_empty(), "a file that says nothing of the policy changes nothing");
    }

    #[test]
    fn machine_that_nothing_happens_to_says_why() {
        let mut question = Question {
            machine: Some(MachineId(uuid::Uuid::from_u128(1))),
            process: None,
            horizon: Span::minutes(5),
            change: None,
            scope: Scope::Everything,
        };
        let view = || fleet(vec![heard(1, 5)], Policy::default());
        let lanes = |question: &Question| {
            foresee(view(), question).waits.into_iter().map(|wait| wait.lane).collect::<Vec<_>>()
        };
        assert_eq!(lanes(&question), ["access", "observe"]);
        question.process = Some(Process::Recovery);
        assert_eq!(lanes(&question), ["access"]);
        question.machine = None;
        assert!(lanes(&question).is_empty(), "it is asked of one machine alone");
    }
}
