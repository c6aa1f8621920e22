//! Conditions of `wait`, and what an order with `--wait` aims at.

use std::fmt;

use crate::object::kind::ObjectKind;
use model::phase::Phase;
use model::power_order::PowerOrderKind;

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitGoal {
    /// What machines are waited for, one by one.
    Machine(MachineGoal),
    /// What clusters are waited for, one by one.
    Cluster(ClusterGoal),
    /// For updates: that they have finished.
    UpdateFinished,
}

/// What machines are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineGoal {
    /// The machine is in this phase.
    Phase(Phase),
    /// The machine needs nothing: it is `Ready` or `Installed`.
    Healthy,
    /// The machine is retired.
    Retired,
    /// The retirement that was ordered has ended.
    RetirementEnd,
    /// The power order was carried out and, unless it switches the machine off, the machine is healthy again.
    PowerOrderEnd(PowerOrderKind),
}

/// What clusters are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterGoal {
    /// The cluster has its desired state.
    Ready,
    /// The cluster does not exist any more.
    Deleted,
    /// The upgrade that was ordered has ended.
    UpgradeEnd(UpgradeDirection),
    /// No replacement of its authority is ordered or under way.
    AuthorityReplaced,
}

/// Where an upgrade goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeDirection {
    /// To the new release.
    Forward,
    /// Back to the former one.
    Back,
    /// Where it went before it was resumed.
    Either,
}

/// Conditions of each kind that can be waited for, in the order of help.
const CONDITIONS: [(ObjectKind, &str); 3] = [
    (ObjectKind::Machine, "phase=PHASE, healthy or retired"),
    (ObjectKind::Cluster, "ready or deleted"),
    (ObjectKind::Update, "finished"),
];

impl WaitGoal {
    /// Parses a condition for objects of a kind. The error is a sentence that lists the conditions.
    pub fn parse(kind: ObjectKind, text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        match (kind, name.to_ascii_lowercase().as_str(), value) {
            (ObjectKind::Machine, "phase", Some(value)) => parse_phase_goal(value),
            (ObjectKind::Machine, "healthy", None) => Ok(Self::Machine(MachineGoal::Healthy)),
            (ObjectKind::Machine, "retired", None) => Ok(Self::Machine(MachineGoal::Retired)),
            (ObjectKind::Cluster, "ready", None) => Ok(Self::Cluster(ClusterGoal::Ready)),
            (ObjectKind::Cluster, "deleted", None) => Ok(Self::Cluster(ClusterGoal::Deleted)),
            (ObjectKind::Update, "finished", None) => Ok(Self::UpdateFinished),
            _ => {
                let plural = kind.row().plural;
                let of_kind = CONDITIONS.iter().find(|(of, _)| *of == kind);
                let conditions = of_kind.map_or("another kind", |(_, conditions)| conditions);
                Err(format!("{text:?} is no condition of {plural}; give {conditions}"))
            }
        }
    }

    /// The kind of the objects.
    #[must_use]
    pub const fn kind(self) -> ObjectKind {
        match self {
            Self::Machine(_) => ObjectKind::Machine,
            Self::Cluster(_) => ObjectKind::Cluster,
            Self::UpdateFinished => ObjectKind::Update,
        }
    }

    /// The condition of `wait` with which to continue after the waiting for this was interrupted; `None` if it has none.
    #[must_use]
    pub fn condition(self) -> Option<String> {
        Some(match self {
            Self::Machine(MachineGoal::Phase(phase)) => format!("phase={phase}"),
            Self::Machine(MachineGoal::Healthy | MachineGoal::PowerOrderEnd(_)) => "healthy".to_owned(),
            Self::Machine(MachineGoal::Retired | MachineGoal::RetirementEnd) => "retired".to_owned(),
            Self::Cluster(ClusterGoal::Ready | ClusterGoal::UpgradeEnd(_)) => "ready".to_owned(),
            Self::Cluster(ClusterGoal::Deleted) => "deleted".to_owned(),
            Self::Cluster(ClusterGoal::AuthorityReplaced) => return None,
            Self::UpdateFinished => "finished".to_owned(),
        })
    }
}

