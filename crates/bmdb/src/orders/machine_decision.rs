//! Operator orders about one machine as pure decisions: hold, release, retry, quarantine, prioritize, label, allow a
//! host key.
//!
//! Each order is a pure function from a snapshot to the facts to change, the line of history that names the actor and
//! the reason, and a message for people. [`crate::orders::machine_order`] executes it under the machine's lock, for the
//! API and for `shepherdctl` alike.

use serde_json::{Map, Value, json};

use crate::engine::change_machine::Decision;
use crate::engine::fact_change::{FactChange, HostKeySource};
use crate::engine::facts::MachineSnapshot;
use crate::orders::key_replacement;
use crate::orders::order::{EXPIRY_PASSED, Expiry, OrderOutcome, OrderRejection, format_attribution};
use model::facts::{Hold, HoldScope, MachineFacts};
use model::host_key::PinnedHostKey;
use model::humanize::{absolute_time, remaining_time};
use model::label::{self, Labels};
use model::needs_human::Obstacle;
use model::phase::silence_deadline;
use model::policy::Policy;
use model::priority::PriorityLevel;
use model::process::{Lane, Process};
use model::time::Timestamp;

/// Puts a hold on the machine, or explains why it would be over already.
pub fn hold_machine(
    snapshot: &MachineSnapshot,
    scope: HoldScope,
    reason: &str,
    who: &str,
    until: Option<Expiry>,
) -> Result<Decision<OrderOutcome>, OrderRejection> {
    let now = snapshot.now;
    let until = until.map(|until| until.resolve(now));
    if let Some(over) = until.filter(|until| *until <= now) {
        let text = format!("is not held: {} is over; nothing was changed", absolute_time(over));
        return Err((EXPIRY_PASSED, text));
    }
    let ends = until.map_or_else(|| "until it is released".to_owned(), |at| remaining_time(at, now));
    let hold = Hold { scope, reason: reason.to_owned(), by: who.to_owned(), until };
    let replaced = if snapshot.facts.hold.is_some() { ", in place of an earlier hold" } else { "" };
    let detail = match until {
        Some(at) => format!(
            "{} until {}, {}",
            scope.as_str(),
            absolute_time(at),
            format_attribution(who, Some(reason))
        ),
        None => format!("{}, {}", scope.as_str(), format_attribution(who, Some(reason))),
    };
    Ok(OrderOutcome::changed(
        vec![FactChange::HoldSet(hold)],
        "Held",
        detail,
        format!(
            "is held ({}) {ends}{replaced}; work under way that this covers is ordered to stop",
            scope.as_str()
        ),
    ))
}

/// Releases the machine from its hold, or from its quarantine.
#[must_use]
pub fn release_machine(facts: &MachineFacts, quarantine: bool, by: &str) -> Decision<OrderOutcome> {
    if quarantine {
        let Some(fact) = &facts.quarantine else {
            return OrderOutcome::already("is not quarantined; nothing was changed");
        };
        return OrderOutcome::changed(
            vec![FactChange::QuarantineCleared],
            "QuarantineReleased",
            format!("{by} (was: {})", fact.reason),
            "is not quarantined any more",
        );
    }
    match &facts.hold {
        Some(hold) => OrderOutcome::changed(
            vec![FactChange::HoldCleared],
            "Released",
            format!("{by} (was held by {}: {})", hold.by, hold.reason),
            "is released",
        ),
        None if facts.quarantine.is_some() => OrderOutcome::no_effect(
            "is not held but quarantined; `release --quarantine` ends that. Nothing was changed",
        ),
        None => OrderOutcome::already("is not held; nothing was changed"),
    }
}

/// Lets everything that failed on the machine be tried again at once.
#[must_use]
pub fn retry_machine(snapshot: &MachineSnapshot, policy: &Policy, by: &str) -> Decision<OrderOutcome> {
    let facts = &snapshot.facts;
    let mut changes: Vec<FactChange> =
        facts.backoffs.keys().map(|process| FactChange::BackoffCleared(*process)).collect();
    let mut forgotten: Vec<String> =
        facts.backoffs.keys().map(|process| format!("failures of {}", process.as_str())).collect();
    if facts.needs_human.is_some() {
        changes.extend(clear_needs_human(facts));
        forgotten.push("its NeedsHuman state".to_owned());
    }
    if changes.is_empty() {
        let text = "has no failures to clear; nothing was changed (`why` says what it waits for)";
        return if is_waiting(facts, policy, snapshot.now) {
            OrderOutcome::no_effect(text)
        } else {
            OrderOutcome::already(text)
        };
    }
    let forgotten = forgotten.join(", ");
    OrderOutcome::changed(
        changes,
        "Retried",
        format!("{by} (cleared {forgotten})"),
        format!("is retried: cleared {forgotten}"),
    )
}

