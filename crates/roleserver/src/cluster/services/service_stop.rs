//! Stop one service beside the event loop: SIGTERM, timeout, kill.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use crate::child::exit::wait_for_exit;
use crate::child::launch::ChildRecord;
use crate::cluster::services::desired::ServiceId;
use crate::cluster::services::service_runtime::{RuntimeError, ServiceRuntime};

/// Runs a blocking operation; the error is a sentence.
pub async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
) -> Result<T, String> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// The stop of one service.
#[derive(Clone, Debug)]
pub struct ServiceStop {
    /// The runtime that stops it.
    pub runtime: ServiceRuntime,
    /// Role and name of the service.
    pub id: ServiceId,
    /// Time that it has to exit.
    pub timeout: Duration,
    /// Cancelled when the service manager ends; the next one completes the stop.
    pub shutdown: CancellationToken,
}

impl ServiceStop {
    /// Sends SIGTERM, waits for the exit or the timeout, and kills remaining processes. `None` if `shutdown`
    /// interrupted the wait: the next service manager stops the service.
    pub async fn stop(self, running: Option<(ChildRecord, Arc<OwnedFd>)>) -> Option<Result<(), String>> {
        if let Some((record, handle)) = running {
            tracing::info!(service = %self.id, pid = record.instance.pid, "SIGTERM is sent to a service");
            if let Err(error) = record.instance.send_signal(Signal::TERM) {
                return Some(Err(format!("sending it SIGTERM failed: {error}")));
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return None,
                how = wait_for_exit(&handle) => match how {
                    Ok(how) => tracing::info!(service = %self.id, "after SIGTERM: {how}"),
                    Err(error) => return Some(Err(format!("waiting for its end failed: {error}"))),
                },
                () = tokio::time::sleep(self.timeout) => {
                    tracing::warn!(service = %self.id, "a service did not exit within its stop time and is killed");
                }
            }
        }
        let Self { runtime, id, .. } = self;
        Some(run_blocking(move || runtime.stop_remaining(&id)).await)
    }
}
