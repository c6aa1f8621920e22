//! Wake-ups of control loops by LISTEN and NOTIFY.
//!
//! A transaction that arms a machine for now sends the process's name on one channel; each shepherd listens on one
//! connection of its own. This only makes a loop poll sooner: a lost notification costs a safety poll, and whenever the
//! connection was lost all loops are woken. Without `LISTEN` loops poll.
//!
//! The connection is outside the common pool: what a listener still sends when it is dropped has no limit, and would take
//! a place there. It goes by the direct URL if there is one, and is used only if that leads to the server of the pool. It is
//! tested every few seconds: nothing is announced on a server that became a reader, and none of its connections need end
//! for that.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::PgListener;
use sqlx::{Acquire as _, PgPool};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::connection::Bmdb;
use crate::connection::access::require_access;
use crate::connection::error::describe_error;
use model::process::Process;

/// The channel that `notify_due` in `schedule.rs` sends on.
const CHANNEL: &str = "shepherd_due";

/// How often the connection is tested, and how long it may take to answer.
const TEST_INTERVAL: Duration = Duration::from_secs(2);
/// How long the closing of the connection is waited for.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Wakes loops by process.
#[derive(Clone, Debug)]
pub struct WakeUps {
    loops: Arc<HashMap<Process, Notify>>,
}

impl Default for WakeUps {
    fn default() -> Self {
        Self { loops: Arc::new(Process::ALL.into_iter().map(|process| (process, Notify::new())).collect()) }
    }
}

impl WakeUps {
    /// Returns at the next wake-up for `process`, or at once if one came since the last time.
    pub async fn wait_for_wake(&self, process: Process) {
        match self.loops.get(&process) {
            Some(notify) => notify.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Wakes the loop of `process`.
    pub fn wake(&self, process: Process) {
        if let Some(notify) = self.loops.get(&process) {
            notify.notify_one();
        }
    }

    fn wake_all(&self) {
        for notify in self.loops.values() {
            notify.notify_one();
        }
    }

    /// Listens until `stop`, connecting again whenever the connection is lost. Returns at once
    /// where the database has no notifications.
    pub async fn listen(self, bmdb: Bmdb, stop: CancellationToken) {
        if !bmdb.dialect().notifies() {
            return;
        }
        while !stop.is_cancelled() {
            let mut open_pool = None;
            let listening = async {
                let pool = open_pool.insert(bmdb.listener_pool().await?);
                self.listen_once(&bmdb, pool).await
            };
            tokio::select! {
                () = stop.cancelled() => {}
                result = listening => {
                    if let Err(error) = result {
                        let error = describe_error(&error);
                        tracing::warn!(error, "lost the connection for wake-ups; loops poll until it is back");
                    }
                }
            }
            if let Some(pool) = open_pool {
                drop(tokio::time::timeout(CLOSE_TIMEOUT, pool.close()).await);
            }
            self.wake_all();
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
        }
    }

    async fn listen_once(&self, bmdb: &Bmdb, pool: &PgPool) -> Result<(), sqlx::Error> {
        let mut listener = PgListener::connect_with(pool).await?;
        // A new connection would be opened within the limit below, which may cut it off.
        listener.eager_reconnect(false);
        listener.listen(CHANNEL).await?;
        // Something may have become due between the last poll and now.
        self.wake_all();
        let access = bmdb.settings().access;
        let ends_at = Instant::now() + bmdb.settings().connection_lifetime;
        while Instant::now() < ends_at {
            let Ok(received) = tokio::time::timeout(TEST_INTERVAL, listener.try_recv()).await else {
                let test = async { require_access(listener.acquire().await?, access).await };
                tokio::time::timeout(TEST_INTERVAL, test).await.map_err(io::Error::from)??;
                continue;
            };
            let Some(notification) = received? else { break };
            if let Ok(process) = notification.payload().parse::<Process>() {
                self.wake(process);
            } else {
                // A newer release's process has no loop here.
                tracing::trace!(payload = notification.payload(), "a wake-up for somebody else");
            }
        }
        Ok(())
    }
}
