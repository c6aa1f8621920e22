//! One order about machines: about one by its own call, or about several as a bulk order.
//!
//! A verb gives the order as data, for many machines, and the call for one. So each verb takes the same machines in the
//! same ways, and asks for the same confirmations.

use tonic::{Response, Status};

use crate::client::fleet_client::ApiChannel;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BulkOrderRequest, BulkSelection, give_bulk_order};
use crate::machine::outcome::{describe_effect, format_response};
use crate::order::confirmation::send_confirmed_order;
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::send_order;
use bmdb::orders::machine_order::MachineOrder;
use model::order_rules::may_need_confirmation;
use proto::fleet::v1;

/// An order about machines, as a command line requests it.
pub(crate) struct MachineOrderRequest<'a> {
    /// Names of the machines; empty if filters select them.
    pub(crate) names: Vec<String>,
    /// The filters, and what confirms the number of machines.
    pub(crate) selection: &'a BulkSelection,
    /// The order about each machine.
    pub(crate) each: MachineOrder,
    /// The reason; `None` for an order that needs none.
    pub(crate) reason: Option<&'a str>,
    /// Whether a flag confirms an order about one machine that nothing undoes.
    pub(crate) is_confirmed: bool,
}

/// Gives an order about machines. `give` sends it about one machine, by its name.
pub(crate) async fn give_machine_order(
    context: &CommandContext,
    request: MachineOrderRequest<'_>,
    give: impl AsyncFn(ApiChannel, String, v1::Order) -> Result<Response<v1::OrderResponse>, Status>,
) -> Result<String, CliError> {
    let MachineOrderRequest { names, selection, each, reason, is_confirmed } = request;
    let (Some(machine), 1, false) = (names.first(), names.len(), selection.is_about_many()) else {
        let bulk = BulkOrderRequest { names: &names, selection, each: &each, reason };
        return give_bulk_order(context, &bulk).await;
    };
    let reason = reason_or_placeholder(reason);
    let give = async |service: ApiChannel, order: v1::Order| give(service, machine.clone(), order).await;
    let response = if may_need_confirmation(each.rpc()) {
        send_confirmed_order(context, reason, is_confirmed, describe_effect, give).await?
    } else {
        send_order(context, reason, give).await?
    };
    format_response(context, &response)
}
