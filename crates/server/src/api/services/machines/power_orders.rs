//! Orders of the service Machines that reboot or switch power.

use tonic::Request;

use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::IncomingOrder;
use crate::api::services::machines::order_execution::{OrderReply, actor_and_reason, try_execute_on_machine};
use crate::api::services::order_fields::parse_power_action;
use bmdb::orders::order::format_attribution;
use bmdb::orders::power_order;
use model::power_order::PowerOrderKind;
use proto::fleet::v1;

/// Handles `Machines.Reboot`: orders a reboot.
pub async fn reboot_machine(context: &ApiContext, request: &Request<v1::RebootRequest>) -> OrderReply {
    let body = request.get_ref();
    let order =
        IncomingOrder { rpc: "shepherd.fleet.v1.Machines/Reboot", request: body, order: body.order.as_ref() };
    order_power(context, request, &body.machine, order, PowerOrderKind::Reboot).await
}

/// Handles `Machines.Power`: orders a power action.
pub async fn switch_power(context: &ApiContext, request: &Request<v1::PowerRequest>) -> OrderReply {
    let body = request.get_ref();
    let order =
        IncomingOrder { rpc: "shepherd.fleet.v1.Machines/Power", request: body, order: body.order.as_ref() };
    order_power(context, request, &body.machine, order, parse_power_action(&body.action)?).await
}

/// Handles `Machines.CancelPower`: cancels a power order.
pub async fn cancel_power_order(
    context: &ApiContext,
    request: &Request<v1::CancelPowerRequest>,
) -> OrderReply {
    let body = request.get_ref();
    let rpc = "shepherd.fleet.v1.Machines/CancelPower";
    let order = IncomingOrder { rpc, request: body, order: body.order.as_ref() };
    let (who, reason) = actor_and_reason(request, body.order.as_ref())?;
    let by = format_attribution(&who, Some(&reason));
    let name = context.find_machine(&caller_of(request)?, &body.machine).await?;
    try_execute_on_machine(context, request, &name, order, move |snapshot| {
        power_order::cancel_power_order(&snapshot.facts, &by)
    })
    .await
}

async fn order_power<M: prost::Message>(
    context: &ApiContext,
    request: &Request<M>,
    machine: &str,
    order: IncomingOrder<'_, M>,
    switch: PowerOrderKind,
) -> OrderReply {
    let (who, reason) = actor_and_reason(request, order.order)?;
    let name = context.find_machine(&caller_of(request)?, machine).await?;
    let decide = move |snapshot: &_| power_order::order_switch(snapshot, switch, &reason, &who);
    try_execute_on_machine(context, request, &name, order, decide).await
}
