//! Orders of the service Machines that retire a machine.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::{IncomingOrder, encode_order_response};
use crate::api::services::machines::actor_and_reason;
use bmdb::action::{OrderOutcome, format_attribution};
use bmdb::facts::MachineSnapshot;
use bmdb::machine_lookup::machine_id;
use bmdb::retirement::{self, OrderRejection};
use bmdb::work::Decision;
use model::machine_view::MachineName;
use model::retirement::{RetirementStage, check_confirmation};
use proto::fleet::v1;

type OrderReply = Result<Response<v1::OrderResponse>, Status>;

/// Handles `Machines.Retire`: orders the retirement.
pub async fn retire_machine(site: &ApiContext, request: &Request<v1::RetireRequest>) -> OrderReply {
    let body = request.get_ref();
    let order =
        IncomingOrder { rpc: "shepherd.fleet.v1.Machines/Retire", request: body, order: body.order.as_ref() };
    let (who, reason) = actor_and_reason(request, body.order.as_ref())?;
    let name = site.find_machine(&caller_of(request)?, &body.machine).await?;
    let wipe = body.wipe;
    try_execute_on_machine(site, request, &name, order, move |snapshot| {
        retirement::retire_machine(snapshot, wipe, &reason, &who)
    })
    .await
}

/// Handles `Machines.CancelRetire`: cancels the retirement.
pub async fn cancel_retirement(site: &ApiContext, request: &Request<v1::CancelRetireRequest>) -> OrderReply {
    let body = request.get_ref();
    let rpc = "shepherd.fleet.v1.Machines/CancelRetire";
    let order = IncomingOrder { rpc, request: body, order: body.order.as_ref() };
    let (who, reason) = actor_and_reason(request, body.order.as_ref())?;
    let by = format_attribution(&who, Some(&reason));
    let caller = caller_of(request)?;
    let role = caller.role();
    let name = site.find_machine(&caller, &body.machine).await?;
    try_execute_on_machine(site, request, &name, order, move |snapshot| {
        retirement::cancel_retirement(snapshot, &by, role)
    })
    .await
}

/// Handles `Machines.WaiveStage`: skips a stage of the retirement.
pub async fn waive_stage(site: &ApiContext, request: &Request<v1::WaiveStageRequest>) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder {
        rpc: "shepherd.fleet.v1.Machines/WaiveStage",
        request: body,
        order: body.order.as_ref(),
    };
    let (who, reason) = actor_and_reason(request, body.order.as_ref())?;
    let stage: RetirementStage = body
        .stage
        .parse()
        .map_err(|error: model::process::UnknownName| invalid_argument("stage", error.to_string()))?;
    let name = site.find_machine(&caller_of(request)?, &body.machine).await?;
    check_confirmation(stage, &name.short_name(), &body.confirmation)
        .map_err(|problem| invalid_argument("confirmation", problem))?;
    let bmdb = site.bmdb.clone();
    let decide = move |snapshot: &MachineSnapshot| {
        retirement::waive_stage(snapshot, &bmdb.policy().1, stage, &reason, &who)
    };
    try_execute_on_machine(site, request, &name, order, decide).await
}

/// Executes an order for a machine that may be rejected because of the machine's facts.
pub(super) async fn try_execute_on_machine<M: prost::Message>(
    site: &ApiContext,
    request: &Request<M>,
    name: &MachineName,
    incoming_order: IncomingOrder<'_, M>,
    decide: impl Fn(&MachineSnapshot) -> Result<Decision<OrderOutcome>, OrderRejection> + Send + Sync + 'static,
) -> OrderReply {
    let short = name.short_name();
    let order = incoming_order.parse(&caller_of(request)?, short.clone())?;
    let dry_run = order.dry_run;
    let decide = move |snapshot: &MachineSnapshot| {
        decide(snapshot).map_err(|(reason, text)| (reason, format!("{short} {text}")))
    };
    let carried =
        site.bmdb.try_execute_on_machine(order, machine_id(name), decide).await.map_err(bmdb_status)?;
    Ok(Response::new(encode_order_response(Some(name), dry_run, &carried)))
}
