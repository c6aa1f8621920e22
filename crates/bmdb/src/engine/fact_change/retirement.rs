//! Changes of a machine's retirement: requested, cleared, authority kept, wipe waived, release ordered, finished.

use sqlx::PgConnection;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use model::ids::{IntentId, MachineId};

/// A change of a machine's retirement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetirementChange {
    /// An operator orders its retirement.
    Requested {
        /// The operator's reason for the order.
        reason: String,
        /// Name of the operator who ordered it.
        by: String,
        /// Whether to wipe it before it is released.
        wipe: bool,
    },
    /// It stays, unless its release was sent to its provider.
    Cleared,
    /// Its cluster keeps its authority when the machine leaves it.
    AuthorityKept,
    /// The wipe is waived, by this operator.
    WipeWaived(String),
    /// Its release is about to be sent to its provider, under this intent.
    ReleaseOrdered(IntentId),
    /// The retirement has ended, in this way.
    Finished(String),
    /// Whether its provider still lists it although it is retired.
    ListedByProvider(bool),
}

const OPERATION: &str = "changing a retirement";

/// Writes one change. The caller holds the machine's due rows.
pub(crate) async fn apply_retirement_change(
    tx: &mut PgConnection,
    machine: MachineId,
    change: &RetirementChange,
) -> Result<(), BmdbError> {
    let id = machine.0;
    let statement = match change {
        RetirementChange::Requested { reason, by, wipe } => sqlx::query!(
            "INSERT INTO machine_retirement (machine_id, reason, requested_by, requested_at, wipe)
             VALUES ($1, $2, $3, clock_timestamp(), $4)
             ON CONFLICT (machine_id) DO NOTHING",
            id,
            reason,
            by,
            wipe
        ),
        RetirementChange::Cleared => {
            // A retirement whose release was ordered from the provider, or that is finished, stays.
            sqlx::query!(
                "DELETE FROM machine_retirement
                 WHERE machine_id = $1 AND release_ordered_at IS NULL AND finished_at IS NULL",
                id
            )
        }
        RetirementChange::AuthorityKept => sqlx::query!(
            "UPDATE machine_retirement SET keep_authority = TRUE WHERE machine_id = $1 AND finished_at IS NULL",
            id
        ),
        RetirementChange::WipeWaived(by) => sqlx::query!(
            "UPDATE machine_retirement SET wipe_waived_at = clock_timestamp(), wipe_waived_by = $2
             WHERE machine_id = $1 AND wipe_waived_at IS NULL AND finished_at IS NULL",
            id,
            by
        ),
        RetirementChange::ReleaseOrdered(intent) => sqlx::query!(
            "UPDATE machine_retirement SET release_ordered_at = clock_timestamp(), release_intent = $2
             WHERE machine_id = $1 AND release_ordered_at IS NULL AND finished_at IS NULL",
            id,
            intent.0
        ),
        RetirementChange::Finished(outcome) => {
            // The first outcome stays, because a later one finds the retirement finished.
            sqlx::query!(
                "UPDATE machine_retirement SET finished_at = clock_timestamp(), outcome = $2
                 WHERE machine_id = $1 AND finished_at IS NULL",
                id,
                outcome
            )
        }
        RetirementChange::ListedByProvider(listed) => sqlx::query!(
            "UPDATE machine_retirement SET listed_since = CASE WHEN $2 THEN clock_timestamp() END
             WHERE machine_id = $1 AND finished_at IS NOT NULL AND (listed_since IS NOT NULL) <> $2",
            id,
            listed
        ),
    };
    statement.execute(tx).await.context(OPERATION)?;
    Ok(())
}
