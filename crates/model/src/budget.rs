//! Disruption budgets and brakes as operators see and set them.
//!
//! [`crate::disruption`] and [`crate::brake`] decide by the policy and by counts of the moment. This
//! module shows what they would decide by: how much of each budget is used, when the next start is possible, which
//! brakes are engaged and what engages them. A budget is identified by the kind of its intents, so that its use is
//! counted where the intents are recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::brake::ALL_PROVIDERS;
use crate::machine_view::EngagedBrake;
use crate::policy::{Budget, DisruptionKind, Policy};
use crate::process::UnknownName;
use crate::time::{Span, Timestamp, after};

/// Most that a budget may allow. A policy without the budget allows more.
pub const MAX_COUNT: u32 = 1_000_000;
/// Longest window. Every step looks back over the whole window.
pub const MAX_WINDOW: Span = Span::hours(30 * 24);

/// What a budget bounds, by the kind of the intents that use it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BudgetKind {
    /// A step that a user of the machine may notice.
    Disrupt(DisruptionKind),
    /// Machines released to their providers.
    Release,
}

impl BudgetKind {
    /// Every kind, gentlest first.
    pub const ALL: [Self; 4] = [
        Self::Disrupt(DisruptionKind::RestartAgent),
        Self::Disrupt(DisruptionKind::Reboot),
        Self::Disrupt(DisruptionKind::PowerCycle),
        Self::Release,
    ];

    /// The name used in the database, on the command line and in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Disrupt(step) => step.as_str(),
            Self::Release => "release",
        }
    }

    /// Its name in the audit log: "the budget reboot".
    #[must_use]
    pub fn audit_target(self) -> String {
        format!("the budget {self}")
    }

    /// What the policy allows of this kind; `None` means no limit.
    #[must_use]
    pub fn budget_in(self, policy: &Policy) -> Option<Budget> {
        match self {
            Self::Disrupt(step) => policy.budgets.get(&step).copied(),
            Self::Release => Some(policy.release_budget),
        }
    }

    /// Writes the budget into a policy.
    pub fn set_in(self, policy: &mut Policy, budget: Budget) {
        match self {
            Self::Disrupt(step) => drop(policy.budgets.insert(step, budget)),
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

/// A change of a budget. Fields that are `None` stay as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetChange {
    /// Most that may start within the window.
    pub max_count: Option<u32>,
    /// Length of the window.
    pub window: Option<Span>,
}

impl BudgetChange {
    /// The present budget with this change applied. The error is a sentence that says why it is not valid.
    pub fn apply_to(self, present: Option<Budget>) -> Result<Budget, String> {
        let (most, window) = (
            self.max_count.or(present.map(|budget| budget.count)),
            self.window.or(present.map(|budget| budget.window)),
        );
        let (Some(count), Some(window)) = (most, window) else {
            return Err(
                "the policy has no such budget yet; give both how many may begin and the window".to_owned()
            );
        };
        if self.max_count.is_none() && self.window.is_none() {
            return Err(
                "nothing would change; give the number that may begin, the window, or both".to_owned()
            );
        }
        if count > MAX_COUNT {
            return Err(format!("{count} is more than {MAX_COUNT}, the most that a budget may allow"));
        }
        if window.0 < Span::seconds(1).0 || window > MAX_WINDOW {
            return Err(format!("a window of {window} is not possible; it must be 1s to {MAX_WINDOW}"));
        }
        Ok(Budget { count, window })
    }
}

/// How much of a budget is used, as the database counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetUsage {
    /// How many started within the window.
    pub count: u32,
    /// Start of the one that frees the next place when it leaves the window; `None` where a place is free now, or none
    /// ever will be.
    pub blocking_since: Option<Timestamp>,
}

/// Status of a budget, as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetStatus {
    /// Kind of the budget, by [`BudgetKind::as_str`].
    pub budget: String,
    /// Most that may start in the window; `null` where the policy has no such budget, and there is no limit.
    pub max_count: Option<u32>,
    /// Length of the window; `null` where the policy has no such budget.
    pub window: Option<Span>,
    /// How many started within the window.
    pub used: u32,
    /// Whether another may start now.
    pub available: bool,
    /// When the next may start; `null` where one may now, or none ever will.
    pub available_at: Option<Timestamp>,
}

