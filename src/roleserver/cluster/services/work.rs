//! What takes time with one service, as the keeper has it done beside its loop.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use crate::roleserver::child::ending::ended;
use crate::roleserver::child::launch::Record;
use crate::roleserver::cluster::services::hands::{Hands, HandsError};
use crate::roleserver::cluster::services::wanted::Id;

/// Has something done that blocks; the error is a sentence.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HandsError> + Send + 'static,
) -> Result<T, String> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// How a service is stopped.
#[derive(Clone, Debug)]
pub struct Stopping {
    /// By whom.
    pub hands: Hands,
    /// Which.
    pub id: Id,
    /// How long it has to end.
    pub patience: Duration,
    /// Cancelled when whoever stops it is to end himself: then the next one does it.
    pub leaving: CancellationToken,
}

impl Stopping {
    /// Asks it to end, waits for as long as it may take, and ends whatever is left of it. None when that is left to whoever
    /// comes next.
    pub async fn stop(self, running: Option<(Record, Arc<OwnedFd>)>) -> Option<Result<(), String>> {
        if let Some((record, handle)) = running {
            tracing::info!(service = %self.id, pid = record.instance.pid, "a service is told to end");
            if let Err(error) = record.instance.signal(Signal::TERM) {
                return Some(Err(format!("telling it to end failed: {error}")));
            }
            tokio::select! {
                () = self.leaving.cancelled() => return None,
                how = ended(&handle) => match how {
                    Ok(how) => tracing::info!(service = %self.id, "told to end: {how}"),
                    Err(error) => return Some(Err(format!("waiting for its end failed: {error}"))),
                },
                () = tokio::time::sleep(self.patience) => {
                    tracing::warn!(service = %self.id, "a service did not end in its time, and is killed");
                }
            }
        }
        let Self { hands, id, .. } = self;
        Some(blocking(move || hands.end(&id)).await)
    }
}