/// Whether a machine without failures waits for something that `retry` does not end. A silent machine waits before its
/// recovery ladder begins, too.
fn is_waiting(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> bool {
    facts.heartbeat.is_none()
        || facts.hold.as_ref().is_some_and(|hold| hold.is_active_at(now))
        || facts.quarantine.is_some()
        || facts.recovery.is_some()
        || facts.retirement.is_some()
        || facts.power_order.is_some()
        || facts.key_replacement.as_ref().is_some_and(|order| order.expires_at > now)
        || !facts.postponements.is_empty()
        || silence_deadline(facts, policy).is_some_and(|silent| silent <= now)
}

/// Quarantines the machine by order of an operator. Such a quarantine lasts until an operator releases it: a provider's
/// list only ends a quarantine that the list was the reason for.
#[must_use]
pub fn quarantine_machine(facts: &MachineFacts, by: &str) -> Decision<OrderOutcome> {
    if let Some(fact) = &facts.quarantine {
        return OrderOutcome::already(format!(
            "is quarantined already ({}); nothing was changed",
            fact.reason
        ));
    }
    OrderOutcome::changed(
        vec![FactChange::Quarantined(by.to_owned())],
        "QuarantineOrdered",
        by.to_owned(),
        "is quarantined until `release --quarantine`; work under way on it is ordered to stop",
    )
}

/// Puts the machine's work before or behind that of others, or returns it to the engine's order. The error is why the
/// priority would be over already.
pub fn prioritize_machine(
    snapshot: &MachineSnapshot,
    level: PriorityLevel,
    reason: &str,
    who: &str,
    until: Option<Expiry>,
) -> Result<Decision<OrderOutcome>, OrderRejection> {
    let now = snapshot.now;
    let present = snapshot.facts.priority.as_ref();
    if level == PriorityLevel::Normal {
        let Some(present) = present else {
            let text = "already has the engine's own priority; nothing was changed";
            return Ok(OrderOutcome::already(text));
        };
        let detail = format!(
            "{}, {} (was {} by {})",
            level,
            format_attribution(who, Some(reason)),
            present.level,
            present.by
        );
        let text = "has the engine's own priority from now on";
        let changes = vec![FactChange::PriorityCleared];
        return Ok(OrderOutcome::changed(changes, "Prioritized", detail, text));
    }
    let until = until.map(|until| until.resolve(now));
    if let Some(over) = until.filter(|until| *until <= now) {
        let text =
            format!("the priority stays as it is: {} is over; nothing was changed", absolute_time(over));
        return Err((EXPIRY_PASSED, text));
    }
    let ends = until.map_or_else(|| "until somebody says otherwise".to_owned(), |at| remaining_time(at, now));
    let detail = until.map_or_else(String::new, |at| format!(" until {}", absolute_time(at)));
    let place = if level == PriorityLevel::Urgent { "before" } else { "behind" };
    let replaced = present
        .filter(|present| present.is_active_at(now))
        .map_or_else(String::new, |present| format!(", in place of {} by {}", present.level, present.by));
    let change = FactChange::Prioritized { level, reason: reason.to_owned(), by: who.to_owned(), until };
    Ok(OrderOutcome::changed(
        vec![change],
        "Prioritized",
        format!("{level}{detail}, {}", format_attribution(who, Some(reason))),
        format!("comes {place} the others ({level}) {ends}{replaced}; running work continues"),
    ))
}

/// Sets and removes labels, or explains why the machine cannot have them.
pub(crate) fn label_machine(
    present: &Labels,
    set: &Labels,
    remove: &[String],
    by: &str,
) -> Result<Decision<OrderOutcome>, String> {
    let labels = label::apply_label_changes(present, set, remove)?;
    if labels == *present {
        return Ok(OrderOutcome::already("already has these labels; nothing was changed"));
    }
    let text = match label::format_labels(&labels) {
        none if none.is_empty() => "has no label any more".to_owned(),
        message => format!("is labelled {message}"),
    };
    let detail = format!("{} in place of {}, {by}", labels_or_none(&labels), labels_or_none(present));
    Ok(OrderOutcome::changed(vec![FactChange::LabelsSet(labels)], "Labelled", detail, text))
}

fn labels_or_none(labels: &Labels) -> String {
    match label::format_labels(labels) {
        none if none.is_empty() => "no label".to_owned(),
        text => text,
    }
}

/// A ladder that was climbed to its end would end again at once, so it is cleared and starts from the first rung.
fn clear_needs_human(facts: &MachineFacts) -> Vec<FactChange> {
    let mut changes = vec![FactChange::NeedsHumanCleared];
    if facts.recovery.is_some() {
        changes.push(FactChange::RecoveryCleared);
    }
    changes
}

/// Pins the refused host key with that fingerprint, or explains why there is none to allow. `name` is what people call
/// the machine.
pub fn allow_host_key(
    facts: &MachineFacts,
    keys: Option<&PinnedHostKey>,
    name: &str,
    fingerprint: &str,
    by: &str,
) -> Result<Decision<OrderOutcome>, String> {
    let Some(keys) = keys else {
        return Err(format!(
            "{name} has shown no SSH host key yet, so there is none to allow; the first one is accepted"
        ));
    };
    let Some((refused, _)) = &keys.rejected else {
        if keys.key.fingerprint() == fingerprint {
            return Ok(OrderOutcome::already("already has that key pinned; nothing was changed"));
        }
        return Err(format!("no SSH host key of {name} was rejected; the pinned one is {}", keys.key));
    };
    if refused.fingerprint() != fingerprint {
        return Err(format!(
            "{fingerprint} is not the rejected key of {name}, which is {refused}; nothing was changed"
        ));
    }
    let mut changes = vec![FactChange::HostKeyPinned {
        algorithm: refused.algorithm.clone(),
        public_key: refused.key.clone(),
        source: HostKeySource::Allowed,
    }];
    changes.extend(clear_host_key_failures(facts));
    Ok(OrderOutcome::changed(
        changes,
        "HostKeyAllowed",
        format!("{refused} in place of {}, {by}", keys.key.fingerprint()),
        format!("is accepted with the host key {refused}, and is retried at once"),
    ))
}

/// A fingerprint as people paste it, without spaces around it and without padding.
#[must_use]
pub fn trim_fingerprint(text: &str) -> &str {
    text.trim().trim_end_matches('=')
}

/// Clears what the refused key caused: backoffs in the access lane, and a request for a person because of it.
fn clear_host_key_failures(facts: &MachineFacts) -> Vec<FactChange> {
    let mut changes: Vec<FactChange> = facts
        .backoffs
        .keys()
        .filter(|process: &&Process| process.lane() == Lane::Access)
        .map(|process| FactChange::BackoffCleared(*process))
        .collect();
    if facts.needs_human.as_ref().is_some_and(|fact| fact.obstacle == Obstacle::HostKeyChanged) {
        changes.extend(clear_needs_human(facts));
    }
    changes
}

/// The state of a machine for the audit, taken before an order and after it.
#[must_use]
pub(crate) fn audit_state(facts: &MachineFacts, keys: Option<&PinnedHostKey>, labels: &Labels) -> Value {
    let mut reports = Map::new();
    if !labels.is_empty() {
        reports.insert("labels".into(), json!(labels));
    }
    if let Some(keys) = keys {
        let refused = keys.rejected.as_ref().map(|(key, _)| key.fingerprint());
        reports
            .insert("ssh_host_key".into(), json!({ "pinned": keys.key.fingerprint(), "refused": refused }));
    }
    if let Some(priority) = &facts.priority {
        reports.insert(
            "priority".into(),
            json!({ "level": priority.level, "reason": priority.reason, "by": priority.by, "until": priority.until }),
        );
    }
    if let Some(hold) = &facts.hold {
        reports.insert(
            "hold".into(),
            json!({ "scope": hold.scope.as_str(), "reason": hold.reason, "by": hold.by, "until": hold.until }),
        );
    }
    if let Some(retirement) = &facts.retirement {
        let ordered = retirement.release.map(|order| order.recorded_at);
        let waived = retirement.wipe_waived.as_ref().map(|waiver| waiver.by.as_str());
        reports.insert(
            "retirement".into(),
            json!({ "reason": retirement.reason, "by": retirement.by, "wipe": retirement.wipe,
                    "wipe_waived_by": waived, "release_ordered_at": ordered,
                    "finished_at": retirement.finished_at, "outcome": retirement.outcome }),
        );
    }
    if let Some(order) = &facts.power_order {
        let begun = order.intent.map(|begun| begun.recorded_at);
        reports.insert(
            "power_order".into(),
            json!({ "switch": order.kind.as_str(), "reason": order.reason, "by": order.by, "at": order.ordered_at,
                    "begun_at": begun }),
        );
    }
    if let Some(order) = &facts.key_replacement {
        reports.insert("signing_keys".into(), key_replacement::audit_json(order));
    }
    if let Some(quarantine) = &facts.quarantine {
        reports
            .insert("quarantine".into(), json!({ "since": quarantine.since, "reason": quarantine.reason }));
    }
    if let Some(needed) = &facts.needs_human {
        reports.insert(
            "needs_human".into(),
            json!({ "since": needed.since, "obstacle": needed.obstacle.as_str(), "reason": needed.reason }),
        );
    }
    if let Some(recovery) = &facts.recovery {
        reports.insert("recovery".into(), json!({ "rung": recovery.rung, "tries": recovery.attempts }));
    }
    let backoffs: Map<String, Value> = facts
        .backoffs
        .iter()
        .map(|(process, backoff)| {
            let value =
                json!({ "failures": backoff.failures, "until": backoff.until, "cause": backoff.cause });
            (process.as_str().to_owned(), value)
        })
        .collect();
    if !backoffs.is_empty() {
        reports.insert("backoffs".into(), Value::Object(backoffs));
    }
    Value::Object(reports)
}

#[cfg(test)]
mod tests;
