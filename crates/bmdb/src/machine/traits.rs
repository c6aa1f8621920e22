//! Traits of a machine that selectors match: labels and hardware, from columns.

use serde_json::Value;
use sqlx::PgConnection;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use model::ids::MachineId;
use model::label::Labels;
use model::selector::traits::Hardware;

/// Reads a machine's labels; empty if it has none.
pub(crate) async fn read_labels(tx: &mut PgConnection, machine: MachineId) -> Result<Labels, BmdbError> {
    let stored = sqlx::query_scalar!("SELECT labels FROM machine_labels WHERE machine_id = $1", machine.0)
        .fetch_optional(tx)
        .await
        .context("reading a machine's labels")?;
    Ok(parse_labels(stored))
}

/// Decodes labels as they are stored. Anything else was not written by us and is ignored.
#[must_use]
pub(crate) fn parse_labels(stored: Option<Value>) -> Labels {
    stored.and_then(|stored| serde_json::from_value(stored).ok()).unwrap_or_default()
}

/// A machine's hardware from the columns of its report.
pub(crate) fn hardware_from_columns(
    manufacturer: Option<String>,
    product: Option<String>,
    memory_bytes: Option<i64>,
    cpu_threads: Option<i64>,
) -> Hardware {
    let count = |number: Option<i64>| number.and_then(|number| u64::try_from(number).ok());
    Hardware { manufacturer, product, memory: count(memory_bytes), cpus: count(cpu_threads) }
}
