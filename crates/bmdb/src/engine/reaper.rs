//! The reaper: closes expired sessions and frees their work and leases.
//!
//! It runs in every shepherd; any number may run at once. It uses two transactions, because the order matters: first
//! the session is closed, under a lock that a renewal under way must wait for or be rejected by; only then is its work
//! freed. In the opposite order, a renewal that committed late would leave a session alive with its work gone.

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;

/// What one pass of the reaper did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Sessions closed because their deadline had passed.
    pub sessions: usize,
    /// Work items freed from closed sessions.
    pub work: usize,
    /// Named leases freed from closed sessions.
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

    /// First half: marks sessions whose deadline passed as closed. A session whose row another client has locked is
    /// left to the next pass, and delays no other one.
    pub async fn close_expired_sessions(&self) -> Result<usize, BmdbError> {
        let closed = self
            .statement("closing expired sessions", |connection| {
                Box::pin(
                    sqlx::query_file_scalar!("../../sql/reap/close_expired_sessions.sql")
                        .fetch_all(connection),
                )
            })
            .await?;
        Ok(closed.len())
    }

    /// Second half: frees the work of closed sessions, 500 items at most, and records that the outcome of steps begun
    /// under it is unknown. A row that another client has locked is left to the next pass.
    pub async fn free_lost_work(&self) -> Result<usize, BmdbError> {
        let freed = self
            .statement("freeing lost work", |connection| {
                Box::pin(sqlx::query_file!("../../sql/reap/free_work.sql").fetch_all(connection))
            })
            .await?;
        Ok(freed.len())
    }

    /// Also second half: frees the named leases of closed sessions, 100 at most.
    async fn free_lost_leases(&self) -> Result<usize, BmdbError> {
        let freed = self
            .statement("freeing named leases", |connection| {
                Box::pin(sqlx::query_file!("../../sql/reap/free_leases.sql").fetch_all(connection))
            })
            .await?;
        Ok(freed.len())
    }
}