/// The status of a budget of which this much is used.
#[must_use]
pub fn budget_status(kind: BudgetKind, budget: Option<Budget>, used: BudgetUsage) -> BudgetStatus {
    let free = budget.is_none_or(|budget| used.count < budget.count);
    BudgetStatus {
        budget: kind.to_string(),
        max_count: budget.map(|budget| budget.count),
        window: budget.map(|budget| budget.window),
        used: used.count,
        available: free,
        available_at: budget
            .zip(used.blocking_since)
            .filter(|_| !free)
            .map(|(budget, at)| after(at, budget.window.0)),
    }
}

/// What the provisioner reports of one provider's brake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderBrake {
    /// Name of the provider.
    pub provider: String,
    /// Why the brake is engaged; `None` when it is not.
    pub reason: Option<String>,
    /// When the brake was engaged; `None` when it is not.
    pub since: Option<Timestamp>,
}

/// State of a brake, engaged or not, as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BrakeState {
    /// What it stops: `recovery` or `provisioner`; another word if only a newer release knows it.
    pub kind: String,
    /// Its provider, or `*` for all.
    pub scope: String,
    /// Whether the brake is engaged now.
    pub engaged: bool,
    /// When it was engaged; `None` when it is not.
    pub since: Option<Timestamp>,
    /// Why it is engaged, without the prefix `brake: `.
    pub reason: Option<String>,
    /// What engages it, as a sentence.
    pub engages_when: String,
}

/// The kind of a recovery brake, as it is stored.
const RECOVERY_BRAKE_KIND: &str = "recovery";

/// Every brake, in this order: those of recovery, for all machines and for each provider; then each provider's
/// provisioner brake; then brakes of a newer release, whose kind is not known here.
#[must_use]
pub fn brake_states(on: &[EngagedBrake], providers: &[ProviderBrake], policy: &Policy) -> Vec<BrakeState> {
    let recovery: BTreeMap<&str, &EngagedBrake> = on
        .iter()
        .filter(|line| line.kind == RECOVERY_BRAKE_KIND)
        .map(|line| (line.scope.as_str(), line))
        .collect();
    let names: BTreeSet<&str> = providers.iter().map(|provider| provider.provider.as_str()).collect();
    let scopes: BTreeSet<&str> =
        recovery.keys().copied().chain(names).filter(|scope| *scope != ALL_PROVIDERS).collect();
    let held = |scope: &str| {
        let line = recovery.get(scope);
        BrakeState {
            kind: RECOVERY_BRAKE_KIND.to_owned(),
            scope: scope.to_owned(),
            engaged: line.is_some(),
            since: line.map(|line| line.engaged_at),
            reason: line.map(|line| strip_brake_prefix(&line.reason)),
            engages_when: recovery_threshold(policy),
        }
    };
    let mut reported: Vec<BrakeState> = std::iter::once(ALL_PROVIDERS).chain(scopes).map(held).collect();
    reported.extend(providers.iter().map(|brake| BrakeState {
        kind: "provisioner".to_owned(),
        scope: brake.provider.clone(),
        engaged: brake.reason.is_some(),
        since: brake.since,
        reason: brake.reason.as_deref().map(strip_brake_prefix),
        engages_when: provisioner_threshold(policy),
    }));
    reported.extend(on.iter().filter(|line| line.kind != RECOVERY_BRAKE_KIND).map(|line| BrakeState {
        kind: line.kind.clone(),
        scope: line.scope.clone(),
        engaged: true,
        since: Some(line.engaged_at),
        reason: Some(strip_brake_prefix(&line.reason)),
        engages_when: "what only a newer release knows".to_owned(),
    }));
    reported
}

/// A brake's reason without the prefix that marks it as one.
fn strip_brake_prefix(reason: &str) -> String {
    reason.trim_start_matches("brake: ").to_owned()
}

fn recovery_threshold(policy: &Policy) -> String {
    let brake = &policy.recovery_brake;
    format!(
        "{} machines or more fall silent within {}, and more than {} of those that are watched",
        brake.at_least.max(1),
        brake.window,
        format_percent(brake.fraction)
    )
}

fn provisioner_threshold(policy: &Policy) -> String {
    let brake = &policy.provisioner_brake;
    format!(
        "its list cannot be read, is empty, loses more than {} of its machines at once, or has more than {} \
         discrepancies at once",
        format_percent(brake.lost_fraction),
        brake.discrepancies
    )
}

