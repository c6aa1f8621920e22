//! What every service of the API stands on.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::find::{Found, find};
use crate::bmdb::look::Looks;
use crate::model::machine_view::MachineName;
use crate::server::api::door::{Caller, Door};
use crate::server::api::refusal::{of_bmdb, unknown, wrong};
use crate::server::api::texts::line;

/// Longest name of a machine that anybody may mean.
const LONGEST_NAME: usize = 300;

/// What every service stands on; cheap to clone.
#[derive(Clone)]
pub struct Site {
    /// For orders.
    pub bmdb: Bmdb,
    /// For looking.
    pub looks: Looks,
    /// For streams, whose credential may end before they do.
    pub door: Arc<Door>,
    /// One permit for each watch there may be.
    pub watches: Arc<Semaphore>,
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
        let wanted = text.to_owned();
        let found = self
            .looks
            .look(move |tx| {
                let wanted = wanted.clone();
                Box::pin(async move { find(tx, &wanted).await })
            })
            .await
            .map_err(of_bmdb)?;
        match found {
            Found::One(name) => caller.reaches(&name, text).map(|()| name),
            // The sentence may name machines that a credential for some providers does not reach.
            Found::Not(_) if !caller.scope().providers().is_empty() => {
                Err(unknown("machine", text, format!("this credential reaches no one machine {text:?}")))
            }
            Found::Not(said) => Err(unknown("machine", text, said)),
        }
    }
}
