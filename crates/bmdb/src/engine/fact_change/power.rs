//! Changes of a machine's power order: given, begun under an intent, ended, given up.

use sqlx::PgConnection;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use crate::engine::schedule::record_event;
use model::event_name::POWER_ORDER_GIVEN_UP;
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
    /// The order was carried out, or is over because of another order.
    Ended,
    /// The order ended and is not known to have been carried out, for this reason.
    GivenUp(String),
}

const OPERATION: &str = "changing an order about power";

/// Writes one change, and the line of history of an order that is given up. The caller holds the machine's due rows.
pub(crate) async fn apply_power_change(
    tx: &mut PgConnection,
    machine: MachineId,
    change: &PowerChange,
) -> Result<(), BmdbError> {
    let id = machine.0;
    let statement = match change {
        PowerChange::Ordered { switch, reason, by } => sqlx::query!(
            "INSERT INTO machine_power_order (machine_id, switch, reason, ordered_by, ordered_at)
             VALUES ($1, $2, $3, $4, clock_timestamp())
             ON CONFLICT (machine_id) DO NOTHING",
            id,
            switch.as_str(),
            reason,
            by
        ),
        PowerChange::Started(intent) => {
            // The first intent stays: it may have been carried out already.
            sqlx::query!(
                "UPDATE machine_power_order SET intent_id = $2, begun_at = clock_timestamp()
                 WHERE machine_id = $1 AND intent_id IS NULL",
                id,
                intent.0
            )
        }
        PowerChange::Ended | PowerChange::GivenUp(_) => {
            sqlx::query!("DELETE FROM machine_power_order WHERE machine_id = $1", id)
        }
    };
    statement.execute(&mut *tx).await.context(OPERATION)?;
    if let PowerChange::GivenUp(reason) = change {
        record_event(tx, machine, POWER_ORDER_GIVEN_UP, reason).await?;
    }
    Ok(())
}
