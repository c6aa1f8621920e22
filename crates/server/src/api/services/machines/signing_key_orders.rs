//! The order of the service Machines about the signing keys that a machine has pinned.

use tonic::Request;

use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::incoming_order::{IncomingOrder, OrderReply};
use crate::api::services::machines::order_execution::try_execute_order;
use bmdb::orders::key_replacement;
use model::rpc_name::ALLOW_SIGNING_KEYS_RPC;
use proto::fleet::v1;

/// Handles `Machines.AllowSigningKeys`: lets the next takeover replace pinned keys by those of this shepherd.
pub async fn allow_signing_keys(
    context: &ApiContext,
    request: &Request<v1::AllowSigningKeysRequest>,
) -> OrderReply {
    let body = request.get_ref();
    let order = IncomingOrder { rpc: ALLOW_SIGNING_KEYS_RPC, request, order: body.order.as_ref() };
    let name = context.find_machine(&caller_of(request)?, &body.machine).await?;
    let signing = context.signing.clone();
    try_execute_order(context, &name, order, move |snapshot, by| {
        key_replacement::allow_signing_keys(snapshot, signing.keys(), &by.reason, &by.who)
    })
    .await
}
