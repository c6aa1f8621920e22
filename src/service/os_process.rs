//! The process on its host: the signals that stop it, and the name of the host.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::service::failure::ExitFailure;

/// The signals that stop a program: SIGTERM and SIGINT.
#[derive(Debug)]
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Listens for the signals from now on. They no longer end the process by themselves.
    pub fn listen() -> Result<Self, ExitFailure> {
        let wrong = |error| ExitFailure::failed(format!("cannot listen for signals: {error}"));
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(wrong)?,
            interrupt: signal(SignalKind::interrupt()).map_err(wrong)?,
        })
    }

    /// Waits for the next signal.
    pub async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The name of this host.
pub(super) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
