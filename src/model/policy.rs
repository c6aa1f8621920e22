//! The rules the fleet is run by: one versioned row of the BMDB.
//!
//! Limits, ladders, budgets and priorities decide when a machine is next due.
//! If each shepherd took them from its own flags, two shepherds started with
//! different flags would undo each other's schedule for ever. So flags and
//! configuration only *write* this row (those that were given, and only when
//! they differ), and everybody decides by the row.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::backoff::Backoff;
use crate::model::cluster::key::DEFAULT_ROTATION;
use crate::model::cluster::snapshot::SnapshotPolicy;
use crate::model::order_limits::OrderLimits;
use crate::model::process::Process;
use crate::model::second_person::SecondPerson;
use crate::model::time::Span;

/// Everything that decisions take from configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// A machine whose agent never reported is silent after this.
    pub recovery_first_heartbeat_timeout: Span,
    /// A machine whose agent reported once is silent after this.
    pub recovery_silence_timeout: Span,
    /// How often agents report.
    pub heartbeat_interval: Span,
    /// Longest time an outward call may still be under way after the session that made it was
    /// lost; a machine freed by expiry is not claimed before.
    pub outward_limit: Span,
    /// Longest time without a heartbeat commit that still counts as listening; see
    /// [`Policy::effective_listening_gap`].
    pub listening_gap: Span,
    /// Look again at a machine whose provider status was complete and stable.
    pub update_interval_stable: Span,
    /// Look again at a machine whose status is incomplete, unstable or just changed.
    pub update_interval_unstable: Span,
    /// Put aside a machine on which the provider failed.
    pub update_failure_pause: Span,
    /// Growing delays by process.
    pub backoff: BTreeMap<Process, Backoff>,
    /// Failures in a row after which a machine's work yields to that of others.
    pub low_priority_after_failures: u32,
    /// Shares of claims by priority class 0 (first) to 2 (last).
    pub priority_weights: [u32; 3],
    /// The steps of recovery, gentlest first.
    pub ladder: Vec<Rung>,
    /// When recovery suspects ourselves instead of the machines.
    pub recovery_brake: RecoveryBrake,
    /// How much may be disturbed.
    pub budgets: BTreeMap<Disturbance, Budget>,
    /// When the provisioner suspects the provider's list.
    pub provisioner_brake: ProvisionerBrake,
    /// A machine that is to be wiped on its way out is overdue after this.
    pub retirement_wipe_timeout: Span,
    /// One that is to be given back is.
    pub retirement_release_timeout: Span,
    /// What a person ordered of a machine's power is given up when it could not be done for so long.
    pub power_order_timeout: Span,
    /// How many machines may be given back. Not among `budgets`, whose kinds a release before this one knows
    /// all of, or cannot read the policy.
    pub release_budget: Budget,
    /// How long history, settled intents and closed sessions are kept; see
    /// [`Policy::effective_history_retention`].
    pub history_retention: Span,
    /// How many machines operators' orders may be about.
    pub order_limits: OrderLimits,
    /// Whether some orders need another admin.
    pub second_person: SecondPerson,
    /// When snapshots of clusters are taken, and which are kept.
    pub cluster_snapshots: SnapshotPolicy,
    /// How old the shepherd's key for a cluster becomes before another one takes its place; zero: as old as nobody orders
    /// otherwise.
    pub cluster_key_rotation: Span,
}

/// One step of the recovery ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rung {
    /// What is done.
    pub step: Disturbance,
    /// How long the machine has to report after each try.
    pub deadline: Span,
    /// How often it is tried before the next rung.
    pub tries: u32,
}

/// A thing done to a machine that whoever uses it may notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Disturbance {
    /// Start the agent anew over SSH.
    RestartAgent,
    /// Ask the operating system, or the provider, for a reboot.
    Reboot,
    /// Cut the power and give it back.
    PowerCycle,
}

impl Disturbance {
    /// Every kind, gentlest first.
    pub const ALL: [Self; 3] = [Self::RestartAgent, Self::Reboot, Self::PowerCycle];

