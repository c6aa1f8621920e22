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

    /// First half: marks sessions whose deadline passed as closed. One whose row somebody has locked
    /// is left to the next time, and keeps nobody else waiting.
    pub async fn close_expired_sessions(&self) -> Result<usize, BmdbError> {
        let what = "closing expired sessions";
        if self.dialect().skip_locked {
            let closed = self
                .statement(what, |pool| {
                    Box::pin(async move {
                        sqlx::query_file_scalar!("sql/reap/close_sessions.sql").fetch_all(pool).await
                    })
                })
                .await?;
            return Ok(closed.len());
        }
        let expired = self
            .statement(what, |pool| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/reap/expired_sessions.sql").fetch_all(pool).await
                })
            })
            .await?;
        let mut closed = 0;
        for session in expired {
            let one = self.statement(what, move |pool| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/reap/close_sessions_waiting.sql", session)
                        .fetch_optional(pool)
                        .await
                })
            });
            closed += unless_locked(one.await)?.flatten().map_or(0, |_| 1);
        }
        Ok(closed)
    }

    /// Second half: frees the work of closed sessions, 500 items at the most, and says of steps that
    /// were begun under it that their outcome is unknown. What somebody has locked is left to the next
    /// time.
    pub async fn free_lost_work(&self) -> Result<usize, BmdbError> {
        let what = "freeing lost work";
        if self.dialect().skip_locked {
            let freed = self
                .statement(what, |pool| {
                    Box::pin(async move { sqlx::query_file!("sql/reap/free_work.sql").fetch_all(pool).await })
                })
                .await?;
            return Ok(freed.len());
        }
        let lost = self
            .statement(what, |pool| {
                Box::pin(async move { sqlx::query_file!("sql/reap/lost_work.sql").fetch_all(pool).await })
            })
            .await?;
        let mut freed = 0;
        for work in lost {
            let one = self.statement(what, move |pool| {
                let lane = work.lane.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/reap/free_work_waiting.sql", work.machine_id, lane)
                        .fetch_optional(pool)
                        .await
                })
            });
            freed += unless_locked(one.await)?.flatten().map_or(0, |_| 1);
        }
        Ok(freed)
    }

    /// Also second half: frees the named leases of closed sessions, 100 at the most.
    async fn free_lost_leases(&self) -> Result<usize, BmdbError> {
        let what = "freeing named leases";
        if self.dialect().skip_locked {
            let freed = self
                .statement(what, |pool| {
                    Box::pin(
                        async move { sqlx::query_file!("sql/reap/free_leases.sql").fetch_all(pool).await },
                    )
                })
                .await?;
            return Ok(freed.len());
        }
        let lost = self
            .statement(what, |pool| {
                Box::pin(async move { sqlx::query_file!("sql/reap/lost_leases.sql").fetch_all(pool).await })
            })
            .await?;
        let mut freed = 0;
        for lease in lost {
            let one = self.statement(what, move |pool| {
                let (kind, name) = (lease.kind.clone(), lease.name.clone());
                Box::pin(async move {
                    sqlx::query_file!("sql/reap/free_leases_waiting.sql", kind, name)
                        .fetch_optional(pool)
                        .await
                })
            });
            freed += unless_locked(one.await)?.flatten().map_or(0, |_| 1);
        }
        Ok(freed)
    }
}

/// `None` for a row that somebody else has locked.
fn unless_locked<T>(result: Result<T, BmdbError>) -> Result<Option<T>, BmdbError> {
    match result {
        Err(error) if error.is_lock_not_available() => Ok(None),
        other => other.map(Some),
    }
}
