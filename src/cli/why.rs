//! `why`: the answer to "it is stuck and nothing tells me why".
//!
//! [`explain`] is a pure function of one moment of the database. It computes
//! the phase and the schedule from the facts, with the same functions that
//! wrote them, and uses the stored schedule for what only that knows: who works,
//! what was lost, where in the code it was decided. Where the two disagree it
//! says so instead of choosing.
//!
//! An answer holds what applies and nothing else: the phase and since when, what
//! is waited for, until when and what happens then, what failed and how often,
//! who works on it, and the commands that would help *this* machine.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::host_key::PinnedHostKey;
use crate::bmdb::inspect::{BrakeLine, LaneView, MachineName, MachineView};
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::{find, id_of};
use crate::cli::output::{Format, absolute, both, labelled, relative, rough, width};
use crate::model::facts::{MachineFacts, Recovery};
use crate::model::phase::{Phase, phase_of, silent_from};
use crate::model::policy::Policy;
use crate::model::process::{Lane, Process};
use crate::model::schedule::{Due, RULES_VERSION, next_due};
use crate::model::time::{Span, Timestamp};

/// Why a machine is as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Why {
    /// Its names.
    #[serde(flatten)]
    pub name: MachineName,
    /// Where it is in its life.
    pub phase: &'static str,
    /// Since when, where that is known.
    pub since: Option<Timestamp>,
    /// The moment that all of this is about.
    pub at: Timestamp,
    /// What the access lane waits for.
    pub waits_for: String,
    /// `file:line` of that decision.
    pub decided_at: String,
    /// What happens next, and when.
    pub next: Option<Next>,
    /// When something else happens if that does not.
    pub deadline: Option<Deadline>,
    /// Processes that failed and have not finished since.
    pub failures: Vec<Failure>,
    /// Who works on it now, a sentence for each lane.
    pub work: Vec<String>,
    /// Whatever else bears on it.
    pub notes: Vec<String>,
    /// What would help.
    pub advice: Vec<Advice>,
}

/// What happens next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Next {
    /// The process.
    pub process: &'static str,
    /// When it may begin; in the past when it waits for a free worker.
    pub at: Timestamp,
}

/// A moment after which something else happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Deadline {
    /// When.
    pub at: Timestamp,
    /// What.
    pub then: String,
}

/// A process that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Which.
    pub process: &'static str,
    /// How often in a row.
    pub count: u32,
    /// The last error.
    pub cause: String,
    /// End of the present wait.
    pub until: Timestamp,
    /// Length of the wait after another failure, before jitter, in seconds.
    pub next_wait_seconds: u64,
}

/// A command, and when to give it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// The command, ready to be pasted.
    pub command: String,
    /// What it is good for.
    pub when: String,
}

/// `why M`.
pub async fn why(bmdb: &Bmdb, machine: &str, format: Format) -> Result<String, CliError> {
    let name = find(bmdb, machine).await?;
    let view = bmdb.machine_view(id_of(&name)).await?;
    let why = explain(&view, view.snapshot.now);
    match format {
        Format::Json => json(&why),
        Format::Table => Ok(render(&why, width())),
    }
}

/// Explains one machine.
#[must_use]
pub fn explain(view: &MachineView, now: Timestamp) -> Why {
    let (facts, policy) = (&view.snapshot.facts, &*view.policy);
    let phase = phase_of(facts, policy, now);
    let due = next_due(facts, Lane::Access, policy, now);
    let stored = lane_of(view, Lane::Access);
    let name = view.name();
    let word = quoted(&name.short());
    Why {
        phase: phase.as_str(),
        since: since(view, phase),
        at: now,
        waits_for: due.reason.clone(),
        decided_at: decided_at(&due, stored, facts),
        next: next(&due, stored),
        deadline: due.deadline.map(|at| Deadline { at, then: then(facts, policy) }),
        failures: failures(facts, policy),
        work: view.lanes.iter().filter_map(|lane| working(lane, now)).collect(),
        notes: notes(view, &due, now),
        advice: advice(view, &word, now),
        name,
    }
}

fn lane_of(view: &MachineView, lane: Lane) -> Option<&LaneView> {
    view.lanes.iter().find(|stored| stored.lane == lane.as_str())
}

/// Facts know best since when; the index knows the rest, unless it lags.
fn since(view: &MachineView, phase: Phase) -> Option<Timestamp> {
    let facts = &view.snapshot.facts;
    let told = match phase {
        Phase::NeedsHuman => facts.needs_human.as_ref().map(|fact| fact.since),
        Phase::Quarantined => facts.quarantine.as_ref().map(|fact| fact.since),
        Phase::Recovering => facts.recovery.as_ref().map(|fact| fact.started_at),
        Phase::Silent => silent_from(facts, &view.policy),
        Phase::AgentStarting => facts.agent_started.as_ref().map(|fact| fact.at),
        _ => None,
    };
    let indexed = lane_of(view, Lane::Access).filter(|lane| lane.phase_index == phase.as_str());
    told.or_else(|| indexed.map(|lane| lane.phase_since))
}

