//! What every service of the API stands on.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::find::{Found, find};
use crate::bmdb::look::Looks;
use crate::bmdb::look::reached::find_reached;
use crate::model::access::Scope;
use crate::model::machine_view::MachineName;
use crate::server::api::door::{Caller, Door};
use crate::server::api::refusal::{of_bmdb, unknown, wrong};
use crate::server::api::texts::line;
use crate::server::api::watches::Watches;

/// Longest name of a machine that anybody may mean.
const LONGEST_NAME: usize = 300;

/// What every service stands on; cheap to clone.
#[derive(Clone)]
pub struct Site {
    /// For orders.
    pub bmdb: Bmdb,
    /// For looking.
    pub looks: Looks,
    /// For what comes before an order, which lists and watches must not keep waiting: the door's.
    pub first_looks: Looks,
    /// For streams, whose credential may end before they do.
    pub door: Arc<Door>,
    /// The watches there are and may be.
    pub watches: Watches,
    /// Cancelled when streams are to end, because the server does.
    pub stop: CancellationToken,
}

impl Site {
    /// Finds the one machine that `text` names and the caller's credential reaches.
    pub async fn find(&self, caller: &Caller, text: &str) -> Result<MachineName, Status> {
        let text = line("machine", text, LONGEST_NAME)?;
        if text.is_empty() {
            return Err(wrong(
                "machine",
                "machine is empty; name one by its UUID, its provider's id, or PROVIDER/ID",
            ));
        }
        let (wanted, scope) = (text.to_owned(), caller.scope().clone());
        let found = self
            .first_looks
            .look(move |tx| {
                let (wanted, scope) = (wanted.clone(), scope.clone());
                Box::pin(async move {
                    match &scope {
                        Scope::Everything => find(tx, &wanted).await,
                        Scope::Providers(_) => find_reached(tx, &wanted, &scope).await,
                    }
                })
            })
            .await
            .map_err(of_bmdb)?;
        match found {
            Found::One(name) => Ok(name),
            Found::Not(said) => Err(unknown("machine", text, said)),
        }
    }
}
