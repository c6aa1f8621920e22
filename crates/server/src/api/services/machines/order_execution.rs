//! Execute an order for one machine: find the machine, validate the order, carry it out, encode the result.

use tonic::{Request, Response, Status};

use crate::api::api_error::bmdb_status;
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::{IncomingOrder, encode_order_response};
use bmdb::engine::change_machine::Decision;
use bmdb::engine::facts::MachineSnapshot;
use bmdb::machine::lookup::machine_id;
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::order::{OrderOutcome, OrderRejection};
use model::machine_view::MachineName;
use proto::fleet::v1;

/// The response to an order.
pub(super) type OrderReply = Result<Response<v1::OrderResponse>, Status>;

/// The caller and the reason, as in the machine's history.
pub(super) fn actor_and_reason<M>(
    request: &Request<M>,
    order: Option<&v1::Order>,
) -> Result<(String, String), Status> {
    let who = caller_of(request)?.name().to_owned();
    Ok((who, order.map(|order| order.reason.trim().to_owned()).unwrap_or_default()))
}

/// Executes an order that also exists as a bulk order, for the machine that `text` names.
pub(super) async fn execute_machine_order<M: prost::Message>(
    context: &ApiContext,
    request: &Request<M>,
    text: &str,
    incoming_order: IncomingOrder<'_, M>,
    each: MachineOrder,
) -> OrderReply {
    let caller = caller_of(request)?;
    let name = context.find_machine(&caller, text).await?;
    let order = incoming_order.parse(&caller, name.short_name())?;
    let (dry_run, who) = (order.dry_run, caller.name().to_owned());
    let carried =
        context.bmdb.execute_machine_order(order, machine_id(&name), each, who).await.map_err(bmdb_status)?;
    Ok(Response::new(encode_order_response(Some(&name), dry_run, &carried)))
}

/// Executes an order for the machine that `text` names. `decide` computes the changes from the facts.
pub(super) async fn execute_order<M: prost::Message>(
    context: &ApiContext,
    request: &Request<M>,
    text: &str,
    incoming_order: IncomingOrder<'_, M>,
    decide: impl Fn(&MachineSnapshot) -> Decision<OrderOutcome> + Send + Sync + 'static,
) -> OrderReply {
    let caller = caller_of(request)?;
    let name = context.find_machine(&caller, text).await?;
    let order = incoming_order.parse(&caller, name.short_name())?;
    let dry_run = order.dry_run;
    let carried =
        context.bmdb.execute_on_machine(order, machine_id(&name), decide).await.map_err(bmdb_status)?;
    Ok(Response::new(encode_order_response(Some(&name), dry_run, &carried)))
}

/// Executes an order that the facts of the machine may forbid: then `decide` returns the reason.
pub(super) async fn try_execute_on_machine<M: prost::Message>(
    context: &ApiContext,
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
        context.bmdb.try_execute_on_machine(order, machine_id(name), decide).await.map_err(bmdb_status)?;
    Ok(Response::new(encode_order_response(Some(name), dry_run, &carried)))
}
