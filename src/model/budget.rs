//! Budgets and brakes as people see and set them: what may begin, what was begun, and what holds.
//!
//! [`crate::model::disturb`] and [`crate::model::brake`] decide by the policy and by counts of the moment. This
//! says in the same words what they would decide by: how much of each budget is used, when the next is free, which
//! brakes hold and what engages them. A budget is known by the kind of its intents, so that what was begun under
//! it is counted where it was recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::model::brake::ALL;
use crate::model::machine_view::BrakeLine;
use crate::model::policy::{Budget, Disturbance, Policy};
use crate::model::process::UnknownName;
use crate::model::time::{Span, Timestamp, after};

/// Most that a budget may allow; who wants more wants none.
pub const MOST: u32 = 1_000_000;
/// Longest window: what was begun is looked back over for every step.
pub const LONGEST_WINDOW: Span = Span::hours(30 * 24);

/// What a budget bounds, by the kind of the intents that use it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BudgetKind {
    /// A step that whoever uses the machine may notice.
    Disturb(Disturbance),
    /// Machines that are given back.
    Release,
}

impl BudgetKind {
    /// Every kind, gentlest first.
    pub const ALL: [Self; 4] = [
        Self::Disturb(Disturbance::RestartAgent),
        Self::Disturb(Disturbance::Reboot),
        Self::Disturb(Disturbance::PowerCycle),
        Self::Release,
    ];

    /// The name used in the database, on the command line and in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Disturb(step) => step.as_str(),
            Self::Release => "release",
        }
    }

    /// What people call it: "the budget reboot".
    #[must_use]
    pub fn target(self) -> String {
        format!("the budget {self}")
    }

    /// What a policy allows of it; `None` is as much as anybody wants.
    #[must_use]
    pub fn of(self, policy: &Policy) -> Option<Budget> {
        match self {
            Self::Disturb(step) => policy.budgets.get(&step).copied(),
            Self::Release => Some(policy.release_budget),
        }
    }

    /// Writes it into a policy.
    pub fn set(self, policy: &mut Policy, budget: Budget) {
        match self {
            Self::Disturb(step) => drop(policy.budgets.insert(step, budget)),
            Self::Release => policy.release_budget = budget,
        }
    }
}

impl fmt::Display for BudgetKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for BudgetKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name).ok_or_else(|| UnknownName {
            what: "budget",
            name: name.to_owned(),
            known: "restart-agent, reboot, power-cycle, release",
        })
    }
}

/// Another budget, of which only what is named is to be different.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetChange {
    /// Most that may begin.
    pub most: Option<u32>,
    /// In any span of this length.
    pub window: Option<Span>,
}

impl BudgetChange {
    /// The budget that this makes of the present one, or a sentence why there is no such.
    pub fn of(self, present: Option<Budget>) -> Result<Budget, String> {
        let (most, window) = (
            self.most.or(present.map(|budget| budget.count)),
            self.window.or(present.map(|budget| budget.window)),
        );
        let (Some(count), Some(window)) = (most, window) else {
            return Err(
                "the policy has no such budget yet; give both how many may begin and the window".to_owned()
            );
        };
        if self.most.is_none() && self.window.is_none() {
            return Err(
                "nothing is to be different; give how many may begin, or the window, or both".to_owned()
            );
        }
        if count > MOST {
            return Err(format!("{count} is more than {MOST}, the most that a budget may allow"));
        }
        if window.0 < Span::seconds(1).0 || window > LONGEST_WINDOW {
            return Err(format!("a window of {window} cannot be; it goes from 1s to {LONGEST_WINDOW}"));
        }
        Ok(Budget { count, window })
    }
}

/// What of a budget was used, as the database counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// How many began within the window.
    pub count: u32,
    /// When the one began with whose leaving the window the next is free; `None` where one is free now, or none
    /// ever will be.
    pub frees: Option<Timestamp>,
}

/// A budget as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetLine {
    /// Which.
    pub budget: String,
    /// Most that may begin in the window; `null` where the policy has no such budget, and anything may.
    pub most: Option<u32>,
    /// The window.
    pub window: Option<Span>,
    /// How many began within it.
    pub used: u32,
    /// Whether another may begin now.
    pub free: bool,
    /// When the next may; `null` where one may now, or none ever will.
    pub free_at: Option<Timestamp>,
}

