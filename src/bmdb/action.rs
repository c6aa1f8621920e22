//! What operators may order about one machine, decided on what is known of it.
//!
//! Each order is a pure function from a snapshot to the facts to change, the line of history that names
//! who asked and why, and a sentence. [`crate::bmdb::audit`] carries it out under the machine's lock, for
//! the API and for `shepherdctl` alike.

use serde_json::{Map, Value, json};

use crate::bmdb::change::{FactChange, HostKeySource};
use crate::bmdb::facts::Snapshot;
use crate::bmdb::work::Decision;
use crate::model::facts::{Hold, HoldScope, MachineFacts};
use crate::model::host_key::PinnedHostKey;
use crate::model::label::{self, Labels};
use crate::model::needs_human::Obstacle;
use crate::model::priority::Level;
use crate::model::process::{Lane, Process};
use crate::model::telling::{absolute, relative};
use crate::model::time::{Span, Timestamp, after};

/// What became of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Done {
    /// Whether anything is different now.
    pub changed: bool,
    /// A sentence that goes on after the machine's name.
    pub said: String,
}

impl Done {
    /// Nothing is to be changed, and why.
    #[must_use]
    pub fn nothing(said: impl Into<String>) -> Decision<Self> {
        Decision { answer: Self { changed: false, said: said.into() }, ..Decision::default() }
    }

