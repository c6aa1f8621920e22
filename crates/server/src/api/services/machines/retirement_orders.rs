//! Orders of the service Machines that retire a machine.

use tonic::Request;

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::{IncomingOrder, OrderReply};
use crate::api::services::machines::order_execution::try_execute_order;
use bmdb::machine::lookup::machine_id;
use bmdb::orders::retirement;
use model::retirement::{RetirementStage, check_confirmation};
use proto::fleet::v1;

/// Handles `Machines.Retire`: orders the retirement.
pub async fn retire_machine(context: &ApiContext, request: &Request<v1::RetireRequest>) -> OrderReply {
    let body = request.get_ref();
    let order =
        IncomingOrder { rpc: "shepherd.fleet.v1.Machines/Retire", request, order: body.order.as_ref() };
    let name = context.find_machine(&caller_of(request)?, &body.machine).await?;
    let how = (body.wipe, body.keep_authority);
    try_execute_order(context, &name, order, move |snapshot, by| {
        retirement::retire_machine(snapshot, how, &by.reason, &by.who)
    })
    .await
}

/// Handles `Machines.CancelRetire`: cancels the retirement.
pub async fn cancel_retirement(
    context: &ApiContext,
    request: &Request<v1::CancelRetireRequest>,
) -> OrderReply {
    let body = request.get_ref();
    let order =
        IncomingOrder { rpc: "shepherd.fleet.v1.Machines/CancelRetire", request, order: body.order.as_ref() };
    let caller = caller_of(request)?;
    let role = caller.role();
    let name = context.find_machine(&caller, &body.machine).await?;
    try_execute_order(context, &name, order, move |snapshot, by| {
        retirement::cancel_retirement(snapshot, &by.line(), role)
    })
    .await
}

/// Handles `Machines.WaiveStage`: skips a stage of the retirement.
pub async fn waive_stage(context: &ApiContext, request: &Request<v1::WaiveStageRequest>) -> OrderReply {
    let body = request.get_ref();
    let order =
        IncomingOrder { rpc: "shepherd.fleet.v1.Machines/WaiveStage", request, order: body.order.as_ref() };
    let stage: RetirementStage = body
        .stage
        .parse()
        .map_err(|error: model::process::UnknownName| invalid_argument("stage", error.to_string()))?;
    let name = context.find_machine(&caller_of(request)?, &body.machine).await?;
    check_confirmation(stage, &name.short_name(), &body.confirmation)
        .map_err(|problem| invalid_argument("confirmation", problem))?;
    let bmdb = context.bmdb.clone();
    // No retiring machine becomes part of a cluster, so this may be read before the order is carried out.
    let cluster = bmdb.read_cluster_name(machine_id(&name)).await.map_err(bmdb_status)?;
    try_execute_order(context, &name, order, move |snapshot, by| {
        let policy = bmdb.policy().1;
        retirement::waive_stage(snapshot, &policy, cluster.as_deref(), stage, &by.reason, &by.who)
    })
    .await
}
