//! Orders as they come in, and what became of them as it goes out.

use prost::Message;
use tonic::Status;

use crate::bmdb::audit::{self, Carried, request_digest};
use crate::model::machine_view::MachineName;
use crate::proto::fleet::v1;
use crate::server::api::convert::{name, optional_structure};
use crate::server::api::door::Caller;
use crate::server::api::refusal::wrong;
use crate::server::api::texts::line;

/// Longest reason and idempotency key, in characters.
const LONGEST_REASON: usize = 2000;
const LONGEST_KEY: usize = 128;

/// An order as it was said: which call, in which request.
pub struct Said<'a, M> {
    /// The call, as its path is without the first slash.
    pub rpc: &'static str,
    /// The request.
    pub request: &'a M,
    /// Its order.
    pub order: Option<&'a v1::Order>,
}

impl<M: Message> Said<'_, M> {
    /// The order, once its form is right, about something that people call `target`.
    pub fn read(&self, caller: &Caller, target: String) -> Result<audit::Order, Status> {
        let order =
            self.order.ok_or_else(|| wrong("order", "the request has no order; give it with a reason"))?;
        let reason = line("order.reason", &order.reason, LONGEST_REASON)?;
        if reason.is_empty() {
            return Err(wrong(
                "order.reason",
                "the order has no reason; whoever reads the audit will want to know",
            ));
        }
        let key = line("order.idempotency_key", &order.idempotency_key, LONGEST_KEY)?;
        if key.is_empty() && !order.dry_run {
            return Err(wrong(
                "order.idempotency_key",
                "the order has no idempotency key; give it one of its own, for example a UUID, so that it can be \
                 given again without being carried out twice",
            ));
        }
        let mut said = self.rpc.as_bytes().to_vec();
        said.push(0);
        said.extend(self.request.encode_to_vec());
        Ok(audit::Order {
            actor: caller.actor(),
            rpc: self.rpc.to_owned(),
            target,
            reason: reason.to_owned(),
            idempotency_key: Some(key.to_owned()).filter(|key| !key.is_empty()),
            dry_run: order.dry_run,
            expected_version: order.expected_version,
            request: request_digest(&said),
        })
    }
}

/// Refuses an order for a version: whoever gives it believes that it is looked at.
pub fn of_no_version(order: audit::Order) -> Result<audit::Order, Status> {
    match order.expected_version {
        None => Ok(order),
        Some(_) => Err(wrong("order.expected_version", "only a machine has a version; leave it out here")),
    }
}

/// What became of an order.
#[must_use]
pub fn answer(about: Option<&MachineName>, dry_run: bool, carried: &Carried) -> v1::OrderResponse {
    v1::OrderResponse {
        name: about.map(name),
        changed: carried.done.changed,
        said: carried.done.said.clone(),
        dry_run,
        repeated: carried.repeated,
        audit: carried.audit.to_string(),
        before: optional_structure(carried.before.as_ref()),
        after: optional_structure(carried.after.as_ref()),
    }
}