/// A postponement was decided where it was made, the rest where the schedule is computed.
fn decided_at(due: &Due, stored: Option<&LaneView>, facts: &MachineFacts) -> String {
    let postponed = due.process.and_then(|process| facts.postponements.get(&process));
    if let Some(wait) = postponed.filter(|wait| wait.reason == due.reason) {
        return wait.decided_at.clone();
    }
    match stored.filter(|lane| lane.reason == due.reason && !lane.decided_at.is_empty()) {
        Some(lane) => lane.decided_at.clone(),
        None => format!("{}:{}", due.decided_at.file(), due.decided_at.line()),
    }
}

/// The stored moment is when it can be claimed; a timer's is a lower bound, so the facts decide.
fn next(due: &Due, stored: Option<&LaneView>) -> Option<Next> {
    let (process, wanted) = due.process.zip(due.ready_at)?;
    let stored = stored.filter(|lane| !due.timer && lane.process.as_deref() == Some(process.as_str()));
    let at = stored.and_then(|lane| lane.ready_at).map_or(wanted, |ready| ready.max(wanted));
    let at = stored.and_then(|lane| lane.not_before).map_or(at, |not_before| at.max(not_before));
    Some(Next { process: process.as_str(), at })
}

/// What follows when the deadline passes.
fn then(facts: &MachineFacts, policy: &Policy) -> String {
    match &facts.recovery {
        None => "recovery begins".to_owned(),
        Some(recovery) => match policy.rung(recovery.rung) {
            Some(rung) if recovery.tries < rung.tries => format!(
                "it is tried once more to {} (try {} of {})",
                rung.step.phrase(),
                recovery.tries + 1,
                rung.tries
            ),
            _ => next_rung(recovery, policy),
        },
    }
}

fn next_rung(recovery: &Recovery, policy: &Policy) -> String {
    let next = policy.ladder.iter().skip(recovery.rung + 1).find(|rung| rung.tries > 0);
    next.map_or_else(
        || "nothing is left to try, and a person is asked".to_owned(),
        |rung| format!("the next step is to {}, if its provider can", rung.step.phrase()),
    )
}

fn failures(facts: &MachineFacts, policy: &Policy) -> Vec<Failure> {
    facts
        .backoffs
        .iter()
        .map(|(process, fact)| Failure {
            process: process.as_str(),
            count: fact.failures,
            cause: fact.cause.clone(),
            until: fact.until,
            next_wait_seconds: policy.backoff_of(*process).next_interval(Some(fact.last_interval)).as_secs(),
        })
        .collect()
}

fn working(lane: &LaneView, now: Timestamp) -> Option<String> {
    let holder = lane.work.as_ref()?;
    let unknown = || "a component that is not known".to_owned();
    let mut who = holder.component.clone().unwrap_or_else(unknown);
    if let Some(host) = &holder.host {
        let _ = write!(who, " on {host}");
    }
    if let Some(pid) = holder.pid {
        let _ = write!(who, ", pid {pid}");
    }
    let session = match (holder.session_closed_at, holder.session_deadline) {
        (Some(at), _) => format!("ended {}, so that this is about to be freed", relative(at, now)),
        (None, Some(at)) if at <= now => {
            format!("expired {}, so that this is about to be freed", relative(at, now))
        }
        (None, Some(at)) => format!("ends {} unless it is renewed", relative(at, now)),
        (None, None) => "not known".to_owned(),
    };
    Some(format!(
        "{} since {} by {who} (session {}, {session}; fence {})",
        holder.process,
        both(holder.since, now),
        holder.session,
        holder.fence
    ))
}

