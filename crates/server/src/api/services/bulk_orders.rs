//! gRPC service `BulkOrders`: one order for all machines of a selector, or for those that it names.

use std::collections::HashSet;

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, invalid_argument, not_found};
use crate::api::caller::{Caller, caller_of};
use crate::api::context::ApiContext;
use crate::api::convert::encode_machine_name;
use crate::api::incoming_order::{IncomingOrder, encode_outcome_kind};
use crate::api::services::machine_filter::parse_filter;
use crate::api::services::order_confirmation::{encode_confirmation, find_irreversible};
use crate::api::services::order_fields::{
    parse_expiry_after, parse_expiry_at, parse_hold_scope, parse_label_order, parse_power_action,
    parse_priority_level,
};
use bmdb::machine::lookup::LookupResult;
use bmdb::orders::bulk_orders::{BulkOrderResult, MachineOutcome, MachineSelection, NamedMachines};
use bmdb::orders::machine_order::MachineOrder;
use model::access::AccessRole;
use model::order_limits::MAX_EXAMINED_MACHINES;
use model::order_rules::{Confirmation, ConfirmationKind};
use model::power_order::PowerOrderKind;
use model::rpc_name::SUBMIT_BULK_ORDER_RPC;
use proto::fleet::v1;
use proto::fleet::v1::bulk_orders_server::BulkOrders;
use proto::fleet::v1::hold_operation;
use proto::fleet::v1::prioritize_operation;
use proto::fleet::v1::submit_bulk_order_request::Operation;

/// Most names of one request.
const MAX_NAMES: usize = 1000;

/// The gRPC service `BulkOrders`.
pub struct BulkOrdersService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl BulkOrders for BulkOrdersService {
    async fn submit(
        &self,
        request: Request<v1::SubmitBulkOrderRequest>,
    ) -> Result<Response<v1::SubmitBulkOrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let each = parse_machine_order(body.operation.as_ref())?;
        let expected = match body.expected_machines {
            None => None,
            Some(count) => Some(
                usize::try_from(count)
                    .map_err(|_| invalid_argument("expected_machines", "expected_machines is negative"))?,
            ),
        };
        let named = self.find_named_machines(&caller, body, &each).await?;
        let target = if named.is_some() { "the machines of a list" } else { "the machines of a selector" };
        let selection = MachineSelection {
            filter: parse_filter(&body.selector)?,
            named,
            scope: caller.scope().clone(),
            expected,
            beyond_limits: body.beyond_limits,
            is_admin: caller.role() >= AccessRole::Admin,
            max_examined: MAX_EXAMINED_MACHINES,
        };
        let order =
            IncomingOrder { rpc: SUBMIT_BULK_ORDER_RPC, request: &request, order: body.order.as_ref() }
                .parse_unversioned(target.to_owned())?;
        let dry_run = order.dry_run;
        let who = caller.name().to_owned();
        let given = self
            .context
            .bmdb
            .execute_bulk_order(order, selection, each.clone(), who)
            .await
            .map_err(bmdb_status)?;
        let confirmation = if dry_run { self.find_confirmation(&given, &each).await? } else { None };
        Ok(Response::new(v1::SubmitBulkOrderResponse {
            outcomes: given.outcomes.iter().map(encode_outcome).collect(),
            dry_run,
            replayed: given.replayed,
            audit_id: given.audit_id.to_string(),
            rejection: given.rejection,
            undecided_reason: given.undecided_reason,
            confirmation: confirmation.map(encode_confirmation),
        }))
    }
}

impl BulkOrdersService {
    /// The machines that the request names, each once; `None` if a selector selects them. A name that fits no machine, or
    /// several, ends the call, so that no machine gets the order.
    async fn find_named_machines(
        &self,
        caller: &Caller,
        body: &v1::SubmitBulkOrderRequest,
        each: &MachineOrder,
    ) -> Result<Option<NamedMachines>, Status> {
        if body.names.is_empty() {
            return Ok(None);
        }
        validate_names(body)?;
        let (mut machines, mut known): (Vec<Uuid>, HashSet<Uuid>) = (Vec::new(), HashSet::new());
        for (name, found) in body.names.iter().zip(self.context.find_machines(caller, &body.names).await?) {
            match found {
                LookupResult::One(found) if known.insert(found.machine) => machines.push(found.machine),
                LookupResult::One(_) => {}
                LookupResult::Unresolved(message) => return Err(not_found("machine", name.trim(), message)),
            }
        }
        let must_be_counted = find_irreversible(&self.context, each, &machines).await?.is_some();
        Ok(Some(NamedMachines { machines, must_be_counted }))
    }

