//! Outcome of an order: decoded from a response of the API, and in the exit code.
//!
//! [`crate::order::retry::send_order`] records the exit code of each response, so that no order is without one. It also
//! records what the orders were about, for `--wait`.

use std::sync::{Mutex, PoisonError};

use crate::exit_code::{CommandEnd, ExitCode, exit_code};
use bmdb::orders::order::{OrderOutcome, OutcomeKind};
use proto::fleet::v1;
use proto::fleet::v1::order_response::Outcome;

/// A response to an order.
pub trait OrderReply {
    /// The exit code of the order.
    fn exit_code(&self) -> ExitCode;

    /// What the order was about and has an effect on. Empty for a dry run.
    fn targets(&self) -> Vec<OrderTarget> {
        Vec::new()
    }
}

/// Something that an order has an effect on.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderTarget {
    /// The machine; `None` for an order that is not about one.
    pub machine: Option<v1::MachineName>,
    /// The state of the target after the order, if it was recorded.
    pub after: Option<prost_types::Struct>,
}

/// What the orders of a command have an effect on.
#[derive(Debug, Default)]
pub struct AffectedObjects(Mutex<Vec<OrderTarget>>);

impl AffectedObjects {
    /// Records the targets of one order.
    pub fn record(&self, mut targets: Vec<OrderTarget>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).append(&mut targets);
    }

    /// Everything that was recorded.
    #[must_use]
    pub fn all(&self) -> Vec<OrderTarget> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl OrderReply for v1::OrderResponse {
    fn exit_code(&self) -> ExitCode {
        exit_code(CommandEnd::Outcome(decode_kind(self.outcome, self.changed)))
    }

    fn targets(&self) -> Vec<OrderTarget> {
        if self.dry_run || decode_kind(self.outcome, self.changed) == OutcomeKind::NoEffect {
            return Vec::new();
        }
        vec![OrderTarget { machine: self.name.clone(), after: self.after.clone() }]
    }
}

impl OrderReply for v1::CreateCredentialResponse {
    fn exit_code(&self) -> ExitCode {
        self.order.as_ref().map_or(ExitCode::Failed, OrderReply::exit_code)
    }
}

impl OrderReply for v1::RequestLogResponse {
    fn exit_code(&self) -> ExitCode {
        self.order.as_ref().map_or(ExitCode::Failed, OrderReply::exit_code)
    }
}

impl OrderReply for v1::SubmitBulkOrderResponse {
    /// The highest code of the machines. An order about no machine has found none.
    fn exit_code(&self) -> ExitCode {
        if self.rejection.is_some() {
            return exit_code(CommandEnd::Rejected);
        }
        // A dry run that decided on no machine has only found that the order would be given.
        if self.undecided_reason.is_some() {
            return ExitCode::Done;
        }
        let codes = self.outcomes.iter().map(|one| {
            exit_code(if one.rejected {
                CommandEnd::Rejected
            } else {
                CommandEnd::Outcome(decode_kind(one.outcome, one.changed))
            })
        });
        codes.max().unwrap_or(ExitCode::NotFound)
    }

    fn targets(&self) -> Vec<OrderTarget> {
        let has_effect = |one: &&v1::MachineOrderOutcome| {
            !self.dry_run && !one.rejected && decode_kind(one.outcome, one.changed) != OutcomeKind::NoEffect
        };
        let outcomes = self.outcomes.iter().filter(has_effect);
        outcomes.map(|one| OrderTarget { machine: one.name.clone(), after: None }).collect()
    }
}

/// Whether an order changed anything.
pub(crate) fn is_changed(response: &v1::OrderResponse) -> bool {
    decode_kind(response.outcome, response.changed) == OutcomeKind::Changed
}

/// The outcome of a bulk order on one machine.
pub(crate) fn decode_machine_outcome(outcome: i32, changed: bool, message: String) -> OrderOutcome {
    OrderOutcome { kind: decode_kind(outcome, changed), message }
}

