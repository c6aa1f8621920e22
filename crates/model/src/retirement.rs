//! Retirement: stages, deadlines and waivers of a machine that leaves.
//!
//! The machine leaves its cluster, is wiped if that was requested, is released to its provider, and stays in the BMDB
//! as a tombstone: a name that is never adopted again and a key that is rejected. [`retirement_state`] computes its
//! stage and the next step. The loop takes one step at a time. The schedule, `shepherdctl why` and a plan use the same
//! function.
//!
//! [`retirement_state`] never returns the stage `leave`: the cluster worker removes a retiring machine from its
//! cluster, and [`crate::disruption::may_release`] waits for that. No machine is wiped, because no agent and no
//! provider of this release can. A stage that cannot be done waits for a person, who may waive it: by its name, and by
//! a sentence about what then remains undone ([`confirmation_text`]).
//!
//! Each stage has a deadline. When it passes nothing is skipped: an issue reports it, and what can be tried is tried
//! again.

use std::fmt;
use std::str::FromStr;

use crate::facts::{MachineFacts, ReleaseOrder, Retirement};
use crate::humanize::absolute_time;
use crate::policy::Policy;
use crate::process::{Process, UnknownName};
use crate::time::{Timestamp, after};

/// A stage of a retirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetirementStage {
    /// It leaves its cluster.
    Leave,
    /// The contents of its disks are destroyed.
    Wipe,
    /// Its provider takes it back.
    Release,
    /// The retirement has finished: only the record of the machine remains.
    Tombstone,
}

impl RetirementStage {
    /// Every stage, in order.
    pub const ALL: [Self; 4] = [Self::Leave, Self::Wipe, Self::Release, Self::Tombstone];

    /// The name used by people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Leave => "leave",
            Self::Wipe => "wipe",
            Self::Release => "release",
            Self::Tombstone => "tombstone",
        }
    }
}

impl fmt::Display for RetirementStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for RetirementStage {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|stage| stage.as_str() == name).ok_or_else(|| UnknownName {
            what: "stage of a retirement",
            name: name.to_owned(),
            known: "leave, wipe, release, tombstone",
        })
    }
}

/// What to do at the present stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetirementStep {
    /// Nothing is left to do.
    Finished,
    /// The stage cannot be done: a person must waive it, or cancel the retirement.
    Blocked {
        /// Why, as the end of a sentence.
        why: &'static str,
    },
    /// Order the provider to take the machine back.
    Release,
    /// The provider was sent the order and the outcome is not known: send it again, under the same intent.
    RetryRelease(ReleaseOrder),
}

/// State of a retirement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetirementState {
    /// The present stage of the retirement.
    pub stage: RetirementStage,
    /// When that stage started.
    pub since: Timestamp,
    /// When it should be finished; `None` at the last stage.
    pub deadline: Option<Timestamp>,
    /// What to do at this stage.
    pub step: RetirementStep,
}

/// Why no machine is wiped.
const WIPE_UNSUPPORTED: &str = "no agent and no provider of this release offers to wipe a machine";

/// The state of a retirement, and its next step.
#[must_use]
pub fn retirement_state(retirement: &Retirement, policy: &Policy) -> RetirementState {
    if let Some(finished) = retirement.finished_at {
        return RetirementState {
            stage: RetirementStage::Tombstone,
            since: finished,
            deadline: None,
            step: RetirementStep::Finished,
        };
    }
    let begun = retirement.requested_at;
    if retirement.wipe && retirement.wipe_waived.is_none() {
        return RetirementState {
            stage: RetirementStage::Wipe,
            since: begun,
            deadline: Some(after(begun, policy.retirement_wipe_timeout.0)),
            step: RetirementStep::Blocked { why: WIPE_UNSUPPORTED },
        };
    }
    let since = retirement.wipe_waived.as_ref().map_or(begun, |waiver| waiver.waived_at);
    RetirementState {
        stage: RetirementStage::Release,
        since,
        deadline: Some(after(since, policy.retirement_release_timeout.0)),
        step: retirement.release.map_or(RetirementStep::Release, RetirementStep::RetryRelease),
    }
}

