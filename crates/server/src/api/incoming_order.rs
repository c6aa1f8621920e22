//! Validate incoming orders, carry them out and encode their results.
//!
//! A call that takes an order parses the fields of its own and passes the rest to [`IncomingOrder::execute`]: the order
//! is validated, carried out by the BMDB, and its result or its error encoded. Orders for one machine do the same with
//! `services/machines/order_execution.rs`, which finds the machine first.

use prost::Message;
use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::convert::{encode_machine_name, encode_optional_struct};
use crate::api::validate::{canonical_line, single_line};
use bmdb::connection::error::BmdbError;
use bmdb::orders::order::{self, OrderResult, OutcomeKind, request_digest};
use model::machine_view::MachineName;
use proto::fleet::v1;

/// Longest reason and idempotency key, in characters.
const MAX_REASON_CHARS: usize = 2000;
const MAX_KEY_CHARS: usize = 128;

/// The response to an order.
pub type OrderReply = Result<Response<v1::OrderResponse>, Status>;

/// An order of a request: its call, the request and the order in it.
pub struct IncomingOrder<'a, M> {
    /// Path of the call without the leading slash.
    pub rpc: &'static str,
    /// The request, for the caller and the digest.
    pub request: &'a Request<M>,
    /// The order in the request; `None` is rejected.
    pub order: Option<&'a v1::Order>,
}

impl<M: Message> IncomingOrder<'_, M> {
    /// Carries out an order that is not about one machine: validates it, has `execute` carry it out, and encodes the
    /// result. `target` is its subject as people call it.
    pub async fn execute<F>(self, target: String, execute: impl FnOnce(order::Order) -> F) -> OrderReply
    where
        F: Future<Output = Result<OrderResult, BmdbError>>,
    {
        let order = self.parse_unversioned(target)?;
        let dry_run = order.dry_run;
        let carried = execute(order).await.map_err(bmdb_status)?;
        Ok(Response::new(encode_order_response(None, dry_run, &carried)))
    }

    /// Validates an order that is not about one machine. An expected version is rejected: the caller would rely on a
    /// check that is not made.
    pub fn parse_unversioned(&self, target: String) -> Result<order::Order, Status> {
        let order = self.parse(target)?;
        match order.expected_version {
            None => Ok(order),
            Some(_) => Err(invalid_argument(
                "order.expected_version",
                "only a machine has a version; leave it out here",
            )),
        }
    }

    /// Validates the order. `target` is its subject as people call it.
    pub fn parse(&self, target: String) -> Result<order::Order, Status> {
        let caller = caller_of(self.request)?;
        let order = self
            .order
            .ok_or_else(|| invalid_argument("order", "the request has no order; give it with a reason"))?;
        let reason = canonical_line("order.reason", &order.reason, MAX_REASON_CHARS)?;
        if reason.is_empty() {
            return Err(invalid_argument(
                "order.reason",
                "the order has no reason; give one for the operator who reads the audit",
            ));
        }
        let key = single_line("order.idempotency_key", &order.idempotency_key, MAX_KEY_CHARS)?;
        if key.is_empty() && !order.dry_run {
            return Err(invalid_argument(
                "order.idempotency_key",
                "the order has no idempotency key; give it one of its own, for example a UUID, so that it can be \
                 given again without being carried out twice",
            ));
        }
        let mut bytes = self.rpc.as_bytes().to_vec();
        bytes.push(0);
        bytes.extend(self.request.get_ref().encode_to_vec());
        Ok(order::Order {
            actor: caller.actor(),
            rpc: self.rpc.to_owned(),
            target,
            reason,
            idempotency_key: Some(key.to_owned()).filter(|key| !key.is_empty()),
            dry_run: order.dry_run,
            expected_version: order.expected_version,
            request_digest: request_digest(&bytes),
        })
    }
}

/// Encodes the result of an order.
#[must_use]
pub fn encode_order_response(
    about: Option<&MachineName>,
    dry_run: bool,
    carried: &OrderResult,
) -> v1::OrderResponse {
    v1::OrderResponse {
        name: about.map(encode_machine_name),
        changed: carried.outcome.is_changed(),
        message: carried.outcome.message.clone(),
        dry_run,
        replayed: carried.replayed,
        audit_id: carried.audit_id.to_string(),
        before: encode_optional_struct(carried.before.as_ref()),
        after: encode_optional_struct(carried.after.as_ref()),
        outcome: encode_outcome_kind(carried.outcome.kind).into(),
        // Services of orders that nothing undoes add it.
        confirmation: None,
    }
}

/// Encodes what an order did.
#[must_use]
pub const fn encode_outcome_kind(kind: OutcomeKind) -> v1::order_response::Outcome {
    match kind {
        OutcomeKind::Changed => v1::order_response::Outcome::Changed,
        OutcomeKind::Already => v1::order_response::Outcome::Already,
        OutcomeKind::NoEffect => v1::order_response::Outcome::NoEffect,
    }
}
