//! Changes of an order to replace the signing keys that a machine has pinned: given, used by a takeover.

use sqlx::PgConnection;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use crate::engine::schedule::record_event;
use model::ids::MachineId;
use model::signed_artefact::key_replacement::KeyReplacement;

/// A change of an order about pinned keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyReplacementChange {
    /// An admin orders that the next takeover replaces them.
    Ordered(KeyReplacement),
    /// A takeover replaced them by this order, which ends.
    Used(KeyReplacement),
}

const OPERATION: &str = "changing an order about signing keys";

/// Writes one change, and the line of history of a takeover. The caller holds the machine's due rows.
pub(crate) async fn apply_key_replacement(
    tx: &mut PgConnection,
    machine: MachineId,
    change: &KeyReplacementChange,
) -> Result<(), BmdbError> {
    let id = machine.0;
    match change {
        KeyReplacementChange::Ordered(order) => {
            let statement = sqlx::query_file!(
                "../../sql/facts/upsert_key_replacement.sql",
                id,
                order.keys.join("\n"),
                order.reason,
                order.by,
                order.ordered_at,
                order.expires_at
            );
            statement.execute(tx).await.context(OPERATION)?;
        }
        KeyReplacementChange::Used(order) => {
            // An order that was given while the takeover ran is another one, and stays.
            sqlx::query!(
                "DELETE FROM machine_key_replacement WHERE machine_id = $1 AND ordered_at = $2",
                id,
                order.ordered_at
            )
            .execute(&mut *tx)
            .await
            .context(OPERATION)?;
            record_event(tx, machine, "SigningKeysReplaced", &order.describe()).await?;
        }
    }
    Ok(())
}
