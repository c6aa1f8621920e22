//! Retiring a machine: the stages in which it leaves, and what comes next.
//!
//! It leaves its cluster, is wiped if that was asked for, goes back to its
//! provider, and stays in the BMDB as a tombstone: a name that is never adopted
//! again and a key that is refused. [`next`] says at which stage it is and what
//! is to be done there. The loop takes one step at a time, the schedule and
//! `shepherdctl why` say the same, and a plan foresees it.
//!
//! Nobody leaves a cluster yet, because this release makes none; and nobody
//! wipes, because no agent and no provider of this release can. A stage that
//! cannot be done waits for a person, who may waive it: by its name, and by a
//! sentence of what then remains undone ([`confirmation`]).
//!
//! Each stage has a deadline. When it passes nothing is skipped: an issue says
//! so, and what can be tried is tried on.

use std::fmt;
use std::str::FromStr;

use crate::model::facts::{MachineFacts, ReleaseOrder, Retirement};
use crate::model::policy::Policy;
use crate::model::process::{Process, UnknownName};
use crate::model::telling::absolute;
use crate::model::time::{Timestamp, after};

/// A step on the way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It leaves its cluster.
    Leave,
    /// What is on its disks is destroyed.
    Wipe,
    /// Its provider takes it back.
    Release,
    /// Only the record of it remains.
    Tombstone,
}

impl Stage {
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

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Stage {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|stage| stage.as_str() == name).ok_or_else(|| UnknownName {
            what: "stage of a retirement",
            name: name.to_owned(),
            known: "leave, wipe, release, tombstone",
        })
    }
}

/// What is to be done at the present stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing any more.
    Over,
    /// Nobody can do it: a person waives the stage, or cancels.
    Stuck {
        /// Why, as the end of a sentence.
        why: &'static str,
    },
    /// Tell the provider to take the machine back.
    Release,
    /// The provider was told, and what became of that is not known: tell it again, under the same intent.
    ReleaseAgain(ReleaseOrder),
}

/// Where a retirement stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// The stage that it is at.
    pub stage: Stage,
    /// Since when.
    pub since: Timestamp,
    /// By when it should be over; `None` at the last one.
    pub deadline: Option<Timestamp>,
    /// What is to be done.
    pub step: Step,
}

/// Why nobody is wiped.
const NOT_WIPED: &str = "no agent and no provider of this release offers to wipe a machine";
/// Why nobody leaves a cluster.
const NO_CLUSTER: &str = "it is in no cluster";

/// Where a retirement stands, and what comes next.
#[must_use]
pub fn next(retirement: &Retirement, policy: &Policy) -> Present {
    if let Some(finished) = retirement.finished_at {
        return Present { stage: Stage::Tombstone, since: finished, deadline: None, step: Step::Over };
    }
    let begun = retirement.requested_at;
    if retirement.wipe && retirement.wipe_waived.is_none() {
        return Present {
            stage: Stage::Wipe,
            since: begun,
            deadline: Some(after(begun, policy.retirement_wipe_timeout.0)),
            step: Step::Stuck { why: NOT_WIPED },
        };
    }
    let since = retirement.wipe_waived.as_ref().map_or(begun, |waiver| waiver.at);
    Present {
        stage: Stage::Release,
        since,
        deadline: Some(after(since, policy.retirement_release_timeout.0)),
        step: retirement.release.map_or(Step::Release, Step::ReleaseAgain),
    }
}

/// Each stage, and how it stands, as words.
#[must_use]
pub fn stages(retirement: &Retirement, policy: &Policy) -> [(Stage, String); 4] {
    let present = next(retirement, policy);
    let over = retirement.finished_at.is_some();
    let wipe = match (retirement.wipe, &retirement.wipe_waived) {
        (false, _) => "not asked for".to_owned(),
        (true, Some(waiver)) => format!("waived by {}", waiver.by),
        (true, None) => NOT_WIPED.to_owned(),
    };
    let release = match (&present.step, &retirement.release) {
        (Step::Over, _) => retirement.outcome.clone().unwrap_or_else(|| "done".to_owned()),
        (_, Some(order)) => format!("ordered {}, not known to be done", absolute(order.at)),
        (Step::Release, None) => "to be ordered".to_owned(),
        _ => "ahead".to_owned(),
    };
    let tombstone = if over { "done" } else { "ahead" };
    [
        (Stage::Leave, format!("not needed, {NO_CLUSTER}")),
        (Stage::Wipe, wipe),
        (Stage::Release, release),
        (Stage::Tombstone, tombstone.to_owned()),
    ]
}

