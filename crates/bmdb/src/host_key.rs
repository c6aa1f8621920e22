//! The pinned SSH host key of a machine.

use crate::connection::Bmdb;
use crate::error::BmdbError;
use model::host_key::{HostKey, PinnedHostKey};
use model::ids::MachineId;

impl Bmdb {
    /// The pinned host key of a machine; `None` before the first connection.
    pub async fn host_key(&self, machine: MachineId) -> Result<Option<PinnedHostKey>, BmdbError> {
        let row = self
            .statement("reading a host key", move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("../../sql/facts/read_host_key.sql", machine.0)
                        .fetch_optional(pool)
                        .await
                })
            })
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
}
