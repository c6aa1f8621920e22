//! The list of the machines that a request names.
//!
//! A name that fits no machine, or several, does not end the call: the response has it with the reason, so that a caller
//! gets what exists.

use tonic::Status;
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::Caller;
use crate::api::context::ApiContext;
use crate::api::convert::{self, encode_timestamp};
use bmdb::connection;
use bmdb::fleet::listing::{self, Filter};
use bmdb::machine::lookup::LookupResult;
use proto::fleet::v1;

/// Most names of one request.
const MAX_NAMES: usize = 100;

/// The machines that `body` names, each once, in the order of their first names.
pub(super) async fn list_named_machines(
    context: &ApiContext,
    caller: &Caller,
    body: &v1::ListMachinesRequest,
) -> Result<v1::ListMachinesResponse, Status> {
    validate_request(body)?;
    let (mut machines, mut unresolved): (Vec<Uuid>, Vec<v1::UnresolvedName>) = (Vec::new(), Vec::new());
    for (name, found) in body.names.iter().zip(context.find_machines(caller, &body.names).await?) {
        match found {
            LookupResult::One(found) => machines.push(found.machine),
            LookupResult::Unresolved(message) => {
                unresolved.push(v1::UnresolvedName { name: name.clone(), message });
            }
        }
    }
    let (listed, now) = context
        .read_pool
        .read_with((caller.scope().clone(), machines), move |tx, (scope, machines)| {
            Box::pin(async move {
                let listed = listing::list_machines_by_id(tx, &Filter::default(), scope, machines).await?;
                Ok((listed, connection::database_now(tx).await?))
            })
        })
        .await
        .map_err(bmdb_status)?;
    Ok(v1::ListMachinesResponse {
        machines: listed.iter().map(convert::encode_machine).collect(),
        next_page_token: String::new(),
        read_at: Some(encode_timestamp(now)),
        unresolved,
    })
}

/// Rejects a request by name that is too long, or that also selects in another way.
fn validate_request(body: &v1::ListMachinesRequest) -> Result<(), Status> {
    if body.names.len() > MAX_NAMES {
        let text = format!("names has {} names; send at most {MAX_NAMES} in one request", body.names.len());
        return Err(invalid_argument("names", text));
    }
    if !body.selector.is_empty() || !body.page_token.is_empty() {
        let text = "names cannot be set together with selector or page_token; send one of them";
        return Err(invalid_argument("names", text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_exclude_other_selections() {
        let named = |count: usize| v1::ListMachinesRequest {
            names: vec!["sim-0007".to_owned(); count],
            ..v1::ListMachinesRequest::default()
        };
        for (body, valid) in [
            (named(1), true),
            (named(MAX_NAMES), true),
            (named(MAX_NAMES + 1), false),
            (v1::ListMachinesRequest { selector: "phase=Ready".to_owned(), ..named(1) }, false),
            (v1::ListMachinesRequest { page_token: "x".to_owned(), ..named(1) }, false),
        ] {
            assert_eq!(validate_request(&body).is_ok(), valid, "{} names", body.names.len());
        }
    }
}
