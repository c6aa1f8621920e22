//! Notes of an explanation: holds, pauses, brakes, schedule mismatches.
//!
//! A note appears only if it adds something: the reason that the machine waits for is not repeated.

use crate::cluster::view::ClusterMembership;
use crate::facts::{MachineFacts, Recovery, Retirement};
use crate::host_key::PinnedHostKey;
use crate::humanize::{
    absolute_time, humanize_duration, relative_and_absolute_time, relative_time, remaining_time,
};
use crate::machine_view::{EngagedBrake, LaneView, MachineView};
use crate::pause::{LoopKind, Pause, active_pauses};
use crate::policy::Policy;
use crate::process::{Lane, Process};
use crate::retirement;
use crate::schedule::{DueWork, RULES_VERSION, next_due};
use crate::schedule_mismatch::describe_mismatch;
use crate::time::{Timestamp, between};
use crate::why::{find_lane, next_work};

/// A sentence for each note, the most useful first.
pub(super) fn collect_notes(view: &MachineView, due: &DueWork, now: Timestamp) -> Vec<String> {
    let facts = &view.facts;
    let mut notes = pause_notes(view, due, now);
    let cluster = view.cluster.as_ref().map(|cluster| cluster.name.as_str());
    notes.extend(
        facts.retirement.as_ref().map(|retirement| retirement_note(retirement, &view.policy, cluster)),
    );
    notes.extend(facts.recovery.as_ref().map(|recovery| ladder_note(recovery, &view.policy, now)));
    if let Some((offered, pinned, at)) = rejected_host_key(view.host_keys.as_ref())
        && !(due.reason.contains(&offered) && due.reason.contains(&pinned))
    {
        notes.push(format!(
            "{} it offered the SSH host key {offered}, and {pinned} is pinned: it was reinstalled or replaced, or \
             something else answers at its address",
            relative_time(at, now)
        ));
    }
    if let Some(newer) = &view.unknown_fence {
        let sentence = newer.describe();
        if !due.reason.contains(&sentence) {
            notes.push(format!("reported {}: {sentence}", relative_time(newer.reported_at, now)));
        }
    }
    notes.extend(view.cluster.as_ref().map(ClusterMembership::describe));
    notes.extend(view.roll_out_note.clone());
    if facts.agent_started.is_some() {
        notes.extend(view.findings.iter().map(|finding| finding.message.clone()));
        notes.extend(view.placement.clone());
    }
    notes.extend(hold_note(facts, due, now));
    notes.extend(
        facts
            .key_replacement
            .as_ref()
            .filter(|order| order.is_active_at(now) && due.reason != order.describe())
            .map(|order| format!("{} (until {})", order.describe(), absolute_time(order.expires_at))),
    );
    notes.extend(
        facts
            .priority
            .as_ref()
            .filter(|priority| priority.is_active_at(now))
            .map(|priority| priority.describe(now)),
    );
    notes.extend(silence_note(facts, due, now));
    notes.extend(brake_notes(view, due, now));
    if let Some(lane) = find_lane(view, Lane::Access) {
        notes.extend(lost_sessions_note(lane, now));
        notes.extend(schedule_mismatch_note(lane, due, view.policy_version));
        let waits_for_worker =
            lane.work.is_none() && next_work(due, Some(lane)).is_some_and(|next| next.at <= now);
        if waits_for_worker && view.open_sessions == 0 {
            notes.push("no shepherd works on this BMDB: there is no open session".to_owned());
        }
    }
    notes
}

/// Pauses that affect the machine: of the loop that its access lane is due for, now or later, and of the loop that its
/// observe lane is due for, once that is due.
fn pause_notes(view: &MachineView, due: &DueWork, now: Timestamp) -> Vec<String> {
    relevant_pauses(view, due, now)
        .map(|pause| format!("{}; work under way continues", pause.describe(now)))
        .collect()
}

/// The pauses that affect the machine.
pub(super) fn relevant_pauses<'a>(
    view: &'a MachineView,
    due: &DueWork,
    now: Timestamp,
) -> impl Iterator<Item = &'a Pause> + use<'a> {
    let provider = view.facts.provider_record.as_ref().map_or("", |provided| provided.provider.as_str());
    let awaited = due.process.filter(|_| !due.timer);
    let looked = next_due(&view.facts, Lane::Observe, &view.policy, now);
    let overdue = looked.process.filter(|_| !looked.timer && looked.ready_at.is_some_and(|at| at <= now));
    awaited
        .into_iter()
        .chain(overdue)
        .flat_map(move |process| active_pauses(&view.pauses, LoopKind::for_process(process), provider, now))
}

fn ladder_note(recovery: &Recovery, policy: &Policy, now: Timestamp) -> String {
    let began = relative_and_absolute_time(recovery.started_at, now);
    match (&recovery.last_action, policy.rung(recovery.rung)) {
        (Some(acted), Some(rung)) => format!(
            "recovery began {began}; it is at step {} of {} ({}), try {} of {}, begun {}",
            recovery.rung + 1,
            policy.ladder.len(),
            acted.step,
            recovery.attempts,
            rung.tries,
            relative_time(acted.acted_at, now),
        ),
        _ => format!("recovery began {began}; nothing was done yet"),
    }
}

