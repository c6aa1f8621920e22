//! What a person types before an order that nothing undoes is given, for the response to its dry run.
//!
//! [`model::order_rules`] has the orders. Only a dry run that would change something needs a confirmation: a client shows
//! it, and requires the text.

use tonic::Status;
use uuid::Uuid;

use crate::api::api_error::bmdb_status;
use crate::api::context::ApiContext;
use crate::api::incoming_order::OrderReply;
use bmdb::orders::machine_order::MachineOrder;
use model::order_rules::{Confirmation, ConfirmationKind, Reversal, find_order_rule, irreversible_reason};
use model::power_order::PowerOrderKind;
use proto::fleet::v1;

/// Adds the confirmation to the response to a dry run that would change something.
pub(super) fn confirm_dry_run(reply: OrderReply, confirmation: Option<Confirmation>) -> OrderReply {
    let mut reply = reply?;
    let response = reply.get_mut();
    if response.dry_run && response.changed {
        response.confirmation = confirmation.map(encode_confirmation);
    }
    Ok(reply)
}

/// The confirmation of an order of this RPC by the name of what it is about; `None` if another order undoes it.
pub(super) fn confirmation_by_name(rpc: &str, name: &str) -> Option<Confirmation> {
    let reason = irreversible_reason(rpc)?;
    Some(Confirmation { kind: ConfirmationKind::Name, text: name.to_owned(), reason })
}

/// Why nothing undoes this order on one of these machines; `None` if another order undoes it on each.
pub(super) async fn find_irreversible(
    context: &ApiContext,
    each: &MachineOrder,
    machines: &[Uuid],
) -> Result<Option<&'static str>, Status> {
    match find_order_rule(each.rpc()).map(|rule| rule.reversal) {
        Some(Reversal::Impossible(reason)) => Ok(Some(reason)),
        Some(Reversal::ImpossibleForVoters(reason)) if *each == MachineOrder::Power(PowerOrderKind::Off) => {
            let voting = context.bmdb.list_voting_machines(machines.to_vec()).await.map_err(bmdb_status)?;
            Ok((!voting.is_empty()).then_some(reason))
        }
        _ => Ok(None),
    }
}

/// Encodes what a person types.
pub(super) fn encode_confirmation(confirmation: Confirmation) -> v1::OrderConfirmation {
    let kind = match confirmation.kind {
        ConfirmationKind::Name => v1::order_confirmation::Kind::Name,
        ConfirmationKind::Count => v1::order_confirmation::Kind::Count,
        ConfirmationKind::Words => v1::order_confirmation::Kind::Words,
    };
    v1::OrderConfirmation {
        kind: kind.into(),
        text: confirmation.text,
        reason: confirmation.reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Response;

    use super::*;
    use model::rpc_name::{CREATE_CLUSTER_RPC, DELETE_CLUSTER_RPC, POWER_RPC};

    #[test]
    fn only_a_dry_run_that_would_change_something_is_confirmed() {
        let confirmed = |rpc, dry_run, changed| {
            let response = v1::OrderResponse { dry_run, changed, ..v1::OrderResponse::default() };
            let reply = confirm_dry_run(Ok(Response::new(response)), confirmation_by_name(rpc, "ams"));
            reply.unwrap().into_inner().confirmation.map(|confirmation| confirmation.text)
        };
        for (rpc, dry_run, changed, expected) in [
            (DELETE_CLUSTER_RPC, true, true, Some("ams")),
            (DELETE_CLUSTER_RPC, true, false, None),
            (DELETE_CLUSTER_RPC, false, true, None),
            (POWER_RPC, true, true, None),
            (CREATE_CLUSTER_RPC, true, true, None),
        ] {
            assert_eq!(confirmed(rpc, dry_run, changed).as_deref(), expected, "{rpc} {dry_run} {changed}");
        }
        assert!(confirm_dry_run(Err(Status::not_found("no")), None).is_err());
    }
}
