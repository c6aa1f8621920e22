//! The SSH host key that is believed for a machine.

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::model::host_key::HostKey;
use crate::model::ids::MachineId;
use crate::model::time::Timestamp;

/// What is stored about a machine's host key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedHostKey {
    /// The key that is believed.
    pub key: HostKey,
    /// Why: `first-use`, `provider` or `allowed`.
    pub source: String,
    /// Since when.
    pub pinned_at: Timestamp,
    /// Another key that was offered and refused since, and when.
    pub refused: Option<(HostKey, Timestamp)>,
}

impl Bmdb {
    /// The believed host key of a machine; `None` before the first connection.
    pub async fn host_key(&self, machine: MachineId) -> Result<Option<PinnedHostKey>, BmdbError> {
        let row = sqlx::query_file!("sql/facts/host_key.sql", machine.0)
            .fetch_optional(self.pool())
            .await
            .doing("reading a host key")?;
        Ok(row.map(|row| PinnedHostKey {
            key: HostKey { algorithm: row.algorithm, key: row.public_key },
            source: row.source,
            pinned_at: row.pinned_at,
            refused: row
                .refused_key
                .zip(row.refused_at)
                .map(|(key, at)| (HostKey { algorithm: row.refused_algorithm.unwrap_or_default(), key }, at)),
        }))
    }
}
