//! Context shared by all services: connection pools, auth, shutdown.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::api::api_error::{bmdb_status, invalid_argument, not_found};
use crate::api::caller::Caller;
use crate::api::credential_checks::CredentialChecks;
use crate::api::stream_limits::StreamLimits;
use crate::api::validate::single_line;
use bmdb::connection::Bmdb;
use bmdb::connection::read_pool::ReadPool;
use bmdb::fleet::machine_names;
use bmdb::machine::lookup::{LookupResult, find_machine};
use bmdb::machine::scoped_lookup::find_in_scope;
use model::access::AccessScope;
use model::machine_view::MachineName;
use model::signed_artefact::signing_configuration::SigningConfiguration;

/// Longest name of a machine in a request, in characters.
const MAX_NAME_CHARS: usize = 300;
/// Most names that are looked up in one read: one that is no whole name is looked up alone, and a read may not take long.
const MAX_NAMES_PER_READ: usize = 100;

/// Context shared by all services; cheap to clone.
#[derive(Clone)]
pub struct ApiContext {
    /// Connection pool for orders.
    pub bmdb: Bmdb,
    /// Connection pool for queries.
    pub read_pool: ReadPool,
    /// The pool of authentication, also for queries that precede an order, so that lists and watches cannot delay it.
    pub auth_pool: ReadPool,
    /// For streams, whose credential may end before they do.
    pub credential_checks: CredentialChecks,
    /// Keys that verify the signatures of uploads.
    pub signing: Arc<SigningConfiguration>,
    /// Limits on the number of watches.
    pub watch_limits: StreamLimits,
    /// Cancelled when the server stops; streams end then.
    pub stop: CancellationToken,
}

impl ApiContext {
    /// Finds the one machine that `text` names within the scope of the caller.
    pub async fn find_machine(&self, caller: &Caller, text: &str) -> Result<MachineName, Status> {
        let text = validate_name(text)?;
        let (wanted, scope) = (text.to_owned(), caller.scope().clone());
        let found = self
            .auth_pool
            .read_with((wanted, scope), move |tx, (wanted, scope)| {
                Box::pin(async move {
                    match scope {
                        AccessScope::Fleet => find_machine(tx, wanted).await,
                        AccessScope::Providers(_) => find_in_scope(tx, wanted, scope).await,
                    }
                })
            })
            .await
            .map_err(bmdb_status)?;
        match found {
            LookupResult::One(name) => Ok(name),
            LookupResult::Unresolved(message) => Err(not_found("machine", text, message)),
        }
    }

    /// Finds the machine that each of `names` names within the scope of the caller, in their order. Many names are read for
    /// one list or one order, so this is a read as that of the list, and does not delay authentication.
    pub async fn find_machines(
        &self,
        caller: &Caller,
        names: &[String],
    ) -> Result<Vec<LookupResult>, Status> {
        let names: Vec<String> =
            names.iter().map(|name| Ok(validate_name(name)?.to_owned())).collect::<Result<_, Status>>()?;
        let mut found = Vec::with_capacity(names.len());
        for names in names.chunks(MAX_NAMES_PER_READ) {
            let read = self
                .read_pool
                .read_with((names.to_vec(), caller.scope().clone()), move |tx, (names, scope)| {
                    Box::pin(machine_names::find_machines(tx, names, scope))
                })
                .await;
            found.extend(read.map_err(bmdb_status)?);
        }
        Ok(found)
    }
}

/// The name of a machine in a request, without white space around it.
fn validate_name(text: &str) -> Result<&str, Status> {
    let text = single_line("machine", text, MAX_NAME_CHARS)?;
    if text.is_empty() {
        return Err(invalid_argument(
            "machine",
            "machine is empty; name one by its UUID, its provider's id, or PROVIDER/ID",
        ));
    }
    Ok(text)
}