/// The state of each stage of a retirement.
fn retirement_note(retirement: &Retirement, policy: &Policy, cluster: Option<&str>) -> String {
    let stages = retirement::describe_stages(retirement, policy, cluster);
    let messages: Vec<String> = stages.iter().map(|(stage, stands)| format!("{stage}: {stands}")).collect();
    let listed = match retirement.listed_since {
        Some(_) => "; its provider still lists it",
        None => "",
    };
    format!("the stages of its retirement are {}{listed}", messages.join("; "))
}

/// Brakes that apply to this machine. A reason that the machine waits for anyhow is not repeated.
fn brake_notes(view: &MachineView, due: &DueWork, now: Timestamp) -> Vec<String> {
    view.brakes
        .iter()
        .filter(|brake| brake_applies(brake, &view.facts))
        .map(|brake| brake_note(brake, &due.reason, now))
        .collect()
}

fn brake_note(brake: &EngagedBrake, waited_for: &str, now: Timestamp) -> String {
    let whose = if brake.scope == "*" { "all machines" } else { &brake.scope };
    let why = brake.reason.trim_start_matches("brake: ");
    // The brake's counts go on changing while the machine's reason has the counts of its last check.
    let notified = without_digits(waited_for).contains(&without_digits(why));
    let why = if notified { String::new() } else { format!(": {why}") };
    format!(
        "the {} brake of {whose} has been on for {}{why}",
        brake.kind,
        humanize_duration(between(brake.engaged_at, now))
    )
}

fn without_digits(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

pub(super) fn brake_applies(brake: &EngagedBrake, facts: &MachineFacts) -> bool {
    brake.scope == "*"
        || facts.provider_record.as_ref().is_some_and(|provided| provided.provider == brake.scope)
}

/// The offered key, the pinned key, and when the offer was rejected.
fn rejected_host_key(keys: Option<&PinnedHostKey>) -> Option<(String, String, Timestamp)> {
    let keys = keys?;
    let (offered, at) = keys.rejected.as_ref()?;
    Some((offered.to_string(), keys.key.to_string(), *at))
}

/// A hold that is not itself the reason that the machine waits for.
fn hold_note(facts: &MachineFacts, due: &DueWork, now: Timestamp) -> Option<String> {
    let hold = facts.hold.as_ref().filter(|hold| hold.is_active_at(now))?;
    if due.reason.starts_with("held by ") {
        return hold.until.is_none().then(|| "the hold has no end; it lasts until it is released".to_owned());
    }
    let until = hold.until.map_or_else(String::new, |until| format!(" {}", remaining_time(until, now)));
    Some(format!("{} holds it ({}){until}: {}", hold.by, hold.scope.as_str(), hold.reason))
}

/// When its agent last reported, where that matters.
fn silence_note(facts: &MachineFacts, due: &DueWork, now: Timestamp) -> Option<String> {
    facts.agent_started.as_ref()?;
    if due.process != Some(Process::Recovery) && facts.needs_human.is_none() {
        return None;
    }
    Some(facts.heartbeat.as_ref().map_or_else(
        || "its agent has never reported".to_owned(),
        |beat| format!("its agent last reported {}", relative_and_absolute_time(beat.received_at, now)),
    ))
}

fn lost_sessions_note(lane: &LaneView, now: Timestamp) -> Option<String> {
    let times = match lane.losses {
        0 => return None,
        1 => "once".to_owned(),
        losses => format!("{losses} times in a row"),
    };
    let pause = lane.not_before.filter(|at| *at > now).map_or_else(String::new, |at| {
        format!(
            "; nobody claims that work again until {}, because it may still be under way",
            absolute_time(at)
        )
    });
    Some(format!(
        "a shepherd was lost {times} while it worked on this machine (crashed, or cut off from the \
         database){pause}"
    ))
}

/// How the stored schedule differs from what the facts demand.
fn schedule_mismatch_note(lane: &LaneView, due: &DueWork, policy_version: i64) -> Option<String> {
    if lane.rules_version > i64::from(RULES_VERSION) {
        return Some(format!(
            "its schedule was written by a newer release (rules {}, here {RULES_VERSION}); use the shepherdctl \
             of that release",
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
    let mismatch = describe_mismatch(&lane.stored_decision()?, due, policy_version)?;
    Some(format!("{mismatch}; the next sweep repairs that"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::time::before;

    #[test]
    fn awaited_brake_is_noted_without_repeating_its_reason() {
        let now = Timestamp::from_timestamp_nanos(0);
        let brake = EngagedBrake {
            kind: "recovery".to_owned(),
            scope: "sim".to_owned(),
            reason: "brake: 5 of 10 machines of provider sim fell silent".to_owned(),
            engaged_at: before(now, Duration::from_mins(3)),
            confirmed_at: now,
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
            assert_eq!(brake_note(&brake, waited_for, now), line);
        }
    }
}
