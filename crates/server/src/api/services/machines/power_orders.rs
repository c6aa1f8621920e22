//! Orders of the service Machines that reboot or switch power.

use tonic::Request;

use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::{IncomingOrder, OrderReply};
use crate::api::services::machines::order_execution::try_execute_order;
use crate::api::services::order_confirmation::{confirm_dry_run, find_irreversible};
use crate::api::services::order_fields::parse_power_action;
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::power_order;
use model::order_rules::{Confirmation, ConfirmationKind};
use model::power_order::PowerOrderKind;
use model::rpc_name::{CANCEL_POWER_RPC, POWER_RPC, REBOOT_RPC};
use proto::fleet::v1;

/// Handles `Machines.Reboot`: orders a reboot.
pub async fn reboot_machine(context: &ApiContext, request: &Request<v1::RebootRequest>) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder { rpc: REBOOT_RPC, request, order: body.order.as_ref() };
    order_power(context, &body.machine, order, PowerOrderKind::Reboot).await
}

/// Handles `Machines.Power`: orders a power action.
pub async fn switch_power(context: &ApiContext, request: &Request<v1::PowerRequest>) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder { rpc: POWER_RPC, request, order: body.order.as_ref() };
    order_power(context, &body.machine, order, parse_power_action(&body.action)?).await
}

/// Handles `Machines.CancelPower`: cancels a power order.
pub async fn cancel_power_order(
    context: &ApiContext,
    request: &Request<v1::CancelPowerRequest>,
) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder { rpc: CANCEL_POWER_RPC, request, order: body.order.as_ref() };
    let name = context.find_machine(&caller_of(request)?, &body.machine).await?;
    try_execute_order(context, &name, order, |snapshot, by| {
        power_order::cancel_power_order(&snapshot.facts, &by.line())
    })
    .await
}

async fn order_power<M: prost::Message>(
    context: &ApiContext,
    machine: &str,
    order: IncomingOrder<'_, M>,
    switch: PowerOrderKind,
) -> OrderReply {
    let name = context.find_machine(&caller_of(order.request)?, machine).await?;
    let is_dry_run = order.order.is_some_and(|order| order.dry_run);
    let reply = try_execute_order(context, &name, order, move |snapshot, by| {
        power_order::order_switch(snapshot, switch, &by.reason, &by.who)
    })
    .await;
    if !is_dry_run || reply.is_err() {
        return reply;
    }
    let irreversible = find_irreversible(context, &MachineOrder::Power(switch), &[name.machine]).await?;
    let confirmation = irreversible.map(|reason| Confirmation {
        kind: ConfirmationKind::Name,
        text: name.short_name(),
        reason,
    });
    confirm_dry_run(reply, confirmation)
}
