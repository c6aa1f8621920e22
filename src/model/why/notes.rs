//! Whatever else bears on a machine, besides what it waits for.
//!
//! A note is said only where it adds something: what is itself the reason waited
//! for is not told twice.

use crate::model::cluster::view::PartOfCluster;
use crate::model::drift::drift_of;
use crate::model::facts::{MachineFacts, Recovery, Retirement};
use crate::model::host_key::PinnedHostKey;
use crate::model::machine_view::{BrakeLine, LaneView, MachineView};
use crate::model::pause::{Loop, Pause, holding};
use crate::model::policy::Policy;
use crate::model::process::{Lane, Process};
use crate::model::retirement;
use crate::model::schedule::{Due, RULES_VERSION, next_due};
use crate::model::telling::{absolute, both, relative, rough};
use crate::model::time::{Timestamp, between};
use crate::model::why::{lane_of, next};

/// A sentence for each thing, the most telling first.
pub(super) fn notes(view: &MachineView, due: &Due, now: Timestamp) -> Vec<String> {
    let facts = &view.facts;
    let mut notes = pauses(view, due, now);
    notes.extend(facts.retirement.as_ref().map(|retirement| stages(retirement, &view.policy)));
    notes.extend(facts.recovery.as_ref().map(|recovery| ladder(recovery, &view.policy, now)));
    if let Some((offered, pinned, at)) = refused(view.host_keys.as_ref())
        && !(due.reason.contains(&offered) && due.reason.contains(&pinned))
    {
        notes.push(format!(
            "{} it offered the SSH host key {offered}, and {pinned} is pinned: it was reinstalled or replaced, or \
             something else answers at its address",
            relative(at, now)
        ));
    }
    if let Some(newer) = &view.newer_fence {
        let sentence = newer.sentence();
        if !due.reason.contains(&sentence) {
            notes.push(format!("{} it was heard: {sentence}", relative(newer.heard, now)));
        }
    }
    notes.extend(view.cluster.as_ref().map(PartOfCluster::note));
    notes.extend(view.release.clone());
    notes.extend(hold_of(facts, due, now));
    notes.extend(facts.priority.as_ref().filter(|said| said.holds_at(now)).map(|said| said.sentence(now)));
    notes.extend(silence(facts, due, now));
    notes.extend(brakes(view, due, now));
    if let Some(lane) = lane_of(view, Lane::Access) {
        notes.extend(losses(lane, now));
        notes.extend(disagreement(lane, due, view.policy_version));
        let waits_for_worker =
            lane.work.is_none() && next(due, Some(lane)).is_some_and(|next| next.at <= now);
        if waits_for_worker && view.open_sessions == 0 {
            notes.push("no shepherd works on this BMDB: there is no open session".to_owned());
        }
    }
    notes
}

/// Pauses that it waits for: of the loop that its access is due for, sooner or later, and of the one that looks
/// at it, once that is due.
fn pauses(view: &MachineView, due: &Due, now: Timestamp) -> Vec<String> {
    paused(view, due, now)
        .map(|pause| format!("{}; what was under way goes on", pause.sentence(now)))
        .collect()
}

/// The pauses themselves.
pub(super) fn paused<'a>(
    view: &'a MachineView,
    due: &Due,
    now: Timestamp,
) -> impl Iterator<Item = &'a Pause> + use<'a> {
    let provider = view.facts.provided.as_ref().map_or("", |provided| provided.provider.as_str());
    let awaited = due.process.filter(|_| !due.timer);
    let looked = next_due(&view.facts, Lane::Observe, &view.policy, now);
    let overdue = looked.process.filter(|_| !looked.timer && looked.ready_at.is_some_and(|at| at <= now));
    awaited
        .into_iter()
        .chain(overdue)
        .flat_map(move |process| holding(&view.pauses, Loop::of(process), provider, now))
}

fn ladder(recovery: &Recovery, policy: &Policy, now: Timestamp) -> String {
    let began = both(recovery.started_at, now);
    match (&recovery.acted, policy.rung(recovery.rung)) {
        (Some(acted), Some(rung)) => format!(
            "recovery began {began}; it is at step {} of {} ({}), try {} of {}, begun {}",
            recovery.rung + 1,
            policy.ladder.len(),
            acted.step,
            recovery.tries,
            rung.tries,
            relative(acted.at, now),
        ),
        _ => format!("recovery began {began}; nothing was done yet"),
    }
}

/// How each stage of its retirement stands.
fn stages(retirement: &Retirement, policy: &Policy) -> String {
    let stages = retirement::stages(retirement, policy);
    let told: Vec<String> = stages.iter().map(|(stage, stands)| format!("{stage}: {stands}")).collect();
    let listed = match retirement.listed_since {
        Some(_) => "; its provider still lists it",
        None => "",
    };
    format!("the stages of its retirement are {}{listed}", told.join("; "))
}