/// A budget of which so much is used, as it is told.
#[must_use]
pub fn line(kind: BudgetKind, budget: Option<Budget>, used: Used) -> BudgetLine {
    let free = budget.is_none_or(|budget| used.count < budget.count);
    BudgetLine {
        budget: kind.to_string(),
        most: budget.map(|budget| budget.count),
        window: budget.map(|budget| budget.window),
        used: used.count,
        free,
        free_at: budget.zip(used.frees).filter(|_| !free).map(|(budget, at)| after(at, budget.window.0)),
    }
}

/// What the provisioner says of one provider's brake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderBrake {
    /// Whose.
    pub provider: String,
    /// Why it holds, if it does.
    pub reason: Option<String>,
    /// Since when.
    pub since: Option<Timestamp>,
}

/// A brake as it is told, whether it holds or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BrakeState {
    /// What it stops: `recovery` or `provisioner`.
    pub kind: String,
    /// Whose: a provider, or `*` for all.
    pub scope: String,
    /// Whether it holds.
    pub holds: bool,
    /// Since when.
    pub since: Option<Timestamp>,
    /// Why.
    pub reason: Option<String>,
    /// What engages it, as a sentence.
    pub engaged_by: String,
}

/// The kind of a brake that holds recovery, as it is stored.
const RECOVERY: &str = "recovery";

/// Every brake: those of recovery, over all machines and each provider's; then each provisioner's; then whatever
/// a newer release holds that is not known here.
#[must_use]
pub fn brakes(on: &[BrakeLine], providers: &[ProviderBrake], policy: &Policy) -> Vec<BrakeState> {
    let recovery: BTreeMap<&str, &BrakeLine> =
        on.iter().filter(|line| line.kind == RECOVERY).map(|line| (line.scope.as_str(), line)).collect();
    let names: BTreeSet<&str> = providers.iter().map(|provider| provider.provider.as_str()).collect();
    let scopes: BTreeSet<&str> =
        recovery.keys().copied().chain(names).filter(|scope| *scope != ALL).collect();
    let held = |scope: &str| {
        let line = recovery.get(scope);
        BrakeState {
            kind: RECOVERY.to_owned(),
            scope: scope.to_owned(),
            holds: line.is_some(),
            since: line.map(|line| line.engaged_at),
            reason: line.map(|line| said(&line.reason)),
            engaged_by: recovery_threshold(policy),
        }
    };
    let mut told: Vec<BrakeState> = std::iter::once(ALL).chain(scopes).map(held).collect();
    told.extend(providers.iter().map(|brake| BrakeState {
        kind: "provisioner".to_owned(),
        scope: brake.provider.clone(),
        holds: brake.reason.is_some(),
        since: brake.since,
        reason: brake.reason.as_deref().map(said),
        engaged_by: provisioner_threshold(policy),
    }));
    told.extend(on.iter().filter(|line| line.kind != RECOVERY).map(|line| BrakeState {
        kind: line.kind.clone(),
        scope: line.scope.clone(),
        holds: true,
        since: Some(line.engaged_at),
        reason: Some(said(&line.reason)),
        engaged_by: "what only a newer release knows".to_owned(),
    }));
    told
}

/// A brake's reason, where it need not say that it is one.
fn said(reason: &str) -> String {
    reason.trim_start_matches("brake: ").to_owned()
}

fn recovery_threshold(policy: &Policy) -> String {
    let brake = &policy.recovery_brake;
    format!(
        "{} machines or more fall silent within {}, and more than {} of those that are watched",
        brake.at_least.max(1),
        brake.window,
        percent(brake.fraction)
    )
}

fn provisioner_threshold(policy: &Policy) -> String {
    let brake = &policy.provisioner_brake;
    format!(
        "its list cannot be read, is empty, loses more than {} of its machines at once, or has more than {} \
         discrepancies at once",
        percent(brake.lost_fraction),
        brake.discrepancies
    )
}

fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0).trim_end_matches('0').trim_end_matches('.').to_owned() + "%"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    #[test]
    fn every_kind_reads_and_writes_its_place_in_the_policy() {
        for kind in BudgetKind::ALL {
            assert_eq!(kind.as_str().parse::<BudgetKind>().unwrap(), kind);
            let (mut policy, budget) = (Policy::default(), Budget { count: 3, window: Span::minutes(7) });
            kind.set(&mut policy, budget);
            assert_eq!(kind.of(&policy), Some(budget), "{kind}");
            let others = BudgetKind::ALL.into_iter().filter(|other| *other != kind);
            for other in others {
                assert_eq!(other.of(&policy), other.of(&Policy::default()), "{kind} has changed {other}");
            }
        }
        assert!("explode".parse::<BudgetKind>().is_err());
    }

    #[test]
    fn budget_is_changed_where_that_is_named_and_can_be() {
        let present = Some(Budget { count: 20, window: Span::minutes(10) });
        let change = |most: Option<u32>, window: Option<Span>| BudgetChange { most, window };
        let budget = |count, window| Ok(Budget { count, window });
        for (change, present, expected) in [
            (change(Some(5), None), present, budget(5, Span::minutes(10))),
            (change(None, Some(Span::hours(1))), present, budget(20, Span::hours(1))),
            (change(Some(0), Some(Span::seconds(1))), present, budget(0, Span::seconds(1))),
            (change(Some(MOST), Some(LONGEST_WINDOW)), None, budget(MOST, LONGEST_WINDOW)),
            (change(None, None), present, Err("nothing is to be different")),
            (change(Some(5), None), None, Err("the policy has no such budget yet")),
            (change(Some(MOST + 1), None), present, Err("1000001 is more than")),
            (change(None, Some(Span::default())), present, Err("a window of 0s cannot be")),
            (change(None, Some(Span::hours(30 * 24 + 1))), present, Err("a window of")),
        ] {
            match (change.of(present), expected) {
                (Ok(found), expected) => assert_eq!(Ok(found), expected),
                (Err(said), Err(part)) => assert!(said.starts_with(part), "{said}"),
                (Err(said), Ok(expected)) => panic!("{expected:?} is refused: {said}"),
            }
        }
    }

    #[test]
    fn line_says_what_is_left_and_when_more_is() {
        let budget = |count| Some(Budget { count, window: Span::minutes(10) });
        for (budget, used, oldest, free, free_at) in [
            (budget(2), 0, None, true, None),
            (budget(2), 1, Some(at(0)), true, None),
            (budget(2), 2, Some(at(0)), false, Some(at(600))),
            (budget(2), 9, Some(at(7)), false, Some(at(607))),
            (budget(0), 0, None, false, None),
            (None, 9, None, true, None),
        ] {
            let told = line(BudgetKind::Release, budget, Used { count: used, frees: oldest });
            assert_eq!((told.free, told.free_at), (free, free_at), "{told:?}");
        }
    }

    #[test]
    fn every_brake_is_told_with_what_engages_it() {
        let on = |kind: &str, scope: &str| BrakeLine {
            kind: kind.to_owned(),
            scope: scope.to_owned(),
            reason: "brake: 6 of 10 fell silent".to_owned(),
            engaged_at: at(0),
            seen_at: at(9),
        };
        let provider = |name: &str, reason: Option<&str>| ProviderBrake {
            provider: name.to_owned(),
            reason: reason.map(str::to_owned),
            since: reason.map(|_| at(5)),
        };
        let told = brakes(
            &[on("recovery", "gone"), on("recovery", "*"), on("curator", "c1")],
            &[provider("a", None), provider("b", Some("brake: its list is empty"))],
            &Policy::default(),
        );
        let short: Vec<(&str, &str, bool)> =
            told.iter().map(|brake| (brake.kind.as_str(), brake.scope.as_str(), brake.holds)).collect();
        assert_eq!(
            short,
            [
                ("recovery", "*", true),
                ("recovery", "a", false),
                ("recovery", "b", false),
                ("recovery", "gone", true),
                ("provisioner", "a", false),
                ("provisioner", "b", true),
                ("curator", "c1", true),
            ]
        );
        assert_eq!(told[0].reason.as_deref(), Some("6 of 10 fell silent"));
        assert_eq!(
            told[1].engaged_by,
            "5 machines or more fall silent within 10m, and more than 20% of those that are watched"
        );
        assert!(told[5].engaged_by.contains("loses more than 20%"), "{:?}", told[5]);
        for (share, text) in [(0.2, "20%"), (0.125, "12.5%"), (1.0, "100%"), (0.0, "0%")] {
            assert_eq!(percent(share), text);
        }
    }
}
