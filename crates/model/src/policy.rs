//! Policy: the fleet-wide configuration stored in the BMDB.
//!
//! It is one versioned row. Limits, ladders, budgets and priorities decide when a machine is next due. If each shepherd
//! took them from its own flags, two shepherds with different flags would overwrite each other's schedule for ever. So
//! flags and configuration only *write* this row (those that are given, and only when they differ), and every shepherd
//! decides by the row.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backoff::BackoffPolicy;
use crate::byte_size::ByteSize;
use crate::cluster::owner_key::DEFAULT_ROTATION_INTERVAL;
use crate::order_limits::OrderLimits;
use crate::process::Process;
use crate::time::Span;
use crate::two_person_rule::{DEFAULT_WAITING_TIME, TwoPersonRule};

/// All configuration that decisions depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// A machine whose agent has never reported counts as silent after this.
    pub recovery_first_heartbeat_timeout: Span,
    /// A machine whose agent has reported before counts as silent after this.
    pub recovery_silence_timeout: Span,
    /// How often agents report.
    pub heartbeat_interval: Span,
    /// Longest time that an outward call may still be under way after the session that made it was lost. A machine
    /// freed by expiry is not claimed earlier.
    pub outward_limit: Span,
    /// Longest time without a heartbeat commit that still counts as listening; see [`Policy::effective_listening_gap`].
    pub listening_gap: Span,
    /// Interval of updates for a machine whose provider status was complete and stable.
    pub update_interval_stable: Span,
    /// Interval of updates for a machine whose status is incomplete, unstable or just changed.
    pub update_interval_unstable: Span,
    /// Pause of updates after the provider failed for a machine.
    pub update_failure_pause: Span,
    /// Backoffs after failures, by process.
    pub backoff: BTreeMap<Process, BackoffPolicy>,
    /// Consecutive failures after which a machine's work yields to that of others.
    pub low_priority_after_failures: u32,
    /// Shares of claims by priority class 0 (first) to 2 (last).
    pub priority_weights: [u32; 3],
    /// The steps of recovery, gentlest first.
    pub ladder: Vec<Rung>,
    /// When recovery suspects ourselves instead of the machines.
    pub recovery_brake: RecoveryBrake,
    /// Most disruptions within a window, by kind. A kind that is absent has no limit.
    pub budgets: BTreeMap<DisruptionKind, Budget>,
    /// When the provisioner suspects the provider's list.
    pub provisioner_brake: ProvisionerBrake,
    /// A machine with a requested wipe is overdue for it after this.
    pub retirement_wipe_timeout: Span,
    /// A machine that must be released is overdue after this.
    pub retirement_release_timeout: Span,
    /// A power order that could not be carried out is given up after this.
    pub power_order_timeout: Span,
    /// How many machines may be released. It is not in `budgets`, because an earlier release cannot read a policy with
    /// a kind of budget that it does not know.
    pub release_budget: Budget,
    /// How long history, settled intents and closed sessions are kept; see [`Policy::effective_history_retention`].
    pub history_retention: Span,
    /// How many machines a bulk order may concern.
    pub order_limits: OrderLimits,
    /// Whether sensitive orders need a second admin.
    // Stored policies have this name, and earlier releases, which share the database during an update, read no other one.
    #[serde(rename = "second_person")]
    pub two_person_rule: TwoPersonRule,
    /// How long a new credential approves nothing under the two-person rule. It is not in `two_person_rule`, because an
    /// earlier release rejects a field of it that it does not know.
    pub approver_waiting_time: Span,
    /// When snapshots of clusters are taken, and which are retained.
    pub cluster_snapshots: SnapshotPolicy,
    /// Age at which the shepherd's key for a cluster is rotated; zero for rotation by order only.
    pub cluster_key_rotation: Span,
    /// Most bytes of all artefacts together. They are stored in the database.
    pub artefact_storage_limit: ByteSize,
    /// Whether releases that nobody signed may be rolled out.
    pub allow_unsigned_releases: bool,
}

/// One step of the recovery ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rung {
    /// The kind of step.
    pub step: DisruptionKind,
    /// How long the machine has to report after each attempt.
    pub deadline: Span,
    /// Number of attempts before the next rung.
    pub tries: u32,
}

/// A step that a user of the machine may notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DisruptionKind {
    /// Restart the agent over SSH.
    RestartAgent,
    /// Reboot by the operating system, or by the provider.
    Reboot,
    /// Cut the power and restore it.
    PowerCycle,
}

impl DisruptionKind {
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

    /// The same for a sentence: "to *reboot the machine*".
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

impl std::fmt::Display for DisruptionKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for DisruptionKind {
    type Err = crate::process::UnknownName;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|step| step.as_str() == name).ok_or_else(|| crate::process::UnknownName {
            what: "disruption",
            name: name.to_owned(),
            known: "restart-agent, reboot, power-cycle",
        })
    }
}

/// How many disruptions of a kind may start in a window of time, over the whole fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Most that may start in a window.
    pub count: u32,
    /// Length of the window, which slides.
    pub window: Span,
}

/// Holds new recovery ladders when too many machines fall silent at once: the cause is more often our network or our
/// clock than the machines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecoveryBrake {
    /// The span that "at once" means. The brake releases itself when fewer machines fell silent in the most recent
    /// span.
    pub window: Span,
    /// Share of a provider's monitored machines, or of all of them, that must be exceeded.
    pub fraction: f64,
    /// Fewest silent machines that engage it.
    pub at_least: u32,
}

