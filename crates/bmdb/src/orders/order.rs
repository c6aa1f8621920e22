//! An order of an operator: actor, idempotency key, reason, dry run, outcome.

use serde_json::Value;
use uuid::Uuid;

use crate::engine::change_machine::Decision;
use crate::engine::fact_change::FactChange;
use model::humanize::absolute_time;
use model::time::{Span, Timestamp, after, between};

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

/// What an order did about what it requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutcomeKind {
    /// Something is different now; after a dry run, something would be.
    Changed,
    /// What was requested holds already, and nothing was changed.
    Already,
    /// What was requested does not hold, and nothing was changed.
    #[default]
    NoEffect,
}

impl OutcomeKind {
    /// All kinds of outcome, in the order of their exit codes.
    pub const ALL: [Self; 3] = [Self::Changed, Self::Already, Self::NoEffect];

    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Changed => "CHANGED",
            Self::Already => "ALREADY",
            Self::NoEffect => "NO_EFFECT",
        }
    }

    /// The name in the audit, which has one more for rejected orders.
    #[must_use]
    pub(crate) const fn audit_name(self) -> &'static str {
        match self {
            Self::Changed => "changed",
            Self::Already => "unchanged",
            Self::NoEffect => "no_effect",
        }
    }

    /// The kind with this name in the audit. `None` for a rejected order.
    #[must_use]
    pub(crate) fn from_audit_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.audit_name() == name)
    }
}

/// The outcome of an order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OrderOutcome {
    /// What the order did.
    pub kind: OutcomeKind,
    /// A phrase that follows the machine's name.
    pub message: String,
}

impl OrderOutcome {
    /// Whether anything is different now.
    #[must_use]
    pub const fn is_changed(&self) -> bool {
        matches!(self.kind, OutcomeKind::Changed)
    }

    /// An outcome that changes nothing, because what was requested holds already.
    #[must_use]
    pub fn already(text: impl Into<String>) -> Decision<Self> {
        Self::without_changes(OutcomeKind::Already, text)
    }

    /// An outcome that changes nothing although what was requested does not hold, and why.
    #[must_use]
    pub fn no_effect(text: impl Into<String>) -> Decision<Self> {
        Self::without_changes(OutcomeKind::NoEffect, text)
    }

    fn without_changes(kind: OutcomeKind, text: impl Into<String>) -> Decision<Self> {
        Decision { output: Self { kind, message: text.into() }, ..Decision::default() }
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
            output: Self { kind: OutcomeKind::Changed, message: text.into() },
        }
    }
}

/// What the transaction of an order did: its outcome, and the state of the order's target for the audit.
#[derive(Debug)]
pub(crate) struct OrderEffect {
    /// What the order did, and the message for people.
    pub(crate) outcome: OrderOutcome,
    /// State of the order's target before it; `None` if it has none.
    pub(crate) before: Option<Value>,
    /// State of the order's target after it; `None` if it has none.
    pub(crate) after: Option<Value>,
}

impl OrderEffect {
    /// An effect that changes something.
    pub(crate) fn changed(text: impl Into<String>, before: Option<Value>, after: Option<Value>) -> Self {
        let outcome = OrderOutcome { kind: OutcomeKind::Changed, message: text.into() };
        Self { outcome, before, after }
    }

    /// An effect that changes nothing, because what was requested holds already. The target has the state `same` before
    /// and after.
    pub(crate) fn already(text: impl Into<String>, same: Option<Value>) -> Self {
        Self::without_changes(OutcomeKind::Already, text, same)
    }

    /// An effect that changes nothing although what was requested does not hold, and why. The target has the state `same`
    /// before and after.
    pub(crate) fn no_effect(text: impl Into<String>, same: Option<Value>) -> Self {
        Self::without_changes(OutcomeKind::NoEffect, text, same)
    }

    fn without_changes(kind: OutcomeKind, text: impl Into<String>, same: Option<Value>) -> Self {
        let outcome = OrderOutcome { kind, message: text.into() };
        Self { outcome, before: same.clone(), after: same }
    }
}

/// The result of an order.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderResult {
    /// What the order did, and the message for people.
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

/// The reason of the rejection of an order that would end before it begins.
pub const EXPIRY_PASSED: &str = "EXPIRY_PASSED";

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

    /// How long something lasts that begins at `now`, in whole seconds if it ends at a moment. A moment that has passed is
    /// an error.
    pub(crate) fn remaining(self, now: Timestamp) -> Result<Span, OrderRejection> {
        match self {
            Self::After(span) => Ok(span),
            Self::At(moment) if moment > now => Ok(Span::seconds(between(now, moment).as_secs())),
            Self::At(moment) => {
                Err((EXPIRY_PASSED, format!("{} is over; nothing was changed", absolute_time(moment))))
            }
        }
    }

    /// The end for a sentence, as the order has it: `for 2h`, `until …`.
    #[must_use]
    pub fn describe(self) -> String {
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
    fn outcome_is_found_again_by_its_name_in_the_audit() {
        for kind in OutcomeKind::ALL {
            assert_eq!(OutcomeKind::from_audit_name(kind.audit_name()), Some(kind));
        }
        assert_eq!(OutcomeKind::from_audit_name("refused"), None);
    }

    #[test]
    fn remaining_time_ends_at_the_moment_or_is_refused() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let now = at("2026-11-20T18:00:00Z");
        for (expiry, expected) in [
            (Expiry::After(Span::hours(2)), Some(Span::hours(2))),
            (Expiry::At(at("2026-11-20T18:30:00Z")), Some(Span::minutes(30))),
            // Never longer than until the moment.
            (Expiry::At(at("2026-11-20T18:00:09.999Z")), Some(Span::seconds(9))),
            (Expiry::At(now), None),
            (Expiry::At(at("2026-11-20T17:59:59Z")), None),
        ] {
            assert_eq!(expiry.remaining(now).ok(), expected, "{expiry:?}");
        }
        let over = Expiry::At(now).remaining(now).unwrap_err().1;
        assert!(over.contains("is over; nothing was changed"), "{over}");
    }

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