    /// The name used in the database, in logs and in policy.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RestartAgent => "restart-agent",
            Self::Reboot => "reboot",
            Self::PowerCycle => "power-cycle",
        }
    }

    /// The same in a sentence: "to *reboot the machine*".
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::RestartAgent => "restart the agent over SSH",
            Self::Reboot => "reboot the machine",
            Self::PowerCycle => "power-cycle the machine",
        }
    }

    /// Whether the machine has another boot id afterwards.
    #[must_use]
    pub const fn reboots(self) -> bool {
        matches!(self, Self::Reboot | Self::PowerCycle)
    }
}

impl std::fmt::Display for Disturbance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Disturbance {
    type Err = crate::model::process::UnknownName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|step| step.as_str() == name).ok_or_else(|| {
            crate::model::process::UnknownName {
                what: "disturbance",
                name: name.to_owned(),
                known: "restart-agent, reboot, power-cycle",
            }
        })
    }
}

/// How many disturbances of a kind may begin in a window of time, over the whole fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Most that may begin.
    pub count: u32,
    /// In any span of this length.
    pub window: Span,
}

/// Holds new recovery ladders when too many machines fell silent at once: that is more often
/// our network or our clock than the machines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoveryBrake {
    /// The span that "at once" means. The brake releases itself when fewer fell silent in the
    /// most recent span.
    pub window: Span,
    /// Share of a provider's watched machines, and of all of them, that engages it.
    pub fraction: f64,
    /// Never engaged by fewer than this many machines.
    pub at_least: u32,
}

/// Stops creation when a provider's list cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProvisionerBrake {
    /// Discrepancies that appear at once before creation stops.
    pub discrepancies: u32,
    /// Share of its machines that a list may lose between two readings.
    pub lost_fraction: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            recovery_first_heartbeat_timeout: Span::minutes(30),
            recovery_silence_timeout: Span::minutes(10),
            heartbeat_interval: Span::seconds(30),
            outward_limit: Span::seconds(60),
            listening_gap: Span::seconds(60),
            update_interval_stable: Span::minutes(30),
            update_interval_unstable: Span::minutes(1),
            update_failure_pause: Span::hours(1),
            backoff: BTreeMap::from([
                (
                    Process::AgentStart,
                    Backoff { initial: Span::minutes(5), maximum: Span::hours(4), exponent: 1.2 },
                ),
                (
                    Process::Recovery,
                    Backoff { initial: Span::minutes(1), maximum: Span::hours(1), exponent: 1.2 },
                ),
                (
                    Process::Update,
                    Backoff { initial: Span::minutes(1), maximum: Span::hours(1), exponent: 1.5 },
                ),
            ]),
            low_priority_after_failures: 3,
            priority_weights: [16, 4, 1],
            ladder: vec![
                Rung { step: Disturbance::RestartAgent, deadline: Span::minutes(2), tries: 2 },
                Rung { step: Disturbance::Reboot, deadline: Span::minutes(15), tries: 2 },
                Rung { step: Disturbance::PowerCycle, deadline: Span::minutes(20), tries: 2 },
            ],
            recovery_brake: RecoveryBrake { window: Span::minutes(10), fraction: 0.2, at_least: 5 },
            budgets: BTreeMap::from([
                (Disturbance::RestartAgent, Budget { count: 100, window: Span::minutes(10) }),
                (Disturbance::Reboot, Budget { count: 20, window: Span::minutes(10) }),
                (Disturbance::PowerCycle, Budget { count: 10, window: Span::minutes(10) }),
            ]),
            provisioner_brake: ProvisionerBrake { discrepancies: 5, lost_fraction: 0.2 },
            retirement_wipe_timeout: Span::hours(4),
            retirement_release_timeout: Span::hours(1),
            power_order_timeout: Span::minutes(30),
            release_budget: Budget { count: 100, window: Span::minutes(10) },
            history_retention: Span::hours(180 * 24),
            order_limits: OrderLimits::default(),
            second_person: SecondPerson::default(),
            cluster_snapshots: SnapshotPolicy::default(),
            cluster_key_rotation: DEFAULT_ROTATION,
        }
    }
}

