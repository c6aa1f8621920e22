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
        let leases = self
            .statement("freeing named leases", |pool| {
                Box::pin(async move { sqlx::query_file!("sql/reap/free_leases.sql").fetch_all(pool).await })
            })
            .await?;
        let reaped = Reaped { sessions, work, leases: leases.len() };
        if reaped != Reaped::default() {
            tracing::info!(sessions, work, leases = reaped.leases, "freed what lost sessions held");
        }
        Ok(reaped)
    }

    /// First half: marks sessions whose deadline passed as closed.
    pub async fn close_expired_sessions(&self) -> Result<usize, BmdbError> {
        let skip_locked = self.dialect().skip_locked;
        let closed = self
            .statement("closing expired sessions", move |pool| {
                Box::pin(async move {
                    if skip_locked {
                        sqlx::query_file_scalar!("sql/reap/close_sessions.sql").fetch_all(pool).await
                    } else {
                        sqlx::query_file_scalar!("sql/reap/close_sessions_waiting.sql").fetch_all(pool).await
                    }
                })
            })
            .await?;
        Ok(closed.len())
    }

    /// Second half: frees the work of closed sessions, 500 items at the most.
    pub async fn free_lost_work(&self) -> Result<usize, BmdbError> {
        let skip_locked = self.dialect().skip_locked;
        self.statement("freeing lost work", move |pool| {
            Box::pin(async move {
                if skip_locked {
                    Ok(sqlx::query_file!("sql/reap/free_work.sql").fetch_all(pool).await?.len())
                } else {
                    Ok(sqlx::query_file!("sql/reap/free_work_waiting.sql").fetch_all(pool).await?.len())
                }
            })
        })
        .await
    }
}
