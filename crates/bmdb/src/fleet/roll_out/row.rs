//! Row of a roll-out: locking, pausing and ending it.
//!
//! Orders about roll-outs and upgrades use these functions, and so do the passes under the roll-out lease. Each is a
//! part of the caller's transaction; `what` is the operation in its errors.

use sqlx::PgConnection;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;

/// State of a roll-out with a locked row.
pub(crate) struct LockedRollOut {
    /// Why it is paused; `None` if it is not.
    pub(crate) paused: Option<String>,
    /// How it ended; `None` while it lasts.
    pub(crate) ended: Option<String>,
}

/// Locks a roll-out; `None` if there is none with this id.
pub(super) async fn lock_roll_out(
    tx: &mut PgConnection,
    id: &str,
    what: &'static str,
) -> Result<Option<LockedRollOut>, BmdbError> {
    sqlx::query_as!(LockedRollOut, "SELECT paused, ended FROM roll_out WHERE roll_out_id = $1 FOR UPDATE", id)
        .fetch_optional(tx)
        .await
        .context(what)
}

/// Pauses a roll-out that has not ended, for a reason, or resumes it.
pub(crate) async fn set_roll_out_paused(
    tx: &mut PgConnection,
    id: &str,
    reason: Option<&str>,
    what: &'static str,
) -> Result<(), BmdbError> {
    sqlx::query!("UPDATE roll_out SET paused = $2 WHERE roll_out_id = $1 AND ended_at IS NULL", id, reason)
        .execute(tx)
        .await
        .context(what)?;
    Ok(())
}

/// Ends a roll-out where it is.
pub(crate) async fn abort_roll_out(
    tx: &mut PgConnection,
    id: &str,
    what: &'static str,
) -> Result<(), BmdbError> {
    // Machines that have not started with the release no longer receive their orders.
    sqlx::query!(
        "UPDATE release_order o SET withdrawn = TRUE FROM roll_out_machine m
         WHERE m.roll_out_id = $1 AND m.state = 'ordered'
           AND o.machine_id = m.machine_id AND o.generation = m.generation",
        id
    )
    .execute(&mut *tx)
    .await
    .context(what)?;
    end_roll_out(tx, id, "aborted", what).await
}

/// Ends a roll-out in the given way.
pub(super) async fn end_roll_out(
    tx: &mut PgConnection,
    id: &str,
    how: &str,
    what: &'static str,
) -> Result<(), BmdbError> {
    sqlx::query!(
        "UPDATE roll_out SET ended_at = clock_timestamp(), ended = $2
         WHERE roll_out_id = $1 AND ended_at IS NULL",
        id,
        how
    )
    .execute(&mut *tx)
    .await
    .context(what)?;
    // A machine that is still waiting counts as skipped.
    sqlx::query!(
        "UPDATE roll_out_machine
         SET active = FALSE, state = CASE WHEN state = 'waiting' THEN 'skipped' ELSE state END
         WHERE roll_out_id = $1",
        id
    )
    .execute(tx)
    .await
    .context(what)?;
    Ok(())
}