/// What an order did. A server of an earlier release only reports whether something was changed. An order that changed
/// nothing may then be one that was not needed, and counts as one without effect.
fn decode_kind(outcome: i32, changed: bool) -> OutcomeKind {
    match Outcome::try_from(outcome).unwrap_or(Outcome::Unspecified) {
        Outcome::Changed => OutcomeKind::Changed,
        Outcome::Already => OutcomeKind::Already,
        Outcome::Unspecified if changed => OutcomeKind::Changed,
        Outcome::NoEffect | Outcome::Unspecified => OutcomeKind::NoEffect,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(outcome: Outcome) -> v1::OrderResponse {
        v1::OrderResponse { outcome: outcome.into(), ..v1::OrderResponse::default() }
    }

    #[test]
    fn response_decides_the_exit_code_of_an_order() {
        for (outcome, expected) in [(Outcome::Changed, 0), (Outcome::Already, 0), (Outcome::NoEffect, 1)] {
            assert_eq!(response(outcome).exit_code().number(), expected, "{outcome:?}");
            let created = v1::CreateCredentialResponse {
                order: Some(response(outcome)),
                ..v1::CreateCredentialResponse::default()
            };
            assert_eq!(created.exit_code().number(), expected, "{outcome:?}");
        }
        let before = |changed| v1::OrderResponse { changed, ..v1::OrderResponse::default() };
        assert_eq!(before(true).exit_code(), ExitCode::Done, "of the release before");
        assert_eq!(before(false).exit_code(), ExitCode::Failed, "of the release before");
    }

    #[test]
    fn target_is_what_an_order_has_an_effect_on() {
        for (outcome, dry_run, expected) in [
            (Outcome::Changed, false, 1),
            (Outcome::Already, false, 1),
            (Outcome::NoEffect, false, 0),
            (Outcome::Changed, true, 0),
        ] {
            let one = v1::OrderResponse { dry_run, ..response(outcome) };
            assert_eq!(one.targets().len(), expected, "{outcome:?}");
            let outcomes = [(outcome, false), (Outcome::Changed, true)].map(|(outcome, rejected)| {
                let outcome = outcome.into();
                v1::MachineOrderOutcome { outcome, rejected, ..v1::MachineOrderOutcome::default() }
            });
            let outcomes = outcomes.to_vec();
            let bulk = v1::SubmitBulkOrderResponse { outcomes, dry_run, ..Default::default() };
            let targets = AffectedObjects::default();
            targets.record(bulk.targets());
            assert_eq!(targets.all().len(), expected, "{outcome:?}");
        }
    }

    #[test]
    fn bulk_order_exits_with_the_highest_code_of_its_machines() {
        let bulk = |outcomes: &[(Outcome, bool)], rejection: Option<&str>| {
            let outcomes = outcomes.iter().map(|(outcome, rejected)| v1::MachineOrderOutcome {
                outcome: (*outcome).into(),
                rejected: *rejected,
                ..v1::MachineOrderOutcome::default()
            });
            let response = v1::SubmitBulkOrderResponse {
                outcomes: outcomes.collect(),
                rejection: rejection.map(str::to_owned),
                ..v1::SubmitBulkOrderResponse::default()
            };
            response.exit_code().number()
        };
        let (changed, already) = ((Outcome::Changed, false), (Outcome::Already, false));
        let (no_effect, rejected) = ((Outcome::NoEffect, false), (Outcome::NoEffect, true));
        for (outcomes, expected) in [
            (&[changed, already][..], 0),
            (&[changed, no_effect, already], 1),
            (&[rejected, no_effect, changed], 4),
            (&[], 3),
        ] {
            assert_eq!(bulk(outcomes, None), expected, "{outcomes:?}");
        }
        assert_eq!(bulk(&[changed], Some("too many")), 4, "a dry run of an order that would be rejected");
        let undecided = v1::SubmitBulkOrderResponse {
            outcomes: vec![v1::MachineOrderOutcome::default()],
            undecided_reason: Some("too many".to_owned()),
            ..v1::SubmitBulkOrderResponse::default()
        };
        assert_eq!(undecided.exit_code(), ExitCode::Done, "a dry run that decided on no machine");
    }
}
