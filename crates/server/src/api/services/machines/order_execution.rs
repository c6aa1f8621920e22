//! Execute an order for one machine: find the machine, validate the order, carry it out, encode the result.

use tonic::{Response, Status};

use crate::api::api_error::bmdb_status;
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::{IncomingOrder, OrderReply, encode_order_response};
use bmdb::connection::error::BmdbError;
use bmdb::engine::change_machine::Decision;
use bmdb::engine::facts::MachineSnapshot;
use bmdb::machine::lookup::machine_id;
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::order::{Order, OrderOutcome, OrderRejection, OrderResult, format_attribution};
use model::machine_view::MachineName;
use model::plain_text::visible_text;

/// The caller and the reason of an order, as in the machine's history.
pub(super) struct Attribution {
    /// Name of the caller.
    pub(super) who: String,
    /// The reason in the order.
    pub(super) reason: String,
}

impl Attribution {
    /// Those of an order in a request.
    pub(super) fn of<M>(order: &IncomingOrder<'_, M>) -> Result<Self, Status> {
        let who = caller_of(order.request)?.name().to_owned();
        // An order with hidden characters in its reason is rejected before anything of this is stored.
        let reason = order.order.map(|order| visible_text(&order.reason)).unwrap_or_default();
        Ok(Self { who, reason })
    }

    /// Both as one line of history names them.
    pub(super) fn line(&self) -> String {
        format_attribution(&self.who, Some(&self.reason))
    }
}

/// Executes an order that also exists as a bulk order, for the machine that `text` names.
pub(super) async fn execute_machine_order<M: prost::Message>(
    context: &ApiContext,
    text: &str,
    incoming_order: IncomingOrder<'_, M>,
    each: MachineOrder,
) -> OrderReply {
    let caller = caller_of(incoming_order.request)?;
    let name = context.find_machine(&caller, text).await?;
    let who = caller.name().to_owned();
    let execute = |order| context.bmdb.execute_machine_order(order, machine_id(&name), each, who);
    execute_for_machine(&name, incoming_order, execute).await
}

/// Executes an order for the machine that `text` names. `decide` computes the changes from the facts.
pub(super) async fn execute_order<M: prost::Message>(
    context: &ApiContext,
    text: &str,
    incoming_order: IncomingOrder<'_, M>,
    decide: impl Fn(&MachineSnapshot, &Attribution) -> Decision<OrderOutcome> + Send + Sync + 'static,
) -> OrderReply {
    let by = Attribution::of(&incoming_order)?;
    let name = context.find_machine(&caller_of(incoming_order.request)?, text).await?;
    let decide = move |snapshot: &MachineSnapshot| decide(snapshot, &by);
    let execute = |order| context.bmdb.execute_on_machine(order, machine_id(&name), decide);
    execute_for_machine(&name, incoming_order, execute).await
}

/// Executes an order that the facts of the machine may forbid: then `decide` returns the reason.
pub(super) async fn try_execute_order<M: prost::Message>(
    context: &ApiContext,
    name: &MachineName,
    incoming_order: IncomingOrder<'_, M>,
    decide: impl Fn(&MachineSnapshot, &Attribution) -> Result<Decision<OrderOutcome>, OrderRejection>
    + Send
    + Sync
    + 'static,
) -> OrderReply {
    let (by, short) = (Attribution::of(&incoming_order)?, name.short_name());
    let decide = move |snapshot: &MachineSnapshot| {
        decide(snapshot, &by).map_err(|(reason, text)| (reason, format!("{short} {text}")))
    };
    let execute = |order| context.bmdb.try_execute_on_machine(order, machine_id(name), decide);
    execute_for_machine(name, incoming_order, execute).await
}

/// Validates an order for a machine, has `execute` carry it out, and encodes the result.
pub(super) async fn execute_for_machine<M: prost::Message, F>(
    name: &MachineName,
    incoming_order: IncomingOrder<'_, M>,
    execute: impl FnOnce(Order) -> F,
) -> OrderReply
where
    F: Future<Output = Result<OrderResult, BmdbError>>,
{
    let order = incoming_order.parse(name.short_name())?;
    let dry_run = order.dry_run;
    let carried = execute(order).await.map_err(bmdb_status)?;
    Ok(Response::new(encode_order_response(Some(name), dry_run, &carried)))
}
