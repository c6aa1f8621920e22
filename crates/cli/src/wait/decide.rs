//! The decision about one object: it meets the condition, it may meet it later, or it cannot meet it any more.
//!
//! An object cannot meet a condition any more only if nobody can change that: a retired machine stays retired, and a
//! cluster that is being deleted cannot be kept. What a person can still help, such as a machine in `NeedsHuman` or a
//! paused update, is waited for until the time is over.

use crate::machine::footer::HEALTHY_PHASES;
use crate::wait::condition::{ClusterGoal, MachineGoal, UpgradeDirection, WaitGoal};
use crate::wait::snapshot::{
    AuthorityState, ClusterState, MachineState, PowerState, Snapshot, UpdateState, UpgradeState,
};
use model::phase::Phase;
use model::power_order::PowerOrderKind;
use model::time::Timestamp;

/// The decision about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The object meets the condition.
    Met,
    /// The object does not meet the condition yet.
    Waiting,
    /// The object cannot meet the condition any more. The text is why, to follow its name.
    Impossible(String),
}

/// Decides whether an object meets a goal at `now`, by the clock of the database.
#[must_use]
pub fn decide_object(snapshot: &Snapshot, goal: WaitGoal, now: Timestamp) -> Verdict {
    match (snapshot, goal) {
        (Snapshot::Machine(machine), WaitGoal::Machine(MachineGoal::PowerOrderEnd(kind))) => {
            decide_power_order(machine, kind, now)
        }
        (Snapshot::Machine(machine), WaitGoal::Machine(goal)) => decide_phase(machine, goal),
        (Snapshot::Cluster(cluster), WaitGoal::Cluster(goal)) => decide_cluster(cluster, goal),
        (Snapshot::Update(update), WaitGoal::UpdateFinished) => decide_update(update),
        (Snapshot::Absent, WaitGoal::Cluster(ClusterGoal::Deleted)) => Verdict::Met,
        // No object is of another kind than its goal.
        (Snapshot::Machine(_) | Snapshot::Cluster(_) | Snapshot::Update(_) | Snapshot::Absent, _) => {
            Verdict::Impossible("does not exist any more".to_owned())
        }
    }
}

fn is_healthy(phase: &str) -> bool {
    HEALTHY_PHASES.iter().any(|healthy| healthy.as_str() == phase)
}

fn decide_phase(machine: &MachineState, goal: MachineGoal) -> Verdict {
    let phase = machine.phase.as_str();
    let is_retired = phase == Phase::Retired.as_str();
    let is_met = match goal {
        MachineGoal::Phase(desired) => phase == desired.as_str(),
        MachineGoal::Healthy | MachineGoal::PowerOrderEnd(_) => is_healthy(phase),
        MachineGoal::Retired | MachineGoal::RetirementEnd => is_retired,
    };
    if is_met {
        return Verdict::Met;
    }
    if is_retired {
        return Verdict::Impossible("is Retired, and stays so".to_owned());
    }
    if goal == MachineGoal::RetirementEnd && phase != Phase::Retiring.as_str() {
        return Verdict::Impossible(format!("is {phase}: its retirement was cancelled"));
    }
    Verdict::Waiting
}

/// A machine that recovery watches is not healthy before it has reported from another boot. Recovery does not watch a
/// machine that is held. There, another boot is the proof or, for a machine that was switched on, any report.
fn decide_power_order(machine: &MachineState, kind: PowerOrderKind, now: Timestamp) -> Verdict {
    let (phase, power) = (machine.phase.as_str(), &machine.power);
    if [Phase::Retiring, Phase::Retired].iter().any(|gone| gone.as_str() == phase) {
        return Verdict::Impossible(format!("is {phase}, and is not switched any more"));
    }
    if power.is_pending {
        return Verdict::Waiting;
    }
    if let Some(reason) = &power.abandoned {
        return Verdict::Impossible(format!("is not known to be {}: {reason}", kind.participle()));
    }
    let is_held = power.hold.is_some_and(|hold| hold.until.is_none_or(|until| until > now));
    let is_back = has_booted(power) || (kind == PowerOrderKind::On && has_reported(power));
    if kind == PowerOrderKind::Off || (is_healthy(phase) && (!is_held || is_back)) {
        Verdict::Met
    } else {
        Verdict::Waiting
    }
}

/// Whether the machine has reported from another boot since the waiting began.
fn has_booted(power: &PowerState) -> bool {
    power.first.as_ref().is_some_and(|first| power.boot_id.is_some() && power.boot_id != first.boot_id)
}

/// Whether the machine has reported since the waiting began.
fn has_reported(power: &PowerState) -> bool {
    power.first.as_ref().zip(power.heartbeat_at).is_some_and(|(first, at)| at > first.at)
}

