//! Validate incoming orders and encode their results.

use prost::Message;
use tonic::Status;

use crate::api::api_error::invalid_argument;
use crate::api::caller::Caller;
use crate::api::convert::{encode_machine_name, encode_optional_struct};
use crate::api::validate::single_line;
use bmdb::orders::order::{self, OrderResult, request_digest};
use model::machine_view::MachineName;
use proto::fleet::v1;

/// Longest reason and idempotency key, in characters.
const MAX_REASON_CHARS: usize = 2000;
const MAX_KEY_CHARS: usize = 128;

/// An order of a request: its call, the request and the order in it.
pub struct IncomingOrder<'a, M> {
    /// Path of the call without the leading slash.
    pub rpc: &'static str,
    /// The request, for the digest.
    pub request: &'a M,
    /// The order in the request; `None` is rejected.
    pub order: Option<&'a v1::Order>,
}

impl<M: Message> IncomingOrder<'_, M> {
    /// Validates the order. `target` is its subject as people call it.
    pub fn parse(&self, caller: &Caller, target: String) -> Result<order::Order, Status> {
        let order = self
            .order
            .ok_or_else(|| invalid_argument("order", "the request has no order; give it with a reason"))?;
        let reason = single_line("order.reason", &order.reason, MAX_REASON_CHARS)?;
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
        bytes.extend(self.request.encode_to_vec());
        Ok(order::Order {
            actor: caller.actor(),
            rpc: self.rpc.to_owned(),
            target,
            reason: reason.to_owned(),
            idempotency_key: Some(key.to_owned()).filter(|key| !key.is_empty()),
            dry_run: order.dry_run,
            expected_version: order.expected_version,
            request_digest: request_digest(&bytes),
        })
    }
}

/// Rejects an order with an expected version: the caller would rely on a check that is not made.
pub fn reject_expected_version(order: order::Order) -> Result<order::Order, Status> {
    match order.expected_version {
        None => Ok(order),
        Some(_) => {
            Err(invalid_argument("order.expected_version", "only a machine has a version; leave it out here"))
        }
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
        changed: carried.outcome.changed,
        message: carried.outcome.message.clone(),
        dry_run,
        replayed: carried.replayed,
        audit_id: carried.audit_id.to_string(),
        before: encode_optional_struct(carried.before.as_ref()),
        after: encode_optional_struct(carried.after.as_ref()),
    }
}