/// Brakes over this machine. A reason that is being waited for anyhow is not told twice.
fn brakes(view: &MachineView, due: &Due, now: Timestamp) -> Vec<String> {
    view.brakes
        .iter()
        .filter(|brake| is_over(brake, &view.facts))
        .map(|brake| brake_line(brake, &due.reason, now))
        .collect()
}

fn brake_line(brake: &BrakeLine, waited_for: &str, now: Timestamp) -> String {
    let whose = if brake.scope == "*" { "all machines" } else { &brake.scope };
    let why = brake.reason.trim_start_matches("brake: ");
    // The brake counts on while the machine waits for what was counted when it was looked at.
    let told = without_digits(waited_for).contains(&without_digits(why));
    let why = if told { String::new() } else { format!(": {why}") };
    format!(
        "the {} brake of {whose} has been on for {}{why}",
        brake.kind,
        rough(between(brake.engaged_at, now))
    )
}

fn without_digits(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

pub(super) fn is_over(brake: &BrakeLine, facts: &MachineFacts) -> bool {
    brake.scope == "*" || facts.provided.as_ref().is_some_and(|provided| provided.provider == brake.scope)
}

/// Offered, pinned, when.
fn refused(keys: Option<&PinnedHostKey>) -> Option<(String, String, Timestamp)> {
    let keys = keys?;
    let (offered, at) = keys.refused.as_ref()?;
    Some((offered.to_string(), keys.key.to_string(), *at))
}

/// A hold that is not itself the reason waited for.
fn hold_of(facts: &MachineFacts, due: &Due, now: Timestamp) -> Option<String> {
    let hold = facts.hold.as_ref().filter(|hold| hold.holds_at(now))?;
    if due.reason.starts_with("held by ") {
        return hold.until.is_none().then(|| "the hold has no end; it lasts until it is released".to_owned());
    }
    let until = hold.until.map_or_else(String::new, |until| format!(" until {}", both(until, now)));
    Some(format!("{} holds it ({}){until}: {}", hold.by, hold.scope.as_str(), hold.reason))
}

/// When it last spoke, where that matters.
fn silence(facts: &MachineFacts, due: &Due, now: Timestamp) -> Option<String> {
    facts.agent_started.as_ref()?;
    if due.process != Some(Process::Recovery) && facts.needs_human.is_none() {
        return None;
    }
    Some(facts.heartbeat.as_ref().map_or_else(
        || "its agent has never reported".to_owned(),
        |beat| format!("its agent last reported {}", both(beat.at, now)),
    ))
}

fn losses(lane: &LaneView, now: Timestamp) -> Option<String> {
    let times = match lane.losses {
        0 => return None,
        1 => "once".to_owned(),
        losses => format!("{losses} times in a row"),
    };
    let pause = lane.not_before.filter(|at| *at > now).map_or_else(String::new, |at| {
        format!("; nobody claims it until {}, because what they began may still be under way", absolute(at))
    });
    Some(format!("whoever worked on it was lost {times} (crashed, or cut off from the database){pause}"))
}

/// Where the stored schedule is not what the facts demand.
fn disagreement(lane: &LaneView, due: &Due, policy_version: i64) -> Option<String> {
    if lane.rules_version > i64::from(RULES_VERSION) {
        return Some(format!(
            "its schedule was written by a newer release (rules {}, here {RULES_VERSION}); believe that one's \
             shepherdctl",
            lane.rules_version
        ));
    }
    if lane.rules_version < i64::from(RULES_VERSION) {
        return Some(
            "its schedule was computed by an older release; a shepherd of this one brings it up to date"
                .to_owned(),
        );
    }
    if lane.policy_version != policy_version {
        return Some(
            "the policy was changed since its schedule was computed; the next sweep brings it up to date"
                .to_owned(),
        );
    }
    let drift = drift_of(&lane.stored()?, due, policy_version)?;
    Some(format!("{drift}; the next sweep repairs that"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::time::before;

    #[test]
    fn a_brake_that_is_waited_for_is_told_without_its_reason_though_it_counted_on() {
        let now = Timestamp::from_timestamp_nanos(0);
        let brake = BrakeLine {
            kind: "recovery".to_owned(),
            scope: "sim".to_owned(),
            reason: "brake: 5 of 10 machines of provider sim fell silent".to_owned(),
            engaged_at: before(now, Duration::from_mins(3)),
            seen_at: now,
        };
        for (waited_for, line) in [
            (
                "brake: 4 of 10 machines of provider sim fell silent",
                "the recovery brake of sim has been on for 3m",
            ),
            (
                "brake: 4 of 10 machines of provider rack fell silent",
                "the recovery brake of sim has been on for 3m: 5 of 10 machines of provider sim fell silent",
            ),
        ] {
            assert_eq!(brake_line(&brake, waited_for, now), line);
        }
    }
}