fn decide_cluster(cluster: &ClusterState, goal: ClusterGoal) -> Verdict {
    let is_ending = cluster.stage == "deleting";
    match goal {
        ClusterGoal::Deleted => Verdict::Waiting,
        ClusterGoal::Ready | ClusterGoal::UpgradeEnd(_) | ClusterGoal::AuthorityReplaced if is_ending => {
            Verdict::Impossible("is being deleted".to_owned())
        }
        ClusterGoal::AuthorityReplaced => match cluster.authority {
            Some(AuthorityState::Replacing(_)) => Verdict::Waiting,
            Some(AuthorityState::Settled) | None => Verdict::Met,
        },
        ClusterGoal::UpgradeEnd(direction) => decide_upgrade(cluster.upgrade.as_ref(), direction),
        ClusterGoal::Ready => {
            // A pass that began before an order may record its result after it, so the stage alone is no proof.
            let is_whole = cluster.members == cluster.desired && cluster.leaving == 0;
            let is_upgraded = cluster.upgrade.as_ref().is_none_or(|upgrade| upgrade.outcome.is_some());
            if cluster.stage == "converged" && is_whole && is_upgraded {
                Verdict::Met
            } else {
                Verdict::Waiting
            }
        }
    }
}

fn decide_upgrade(upgrade: Option<&UpgradeState>, direction: UpgradeDirection) -> Verdict {
    let Some(upgrade) = upgrade else {
        return Verdict::Impossible("has no upgrade any more".to_owned());
    };
    match (upgrade.outcome.as_deref(), direction) {
        (None, _) => Verdict::Waiting,
        (Some("finished"), UpgradeDirection::Forward | UpgradeDirection::Either)
        | (Some("rolled back"), UpgradeDirection::Back | UpgradeDirection::Either) => Verdict::Met,
        (Some(outcome), _) => Verdict::Impossible(format!("has an upgrade that is {outcome}")),
    }
}