    /// What a person types before this order is given; `None` if another order undoes it on each machine that it changes.
    async fn find_confirmation(
        &self,
        dry_run: &BulkOrderResult,
        each: &MachineOrder,
    ) -> Result<Option<Confirmation>, Status> {
        let is_undecided = dry_run.undecided_reason.is_some();
        let affected = dry_run.outcomes.iter().filter(|one| is_undecided || one.outcome.is_changed());
        let machines: Vec<Uuid> = affected.map(|one| one.name.machine).collect();
        if machines.is_empty() {
            return Ok(None);
        }
        let reason = find_irreversible(&self.context, each, &machines).await?;
        let text = dry_run.outcomes.len().to_string();
        Ok(reason.map(|reason| Confirmation { kind: ConfirmationKind::Count, text, reason }))
    }
}

/// Rejects a request with too many names, or with a selector beside them.
fn validate_names(body: &v1::SubmitBulkOrderRequest) -> Result<(), Status> {
    if body.names.len() > MAX_NAMES {
        let text = format!("names has {} names; send at most {MAX_NAMES} in one request", body.names.len());
        return Err(invalid_argument("names", text));
    }
    if !body.selector.is_empty() {
        return Err(invalid_argument(
            "names",
            "names cannot be set together with selector; send one of them",
        ));
    }
    Ok(())
}

fn encode_outcome(outcome: &MachineOutcome) -> v1::MachineOrderOutcome {
    v1::MachineOrderOutcome {
        name: Some(encode_machine_name(&outcome.name)),
        changed: outcome.outcome.is_changed(),
        message: outcome.outcome.message.clone(),
        rejected: outcome.rejected,
        outcome: encode_outcome_kind(outcome.outcome.kind).into(),
    }
}

fn parse_machine_order(what: Option<&Operation>) -> Result<MachineOrder, Status> {
    Ok(match what {
        None => {
            return Err(invalid_argument("operation", "the request has no operation; give hold, release, …"));
        }
        Some(Operation::Hold(hold)) => MachineOrder::Hold {
            scope: parse_hold_scope(&hold.scope)?,
            until: match &hold.expiry {
                None => None,
                Some(hold_operation::Expiry::ExpiresAt(time)) => Some(parse_expiry_at(*time)?),
                Some(hold_operation::Expiry::ExpiresAfter(text)) => Some(parse_expiry_after(text)?),
            },
        },
        Some(Operation::Release(release)) => MachineOrder::Release { quarantine: release.quarantine },
        Some(Operation::Retry(_)) => MachineOrder::Retry,
        Some(Operation::Quarantine(_)) => MachineOrder::Quarantine,
        Some(Operation::Retire(retire)) => {
            MachineOrder::Retire { wipe: retire.wipe, keep_authority: retire.keep_authority }
        }
        Some(Operation::CancelRetire(_)) => MachineOrder::CancelRetire,
        Some(Operation::CancelPower(_)) => MachineOrder::CancelPower,
        Some(Operation::Reboot(_)) => MachineOrder::Power(PowerOrderKind::Reboot),
        Some(Operation::Power(power)) => MachineOrder::Power(parse_power_action(&power.action)?),
        Some(Operation::Prioritize(each)) => MachineOrder::Prioritize {
            level: parse_priority_level(&each.level)?,
            until: match &each.expiry {
                None => None,
                Some(prioritize_operation::Expiry::ExpiresAt(time)) => Some(parse_expiry_at(*time)?),
                Some(prioritize_operation::Expiry::ExpiresAfter(text)) => Some(parse_expiry_after(text)?),
            },
        },
        Some(Operation::Label(label)) => {
            let set = label.set.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
            parse_label_order(set, label.remove.clone())?
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_exclude_a_selector() {
        let request = |count: usize, selector: &str| v1::SubmitBulkOrderRequest {
            names: vec!["sim-0007".to_owned(); count],
            selector: selector.to_owned(),
            ..v1::SubmitBulkOrderRequest::default()
        };
        for (request, valid) in [
            (request(1, ""), true),
            (request(MAX_NAMES, ""), true),
            (request(MAX_NAMES + 1, ""), false),
            (request(1, "phase=Ready"), false),
        ] {
            assert_eq!(validate_names(&request).is_ok(), valid, "{} names", request.names.len());
        }
    }
}
