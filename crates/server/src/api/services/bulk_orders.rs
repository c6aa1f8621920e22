//! gRPC service `BulkOrders`: one order for all machines of a selector.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::encode_machine_name;
use crate::api::incoming_order::{IncomingOrder, encode_outcome_kind};
use crate::api::services::machine_filter::parse_filter;
use crate::api::services::order_fields::{
    parse_expiry_after, parse_expiry_at, parse_hold_scope, parse_label_order, parse_power_action,
    parse_priority_level,
};
use bmdb::orders::bulk_orders::{MachineOutcome, MachineSelection, RPC};
use bmdb::orders::machine_order::MachineOrder;
use model::access::AccessRole;
use model::power_order::PowerOrderKind;
use proto::fleet::v1;
use proto::fleet::v1::bulk_orders_server::BulkOrders;
use proto::fleet::v1::hold_operation;
use proto::fleet::v1::prioritize_operation;
use proto::fleet::v1::submit_bulk_order_request::Operation;

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
        let selection = MachineSelection {
            filter: parse_filter(&body.selector)?,
            scope: caller.scope().clone(),
            expected,
            beyond_limits: body.override_limits,
            is_admin: caller.role() >= AccessRole::Admin,
        };
        let order = IncomingOrder { rpc: RPC, request: &request, order: body.order.as_ref() }
            .parse_unversioned("the machines of a selector".to_owned())?;
        let dry_run = order.dry_run;
        let who = caller.name().to_owned();
        let given =
            self.context.bmdb.execute_bulk_order(order, selection, each, who).await.map_err(bmdb_status)?;
        Ok(Response::new(v1::SubmitBulkOrderResponse {
            outcomes: given.outcomes.iter().map(encode_outcome).collect(),
            dry_run,
            replayed: given.replayed,
            audit_id: given.audit_id.to_string(),
            rejection: given.rejection,
            undecided_reason: given.undecided_reason,
        }))
    }
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
