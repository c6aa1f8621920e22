//! Snapshots of clusters for the machines that restore them.
//!
//! A snapshot has the key of its cluster's authority, so it is sent to one machine: the one that was asked to restore just
//! this one, for as long as it is asked. That is looked up for every piece; a machine that is asked no more gets nothing
//! more. What is kept sealed is opened here, once for several pieces, and not remembered for longer than a minute.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use secrecy::{ExposeSecret as _, SecretSlice};

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::sealed_snapshot::unseal;
use crate::bmdb::secret::{SecretError, SecretsKey};
use crate::model::declaration::Sha256;
use crate::model::ids::MachineId;
use crate::server::fetching::Source;

/// Bytes of a piece.
const PIECE: usize = 256 << 10;
/// How long an opened snapshot is remembered.
const REMEMBERED: Duration = Duration::from_mins(1);

/// Where machines get snapshots from.
pub struct Snapshots {
    bmdb: Bmdb,
    secrets: Arc<SecretsKey>,
    opened: Remembered,
}

/// Opened snapshots, each until its time is over.
type Remembered = Arc<Mutex<BTreeMap<Sha256, Arc<SecretSlice<u8>>>>>;

impl Snapshots {
    /// Those of this database.
    #[must_use]
    pub fn new(bmdb: Bmdb, secrets: Arc<SecretsKey>) -> Self {
        Self { bmdb, secrets, opened: Remembered::default() }
    }

    /// The snapshot, opened, if the machine is to restore it.
    async fn open(
        &self,
        machine: MachineId,
        sha256: Sha256,
    ) -> Result<Option<Arc<SecretSlice<u8>>>, BmdbError> {
        let Some(id) = self.bmdb.snapshot_for(machine, sha256.0).await? else { return Ok(None) };
        if let Some(known) = remembered(&self.opened).get(&sha256) {
            return Ok(Some(known.clone()));
        }
        let sealed = self.bmdb.sealed_snapshot(id).await?;
        let secrets = self.secrets.clone();
        let unsealed = tokio::task::spawn_blocking(move || unseal(&secrets, &sealed, &sha256.0)).await;
        let unsealed = unsealed.map_err(|error| BmdbError::Corrupt(format!("a snapshot: {error}")))?;
        let encoded = unsealed.map_err(|error| match error {
            SecretError::Database(error) => error,
            other => BmdbError::Corrupt(other.to_string()),
        })?;
        tracing::info!(%machine, "a snapshot was opened for the machine that restores it");
        let encoded = Arc::new(encoded);
        remembered(&self.opened).insert(sha256, encoded.clone());
        // Whoever fetches it more slowly has it opened again. Nobody need ask any more for it to be forgotten.
        let opened = self.opened.clone();
        tokio::spawn(async move {
            tokio::time::sleep(REMEMBERED).await;
            remembered(&opened).remove(&sha256);
        });
        Ok(Some(encoded))
    }
}

fn remembered(opened: &Remembered) -> MutexGuard<'_, BTreeMap<Sha256, Arc<SecretSlice<u8>>>> {
    opened.lock().unwrap_or_else(PoisonError::into_inner)
}

#[tonic::async_trait]
impl Source for Snapshots {
    async fn size(&self, machine: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        let opened = self.open(machine, sha256).await?;
        Ok(opened.map(|encoded| u64::try_from(encoded.expose_secret().len()).unwrap_or(u64::MAX)))
    }

    async fn piece(
        &self,
        machine: MachineId,
        sha256: Sha256,
        offset: u64,
    ) -> Result<Option<Vec<u8>>, BmdbError> {
        let Some(encoded) = self.open(machine, sha256).await? else { return Ok(None) };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let rest = encoded.expose_secret().get(from..).filter(|rest| !rest.is_empty());
        Ok(rest.map(|rest| rest[..rest.len().min(PIECE)].to_vec()))
    }
}