fn format_percent(share: f64) -> String {
    format!("{:.1}", share * 100.0).trim_end_matches('0').trim_end_matches('.').to_owned() + "%"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    #[test]
    fn every_kind_reads_and_writes_its_policy_field() {
        for kind in BudgetKind::ALL {
            assert_eq!(kind.as_str().parse::<BudgetKind>().unwrap(), kind);
            let (mut policy, budget) = (Policy::default(), Budget { count: 3, window: Span::minutes(7) });
            kind.set_in(&mut policy, budget);
            assert_eq!(kind.budget_in(&policy), Some(budget), "{kind}");
            let others = BudgetKind::ALL.into_iter().filter(|other| *other != kind);
            for other in others {
                assert_eq!(
                    other.budget_in(&policy),
                    other.budget_in(&Policy::default()),
                    "{kind} has changed {other}"
                );
            }
        }
        assert!("explode".parse::<BudgetKind>().is_err());
    }

    #[test]
    fn budget_change_applies_only_named_fields_within_bounds() {
        let present = Some(Budget { count: 20, window: Span::minutes(10) });
        let change = |most: Option<u32>, window: Option<Span>| BudgetChange { max_count: most, window };
        let budget = |count, window| Ok(Budget { count, window });
        for (change, present, expected) in [
            (change(Some(5), None), present, budget(5, Span::minutes(10))),
            (change(None, Some(Span::hours(1))), present, budget(20, Span::hours(1))),
            (change(Some(0), Some(Span::seconds(1))), present, budget(0, Span::seconds(1))),
            (change(Some(MAX_COUNT), Some(MAX_WINDOW)), None, budget(MAX_COUNT, MAX_WINDOW)),
            (change(None, None), present, Err("nothing would change")),
            (change(Some(5), None), None, Err("the policy has no such budget yet")),
            (change(Some(MAX_COUNT + 1), None), present, Err("1000001 is more than")),
            (change(None, Some(Span::default())), present, Err("a window of 0s is not possible")),
            (change(None, Some(Span::hours(30 * 24 + 1))), present, Err("a window of")),
        ] {
            match (change.apply_to(present), expected) {
                (Ok(found), expected) => assert_eq!(Ok(found), expected),
                (Err(reason), Err(part)) => assert!(reason.starts_with(part), "{reason}"),
                (Err(reason), Ok(expected)) => panic!("{expected:?} is refused: {reason}"),
            }
        }
    }

    #[test]
    fn status_shows_remaining_budget_and_when_more_is_available() {
        let budget = |count| Some(Budget { count, window: Span::minutes(10) });
        for (budget, used, oldest, free, free_at) in [
            (budget(2), 0, None, true, None),
            (budget(2), 1, Some(at(0)), true, None),
            (budget(2), 2, Some(at(0)), false, Some(at(600))),
            (budget(2), 9, Some(at(7)), false, Some(at(607))),
            (budget(0), 0, None, false, None),
            (None, 9, None, true, None),
        ] {
            let status = budget_status(
                BudgetKind::Release,
                budget,
                BudgetUsage { count: used, blocking_since: oldest },
            );
            assert_eq!((status.available, status.available_at), (free, free_at), "{status:?}");
        }
    }

    #[test]
    fn every_brake_is_listed_with_its_threshold() {
        let on = |kind: &str, scope: &str| EngagedBrake {
            kind: kind.to_owned(),
            scope: scope.to_owned(),
            reason: "brake: 6 of 10 fell silent".to_owned(),
            engaged_at: at(0),
            confirmed_at: at(9),
        };
        let provider = |name: &str, reason: Option<&str>| ProviderBrake {
            provider: name.to_owned(),
            reason: reason.map(str::to_owned),
            since: reason.map(|_| at(5)),
        };
        let reported = brake_states(
            &[on("recovery", "gone"), on("recovery", "*"), on("curator", "c1")],
            &[provider("a", None), provider("b", Some("brake: its list is empty"))],
            &Policy::default(),
        );
        let short: Vec<(&str, &str, bool)> =
            reported.iter().map(|brake| (brake.kind.as_str(), brake.scope.as_str(), brake.engaged)).collect();
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
        assert_eq!(reported[0].reason.as_deref(), Some("6 of 10 fell silent"));
        assert_eq!(
            reported[1].engages_when,
            "5 machines or more fall silent within 10m, and more than 20% of those that are watched"
        );
        assert!(reported[5].engages_when.contains("loses more than 20%"), "{:?}", reported[5]);
        for (share, text) in [(0.2, "20%"), (0.125, "12.5%"), (1.0, "100%"), (0.0, "0%")] {
            assert_eq!(format_percent(share), text);
        }
    }
}