/// Stops creation of machines when a provider's list cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProvisionerBrake {
    /// Most discrepancies that may appear at once before creation stops.
    pub discrepancies: u32,
    /// Largest share of its machines that a list may lose between two readings.
    pub lost_fraction: f64,
}

/// Highest `newest` and `days` of a [`SnapshotPolicy`].
pub const MAX_RETAINED_SNAPSHOTS: u32 = 1_000;

/// How often snapshots of a cluster are taken, and how many are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotPolicy {
    /// Age of the last snapshot at which the next one is taken.
    pub interval: Span,
    /// How many of the newest snapshots are kept; at least one always is.
    pub newest: u32,
    /// For how many days the newest snapshot of each day is kept.
    pub days: u32,
}

impl Default for SnapshotPolicy {
    fn default() -> Self {
        Self { interval: Span::hours(1), newest: 24, days: 7 }
    }
}

impl SnapshotPolicy {
    /// Age of the last snapshot from which on a person should look.
    #[must_use]
    pub fn overdue_after(&self) -> Duration {
        const OVERDUE_INTERVALS: u32 = 3;
        self.interval.0.saturating_mul(OVERDUE_INTERVALS)
    }
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
                    BackoffPolicy { initial: Span::minutes(5), maximum: Span::hours(4), exponent: 1.2 },
                ),
                (
                    Process::Recovery,
                    BackoffPolicy { initial: Span::minutes(1), maximum: Span::hours(1), exponent: 1.2 },
                ),
                (
                    Process::Update,
                    BackoffPolicy { initial: Span::minutes(1), maximum: Span::hours(1), exponent: 1.5 },
                ),
            ]),
            low_priority_after_failures: 3,
            priority_weights: [16, 4, 1],
            ladder: vec![
                Rung { step: DisruptionKind::RestartAgent, deadline: Span::minutes(2), tries: 2 },
                Rung { step: DisruptionKind::Reboot, deadline: Span::minutes(15), tries: 2 },
                Rung { step: DisruptionKind::PowerCycle, deadline: Span::minutes(20), tries: 2 },
            ],
            recovery_brake: RecoveryBrake { window: Span::minutes(10), fraction: 0.2, at_least: 5 },
            budgets: BTreeMap::from([
                (DisruptionKind::RestartAgent, Budget { count: 100, window: Span::minutes(10) }),
                (DisruptionKind::Reboot, Budget { count: 20, window: Span::minutes(10) }),
                (DisruptionKind::PowerCycle, Budget { count: 10, window: Span::minutes(10) }),
            ]),
            provisioner_brake: ProvisionerBrake { discrepancies: 5, lost_fraction: 0.2 },
            retirement_wipe_timeout: Span::hours(4),
            retirement_release_timeout: Span::hours(1),
            power_order_timeout: Span::minutes(30),
            release_budget: Budget { count: 100, window: Span::minutes(10) },
            history_retention: Span::hours(180 * 24),
            order_limits: OrderLimits::default(),
            two_person_rule: TwoPersonRule::default(),
            approver_waiting_time: DEFAULT_WAITING_TIME,
            cluster_snapshots: SnapshotPolicy::default(),
            cluster_key_rotation: DEFAULT_ROTATION_INTERVAL,
            artefact_storage_limit: ByteSize::gibibytes(20),
            allow_unsigned_releases: false,
        }
    }
}

impl Policy {
    /// Longest time without a heartbeat commit that counts as listening: never more than half of the shortest limit of
    /// silence. Were it longer than such a limit, we could be away for just that long and then count every machine that
    /// could not reach us as silent.
    #[must_use]
    pub fn effective_listening_gap(&self) -> Span {
        let shortest = self.recovery_silence_timeout.0.min(self.recovery_first_heartbeat_timeout.0);
        Span(self.listening_gap.0.min(shortest / 2))
    }

    /// Longest window of budgets and brakes.
    #[must_use]
    pub fn longest_window(&self) -> Span {
        let windows = self.budgets.values().map(|budget| budget.window);
        windows.fold(self.recovery_brake.window.max(self.release_budget.window), Span::max)
    }

    /// How long history is kept: never shorter than any window of budgets and brakes, and at least a day, so that a
    /// night can be explained in the morning.
    #[must_use]
    pub fn effective_history_retention(&self) -> Span {
        self.history_retention.max(self.longest_window()).max(Span::hours(24))
    }

    /// The backoff of a process; a default when the stored policy has none.
    #[must_use]
    pub fn backoff_of(&self, process: Process) -> BackoffPolicy {
        self.backoff.get(&process).copied().unwrap_or(BackoffPolicy {
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
    fn listening_gap_is_shorter_than_the_silence_limits() {
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
    fn history_retention_covers_every_budget_window() {
        let kept = |retention: Span, budget: Span, brake: Span| {
            let mut policy = Policy { history_retention: retention, ..Policy::default() };
            policy.budgets.insert(DisruptionKind::Reboot, Budget { count: 1, window: budget });
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
    fn stored_policy_of_an_older_release_gets_defaults() {
        let policy: Policy = serde_json::from_str(r#"{"recovery_silence_timeout": "2m"}"#).unwrap();
        assert_eq!(policy.recovery_silence_timeout, Span::minutes(2));
        assert_eq!(policy.ladder, Policy::default().ladder);
        assert_eq!(policy.artefact_storage_limit, ByteSize::gibibytes(20));
        assert!(!policy.allow_unsigned_releases);
    }

    #[test]
    fn policy_round_trips_through_its_stored_form() {
        let policy = Policy::default();
        let stored = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<Policy>(&stored).unwrap(), policy);
    }
}