/// What the schedule says of it: the stage, and what is waited for.
#[must_use]
pub fn waits_for(retirement: &Retirement, present: &Present) -> String {
    let Retirement { reason, by, .. } = retirement;
    match &present.step {
        Step::Over => {
            let outcome = retirement.outcome.as_deref().unwrap_or("it is over");
            format!("retired ({reason}): {outcome}")
        }
        Step::Stuck { why } => format!(
            "is being retired by {by} ({reason}), and stands at the stage {}: {why}; waive the stage or cancel",
            present.stage
        ),
        Step::Release => format!("is being retired by {by} ({reason}); its provider is to take it back"),
        Step::ReleaseAgain(_) => format!(
            "is being retired by {by} ({reason}); its provider was told to take it back, and what became of \
             that is not known yet"
        ),
    }
}

/// What follows when the deadline of the present stage passes.
#[must_use]
pub fn then(present: &Present) -> String {
    let then = match present.step {
        Step::Stuck { .. } => "it waits on for a person",
        _ => "it is tried on",
    };
    format!("an issue says that its stage {} is overdue, and {then}", present.stage)
}

/// Whether the present stage is known to be one that a person may waive at `now`; why not, if it is not.
pub fn may_waive(facts: &MachineFacts, policy: &Policy, stage: Stage, now: Timestamp) -> Result<(), String> {
    let Some(retirement) = &facts.retirement else { return Err("is not being retired".to_owned()) };
    let present = next(retirement, policy);
    if present.step == Step::Over {
        return Err("is retired already".to_owned());
    }
    if stage == Stage::Leave {
        return Err(format!("has nothing to waive at the stage leave: {NO_CLUSTER}"));
    }
    if stage != present.stage {
        return Err(format!("is at the stage {}, and no other can be waived", present.stage));
    }
    if facts.hold.as_ref().is_some_and(|hold| hold.holds_at(now)) {
        return Err("is held; release it first".to_owned());
    }
    let in_vain = facts.backoffs.contains_key(&Process::Retirement)
        || matches!(present.step, Step::Stuck { .. })
        || present.deadline.is_some_and(|deadline| deadline <= now);
    if in_vain {
        Ok(())
    } else {
        Err(format!("is at the stage {stage}, which has neither failed nor passed its deadline yet"))
    }
}

/// What whoever waives a stage of the machine that people call `name` must type: what remains undone. `None`
/// for a stage that leaves nothing undone.
#[must_use]
pub fn confirmation(stage: Stage, name: &str) -> Option<String> {
    match stage {
        Stage::Wipe => Some(format!("{name} is not wiped")),
        // It may have been ordered: whoever waives it knows neither that it was, nor what became of it.
        Stage::Release => Some(format!("{name} is not known to be given back")),
        Stage::Leave | Stage::Tombstone => None,
    }
}

