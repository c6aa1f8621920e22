//! An order of an operator: actor, idempotency key, reason, dry run, outcome.

use serde_json::Value;
use uuid::Uuid;

use crate::engine::change_machine::Decision;
use crate::engine::fact_change::FactChange;
use model::humanize::absolute_time;
use model::time::{Span, Timestamp, after};

/// The person or program that gives an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// The name that people and the audit use.
    pub name: String,
    /// The credential they authenticated with; `None` for a client that writes to the BMDB directly.
    pub credential: Option<Uuid>,
}

/// An order with everything that makes it repeatable and traceable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Who gives the order.
    pub actor: Actor,
    /// The RPC it came by, as `shepherd.fleet.v1.Machines/Hold`.
    pub rpc: String,
    /// What it is about, for people.
    pub target: String,
    /// The actor's reason, for history and the audit.
    pub reason: String,
    /// Its name among the orders of its actor; `None` if it cannot be repeated safely.
    pub idempotency_key: Option<String>,
    /// Whether to undo everything and only report what would happen.
    pub dry_run: bool,
    /// The version that the machine must still have; `None` for any.
    pub expected_version: Option<i64>,
    /// Digest that distinguishes it from another order with the same key.
    pub request_digest: [u8; 32],
}

/// The outcome of an order.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct OrderOutcome {
    /// Whether anything is different now.
    pub changed: bool,
    /// A phrase that follows the machine's name.
    pub message: String,
}

impl OrderOutcome {
    /// An outcome that changes nothing, and why.
    #[must_use]
    pub fn unchanged(text: impl Into<String>) -> Decision<Self> {
        Decision { output: Self { changed: false, message: text.into() }, ..Decision::default() }
    }

    /// An outcome that changes these facts, with one line of history.
    pub(crate) fn changed(
        changes: Vec<FactChange>,
        event: &str,
        detail: String,
        text: impl Into<String>,
    ) -> Decision<Self> {
        Decision {
            changes,
            events: vec![(event.to_owned(), detail)],
            output: Self { changed: true, message: text.into() },
        }
    }
}

/// What the transaction of an order did: its outcome, and the state of the order's target for the audit.
#[derive(Debug)]
pub(crate) struct OrderEffect {
    /// Whether anything changed, and the message for people.
    pub(crate) outcome: OrderOutcome,
    /// State of the order's target before it; `None` if it has none.
    pub(crate) before: Option<Value>,
    /// State of the order's target after it; `None` if it has none.
    pub(crate) after: Option<Value>,
}

impl OrderEffect {
    /// An effect that changes something.
    pub(crate) fn changed(text: impl Into<String>, before: Option<Value>, after: Option<Value>) -> Self {
        Self { outcome: OrderOutcome { changed: true, message: text.into() }, before, after }
    }

    /// An effect that changes nothing, and why. The target has the state `same` before and after.
    pub(crate) fn unchanged(text: impl Into<String>, same: Option<Value>) -> Self {
        let outcome = OrderOutcome { changed: false, message: text.into() };
        Self { outcome, before: same.clone(), after: same }
    }
}

/// The result of an order.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderResult {
    /// Whether anything changed, and the message for people.
    pub outcome: OrderOutcome,
    /// Whether the order was carried out before and this is its first result.
    pub replayed: bool,
    /// Id of its line in the audit.
    pub audit_id: Uuid,
    /// State of the order's target before it; `None` if it has none.
    pub before: Option<Value>,
    /// State of the order's target after it; `None` if it has none.
    pub after: Option<Value>,
}

/// Digest of an encoded request, which distinguishes it from every other one.
#[must_use]
pub fn request_digest(data: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, data);
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    bytes
}

/// The rejection of an order: a reason for programs, and a phrase that follows the machine's name.
pub type OrderRejection = (&'static str, String);

/// The actor and the reason as a line of history names them.
#[must_use]
pub fn format_attribution(who: &str, reason: Option<&str>) -> String {
    reason.map_or_else(|| format!("by {who}"), |reason| format!("by {who}: {reason}"))
}

/// When a hold or another temporary setting ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// After this long, counted from the order.
    After(Span),
    /// At this moment of the database's clock.
    At(Timestamp),
}

impl Expiry {
    /// The moment of expiry, for an order that is given at `now`.
    pub(crate) fn resolve(self, now: Timestamp) -> Timestamp {
        match self {
            Self::After(span) => after(now, span.0),
            Self::At(moment) => moment,
        }
    }

    /// The end for a sentence, as the order has it: `for 2h`, `until …`.
    pub(crate) fn describe(self) -> String {
        match self {
            Self::After(span) => format!("for {span}"),
            Self::At(moment) => format!("until {}", absolute_time(moment)),
        }
    }
}

/// Parses `2h` or `2026-11-20T18:00:00Z`.
#[must_use]
pub fn parse_expiry(text: &str) -> Option<Expiry> {
    if let Ok(moment) = chrono::DateTime::parse_from_rfc3339(text) {
        return Some(Expiry::At(moment.to_utc()));
    }
    text.parse().ok().map(Expiry::After)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_is_a_duration_or_a_timestamp() {
        assert_eq!(parse_expiry("2h").unwrap(), Expiry::After(Span::hours(2)));
        let moment = "2026-11-20T18:00:00Z".parse().unwrap();
        assert_eq!(parse_expiry("2026-11-20T19:00:00+01:00").unwrap(), Expiry::At(moment));
        for text in ["", "soon", "2", "2026-11-20"] {
            assert_eq!(parse_expiry(text), None, "{text}");
        }
    }
}