/// What an object is that met the goal: the end of a sentence that begins with "it is".
impl fmt::Display for WaitGoal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(MachineGoal::PowerOrderEnd(kind)) => f.write_str(kind.participle()),
            Self::Cluster(ClusterGoal::UpgradeEnd(UpgradeDirection::Forward)) => f.write_str("upgraded"),
            Self::Cluster(ClusterGoal::UpgradeEnd(UpgradeDirection::Back)) => f.write_str("rolled back"),
            Self::Cluster(ClusterGoal::UpgradeEnd(UpgradeDirection::Either)) => {
                f.write_str("upgraded or rolled back")
            }
            Self::Machine(MachineGoal::Phase(phase)) => write!(f, "{phase}"),
            Self::Cluster(ClusterGoal::AuthorityReplaced) => f.write_str("under a new authority"),
            other => f.write_str(&other.condition().unwrap_or_default()),
        }
    }
}

fn parse_phase_goal(text: &str) -> Result<WaitGoal, String> {
    let found = Phase::find_by_name(text);
    found
        .map(|phase| WaitGoal::Machine(MachineGoal::Phase(phase)))
        .ok_or_else(|| format!("{text:?} is no phase; give one of: {}", Phase::list_names()))
}

/// The sentence for a command without a condition.
#[must_use]
pub fn describe_missing_condition() -> String {
    let of_kind =
        |(kind, conditions): &(ObjectKind, &str)| format!("{conditions} (for {})", kind.row().plural);
    let conditions: Vec<String> = CONDITIONS.iter().map(of_kind).collect();
    format!("`wait` needs a condition: give --for with {}", conditions.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn condition_is_one_of_its_kind() {
        use ObjectKind::{Cluster, Machine, Update};
        for (kind, text, expected) in [
            (Machine, "phase=Ready", Some(WaitGoal::Machine(MachineGoal::Phase(Phase::Ready)))),
            (Machine, "phase=needshuman", Some(WaitGoal::Machine(MachineGoal::Phase(Phase::NeedsHuman)))),
            (Machine, "Healthy", Some(WaitGoal::Machine(MachineGoal::Healthy))),
            (Machine, "retired", Some(WaitGoal::Machine(MachineGoal::Retired))),
            (Cluster, "ready", Some(WaitGoal::Cluster(ClusterGoal::Ready))),
            (Cluster, "deleted", Some(WaitGoal::Cluster(ClusterGoal::Deleted))),
            (Update, "finished", Some(WaitGoal::UpdateFinished)),
            (Machine, "phase=Redy", None),
            (Machine, "phase", None),
            (Machine, "phase=", None),
            (Machine, "ready", None),
            (Machine, "healthy=yes", None),
            (Machine, "condition=Ready", None),
            (Machine, "", None),
            (Cluster, "healthy", None),
            (Cluster, "delete", None),
            (Update, "ready", None),
        ] {
            assert_eq!(WaitGoal::parse(kind, text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn wrong_condition_is_answered_with_those_that_exist() {
        for (kind, text, expected) in [
            (
                ObjectKind::Machine,
                "ready",
                "\"ready\" is no condition of machines; give phase=PHASE, healthy or retired",
            ),
            (ObjectKind::Cluster, "gone", "\"gone\" is no condition of clusters; give ready or deleted"),
            (ObjectKind::Update, "done", "\"done\" is no condition of updates; give finished"),
        ] {
            assert_eq!(WaitGoal::parse(kind, text), Err(expected.to_owned()));
        }
        let phase = WaitGoal::parse(ObjectKind::Machine, "phase=Redy").unwrap_err();
        assert!(phase.starts_with("\"Redy\" is no phase; give one of: New, Provisioning, "), "{phase}");
        let missing = describe_missing_condition();
        for (_, conditions) in CONDITIONS {
            assert!(missing.contains(conditions), "{missing}");
        }
    }

    #[test]
    fn goal_of_an_order_continues_with_a_condition() {
        for goal in [
            WaitGoal::Machine(MachineGoal::RetirementEnd),
            WaitGoal::Machine(MachineGoal::PowerOrderEnd(PowerOrderKind::Cycle)),
            WaitGoal::Machine(MachineGoal::Phase(Phase::Silent)),
            WaitGoal::Cluster(ClusterGoal::UpgradeEnd(UpgradeDirection::Back)),
            WaitGoal::Cluster(ClusterGoal::Deleted),
            WaitGoal::UpdateFinished,
        ] {
            let condition = goal.condition().unwrap();
            assert!(WaitGoal::parse(goal.kind(), &condition).is_ok(), "{goal:?}");
        }
        assert_eq!(WaitGoal::Cluster(ClusterGoal::AuthorityReplaced).condition(), None);
    }
}
