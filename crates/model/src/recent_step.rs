//! Recent steps: what was done to a machine lately, as the intents record it.
//!
//! An intent outlives the fact that led to it: a ladder ends, and so does a power order, and only the intent still shows
//! what was done. `why` derives from it that a machine has just recovered, or was just switched off. An intent is for
//! people, but how its two texts begin is fixed here.

use crate::power_order::PowerOrderKind;
use crate::time::Timestamp;

/// How the outcome of an intent begins if the step was taken.
pub const STEP_DONE: &str = "done: ";
/// How the outcome of an intent begins if the step failed.
pub const STEP_FAILED: &str = "failed: ";

/// What separates the operator from the order in the detail of an intent.
const ORDERED_TO: &str = " ordered to ";

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// It was taken, as far as its performer knows.
    Done,
    /// It failed, so that nothing is known to have changed.
    Failed,
    /// It may have been taken.
    Unknown,
}

/// An operator's order that a step carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepOrder {
    /// What the operator ordered: reboot, on, off or cycle.
    pub kind: PowerOrderKind,
    /// The operator who ordered it.
    pub by: String,
}

/// A step that was taken on a machine, or may have been.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentStep {
    /// Kind of the step, such as `restart-agent`.
    pub kind: String,
    /// The order that it carried out; `None` for a step of recovery.
    pub order: Option<StepOrder>,
    /// When it was begun.
    pub begun_at: Timestamp,
    /// When its outcome was recorded; `None` while it is not known.
    pub settled_at: Option<Timestamp>,
    /// How it ended, by its record.
    pub outcome: StepOutcome,
}

impl RecentStep {
    /// The step that an intent records: its kind and its detail, when it was begun and settled, and its outcome.
    #[must_use]
    pub fn from_intent(
        kind: String,
        detail: &str,
        begun_at: Timestamp,
        settled_at: Option<Timestamp>,
        outcome: Option<&str>,
    ) -> Self {
        let outcome = match outcome {
            Some(text) if text.starts_with(STEP_DONE) => StepOutcome::Done,
            Some(text) if text.starts_with(STEP_FAILED) => StepOutcome::Failed,
            _ => StepOutcome::Unknown,
        };
        Self { kind, order: parse_order_detail(detail), begun_at, settled_at, outcome }
    }
}

/// The detail of the intent for an order.
#[must_use]
pub fn format_order_detail(by: &str, kind: PowerOrderKind) -> String {
    format!("{by}{ORDERED_TO}{}", kind.phrase())
}

fn parse_order_detail(detail: &str) -> Option<StepOrder> {
    let (by, phrase) = detail.rsplit_once(ORDERED_TO)?;
    let kind = PowerOrderKind::ALL.into_iter().find(|kind| kind.phrase() == phrase)?;
    Some(StepOrder { kind, by: by.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_read_from_the_detail_of_its_intent() {
        for kind in PowerOrderKind::ALL {
            let order = StepOrder { kind, by: "kim ordered to lee".to_owned() };
            assert_eq!(parse_order_detail(&format_order_detail(&order.by, kind)), Some(order));
        }
        for detail in ["about to reboot the machine (try 1)", "kim ordered to dance", ""] {
            assert_eq!(parse_order_detail(detail), None, "{detail}");
        }
    }

    #[test]
    fn outcome_is_read_from_the_outcome_of_the_intent() {
        let outcome = |text| {
            RecentStep::from_intent("reboot".to_owned(), "", Timestamp::UNIX_EPOCH, None, text).outcome
        };
        for (text, expected) in [
            (Some("done: the provider took the order"), StepOutcome::Done),
            (Some("failed: no route to host"), StepOutcome::Failed),
            (Some("unknown: its session ended"), StepOutcome::Unknown),
            (None, StepOutcome::Unknown),
        ] {
            assert_eq!(outcome(text), expected, "{text:?}");
        }
    }
}
