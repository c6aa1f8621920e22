//! The order to replace the signing keys that a machine has pinned, for keys that are lost (pure).

use serde_json::{Value, json};

use crate::engine::change_machine::Decision;
use crate::engine::fact_change::FactChange;
use crate::engine::fact_change::key_replacement::KeyReplacementChange;
use crate::engine::facts::MachineSnapshot;
use crate::orders::order::{OrderOutcome, OrderRejection, format_attribution};
use model::process::Process;
use model::signed_artefact::key_replacement::{KeyReplacement, REPLACEMENT_TTL};
use model::signed_artefact::signing_key::SigningKey;
use model::time::after;

/// Orders that the next takeover pins `keys`, those of the shepherd that takes the order, on behalf of `who`.
///
/// The outcome names the keys as a whole: the id of a key is no proof, and the admin who approves the order has nothing
/// else to compare them by.
pub fn allow_signing_keys(
    snapshot: &MachineSnapshot,
    keys: &[SigningKey],
    reason: &str,
    who: &str,
) -> Result<Decision<OrderOutcome>, OrderRejection> {
    let (facts, now) = (&snapshot.facts, snapshot.now);
    if keys.is_empty() {
        return Err((
            "NO_SIGNING_KEYS",
            "keeps its pinned signing keys: this shepherd has none; start the shepherds with --signing_keys_path, and \
             give the order to one of them"
                .to_owned(),
        ));
    }
    if facts.retirement.is_some() {
        return Err(("RETIRING", "is being retired, or was, and is taken over no more".to_owned()));
    }
    let present = facts.key_replacement.as_ref().filter(|order| order.is_active_at(now));
    if let Some(present) = present.filter(|order| order.is_for(keys)) {
        return Ok(OrderOutcome::already(format!(
            "already gets these signing keys with its next takeover, by order of {}: {}; nothing was changed",
            present.by, present.reason
        )));
    }
    let lines: Vec<String> = keys.iter().map(|key| key.as_str().to_owned()).collect();
    let text = format!(
        "is taken over within {REPLACEMENT_TTL}, and gets the signing keys {} in place of those that it has pinned",
        lines.join(" and ")
    );
    let order = KeyReplacement {
        keys: lines,
        reason: reason.to_owned(),
        by: who.to_owned(),
        ordered_at: now,
        expires_at: after(now, REPLACEMENT_TTL.0),
    };
    let ids: Vec<String> = keys.iter().map(|key| key.id().to_string()).collect();
    Ok(OrderOutcome::changed(
        vec![
            FactChange::KeyReplacement(KeyReplacementChange::Ordered(order)),
            FactChange::BackoffCleared(Process::AgentStart),
            FactChange::PostponementCleared(Process::AgentStart),
        ],
        "SigningKeysAllowed",
        format!("{}, {}", ids.join(", "), format_attribution(who, Some(reason))),
        text,
    ))
}

/// The order as the audit stores it.
pub(crate) fn audit_json(order: &KeyReplacement) -> Value {
    json!({ "keys": order.keys, "reason": order.reason, "by": order.by, "until": order.expires_at })
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::facts::{MachineFacts, Retirement};
    use model::ids::MachineId;
    use model::time::Timestamp;

    const FIRST: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    const SECOND: &str = "RWQCAgICAgICAIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU";

    #[test]
    fn order_is_for_the_keys_of_the_shepherd_and_ends() {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let key = |line: &str| SigningKey::parse(line).unwrap();
        let facts = |order: Option<(&str, i64)>, retiring: bool| {
            let mut facts = MachineFacts::empty(MachineId::generate(), now);
            facts.key_replacement = order.map(|(key, seconds)| KeyReplacement {
                keys: vec![key.to_owned()],
                reason: "the safe burnt".to_owned(),
                by: "kim".to_owned(),
                ordered_at: now,
                expires_at: Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap(),
            });
            facts.retirement = retiring.then(|| Retirement::new("sold".into(), "kim".into(), now));
            facts
        };
        for (name, facts, keys, changes, text) in [
            (
                "first",
                facts(None, false),
                vec![key(FIRST)],
                3,
                "is taken over within 1d, and gets the signing keys RWQB",
            ),
            ("again", facts(Some((FIRST, 1)), false), vec![key(FIRST)], 0, "already gets these signing keys"),
            ("over", facts(Some((FIRST, 0)), false), vec![key(FIRST)], 3, "is taken over within 1d"),
            ("other keys", facts(Some((SECOND, 1)), false), vec![key(FIRST)], 3, "is taken over within 1d"),
            ("no keys", facts(None, false), Vec::new(), 0, "NO_SIGNING_KEYS: keeps its pinned signing keys"),
            ("retired", facts(None, true), vec![key(FIRST)], 0, "RETIRING: is being retired"),
        ] {
            let snapshot = MachineSnapshot { facts, now, policy_version: 1 };
            let (count, message) = match allow_signing_keys(&snapshot, &keys, "they are lost", "lee") {
                Ok(decision) => (decision.changes.len(), decision.output.message),
                Err((reason, text)) => (0, format!("{reason}: {text}")),
            };
            assert_eq!(count, changes, "{name}: {message}");
            assert!(message.starts_with(text), "{name}: {message}");
        }
    }
}
