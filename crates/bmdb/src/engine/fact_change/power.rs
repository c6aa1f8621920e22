//! Changes of a machine's power order: given, begun under an intent, ended.

use sqlx::PgConnection;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use model::ids::{IntentId, MachineId};
use model::power_order::PowerOrderKind;

/// A change of a machine's power order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PowerChange {
    /// An operator orders that it be switched.
    Ordered {
        /// Which way to switch it.
        switch: PowerOrderKind,
        /// The operator's reason for the order.
        reason: String,
        /// Name of the operator who gave it.
        by: String,
    },
    /// It is about to be switched, under this intent.
    Started(IntentId),
    /// The order was carried out, or abandoned.
    Ended,
}

const OPERATION: &str = "changing an order about power";

/// Writes one change. The caller holds the machine's due rows.
pub(crate) async fn apply_power_change(
    tx: &mut PgConnection,
    machine: MachineId,
    change: &PowerChange,
) -> Result<(), BmdbError> {
    let id = machine.0;
    match change {
        PowerChange::Ordered { switch, reason, by } => {
            sqlx::query_file!("../../sql/power_order/insert.sql", id, switch.as_str(), reason, by)
                .execute(tx)
                .await
        }
        PowerChange::Started(intent) => {
            sqlx::query_file!("../../sql/power_order/mark_started.sql", id, intent.0).execute(tx).await
        }
        PowerChange::Ended => sqlx::query_file!("../../sql/power_order/delete.sql", id).execute(tx).await,
    }
    .context(OPERATION)?;
    Ok(())
}