fn decide_update(update: &UpdateState) -> Verdict {
    match update.outcome.as_deref() {
        None => Verdict::Waiting,
        Some("finished") => Verdict::Met,
        Some(outcome) => Verdict::Impossible(format!("is {outcome}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::snapshot::{FirstReport, HoldState};

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn machine(phase: Phase, power: PowerState) -> Snapshot {
        let reason = "because".to_owned();
        Snapshot::Machine(MachineState { phase: phase.as_str().to_owned(), reason, working: None, power })
    }

    /// `+` for met, `.` for waiting, `-` for impossible.
    fn sign(verdict: &Verdict) -> char {
        match verdict {
            Verdict::Met => '+',
            Verdict::Waiting => '.',
            Verdict::Impossible(_) => '-',
        }
    }

    #[test]
    fn phase_decides_about_a_machine() {
        let goals = [
            MachineGoal::Phase(Phase::Ready),
            MachineGoal::Phase(Phase::NeedsHuman),
            MachineGoal::Healthy,
            MachineGoal::Retired,
            MachineGoal::RetirementEnd,
        ];
        for (phase, expected) in [
            (Phase::New, "....-"),
            (Phase::Provisioning, "....-"),
            (Phase::Provided, "....-"),
            (Phase::AgentStarting, "....-"),
            (Phase::Ready, "+.+.-"),
            (Phase::Installing, "....-"),
            (Phase::Installed, "..+.-"),
            (Phase::Silent, "....-"),
            (Phase::Recovering, "....-"),
            (Phase::Quarantined, "....-"),
            (Phase::NeedsHuman, ".+..-"),
            (Phase::Retiring, "....."),
            (Phase::Retired, "---++"),
        ] {
            let snapshot = machine(phase, PowerState::default());
            let found: String = goals
                .map(|goal| sign(&decide_object(&snapshot, WaitGoal::Machine(goal), at(0))))
                .iter()
                .collect();
            assert_eq!(found, expected, "{phase}");
        }
    }

    #[test]
    fn power_order_is_met_when_the_machine_is_back() {
        use PowerOrderKind::{Cycle, Off, On, Reboot};
        let first = Some(FirstReport { boot_id: Some("one".to_owned()), at: at(0) });
        let over = PowerState { boot_id: Some("one".to_owned()), first, ..PowerState::default() };
        let pending = PowerState { is_pending: true, ..over.clone() };
        let given_up = PowerState { abandoned: Some("its provider is gone".to_owned()), ..over.clone() };
        let rebooted = PowerState { boot_id: Some("two".to_owned()), ..over.clone() };
        let held =
            |until, power: &PowerState| PowerState { hold: Some(HoldState { until }), ..power.clone() };
        let reported = PowerState { heartbeat_at: Some(at(5)), ..over.clone() };
        let before = PowerState { heartbeat_at: Some(at(-5)), ..over.clone() };
        let kinds = [Reboot, Cycle, On, Off];
        for (phase, power, expected) in [
            (Phase::Ready, &pending, "...."),
            (Phase::Ready, &given_up, "----"),
            // Recovery watches whether it comes back.
            (Phase::Recovering, &over, "...+"),
            (Phase::Recovering, &rebooted, "...+"),
            (Phase::NeedsHuman, &over, "...+"),
            (Phase::Silent, &over, "...+"),
            (Phase::Provided, &over, "...+"),
            (Phase::Ready, &rebooted, "++++"),
            (Phase::Ready, &over, "++++"),
            // Nobody watches.
            (Phase::Ready, &held(None, &over), "...+"),
            (Phase::Ready, &held(Some(at(20)), &over), "...+"),
            (Phase::Ready, &held(Some(at(10)), &over), "++++"),
            (Phase::Ready, &held(None, &rebooted), "++++"),
            (Phase::Ready, &held(None, &reported), "..++"),
            (Phase::Ready, &held(None, &before), "...+"),
            (Phase::Retiring, &pending, "----"),
            (Phase::Retired, &over, "----"),
        ] {
            let snapshot = machine(phase, power.clone());
            let goals = kinds.map(|kind| WaitGoal::Machine(MachineGoal::PowerOrderEnd(kind)));
            let found: String =
                goals.map(|goal| sign(&decide_object(&snapshot, goal, at(10)))).iter().collect();
            assert_eq!(found, expected, "{phase} {power:?}");
        }
    }

    #[test]
    fn cluster_is_ready_with_its_desired_machines() {
        let whole = ClusterState {
            stage: "converged".to_owned(),
            desired: (3, 2),
            members: (3, 2),
            ..ClusterState::default()
        };
        let stage = |stage: &str| ClusterState { stage: stage.to_owned(), ..whole.clone() };
        let upgrade = |outcome: Option<&str>| ClusterState {
            upgrade: Some(UpgradeState { outcome: outcome.map(str::to_owned), ..UpgradeState::default() }),
            ..whole.clone()
        };
        let goals = [
            ClusterGoal::Ready,
            ClusterGoal::Deleted,
            ClusterGoal::UpgradeEnd(UpgradeDirection::Forward),
            ClusterGoal::UpgradeEnd(UpgradeDirection::Back),
            ClusterGoal::UpgradeEnd(UpgradeDirection::Either),
        ];
        for (cluster, expected) in [
            (whole.clone(), "+.---"),
            (ClusterState { members: (3, 1), ..whole.clone() }, "..---"),
            (ClusterState { leaving: 1, ..whole.clone() }, "..---"),
            (stage("waiting for machines"), "..---"),
            (stage("founding"), "..---"),
            (stage("changing"), "..---"),
            (stage("restoring"), "..---"),
            (stage("deleting"), "-.---"),
            (upgrade(None), "....."),
            (upgrade(Some("finished")), "+.+-+"),
            (upgrade(Some("rolled back")), "+.-++"),
            (upgrade(Some("aborted")), "+.---"),
        ] {
            let snapshot = Snapshot::Cluster(cluster);
            let found: String = goals
                .map(|goal| sign(&decide_object(&snapshot, WaitGoal::Cluster(goal), at(0))))
                .iter()
                .collect();
            assert_eq!(found, expected, "{snapshot:?}");
        }
    }

    #[test]
    fn authority_is_replaced_when_no_replacement_is_under_way() {
        let cluster = |stage: &str, authority| {
            let (stage, authority) = (stage.to_owned(), Some(authority));
            Snapshot::Cluster(ClusterState { stage, authority, ..ClusterState::default() })
        };
        let replacing = AuthorityState::Replacing("it has not begun".to_owned());
        let goal = WaitGoal::Cluster(ClusterGoal::AuthorityReplaced);
        for (snapshot, expected) in [
            (cluster("converged", replacing.clone()), '.'),
            (cluster("converged", AuthorityState::Settled), '+'),
            (cluster("changing", AuthorityState::Settled), '+'),
            (cluster("deleting", replacing), '-'),
            (Snapshot::Absent, '-'),
        ] {
            assert_eq!(sign(&decide_object(&snapshot, goal, at(0))), expected, "{snapshot:?}");
        }
    }

    #[test]
    fn update_that_was_aborted_never_finishes() {
        let update = |outcome: Option<&str>, pause_reason: Option<&str>| {
            Snapshot::Update(UpdateState {
                outcome: outcome.map(str::to_owned),
                pause_reason: pause_reason.map(str::to_owned),
                ..UpdateState::default()
            })
        };
        for (snapshot, expected) in [
            (update(None, None), '.'),
            (update(None, Some("m1: no")), '.'),
            (update(Some("finished"), None), '+'),
            (update(Some("aborted"), None), '-'),
        ] {
            assert_eq!(
                sign(&decide_object(&snapshot, WaitGoal::UpdateFinished, at(0))),
                expected,
                "{snapshot:?}"
            );
        }
    }

    #[test]
    fn object_that_is_gone_can_only_be_deleted() {
        for (goal, expected) in [
            (WaitGoal::Machine(MachineGoal::Healthy), '-'),
            (WaitGoal::Machine(MachineGoal::Retired), '-'),
            (WaitGoal::Cluster(ClusterGoal::Ready), '-'),
            (WaitGoal::Cluster(ClusterGoal::Deleted), '+'),
            (WaitGoal::UpdateFinished, '-'),
        ] {
            assert_eq!(sign(&decide_object(&Snapshot::Absent, goal, at(0))), expected, "{goal:?}");
        }
    }
}