    /// These facts are to be changed, with one line of history.
    pub(crate) fn changed(
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

/// Who asked and why, as a line of history says it.
#[must_use]
pub fn by(who: &str, reason: Option<&str>) -> String {
    reason.map_or_else(|| format!("by {who}"), |reason| format!("by {who}: {reason}"))
}

/// When a hold ends: after a while, or at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After a while.
    After(Span),
    /// At a moment.
    At(Timestamp),
}

/// Reads `2h` or `2026-11-20T18:00:00Z`.
#[must_use]
pub fn read_until(text: &str) -> Option<Until> {
    if let Ok(moment) = chrono::DateTime::parse_from_rfc3339(text) {
        return Some(Until::At(moment.to_utc()));
    }
    text.parse().ok().map(Until::After)
}

/// A hold on it.
#[must_use]
pub fn hold(
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

/// The end of its hold, or of its quarantine.
#[must_use]
pub fn release(facts: &MachineFacts, quarantine: bool, by: &str) -> Decision<Done> {
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

/// Another try at once.
#[must_use]
pub fn retry(facts: &MachineFacts, by: &str) -> Decision<Done> {
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

/// A quarantine by hand. It lasts until it is released by hand, too: a provider's list explains only what the
/// list was the reason of.
#[must_use]
pub fn quarantine(facts: &MachineFacts, by: &str) -> Decision<Done> {
    if let Some(fact) = &facts.quarantine {
        return Done::nothing(format!("is quarantined already ({}); nothing was changed", fact.reason));
    }
    Done::changed(
        vec![FactChange::Quarantined(by.to_owned())],
        "QuarantineOrdered",
        by.to_owned(),
        "is quarantined until `release --quarantine`; work under way on it is told to stop",
    )
}

/// Its work before or behind that of others, or as the engine decides.
#[must_use]
pub fn prioritize(
    snapshot: &Snapshot,
    level: Level,
    reason: &str,
    who: &str,
    until: Option<Until>,
) -> Decision<Done> {
    let now = snapshot.now;
    let present = snapshot.facts.priority.as_ref();
    if level == Level::Normal {
        let Some(present) = present else {
            return Done::nothing("comes as the engine decides already; nothing was changed");
        };
        let detail =
            format!("{}, {} (was {} by {})", level, by(who, Some(reason)), present.level, present.by);
        let said = "comes as the engine decides from now on";
        return Done::changed(vec![FactChange::PriorityCleared], "Prioritized", detail, said);
    }
    let until = until.map(|until| match until {
        Until::After(span) => after(now, span.0),
        Until::At(moment) => moment,
    });
    if let Some(over) = until.filter(|until| *until <= now) {
        return Done::nothing(format!("stays as it is: {} is over; nothing was changed", absolute(over)));
    }
    let ends = until.map_or_else(
        || "until somebody says otherwise".to_owned(),
        |at| format!("until {} ({})", absolute(at), relative(at, now)),
    );
    let detail = until.map_or_else(String::new, |at| format!(" until {}", absolute(at)));
    let place = if level == Level::Urgent { "before" } else { "behind" };
    let replaced = present
        .filter(|present| present.holds_at(now))
        .map_or_else(String::new, |present| format!(", in place of {} by {}", present.level, present.by));
    let change = FactChange::Prioritized { level, reason: reason.to_owned(), by: who.to_owned(), until };
    Done::changed(
        vec![change],
        "Prioritized",
        format!("{level}{detail}, {}", by(who, Some(reason))),
        format!("comes {place} the others ({level}) {ends}{replaced}; what is under way goes on"),
    )
}

/// Other labels, or a sentence why it cannot have them.
pub fn label(present: &Labels, set: &Labels, remove: &[String], by: &str) -> Result<Decision<Done>, String> {
    let labels = label::relabelled(present, set, remove)?;
    if labels == *present {
        return Ok(Done::nothing("is labelled so already; nothing was changed"));
    }
    let said = match label::told(&labels) {
        none if none.is_empty() => "has no label any more".to_owned(),
        told => format!("is labelled {told}"),
    };
    let detail = format!("{} in place of {}, {by}", quoted(&labels), quoted(present));
    Ok(Done::changed(vec![FactChange::Labelled(labels)], "Labelled", detail, said))
}

fn quoted(labels: &Labels) -> String {
    match label::told(labels) {
        none if none.is_empty() => "no label".to_owned(),
        told => told,
    }
}

/// A ladder that was climbed to its end would end again at once, so it begins anew.
fn ask_no_person(facts: &MachineFacts) -> Vec<FactChange> {
    let mut changes = vec![FactChange::NeedsHumanCleared];
    if facts.recovery.is_some() {
        changes.push(FactChange::RecoveryCleared);
    }
    changes
}

/// Belief in the host key with that fingerprint, which a machine that people call `name` was refused for, or a
/// sentence why there is none to believe.
pub fn allow_host_key(
    facts: &MachineFacts,
    keys: Option<&PinnedHostKey>,
    name: &str,
    fingerprint: &str,
    by: &str,
) -> Result<Decision<Done>, String> {
    let Some(keys) = keys else {
        return Err(format!(
            "{name} has shown no SSH host key yet, so there is none to allow; the first one is believed"
        ));
    };
    let Some((refused, _)) = &keys.refused else {
        if keys.key.fingerprint() == fingerprint {
            return Ok(Done::nothing("believes that key already; nothing was changed"));
        }
        return Err(format!("no SSH host key of {name} was refused; pinned is {}", keys.key));
    };
    if refused.fingerprint() != fingerprint {
        return Err(format!(
            "{fingerprint} is not the key that {name} was refused for: that was {refused}; nothing was changed"
        ));
    }
    let mut changes = vec![FactChange::HostKeyPinned {
        algorithm: refused.algorithm.clone(),
        public_key: refused.key.clone(),
        source: HostKeySource::Allowed,
    }];
    changes.extend(after_host_key(facts));
    Ok(Done::changed(
        changes,
        "HostKeyAllowed",
        format!("{refused} in place of {}, {by}", keys.key.fingerprint()),
        format!("is believed with the host key {refused}; it is tried again at once"),
    ))
}

/// A fingerprint as people paste it.
#[must_use]
pub fn fingerprint(text: &str) -> &str {
    text.trim().trim_end_matches('=')
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

/// What orders are about, for the audit: before one and after it.
#[must_use]
pub fn ordered_about(facts: &MachineFacts, keys: Option<&PinnedHostKey>, labels: &Labels) -> Value {
    let mut told = Map::new();
    if !labels.is_empty() {
        told.insert("labels".into(), json!(labels));
    }
    if let Some(keys) = keys {
        let refused = keys.refused.as_ref().map(|(key, _)| key.fingerprint());
        told.insert("ssh_host_key".into(), json!({ "pinned": keys.key.fingerprint(), "refused": refused }));
    }
    if let Some(said) = &facts.priority {
        told.insert(
            "priority".into(),
            json!({ "level": said.level, "reason": said.reason, "by": said.by, "until": said.until }),
        );
    }
    if let Some(hold) = &facts.hold {
        told.insert(
            "hold".into(),
            json!({ "scope": hold.scope.as_str(), "reason": hold.reason, "by": hold.by, "until": hold.until }),
        );
    }
    if let Some(retirement) = &facts.retirement {
        let ordered = retirement.release.map(|order| order.at);
        let waived = retirement.wipe_waived.as_ref().map(|waiver| waiver.by.as_str());
        told.insert(
            "retirement".into(),
            json!({ "reason": retirement.reason, "by": retirement.by, "wipe": retirement.wipe,
                    "wipe_waived_by": waived, "release_ordered_at": ordered,
                    "finished_at": retirement.finished_at, "outcome": retirement.outcome }),
        );
    }
    if let Some(order) = &facts.power_order {
        let begun = order.begun.map(|begun| begun.at);
        told.insert(
            "power_order".into(),
            json!({ "switch": order.switch.as_str(), "reason": order.reason, "by": order.by, "at": order.at,
                    "begun_at": begun }),
        );
    }
    if let Some(quarantine) = &facts.quarantine {
        told.insert("quarantine".into(), json!({ "since": quarantine.since, "reason": quarantine.reason }));
    }
    if let Some(needed) = &facts.needs_human {
        told.insert(
            "needs_human".into(),
            json!({ "since": needed.since, "obstacle": needed.obstacle.as_str(), "reason": needed.reason }),
        );
    }
    if let Some(recovery) = &facts.recovery {
        told.insert("recovery".into(), json!({ "rung": recovery.rung, "tries": recovery.tries }));
    }
    let backoffs: Map<String, Value> = facts
        .backoffs
        .iter()
        .map(|(process, backoff)| {
            let told =
                json!({ "failures": backoff.failures, "until": backoff.until, "cause": backoff.cause });
            (process.as_str().to_owned(), told)
        })
        .collect();
    if !backoffs.is_empty() {
        told.insert("backoffs".into(), Value::Object(backoffs));
    }
    Value::Object(told)
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
            assert_eq!(read_until(text), None, "{text}");
        }
    }

    #[test]
    fn machine_is_quarantined_by_hand_once_and_labelled_where_that_makes_a_difference() {
        let mut facts = MachineFacts::unknown(
            crate::model::ids::MachineId(uuid::Uuid::from_u128(1)),
            Timestamp::UNIX_EPOCH,
        );
        let decided = quarantine(&facts, "by kim: its fan rattles");
        assert_eq!(decided.changes, [FactChange::Quarantined("by kim: its fan rattles".into())]);
        facts.quarantine =
            Some(crate::model::facts::Quarantine { since: Timestamp::UNIX_EPOCH, reason: "by lee".into() });
        let again = quarantine(&facts, "by kim");
        assert!(again.changes.is_empty() && again.answer.said.contains("by lee"), "{again:?}");

        let row = |value: &str| Labels::from([("row".to_owned(), value.to_owned())]);
        for (present, set, remove, expected) in [
            (Labels::new(), row("7"), vec![], Some("is labelled row=7")),
            (row("7"), row("7"), vec![], None),
            (row("7"), Labels::new(), vec!["row".to_owned()], Some("has no label any more")),
            (Labels::new(), Labels::new(), vec!["row".to_owned()], None),
        ] {
            let decided = label(&present, &set, &remove, "by kim").unwrap();
            let said = decided.answer.changed.then_some(decided.answer.said.as_str());
            assert_eq!((said, decided.changes.is_empty()), (expected, expected.is_none()), "{present:?}");
        }
    }
}