/// Refuses what was typed instead of [`confirmation`].
pub fn confirmed(stage: Stage, name: &str, typed: &str) -> Result<(), String> {
    match confirmation(stage, name) {
        Some(wanted) if typed.trim() == wanted => Ok(()),
        Some(wanted) => Err(format!(
            "waiving the stage {stage} leaves something undone for good; say that you know it with the words \
             \"{wanted}\". Nothing was changed"
        )),
        None => Err(format!("the stage {stage} cannot be waived; wipe and release can")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::backoff::BackoffFact;
    use crate::model::facts::{Hold, HoldScope, Waiver};
    use crate::model::ids::{IntentId, MachineId};
    use crate::model::process::Lane;
    use crate::model::schedule::next_due;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn retiring() -> Retirement {
        Retirement::new("old".to_owned(), "kim".to_owned(), at(0))
    }

    #[test]
    fn stages_follow_each_other_and_each_has_its_deadline() {
        let policy = Policy::default();
        let order = ReleaseOrder { intent: IntentId::generate(), at: at(60) };
        let wiping = Retirement { wipe: true, ..retiring() };
        let waived =
            Retirement { wipe_waived: Some(Waiver { at: at(50), by: "kim".into() }), ..wiping.clone() };
        let hours = |hours: i64| Some(hours * 3600);
        for (name, retirement, stage, since, deadline, step) in [
            ("asked for", retiring(), Stage::Release, 0, hours(1), Step::Release),
            ("to be wiped", wiping, Stage::Wipe, 0, hours(4), Step::Stuck { why: NOT_WIPED }),
            ("wipe waived", waived.clone(), Stage::Release, 50, Some(50 + 3600), Step::Release),
            (
                "ordered",
                Retirement { release: Some(order), ..waived },
                Stage::Release,
                50,
                Some(50 + 3600),
                Step::ReleaseAgain(order),
            ),
            (
                "over, whatever else is said",
                Retirement { finished_at: Some(at(90)), wipe: true, ..retiring() },
                Stage::Tombstone,
                90,
                None,
                Step::Over,
            ),
        ] {
            let present = next(&retirement, &policy);
            let expected = Present { stage, since: at(since), deadline: deadline.map(at), step };
            assert_eq!(present, expected, "{name}");
            assert!(waits_for(&retirement, &present).contains("(old)"), "{name}");
        }
    }

    #[test]
    fn nothing_is_due_on_its_way_out_but_what_its_stage_asks_for() {
        let policy = Policy::default();
        let hold = |scope| Hold { scope, reason: "disks".into(), by: "lee".into(), until: None };
        let order = ReleaseOrder { intent: IntentId::generate(), at: at(60) };
        for (name, retirement, held, due) in [
            ("asked for", retiring(), None, Some((Process::Retirement, 0))),
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
            let mut facts = MachineFacts::unknown(MachineId::generate(), at(0));
            facts.retirement = Some(retirement);
            facts.hold = held.map(hold);
            let access = next_due(&facts, Lane::Access, &policy, at(100));
            assert_eq!(
                access.process.zip(access.ready_at),
                due.map(|(what, when)| (what, at(when))),
                "{name}"
            );
            // Whoever holds it: that it is overdue is told all the same.
            let deadline = next(facts.retirement.as_ref().unwrap(), &policy).deadline;
            assert_eq!(access.deadline, deadline, "{name}");
            assert_eq!(next_due(&facts, Lane::Observe, &policy, at(100)).process, None, "{name}");
        }
    }

    #[test]
    fn only_the_present_stage_is_waived_and_only_when_it_was_tried_in_vain() {
        let facts = |retirement: Option<Retirement>| {
            let mut facts = MachineFacts::unknown(MachineId::generate(), at(0));
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
            ("no retirement", facts(None), Stage::Release, 1, Some("is not being retired")),
            ("over", facts(Some(over)), Stage::Release, 1, Some("is retired already")),
            ("no cluster", facts(Some(retiring())), Stage::Leave, 1, Some("nothing to waive")),
            ("another stage", facts(Some(wiping.clone())), Stage::Release, 1, Some("is at the stage wipe")),
            ("wipe", facts(Some(wiping)), Stage::Wipe, 1, None),
            ("not tried", facts(Some(retiring())), Stage::Release, 1, Some("has neither failed")),
            ("overdue", facts(Some(retiring())), Stage::Release, 3600, None),
            ("failed", failed, Stage::Release, 1, None),
            ("held", held, Stage::Release, 1, Some("is held")),
        ] {
            let said = may_waive(&facts, &Policy::default(), stage, at(now)).err();
            assert_eq!(said.is_some(), refused.is_some(), "{name}: {said:?}");
            assert!(said.unwrap_or_default().contains(refused.unwrap_or_default()), "{name}");
        }
    }

    #[test]
    fn what_remains_undone_is_typed_word_by_word() {
        for (stage, typed, fits) in [
            (Stage::Wipe, "rack/1 is not wiped", true),
            (Stage::Release, " rack/1 is not known to be given back ", true),
            (Stage::Release, "rack/1 is not given back", false),
            (Stage::Release, "rack/2 is not known to be given back", false),
            (Stage::Wipe, "yes", false),
            (Stage::Tombstone, "rack/1 is not wiped", false),
        ] {
            assert_eq!(confirmed(stage, "rack/1", typed).is_ok(), fits, "{stage} {typed}");
        }
    }

    #[test]
    fn every_stage_has_a_name_that_reads_back() {
        for stage in Stage::ALL {
            assert_eq!(stage.as_str().parse::<Stage>().unwrap(), stage);
        }
        assert!("explode".parse::<Stage>().is_err());
    }
}
