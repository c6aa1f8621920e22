//! What was done to a machine lately, where its phase does not show it: a recovery that has ended, and an order to reboot
//! or switch it.
//!
//! A machine that was just switched off is Ready until its agent has been silent for long enough, and one that has just
//! recovered looks as if nothing had happened.

use std::time::Duration;

use crate::humanize::relative_time;
use crate::machine_view::MachineView;
use crate::phase::Phase;
use crate::power_order::PowerOrderKind;
use crate::process::Lane;
use crate::recent_step::StepOutcome;
use crate::time::{Timestamp, after, between};

/// For how long an end of a recovery, or an order that was carried out, is recent.
const RECENT: Duration = Duration::from_hours(1);
/// For how long the agent of a machine that was switched off may report while the machine shuts down.
const SHUTDOWN: Duration = Duration::from_mins(1);

/// A recovery that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentRecovery {
    /// When the machine was healthy again.
    pub ended_at: Timestamp,
    /// Kind of the last step, such as `restart-agent`.
    pub step: String,
}

impl RecentRecovery {
    /// The recovery as a sentence.
    #[must_use]
    pub fn describe(&self, now: Timestamp) -> String {
        format!("recovered {} ({})", relative_time(self.ended_at, now), self.step)
    }
}

/// An order to reboot or switch a machine that was carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerSwitch {
    /// The order: `reboot`, `on`, `off` or `cycle`.
    pub kind: String,
    /// The operator who gave it.
    pub ordered_by: String,
    /// When it was carried out.
    pub carried_out_at: Timestamp,
    /// Whether the machine has reported since.
    pub reported: bool,
}

impl PowerSwitch {
    /// The order as a sentence.
    #[must_use]
    pub fn describe(&self, now: Timestamp) -> String {
        let done = match self.kind.parse::<PowerOrderKind>() {
            Ok(kind) => kind.participle(),
            Err(_) => self.kind.as_str(),
        };
        format!("{done} {} by {}", relative_time(self.carried_out_at, now), self.ordered_by)
    }

    /// Whether the machine is off, as far as anybody knows.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.kind == PowerOrderKind::Off.as_str() && !self.reported
    }
}

/// The recovery from which a machine in this phase has just come back; `None` if there was none.
pub(super) fn find_recent_recovery(view: &MachineView, phase: Phase) -> Option<RecentRecovery> {
    let is_well = matches!(phase, Phase::Ready | Phase::Installing | Phase::Installed);
    // What an operator ordered is no recovery, although the ladder watched it.
    let step = view.recent_steps.first().filter(|step| step.order.is_none())?;
    let mut lanes = view.lanes.iter().filter(|lane| lane.lane == Lane::Access.as_str());
    let lane = lanes.next().filter(|lane| lane.phase_index == phase.as_str())?;
    let ended_at = lane.phase_since;
    let is_recent = ended_at >= step.begun_at && between(ended_at, view.at) <= RECENT;
    (is_well && is_recent && step.outcome != StepOutcome::Failed && view.facts.recovery.is_none())
        .then(|| RecentRecovery { ended_at, step: step.kind.clone() })
}