impl Policy {
    /// Longest time without a heartbeat commit that counts as listening: never more than half of the
    /// shortest limit of silence. Were it longer than such a limit, we could be away for just that
    /// long and then take everybody who could not reach us for silent.
    #[must_use]
    pub fn effective_listening_gap(&self) -> Span {
        let shortest = self.recovery_silence_timeout.0.min(self.recovery_first_heartbeat_timeout.0);
        Span(self.listening_gap.0.min(shortest / 2))
    }

    /// How far back budgets and brakes look.
    #[must_use]
    pub fn longest_window(&self) -> Span {
        let windows = self.budgets.values().map(|budget| budget.window);
        windows.fold(self.recovery_brake.window.max(self.release_budget.window), Span::max)
    }

    /// How long what happened is kept: never shorter than any window that budgets and brakes look back
    /// over, and a day at least, so that a night can be explained in the morning.
    #[must_use]
    pub fn effective_history_retention(&self) -> Span {
        self.history_retention.max(self.longest_window()).max(Span::hours(24))
    }

    /// The growing delay of a process; the default's when the stored policy names none.
    #[must_use]
    pub fn backoff_of(&self, process: Process) -> Backoff {
        self.backoff.get(&process).copied().unwrap_or(Backoff {
            initial: Span::minutes(1),
            maximum: Span::hours(1),
            exponent: 1.2,
        })
    }

    /// The rung at `index`, if the ladder is that long.
    #[must_use]
    pub fn rung(&self, index: usize) -> Option<Rung> {
        self.ladder.get(index).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_are_deaf_before_anybody_can_be_silent() {
        let with = |silence: u64, first: u64, gap: u64| Policy {
            recovery_silence_timeout: Span::seconds(silence),
            recovery_first_heartbeat_timeout: Span::seconds(first),
            listening_gap: Span::seconds(gap),
            ..Policy::default()
        };
        for (silence, first, gap, effective) in [
            (600, 1800, 60, 60),
            (16, 1800, 60, 8),
            (600, 20, 60, 10),
            (120, 120, 60, 60),
            (100, 120, 60, 50),
        ] {
            let policy = with(silence, first, gap);
            assert_eq!(policy.effective_listening_gap(), Span::seconds(effective), "{silence} {first} {gap}");
        }
    }

    #[test]
    fn nothing_is_forgotten_that_a_budget_or_a_brake_still_counts() {
        let kept = |retention: Span, budget: Span, brake: Span| {
            let mut policy = Policy { history_retention: retention, ..Policy::default() };
            policy.budgets.insert(Disturbance::Reboot, Budget { count: 1, window: budget });
            policy.recovery_brake.window = brake;
            policy.effective_history_retention()
        };
        let (hour, day) = (Span::hours(1), Span::hours(24));
        assert_eq!(Policy::default().effective_history_retention(), Span::hours(180 * 24));
        for (retention, budget, brake, effective) in [
            (Span::hours(48), hour, hour, Span::hours(48)),
            (hour, hour, hour, day),
            (Span::hours(48), Span::hours(72), hour, Span::hours(72)),
            (Span::hours(48), hour, Span::hours(96), Span::hours(96)),
        ] {
            assert_eq!(kept(retention, budget, brake), effective, "{retention} {budget} {brake}");
        }
    }

    #[test]
    fn stored_policy_of_an_older_release_gets_defaults_for_what_it_lacks() {
        let policy: Policy = serde_json::from_str(r#"{"recovery_silence_timeout": "2m"}"#).unwrap();
        assert_eq!(policy.recovery_silence_timeout, Span::minutes(2));
        assert_eq!(policy.ladder, Policy::default().ladder);
    }

    #[test]
    fn policy_survives_its_stored_form() {
        let policy = Policy::default();
        let stored = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<Policy>(&stored).unwrap(), policy);
    }
}