/// Each stage with its state in words. `cluster` is the cluster that the machine is a part of.
#[must_use]
pub fn describe_stages(
    retirement: &Retirement,
    policy: &Policy,
    cluster: Option<&str>,
) -> [(RetirementStage, String); 4] {
    let present = retirement_state(retirement, policy);
    let leave = cluster.map_or_else(
        || "not needed, it is in no cluster".to_owned(),
        |name| format!("under way, it leaves cluster {name} first"),
    );
    let over = retirement.finished_at.is_some();
    let wipe = match (retirement.wipe, &retirement.wipe_waived) {
        (false, _) => "not requested".to_owned(),
        (true, Some(waiver)) => format!("waived by {}", waiver.by),
        (true, None) => WIPE_UNSUPPORTED.to_owned(),
    };
    let release = match (&present.step, &retirement.release) {
        (RetirementStep::Finished, _) => retirement.outcome.clone().unwrap_or_else(|| "done".to_owned()),
        (_, Some(order)) => format!("ordered {}, not known to be done", absolute_time(order.recorded_at)),
        (RetirementStep::Release, None) if cluster.is_some() => "ahead".to_owned(),
        (RetirementStep::Release, None) => "to be ordered".to_owned(),
        _ => "ahead".to_owned(),
    };
    let tombstone = if over { "done" } else { "ahead" };
    [
        (RetirementStage::Leave, leave),
        (RetirementStage::Wipe, wipe),
        (RetirementStage::Release, release),
        (RetirementStage::Tombstone, tombstone.to_owned()),
    ]
}

/// The reason in the schedule: the stage, and what it waits for.
#[must_use]
pub fn wait_reason(retirement: &Retirement, present: &RetirementState) -> String {
    let Retirement { reason, by, .. } = retirement;
    match &present.step {
        RetirementStep::Finished => {
            let outcome = retirement.outcome.as_deref().unwrap_or("it is over");
            format!("retired ({reason}): {outcome}")
        }
        RetirementStep::Blocked { why } => format!(
            "is being retired by {by} ({reason}), and is at the stage {}: {why}; waive the stage or cancel",
            present.stage
        ),
        RetirementStep::Release => {
            format!("is being retired by {by} ({reason}); its provider is to take it back")
        }
        RetirementStep::RetryRelease(_) => format!(
            "is being retired by {by} ({reason}); its provider was ordered to take it back, and what became \
             of that is not known yet"
        ),
    }
}

/// What follows when the deadline of the present stage passes.
#[must_use]
pub fn deadline_consequence(present: &RetirementState) -> String {
    let then = match present.step {
        RetirementStep::Blocked { .. } => "it still waits for a person",
        _ => "it is still retried",
    };
    format!("an issue says that its stage {} is overdue, and {then}", present.stage)
}

/// Whether a person may waive this stage at `now`. The error is why not. `cluster` is the cluster that the machine is a
/// part of: no machine is given back before it has left it, as [`crate::disruption::may_release`] requires.
pub fn check_waiver(
    facts: &MachineFacts,
    policy: &Policy,
    cluster: Option<&str>,
    stage: RetirementStage,
    now: Timestamp,
) -> Result<(), String> {
    let Some(retirement) = &facts.retirement else { return Err("is not being retired".to_owned()) };
    let present = retirement_state(retirement, policy);
    if present.step == RetirementStep::Finished {
        return Err("is retired already".to_owned());
    }
    match (stage, cluster) {
        (RetirementStage::Leave, None) => {
            return Err("has nothing to waive at the stage leave: it is in no cluster".to_owned());
        }
        (RetirementStage::Leave | RetirementStage::Release, Some(name)) => {
            return Err(format!(
                "is a part of cluster {name}, which it leaves first, and that cannot be waived; `shepherdctl why` shows \
                 what the cluster waits for"
            ));
        }
        _ => {}
    }
    if stage != present.stage {
        return Err(format!("is at the stage {}, and no other can be waived", present.stage));
    }
    if facts.hold.as_ref().is_some_and(|hold| hold.is_active_at(now)) {
        return Err("is held; release it first".to_owned());
    }
    let in_vain = facts.backoffs.contains_key(&Process::Retirement)
        || matches!(present.step, RetirementStep::Blocked { .. })
        || present.deadline.is_some_and(|deadline| deadline <= now);
    if in_vain {
        Ok(())
    } else {
        Err(format!("is at the stage {stage}, which has neither failed nor passed its deadline yet"))
    }
}

