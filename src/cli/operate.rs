//! `hold`, `release`, `retry`, `allow`: what an operator may change.
//!
//! Each decides under the machine's lock on what is known there, and leaves a
//! line of history that names who asked and why. Who that is, is what the
//! environment says; whoever may write to the BMDB is believed.

use serde::Serialize;

use crate::bmdb::change::{FactChange, HostKeySource};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::work::Decision;
use crate::cli::command::{AllowHostKey, Hold as HoldArguments, Release, Retry};
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::{find, id_of};
use crate::cli::output::Format;
use crate::model::facts::{Hold, HoldScope, MachineFacts};
use crate::model::machine_view::MachineName;
use crate::model::needs_human::Obstacle;
use crate::model::process::{Lane, Process};
use crate::model::telling::{absolute, relative};
use crate::model::time::{Span, Timestamp, after};

/// What became of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Done {
    /// Whether anything is different now.
    changed: bool,
    /// A sentence.
    said: String,
}

impl Done {
    fn nothing(said: impl Into<String>) -> Decision<Self> {
        Decision { answer: Self { changed: false, said: said.into() }, ..Decision::default() }
    }

    fn changed(
        changes: Vec<FactChange>,
        event: &str,
        detail: String,
        said: impl Into<String>,
    ) -> Decision<Self> {
        Decision {
            changes,
            events: vec![(event.to_owned(), detail)],
            answer: Self { changed: true, said: said.into() },
        }
    }
}

#[derive(Serialize)]
struct DoneAnswer {
    #[serde(flatten)]
    name: MachineName,
    #[serde(flatten)]
    done: Done,
}

fn told(name: MachineName, done: Done, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => json(&DoneAnswer { name, done }),
        Format::Table => Ok(format!("{} {}\n", name.short(), done.said)),
    }
}

/// Who asks, for the history: `kim@workstation`.
pub(crate) fn who() -> String {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
    let user = variable("USER")
        .or_else(|| variable("LOGNAME"))
        .unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy())
}

pub(crate) fn by(who: &str, reason: Option<&str>) -> String {
    reason.map_or_else(|| format!("by {who}"), |reason| format!("by {who}: {reason}"))
}

/// `hold M`.
pub async fn hold(bmdb: &Bmdb, arguments: &HoldArguments, format: Format) -> Result<String, CliError> {
    let until = arguments.until.as_deref().map(read_until).transpose()?;
    let scope = HoldScope::ALL.into_iter().find(|scope| scope.as_str() == arguments.scope);
    let scope = scope.unwrap_or(HoldScope::Everything);
    if arguments.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever asks `why` later will want to know".into()));
    }
    let (reason, who) = (arguments.reason.clone(), who());
    let name = find(bmdb, &arguments.machine).await?;
    let done = bmdb
        .change_machine(id_of(&name), move |snapshot| plan_hold(snapshot, scope, &reason, &who, until))
        .await?;
    told(name, done, format)
}

/// When a hold ends: after a while, or at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    After(Span),
    At(Timestamp),
}

fn read_until(text: &str) -> Result<Until, CliError> {
    if let Ok(moment) = chrono::DateTime::parse_from_rfc3339(text) {
        return Ok(Until::At(moment.to_utc()));
    }
    text.parse().map(Until::After).map_err(|_| {
        CliError::Wrong(format!(
            "--until {text:?} is neither a duration (2h, 30m, 1d) nor a moment (2026-11-20T18:00:00Z)"
        ))
    })
}

fn plan_hold(
    snapshot: &Snapshot,
    scope: HoldScope,
    reason: &str,
    who: &str,
    until: Option<Until>,
) -> Decision<Done> {
    let now = snapshot.now;
    let until = until.map(|until| match until {
        Until::After(span) => after(now, span.0),
        Until::At(moment) => moment,
    });
    if let Some(over) = until.filter(|until| *until <= now) {
        return Done::nothing(format!("is not held: {} is over; nothing was changed", absolute(over)));
    }
    let ends = until.map_or_else(
        || "until it is released".to_owned(),
        |at| format!("until {} ({})", absolute(at), relative(at, now)),
    );
    let hold = Hold { scope, reason: reason.to_owned(), by: who.to_owned(), until };
    let replaced = if snapshot.facts.hold.is_some() { ", in place of an earlier hold" } else { "" };
    let detail = match until {
        Some(at) => format!("{} until {}, {}", scope.as_str(), absolute(at), by(who, Some(reason))),
        None => format!("{}, {}", scope.as_str(), by(who, Some(reason))),
    };
    Done::changed(
        vec![FactChange::Held(hold)],
        "Held",
        detail,
        format!(
            "is held ({}) {ends}{replaced}; work under way that this covers is told to stop",
            scope.as_str()
        ),
    )
}

/// `release M`.
pub async fn release(bmdb: &Bmdb, arguments: &Release, format: Format) -> Result<String, CliError> {
    let (quarantine, reason, who) = (arguments.quarantine, arguments.reason.clone(), who());
    let name = find(bmdb, &arguments.machine).await?;
    let done = bmdb
        .change_machine(id_of(&name), move |snapshot| {
            plan_release(&snapshot.facts, quarantine, &by(&who, reason.as_deref()))
        })
        .await?;
    told(name, done, format)
}