fn notes(view: &MachineView, due: &Due, now: Timestamp) -> Vec<String> {
    let facts = &view.snapshot.facts;
    let mut notes = Vec::new();
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
    notes.extend(hold_of(facts, due, now));
    notes.extend(silence(facts, due, now));
    notes.extend(brakes(view, due, now));
    if let Some(lane) = lane_of(view, Lane::Access) {
        notes.extend(losses(lane, now));
        notes.extend(disagreement(lane, due, view.snapshot.policy_version));
        let waits_for_worker =
            lane.work.is_none() && next(due, Some(lane)).is_some_and(|next| next.at <= now);
        if waits_for_worker && view.open_sessions == 0 {
            notes.push("no shepherd works on this BMDB: there is no open session".to_owned());
        }
    }
    notes
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

/// Brakes over this machine. A reason that is being waited for anyhow is not told twice.
fn brakes(view: &MachineView, due: &Due, now: Timestamp) -> Vec<String> {
    view.brakes
        .iter()
        .filter(|brake| is_over(brake, &view.snapshot.facts))
        .map(|brake| {
            let whose = if brake.scope == "*" { "all machines" } else { &brake.scope };
            let why = brake.reason.trim_start_matches("brake: ");
            let why = if due.reason.contains(why) { String::new() } else { format!(": {why}") };
            format!(
                "the {} brake of {whose} has been on for {}{why}",
                brake.kind,
                rough_since(brake.engaged_at, now)
            )
        })
        .collect()
}

fn is_over(brake: &BrakeLine, facts: &MachineFacts) -> bool {
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
    if lane.policy_version != policy_version {
        return Some(
            "the policy was changed since its schedule was computed; the next sweep brings it up to date"
                .to_owned(),
        );
    }
    let differs = lane.process.as_deref() != due.process.map(Process::as_str);
    differs.then(|| {
        format!(
            "its stored schedule says {} ({}), which is not what its facts demand; the next sweep repairs that",
            lane.process.as_deref().unwrap_or("nothing"),
            lane.reason
        )
    })
}

fn advice(view: &MachineView, word: &str, now: Timestamp) -> Vec<Advice> {
    let facts = &view.snapshot.facts;
    let mut advice = Vec::new();
    let mut add = |command: String, when: &str| advice.push(Advice { command, when: when.to_owned() });
    let refused = view.host_keys.as_ref().and_then(|keys| keys.refused.as_ref());
    if let Some((offered, _)) = refused {
        add(
            format!("shepherdctl allow host-key {word} --fingerprint {}", offered.fingerprint()),
            "once you know that this key is the machine's own (on its console: ssh-keygen -lf \
             /etc/ssh/ssh_host_ed25519_key.pub)",
        );
        if facts.needs_human.is_some() {
            add(format!("shepherdctl retry {word}"), "when it shows the pinned key again");
        }
    }
    if facts.hold.as_ref().is_some_and(|hold| hold.holds_at(now)) {
        add(format!("shepherdctl release {word}"), "when the hold has served its purpose");
    }
    if facts.quarantine.is_some() {
        add(format!("shepherdctl release {word} --quarantine"), "when provider and BMDB agree again");
    }
    if facts.needs_human.is_some() && refused.is_none() {
        add(format!("shepherdctl timeline {word}"), "to see what was tried");
        add(format!("shepherdctl retry {word}"), "when you have helped: everything begins anew");
    } else if facts.backoffs.iter().any(|(_, fact)| fact.until > now) && refused.is_none() {
        add(format!("shepherdctl retry {word}"), "when the cause is gone: tries again at once");
    }
    if view.brakes.iter().any(|brake| is_over(brake, facts)) {
        add("shepherdctl get providers".to_owned(), "to see every brake that is on; they release themselves");
    }
    advice
}

/// A name as one word of a shell.
fn quoted(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@".contains(c);
    if !name.is_empty() && name.chars().all(plain) {
        return name.to_owned();
    }
    format!("'{}'", name.replace('\'', r"'\''"))
}

fn rough_since(at: Timestamp, now: Timestamp) -> String {
    rough(crate::model::time::between(at, now))
}

/// The answer for people.
#[must_use]
pub fn render(why: &Why, width: Option<usize>) -> String {
    let now = why.at;
    let short = why.name.short();
    let id = why.name.machine.to_string();
    let mut text = if short == id { format!("{id}\n") } else { format!("{short}  {id}\n") };
    let _ = match why.since {
        Some(since) if since <= now => {
            write!(text, "{} for {}, since {}\n\n", why.phase, rough_since(since, now), absolute(since))
        }
        _ => write!(text, "{}\n\n", why.phase),
    };
    let mut lines: Vec<(String, String)> = Vec::new();
    let mut add = |label: &str, value: String| lines.push((label.to_owned(), value));
    for work in &why.work {
        add("under way", work.clone());
    }
    add("why", why.waits_for.clone());
    if let Some(next) = next_line(why) {
        add("next", next);
    }
    if let Some(deadline) = &why.deadline {
        add("deadline", format!("{}; then {}", both(deadline.at, now), deadline.then));
    }
    for failure in &why.failures {
        let times =
            if failure.count == 1 { "once".to_owned() } else { format!("{} times in a row", failure.count) };
        let wait = Span(Duration::from_secs(failure.next_wait_seconds));
        add("failed", format!("{} {times}; after another failure it waits about {wait}", failure.process));
        if !why.waits_for.contains(&failure.cause) {
            add("last error", failure.cause.clone());
        }
    }
    for note in &why.notes {
        add("note", note.clone());
    }
    add("decided at", why.decided_at.clone());
    text.push_str(&labelled(2, &lines, width));
    if !why.advice.is_empty() {
        text.push_str("\nWhat would help:\n");
        for advice in &why.advice {
            let _ = writeln!(text, "  {}", advice.command);
            text.push_str(&labelled(4, &[(String::new(), advice.when.clone())], width));
        }
    }
    text
}

/// What happens next, unless that is under way and was said.
fn next_line(why: &Why) -> Option<String> {
    let Some(next) = &why.next else { return Some("nothing happens by time alone".to_owned()) };
    if why.work.iter().any(|work| work.starts_with(next.process)) {
        return None;
    }
    Some(if next.at > why.at {
        format!("{} {}", next.process, both(next.at, why.at))
    } else {
        format!("{} as soon as a worker is free; due {}", next.process, both(next.at, why.at))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_are_one_word_of_a_shell() {
        for (name, expected) in [
            ("sim/sim-0007", "sim/sim-0007"),
            ("rack a/1", "'rack a/1'"),
            ("it's", r"'it'\''s'"),
            ("$(reboot)", "'$(reboot)'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(name), expected);
        }
    }
}