/// The text that an operator must type to waive a stage of the machine called `name`: what remains undone. `None` for a
/// stage that leaves nothing undone.
#[must_use]
pub fn confirmation_text(stage: RetirementStage, name: &str) -> Option<String> {
    match stage {
        RetirementStage::Wipe => Some(format!("{name} is not wiped")),
        // It may have been ordered. The operator who waives it knows neither whether it was, nor what the outcome is.
        RetirementStage::Release => Some(format!("{name} is not known to be given back")),
        RetirementStage::Leave | RetirementStage::Tombstone => None,
    }
}

/// Rejects a typed text that is not the [`confirmation_text`].
pub fn check_confirmation(stage: RetirementStage, name: &str, typed: &str) -> Result<(), String> {
    match confirmation_text(stage, name) {
        Some(wanted) if typed.trim() == wanted => Ok(()),
        Some(wanted) => Err(format!(
            "waiving the stage {stage} leaves something undone permanently; confirm that with the words \
             \"{wanted}\". Nothing was changed"
        )),
        None => Err(format!("the stage {stage} cannot be waived; wipe and release can")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backoff::BackoffFact;
    use crate::facts::{Hold, HoldScope, Waiver};
    use crate::ids::{IntentId, MachineId};
    use crate::process::Lane;
    use crate::schedule::next_due;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn retiring() -> Retirement {
        Retirement::new("old".to_owned(), "kim".to_owned(), at(0))
    }

    #[test]
    fn stages_follow_each_other_and_each_has_its_deadline() {
        let policy = Policy::default();
        let order = ReleaseOrder { intent: IntentId::generate(), recorded_at: at(60) };
        let wiping = Retirement { wipe: true, ..retiring() };
        let waived = Retirement {
            wipe_waived: Some(Waiver { waived_at: at(50), by: "kim".into() }),
            ..wiping.clone()
        };
        let hours = |hours: i64| Some(hours * 3600);
        for (name, retirement, stage, since, deadline, step) in [
            ("requested", retiring(), RetirementStage::Release, 0, hours(1), RetirementStep::Release),
            (
                "to be wiped",
                wiping,
                RetirementStage::Wipe,
                0,
                hours(4),
                RetirementStep::Blocked { why: WIPE_UNSUPPORTED },
            ),
            (
                "wipe waived",
                waived.clone(),
                RetirementStage::Release,
                50,
                Some(50 + 3600),
                RetirementStep::Release,
            ),
            (
                "ordered",
                Retirement { release: Some(order), ..waived },
                RetirementStage::Release,
                50,
                Some(50 + 3600),
                RetirementStep::RetryRelease(order),
            ),
            (
                "over, whatever else is recorded",
                Retirement { finished_at: Some(at(90)), wipe: true, ..retiring() },
                RetirementStage::Tombstone,
                90,
                None,
                RetirementStep::Finished,
            ),
        ] {
            let present = retirement_state(&retirement, &policy);
            let expected = RetirementState { stage, since: at(since), deadline: deadline.map(at), step };
            assert_eq!(present, expected, "{name}");
            assert!(wait_reason(&retirement, &present).contains("(old)"), "{name}");
        }
    }

    #[test]
    fn retiring_machine_is_due_only_for_its_stage() {
        let policy = Policy::default();
        let hold = |scope| Hold { scope, reason: "disks".into(), by: "lee".into(), until: None };
        let order = ReleaseOrder { intent: IntentId::generate(), recorded_at: at(60) };
        for (name, retirement, held, due) in [
            ("requested", retiring(), None, Some((Process::Retirement, 0))),
            ("to be wiped", Retirement { wipe: true, ..retiring() }, None, None),
            (
                "ordered",
                Retirement { release: Some(order), ..retiring() },
                None,
                Some((Process::Retirement, 60)),
            ),
            ("held", retiring(), Some(HoldScope::Everything), None),
            ("held from power", retiring(), Some(HoldScope::Power), None),
            ("held from recovery", retiring(), Some(HoldScope::Recovery), None),
            ("over", Retirement { finished_at: Some(at(9)), ..retiring() }, None, None),
        ] {
            let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
            facts.retirement = Some(retirement);
            facts.hold = held.map(hold);
            let access = next_due(&facts, Lane::Access, &policy, at(100));
            assert_eq!(
                access.process.zip(access.ready_at),
                due.map(|(what, when)| (what, at(when))),
                "{name}"
            );
            // The deadline is reported even while an operator holds the machine.
            let deadline = retirement_state(facts.retirement.as_ref().unwrap(), &policy).deadline;
            assert_eq!(access.deadline, deadline, "{name}");
            assert_eq!(next_due(&facts, Lane::Observe, &policy, at(100)).process, None, "{name}");
        }
    }

    #[test]
    fn only_a_failed_current_stage_may_be_waived() {
        let facts = |retirement: Option<Retirement>| {
            let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
            facts.retirement = retirement;
            facts
        };
        let wiping = Retirement { wipe: true, ..retiring() };
        let over = Retirement { finished_at: Some(at(1)), ..retiring() };
        let mut failed = facts(Some(retiring()));
        let backoff = BackoffFact {
            failures: 1,
            last_interval: std::time::Duration::ZERO,
            until: at(20),
            cause: "HTTP 503".into(),
        };
        failed.backoffs.insert(Process::Retirement, backoff);
        let mut held = failed.clone();
        held.hold = Some(Hold { scope: HoldScope::Power, reason: "r".into(), by: "lee".into(), until: None });
        for (name, facts, stage, now, refused) in [
            ("no retirement", facts(None), RetirementStage::Release, 1, Some("is not being retired")),
            ("over", facts(Some(over)), RetirementStage::Release, 1, Some("is retired already")),
            ("no cluster", facts(Some(retiring())), RetirementStage::Leave, 1, Some("nothing to waive")),
            (
                "another stage",
                facts(Some(wiping.clone())),
                RetirementStage::Release,
                1,
                Some("is at the stage wipe"),
            ),
            ("wipe", facts(Some(wiping)), RetirementStage::Wipe, 1, None),
            ("not tried", facts(Some(retiring())), RetirementStage::Release, 1, Some("has neither failed")),
            ("overdue", facts(Some(retiring())), RetirementStage::Release, 3600, None),
            ("failed", failed, RetirementStage::Release, 1, None),
            ("held", held, RetirementStage::Release, 1, Some("is held")),
        ] {
            let text = check_waiver(&facts, &Policy::default(), None, stage, at(now)).err();
            assert_eq!(text.is_some(), refused.is_some(), "{name}: {text:?}");
            assert!(text.unwrap_or_default().contains(refused.unwrap_or_default()), "{name}");
        }
    }

    #[test]
    fn machine_leaves_its_cluster_before_anything_is_waived() {
        let policy = Policy::default();
        let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
        facts.retirement = Some(retiring());
        for stage in [RetirementStage::Leave, RetirementStage::Release] {
            let text = check_waiver(&facts, &policy, Some("ams"), stage, at(3600)).unwrap_err();
            assert!(text.starts_with("is a part of cluster ams, which it leaves first"), "{text}");
        }
        let text = check_waiver(&facts, &policy, None, RetirementStage::Leave, at(3600)).unwrap_err();
        assert!(text.ends_with("it is in no cluster"), "{text}");
        facts.retirement = Some(Retirement { wipe: true, ..retiring() });
        assert_eq!(check_waiver(&facts, &policy, Some("ams"), RetirementStage::Wipe, at(1)), Ok(()));
        let [leave, _, release, _] = describe_stages(&retiring(), &policy, Some("ams"));
        assert_eq!(leave.1, "under way, it leaves cluster ams first");
        assert_eq!(release.1, "ahead");
        let [leave, _, release, _] = describe_stages(&retiring(), &policy, None);
        assert_eq!(leave.1, "not needed, it is in no cluster");
        assert_eq!(release.1, "to be ordered");
    }

    #[test]
    fn confirmation_text_must_match() {
        for (stage, typed, fits) in [
            (RetirementStage::Wipe, "rack/1 is not wiped", true),
            (RetirementStage::Release, " rack/1 is not known to be given back ", true),
            (RetirementStage::Release, "rack/1 is not given back", false),
            (RetirementStage::Release, "rack/2 is not known to be given back", false),
            (RetirementStage::Wipe, "yes", false),
            (RetirementStage::Tombstone, "rack/1 is not wiped", false),
        ] {
            assert_eq!(check_confirmation(stage, "rack/1", typed).is_ok(), fits, "{stage} {typed}");
        }
    }

    #[test]
    fn every_stage_has_a_name_that_reads_back() {
        for stage in RetirementStage::ALL {
            assert_eq!(stage.as_str().parse::<RetirementStage>().unwrap(), stage);
        }
        assert!("explode".parse::<RetirementStage>().is_err());
    }
}