/// The last order to reboot or switch the machine, if that was the last step and was carried out lately.
pub(super) fn find_power_switch(view: &MachineView) -> Option<PowerSwitch> {
    let step = view.recent_steps.first()?;
    let order = step.order.as_ref().filter(|_| step.outcome == StepOutcome::Done)?;
    let carried_out_at = step.settled_at.filter(|at| between(*at, view.at) <= RECENT)?;
    let since = match order.kind {
        PowerOrderKind::Off => after(carried_out_at, SHUTDOWN),
        _ => carried_out_at,
    };
    let reported = view.facts.heartbeat.as_ref().is_some_and(|beat| beat.received_at > since);
    Some(PowerSwitch {
        kind: order.kind.as_str().to_owned(),
        ordered_by: order.by.clone(),
        carried_out_at,
        // While recovery watches, what reports may be the boot before.
        reported: reported && view.facts.recovery.is_none(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine_view::LaneView;
    use crate::recent_step::{RecentStep, STEP_DONE, STEP_FAILED, format_order_detail};
    use crate::sample_machine::{at, machine_view, ready_machine};
    use crate::why::explain_machine;
    use crate::why::render::{ExplanationDetail, render_explanation};

    /// A machine at 1000 that has been Ready since `ready` and reported at `reported`.
    fn view(ready: i64, reported: i64, steps: Vec<RecentStep>) -> MachineView {
        let lane = LaneView {
            lane: Lane::Access.as_str().to_owned(),
            process: None,
            ready_at: None,
            timer: false,
            reason: String::new(),
            decided_at: String::new(),
            deadline: None,
            priority: 1,
            fence: 1,
            losses: 0,
            not_before: None,
            phase_index: "Ready".to_owned(),
            phase_since: at(ready),
            rules_version: 1,
            policy_version: 1,
            work: None,
        };
        MachineView { lanes: vec![lane], recent_steps: steps, ..machine_view(ready_machine(reported), 1000) }
    }

    fn step(kind: &str, detail: &str, begun: i64, outcome: &str) -> RecentStep {
        RecentStep::from_intent(kind.to_owned(), detail, at(begun), Some(at(begun + 1)), Some(outcome))
    }

    fn ordered(kind: PowerOrderKind, begun: i64, outcome: &str) -> RecentStep {
        step(kind.intent_kind(), &format_order_detail("kim", kind), begun, outcome)
    }

    fn text(view: &MachineView) -> String {
        render_explanation(&explain_machine(view), None, ExplanationDetail::Short)
    }

    #[test]
    fn recovery_that_has_just_ended_is_noted() {
        let restarted = |begun, outcome| step("restart-agent", "about to restart", begun, outcome);
        for (ready, steps, expected) in [
            (997, vec![restarted(990, STEP_DONE)], Some("recovered 3s ago (restart-agent)")),
            // It became Ready before that step, which so has not ended.
            (980, vec![restarted(990, STEP_DONE)], None),
            (997, vec![restarted(990, STEP_FAILED)], None),
            (997, Vec::new(), None),
            // An order counts as one.
            (997, vec![ordered(PowerOrderKind::Reboot, 990, STEP_DONE), restarted(900, STEP_DONE)], None),
        ] {
            let view = view(ready, 998, steps);
            let found = find_recent_recovery(&view, Phase::Ready).map(|found| found.describe(view.at));
            assert_eq!(found.as_deref(), expected, "{ready} {:?}", view.recent_steps);
            assert_eq!(text(&view).contains("recovered "), expected.is_some());
        }
        let long_ago = MachineView { at: at(7000), ..view(997, 6990, vec![restarted(990, STEP_DONE)]) };
        assert_eq!(find_recent_recovery(&long_ago, Phase::Ready), None);
    }

    #[test]
    fn machine_that_was_just_switched_off_does_not_read_as_ready() {
        let off = |reported| view(896, reported, vec![ordered(PowerOrderKind::Off, 995, STEP_DONE)]);
        let shown = text(&off(994));
        assert!(shown.contains("switched off 4s ago by kim; its phase is still Ready"), "{shown}");
        assert!(!shown.contains("Ready for"), "{shown}");
        // It may report while it shuts down.
        assert!(find_power_switch(&off(999)).is_some_and(|switch| switch.is_off()));
        let failed = view(896, 994, vec![ordered(PowerOrderKind::Off, 995, STEP_FAILED)]);
        assert!(text(&failed).contains("Ready for 1m44s"));
    }

    #[test]
    fn other_orders_are_noted_with_what_followed() {
        for (kind, begun, reported, expected) in [
            (PowerOrderKind::Reboot, 900, 990, "rebooted 1m39s ago by kim, and it has reported since"),
            (
                PowerOrderKind::Cycle,
                900,
                800,
                "switched off and on 1m39s ago by kim, and it has not reported since",
            ),
            (PowerOrderKind::Off, 800, 990, "switched off 3m19s ago by kim, and it has reported since"),
        ] {
            let shown = text(&view(100, reported, vec![ordered(kind, begun, STEP_DONE)]));
            assert!(shown.contains(expected) && shown.contains("Ready for 15m"), "{shown}");
        }
    }
}
