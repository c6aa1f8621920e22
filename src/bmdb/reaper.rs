//! Freeing what lost sessions held. Runs in every shepherd; any number may.
//!
//! In two transactions, because the order is the point: first the session is
//! closed, under a lock that a renewal under way must wait for or be refused
//! by; only then is its work freed. Done the other way round, a renewal that
//! committed late would leave a session alive with its work gone.

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;

/// What one pass of the reaper did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Sessions closed because their deadline had passed.
    pub sessions: usize,
    /// Work items freed.
    pub work: usize,
    /// Named leases freed.
    pub leases: usize,
}

impl Bmdb {
    /// Closes expired sessions, then frees what closed sessions hold.
    pub async fn reap(&self) -> Result<Reaped, BmdbError> {
        let sessions = self.close_expired_sessions().await?;
        let work = self.free_lost_work().await?;
        let leases = self.free_lost_leases().await?;
        let reaped = Reaped { sessions, work, leases };
        if reaped != Reaped::default() {
            tracing::info!(sessions, work, leases, "freed what lost sessions held");
        }
        Ok(reaped)
    }

    /// First half: marks sessions whose deadline passed as closed. A session whose row somebody has locked
    /// is left to the next pass, and keeps nobody else waiting.
    pub async fn close_expired_sessions(&self) -> Result<usize, BmdbError> {
        let closed = self
            .statement("closing expired sessions", |connection| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/reap/close_expired_sessions.sql")
                        .fetch_all(connection)
                        .await
                })
            })
            .await?;
        Ok(closed.len())
    }

    /// Second half: frees the work of closed sessions, 500 items at the most, and records of steps that
    /// were begun under it that their outcome is unknown. A row that somebody has locked is left to the next
    /// pass.
    pub async fn free_lost_work(&self) -> Result<usize, BmdbError> {
        let freed = self
            .statement("freeing lost work", |connection| {
                Box::pin(
                    async move { sqlx::query_file!("sql/reap/free_work.sql").fetch_all(connection).await },
                )
            })
            .await?;
        Ok(freed.len())
    }

    /// Also second half: frees the named leases of closed sessions, 100 at the most.
    async fn free_lost_leases(&self) -> Result<usize, BmdbError> {
        let freed = self
            .statement("freeing named leases", |connection| {
                Box::pin(
                    async move { sqlx::query_file!("sql/reap/free_leases.sql").fetch_all(connection).await },
                )
            })
            .await?;
        Ok(freed.len())
    }
}
