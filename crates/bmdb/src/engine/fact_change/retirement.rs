//! Changes of a machine's retirement: requested, cleared, wipe waived, release ordered, finished.

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
    match change {
        RetirementChange::Requested { reason, by, wipe } => {
            sqlx::query_file!("../../sql/retirement/insert.sql", id, reason, by, wipe).execute(tx).await
        }
        RetirementChange::Cleared => {
            sqlx::query_file!("../../sql/retirement/delete.sql", id).execute(tx).await
        }
        RetirementChange::WipeWaived(by) => {
            sqlx::query_file!("../../sql/retirement/waive_wipe.sql", id, by).execute(tx).await
        }
        RetirementChange::ReleaseOrdered(intent) => {
            sqlx::query_file!("../../sql/retirement/mark_release_ordered.sql", id, intent.0).execute(tx).await
        }
        RetirementChange::Finished(outcome) => {
            sqlx::query_file!("../../sql/retirement/mark_finished.sql", id, outcome).execute(tx).await
        }
        RetirementChange::ListedByProvider(listed) => {
            sqlx::query_file!("../../sql/retirement/set_listed.sql", id, listed).execute(tx).await
        }
    }
    .context(OPERATION)?;
    Ok(())
}
