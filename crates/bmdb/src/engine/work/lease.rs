//! The lease of a work item: the right to write about its machine, checked under the machine's lock. With a lost lease,
//! nothing is written.

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::engine::schedule::{DueRow, lock_due_rows_for_session};
use model::ids::{MachineId, SessionId};
use model::process::Lane;

/// The right to write under a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkLease {
    pub(crate) session: SessionId,
    pub(crate) lane: Lane,
    pub(crate) fence: i64,
}

/// Locks a machine's due rows under a lease. Fails when its session is over, or when it holds none of them.
pub(crate) async fn lock_due_rows_leased(
    tx: &mut PgConnection,
    lease: WorkLease,
    machine: MachineId,
) -> Result<Vec<DueRow>, BmdbError> {
    let rows = lock_due_rows_for_session(tx, lease.session, machine).await?;
    let held = rows.iter().any(|row| {
        row.lane == lease.lane && row.lease_session == Some(lease.session.0) && row.fence == lease.fence
    });
    if held { Ok(rows) } else { Err(BmdbError::LeaseLost) }
}
