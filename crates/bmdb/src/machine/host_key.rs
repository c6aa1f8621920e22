//! The SSH host key of a machine: pinned, and refused.

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use model::host_key::{HostKey, PinnedHostKey};
use model::ids::MachineId;

const OPERATION: &str = "reading what to show";

impl Bmdb {
    /// The pinned host key of a machine; `None` before the first connection.
    pub async fn host_key(&self, machine: MachineId) -> Result<Option<PinnedHostKey>, BmdbError> {
        self.statement("reading a host key", move |pool| Box::pin(select_host_keys(pool, machine))).await
    }
}

pub(crate) async fn read_host_keys(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<PinnedHostKey>, BmdbError> {
    select_host_keys(tx, machine).await.context(OPERATION)
}

async fn select_host_keys(
    connection: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<PinnedHostKey>, sqlx::Error> {
    let row = sqlx::query!(
        "SELECT algorithm, public_key, source, pinned_at, refused_algorithm, refused_key, refused_at
         FROM machine_ssh_host_key WHERE machine_id = $1",
        machine.0
    )
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| PinnedHostKey {
        key: HostKey { algorithm: row.algorithm, key: row.public_key },
        source: row.source,
        pinned_at: row.pinned_at,
        rejected: row
            .refused_key
            .zip(row.refused_at)
            .map(|(key, at)| (HostKey { algorithm: row.refused_algorithm.unwrap_or_default(), key }, at)),
    }))
}
