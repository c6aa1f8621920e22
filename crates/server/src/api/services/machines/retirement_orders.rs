//! Orders of the service Machines that retire a machine.

use tonic::Request;

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::{IncomingOrder, OrderReply};
use crate::api::services::machines::order_execution::try_execute_order;
use crate::api::services::order_confirmation::{confirm_dry_run, confirmation_by_name};
use bmdb::machine::lookup::machine_id;
use bmdb::orders::retirement;
use model::order_rules::{Confirmation, ConfirmationKind, irreversible_reason};
use model::retirement::{RetirementStage, check_confirmation, confirmation_text};
use model::rpc_name::{CANCEL_RETIRE_RPC, RETIRE_RPC, WAIVE_RPC};
use proto::fleet::v1;

/// Handles `Machines.Retire`: orders the retirement.
pub async fn retire_machine(context: &ApiContext, request: &Request<v1::RetireRequest>) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder { rpc: RETIRE_RPC, request, order: body.order.as_ref() };
    let name = context.find_machine(&caller_of(request)?, &body.machine).await?;
    let how = (body.wipe, body.keep_authority);
    let reply = try_execute_order(context, &name, order, move |snapshot, by| {
        retirement::retire_machine(snapshot, how, &by.reason, &by.who)
    })
    .await;
    confirm_dry_run(reply, confirmation_by_name(RETIRE_RPC, &name.short_name()))
}

/// Handles `Machines.CancelRetire`: cancels the retirement.
pub async fn cancel_retirement(
    context: &ApiContext,
    request: &Request<v1::CancelRetireRequest>,
) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder { rpc: CANCEL_RETIRE_RPC, request, order: body.order.as_ref() };
    let caller = caller_of(request)?;
    let role = caller.role();
    let name = context.find_machine(&caller, &body.machine).await?;
    try_execute_order(context, &name, order, move |snapshot, by| {
        retirement::cancel_retirement(snapshot, &by.line(), role)
    })
    .await
}

/// Handles `Machines.WaiveStage`: skips a stage of the retirement. A dry run may leave the confirmation out, and returns it.
pub async fn waive_stage(context: &ApiContext, request: &Request<v1::WaiveStageRequest>) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder { rpc: WAIVE_RPC, request, order: body.order.as_ref() };
    let stage: RetirementStage = body
        .stage
        .parse()
        .map_err(|error: model::process::UnknownName| invalid_argument("stage", error.to_string()))?;
    let name = context.find_machine(&caller_of(request)?, &body.machine).await?;
    let short = name.short_name();
    let words = confirmation_text(stage, &short);
    let is_dry_run = body.order.as_ref().is_some_and(|order| order.dry_run);
    if words.is_none() || !is_dry_run || !body.confirmation.is_empty() {
        check_confirmation(stage, &short, &body.confirmation)
            .map_err(|problem| invalid_argument("confirmation", problem))?;
    }
    let bmdb = context.bmdb.clone();
    // No retiring machine becomes part of a cluster, so this may be read before the order is carried out.
    let cluster = bmdb.read_cluster_name(machine_id(&name)).await.map_err(bmdb_status)?;
    let reply = try_execute_order(context, &name, order, move |snapshot, by| {
        let policy = bmdb.policy().1;
        retirement::waive_stage(snapshot, &policy, cluster.as_deref(), stage, &by.reason, &by.who)
    })
    .await;
    let confirmation = words.zip(irreversible_reason(WAIVE_RPC)).map(|(text, reason)| Confirmation {
        kind: ConfirmationKind::Words,
        text,
        reason,
    });
    confirm_dry_run(reply, confirmation)
}