fn plan_release(facts: &MachineFacts, quarantine: bool, by: &str) -> Decision<Done> {
    if quarantine {
        let Some(fact) = &facts.quarantine else {
            return Done::nothing("is not quarantined; nothing was changed");
        };
        return Done::changed(
            vec![FactChange::QuarantineCleared],
            "QuarantineReleased",
            format!("{by} (was: {})", fact.reason),
            "is not quarantined any more",
        );
    }
    match &facts.hold {
        Some(hold) => Done::changed(
            vec![FactChange::HoldCleared],
            "Released",
            format!("{by} (was held by {}: {})", hold.by, hold.reason),
            "is released",
        ),
        None if facts.quarantine.is_some() => Done::nothing(
            "is not held but quarantined; `release --quarantine` ends that. Nothing was changed",
        ),
        None => Done::nothing("is not held; nothing was changed"),
    }
}

/// `retry M`.
pub async fn retry(bmdb: &Bmdb, arguments: &Retry, format: Format) -> Result<String, CliError> {
    let (reason, who) = (arguments.reason.clone(), who());
    let name = find(bmdb, &arguments.machine).await?;
    let done = bmdb
        .change_machine(id_of(&name), move |snapshot| {
            plan_retry(&snapshot.facts, &by(&who, reason.as_deref()))
        })
        .await?;
    told(name, done, format)
}

fn plan_retry(facts: &MachineFacts, by: &str) -> Decision<Done> {
    let mut changes: Vec<FactChange> =
        facts.backoffs.keys().map(|process| FactChange::BackoffCleared(*process)).collect();
    let mut forgotten: Vec<String> =
        facts.backoffs.keys().map(|process| format!("failures of {}", process.as_str())).collect();
    if facts.needs_human.is_some() {
        changes.extend(ask_no_person(facts));
        forgotten.push("that it needs a person".to_owned());
    }
    if changes.is_empty() {
        return Done::nothing(
            "has no failures to forget; nothing was changed (`why` says what it waits for)",
        );
    }
    let forgotten = forgotten.join(", ");
    Done::changed(
        changes,
        "Retried",
        format!("{by} (forgot {forgotten})"),
        format!("is tried again: forgot {forgotten}"),
    )
}

/// A ladder that was climbed to its end would end again at once, so it begins anew.
fn ask_no_person(facts: &MachineFacts) -> Vec<FactChange> {
    let mut changes = vec![FactChange::NeedsHumanCleared];
    if facts.recovery.is_some() {
        changes.push(FactChange::RecoveryCleared);
    }
    changes
}

/// `allow host-key M`.
pub async fn allow_host_key(
    bmdb: &Bmdb,
    arguments: &AllowHostKey,
    format: Format,
) -> Result<String, CliError> {
    let name = find(bmdb, &arguments.machine).await?;
    let fingerprint = arguments.fingerprint.trim().trim_end_matches('=').to_owned();
    let view = bmdb.machine_view(id_of(&name)).await?;
    let Some(keys) = view.host_keys else {
        return Err(CliError::Wrong(format!(
            "{} has shown no SSH host key yet, so there is none to allow; the first one is believed",
            name.short()
        )));
    };
    let Some((refused, _)) = keys.refused else {
        if keys.key.fingerprint() == fingerprint {
            let done = Done { changed: false, said: "believes that key already; nothing was changed".into() };
            return told(name, done, format);
        }
        return Err(CliError::Wrong(format!(
            "no SSH host key of {} was refused; pinned is {}",
            name.short(),
            keys.key
        )));
    };
    if refused.fingerprint() != fingerprint {
        return Err(CliError::Wrong(format!(
            "{fingerprint} is not the key that {} was refused for: that was {}; nothing was changed",
            name.short(),
            refused
        )));
    }
    // The key is named by its fingerprint, so whatever happens between reading and writing, the one
    // pinned is the one that the person meant.
    let (pinned, by) = (keys.key.fingerprint(), by(&who(), arguments.reason.as_deref()));
    let done = bmdb
        .change_machine(id_of(&name), move |snapshot| {
            let mut changes = vec![FactChange::HostKeyPinned {
                algorithm: refused.algorithm.clone(),
                public_key: refused.key.clone(),
                source: HostKeySource::Allowed,
            }];
            changes.extend(after_host_key(&snapshot.facts));
            let detail = format!("{refused} in place of {pinned}, {by}");
            Done::changed(
                changes,
                "HostKeyAllowed",
                detail,
                format!("is believed with the host key {refused}; it is tried again at once"),
            )
        })
        .await?;
    told(name, done, format)
}

/// What the refused key was the cause of: waits in the lane that connects, and a call for a person
/// because of it.
fn after_host_key(facts: &MachineFacts) -> Vec<FactChange> {
    let mut changes: Vec<FactChange> = facts
        .backoffs
        .keys()
        .filter(|process: &&Process| process.lane() == Lane::Access)
        .map(|process| FactChange::BackoffCleared(*process))
        .collect();
    if facts.needs_human.as_ref().is_some_and(|fact| fact.obstacle == Obstacle::HostKeyChanged) {
        changes.extend(ask_no_person(facts));
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hold_ends_after_a_while_or_at_a_moment() {
        assert_eq!(read_until("2h").unwrap(), Until::After(Span::hours(2)));
        let moment = "2026-11-20T18:00:00Z".parse().unwrap();
        assert_eq!(read_until("2026-11-20T19:00:00+01:00").unwrap(), Until::At(moment));
        for text in ["", "soon", "2", "2026-11-20"] {
            assert!(read_until(text).is_err(), "{text}");
        }
    }
}
