//! Looking at the whole fleet for somebody, and telling what was found in pieces of one answer.
//!
//! A plan and a list of issues are computed from every machine there is. That takes seconds, which no page of
//! a list may, and two pages would be of two moments. So they are answered by a stream: it is opened at once,
//! the fleet is read in pages on the connections that the API has for looking, what follows from it is computed
//! beside the runtime's own threads, and then it is told, a piece at a time.
//!
//! What it costs is bounded: so many looks at once at this server, so many that wait for their turn, a quarter
//! of those of one credential. It ends as a watch does (see [`watch`]): with the server, with its credential,
//! or when nobody listens, or reads too slowly.
//!
//! [`watch`]: crate::server::api::watch

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::{Code, Status};

use crate::server::api::door::Caller;
use crate::server::api::farewell::{Farewell, Telling, telling};
use crate::server::api::refusal::refused;
use crate::server::api::site::Site;
use crate::server::api::watch::{End, credential_ends, hand_over};
use crate::server::api::watches::{Permit, Watches};

/// Most lines of a piece: what a client decodes has a bound on its fields.
pub const PIECE: usize = 500;
/// Most fleets that are looked at and told at once.
const AT_ONCE: usize = 2;
/// Most that are asked for, those that are looked at included.
const ASKED_FOR: usize = 16;
/// Pieces that wait for whoever reads, and how long the next one waits for room.
const ROOM: usize = 4;
const READ_WITHIN: Duration = Duration::from_secs(20);

/// Looks at the whole fleet; cheap to clone.
#[derive(Clone)]
pub struct Whole {
    site: Site,
    places: Watches,
    turns: Arc<Semaphore>,
}

impl Whole {
    /// For what stands on `site`.
    #[must_use]
    pub fn new(site: Site) -> Self {
        Self { site, places: Watches::new(ASKED_FOR), turns: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// What it stands on.
    #[must_use]
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Opens a stream of the pieces that `find` finds once it has its turn.
    pub fn tell<T, F>(&self, caller: &Caller, find: F) -> Result<Telling<T>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<Vec<T>, Status>> + Send + 'static,
    {
        let credential = caller.credential().id;
        let place = self.places.begin(credential).map_err(|_| busy())?;
        let (tell, bid, told) = telling(ROOM);
        let (site, turns, listened) = (self.site.clone(), self.turns.clone(), tell.clone());
        tokio::spawn(async move {
            let ended = site.stop.run_until_cancelled(async {
                tokio::select! {
                    end = tell_all(turns, place, tell, find) => end,
                    // Beside it, because telling may wait for whoever listens.
                    end = credential_ends(&site, credential) => Err(end),
                    () = listened.closed() => Err(End::Gone),
                }
            });
            let farewell = match ended.await {
                None => {
                    let said = "this shepherd stops; ask another one";
                    Farewell::AtOnce(refused(Code::Unavailable, "UNAVAILABLE", said))
                }
                Some(Ok(())) => Farewell::AllIsSaid,
                Some(Err(End::Gone)) => return,
                Some(Err(End::Refused(status))) => Farewell::AtOnce(status),
            };
            // Whoever has gone away needs no farewell.
            drop(bid.send(farewell));
        });
        Ok(told)
    }
}

async fn tell_all<T: Send + 'static>(
    turns: Arc<Semaphore>,
    _place: Permit,
    tell: tokio::sync::mpsc::Sender<T>,
    find: impl Future<Output = Result<Vec<T>, Status>> + Send,
) -> Result<(), End> {
    // Nobody closes it; until then there is a turn for everybody.
    let _turn = turns.acquire_owned().await;
    for piece in find.await.map_err(End::Refused)? {
        hand_over(&tell, piece, READ_WITHIN).await?;
    }
    Ok(())
}

/// Computes something that takes a processor for a while, beside the runtime's own threads.
pub async fn computed<T: Send + 'static>(compute: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
    tokio::task::spawn_blocking(compute).await.map_err(|error| {
        tracing::error!(%error, "what was asked of the whole fleet could not be computed");
        refused(Code::Internal, "INTERNAL", "this shepherd failed to answer; its log says why")
    })
}

fn busy() -> Status {
    refused(
        Code::ResourceExhausted,
        "TOO_MANY_QUERIES",
        "there are as many plans and lists of issues asked of this shepherd as it bears, or of yours as are \
         borne at once; ask again in a moment, or another one",
    )
}
