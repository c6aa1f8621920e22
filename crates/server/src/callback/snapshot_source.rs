//! Download source for cluster snapshots, restricted to the machine that restores.
//!
//! A snapshot contains the key of its cluster's CA. So it is sent only to the machine that currently has the order to
//! restore this snapshot. That is checked for every piece, by the sealed order (`sealed_order`) and by the
//! cluster in the snapshot, and a machine without the order gets no further piece.
//! Sealed snapshots are unsealed here, once for several pieces, and are cached for a minute at most.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message as _;
use secrecy::{ExposeSecret as _, SecretSlice};
use uuid::Uuid;

use crate::callback::file_downloads::FileSource;
use crate::callback::sealed_order::{RestoredFile, check_cluster, restored_cluster};
use bmdb::cluster::sealed_snapshot::unseal_snapshot;
use bmdb::connection::Bmdb;
use bmdb::connection::error::BmdbError;
use bmdb::fleet::secret::{SecretError, SecretsKey};
use model::ids::MachineId;
use model::role_declaration::Sha256;
use proto::curator::v1::Snapshot;

/// Bytes of a piece.
const PIECE_BYTES: usize = 256 << 10;
/// How long an unsealed snapshot is cached.
const CACHE_TTL: Duration = Duration::from_mins(1);

/// Source of cluster snapshots for machines.
pub struct SnapshotSource {
    bmdb: Bmdb,
    secrets: Arc<SecretsKey>,
    cache: UnsealedCache,
}

struct Unsealed {
    /// The cluster that it is of, by its content.
    cluster: Uuid,
    encoded: SecretSlice<u8>,
}

/// Unsealed snapshots, each until its time is over.
type UnsealedCache = Arc<Mutex<BTreeMap<Sha256, Arc<Unsealed>>>>;

impl SnapshotSource {
    /// Creates a source for the snapshots of this database.
    #[must_use]
    pub fn new(bmdb: Bmdb, secrets: Arc<SecretsKey>) -> Self {
        Self { bmdb, secrets, cache: UnsealedCache::default() }
    }

    /// Unseals the snapshot if the machine has the order to restore it.
    async fn unseal_for_machine(
        &self,
        machine: MachineId,
        sha256: Sha256,
    ) -> Result<Option<Arc<Unsealed>>, BmdbError> {
        let Some(found) = self.bmdb.snapshot_to_restore(machine, sha256.0).await? else { return Ok(None) };
        let requested = (RestoredFile::Snapshot, sha256);
        let cluster = restored_cluster(&self.secrets, &found.sealed_order, machine, requested)?;
        let known = lock_cache(&self.cache).get(&sha256).cloned();
        let opened = match known {
            Some(known) => known,
            None => self.unseal(found.snapshot, sha256).await?,
        };
        check_cluster(RestoredFile::Snapshot, cluster, opened.cluster)?;
        Ok(Some(opened))
    }

    /// Unseals a snapshot, and caches it.
    async fn unseal(&self, id: Uuid, sha256: Sha256) -> Result<Arc<Unsealed>, BmdbError> {
        let sealed = self.bmdb.read_sealed_snapshot(id).await?;
        let secrets = self.secrets.clone();
        let unsealed = tokio::task::spawn_blocking(move || {
            let encoded = unseal_snapshot(&secrets, &sealed, &sha256.0).map_err(|error| match error {
                SecretError::Database(error) => error,
                other => BmdbError::Corrupt(other.to_string()),
            })?;
            Ok::<_, BmdbError>(Unsealed { cluster: cluster_in(encoded.expose_secret())?, encoded })
        })
        .await;
        let unsealed = unsealed.map_err(|error| BmdbError::Corrupt(format!("a snapshot: {error}")))??;
        tracing::info!(snapshot = %id, "a snapshot was opened for a machine that restores");
        let unsealed = Arc::new(unsealed);
        lock_cache(&self.cache).insert(sha256, unsealed.clone());
        // A slower download unseals it again. The task removes it even if no further piece is requested.
        let opened = self.cache.clone();
        tokio::spawn(async move {
            tokio::time::sleep(CACHE_TTL).await;
            lock_cache(&opened).remove(&sha256);
        });
        Ok(unsealed)
    }
}

/// The cluster that an encoded snapshot is of.
fn cluster_in(encoded: &[u8]) -> Result<Uuid, BmdbError> {
    let corrupt = |flaw: String| BmdbError::Corrupt(format!("a snapshot: {flaw}"));
    let snapshot = Snapshot::decode(encoded).map_err(|error| corrupt(error.to_string()))?;
    snapshot.cluster_id.parse().map_err(|_| corrupt("it names no cluster".to_owned()))
}

fn lock_cache(opened: &UnsealedCache) -> MutexGuard<'_, BTreeMap<Sha256, Arc<Unsealed>>> {
    opened.lock().unwrap_or_else(PoisonError::into_inner)
}

#[tonic::async_trait]
impl FileSource for SnapshotSource {
    async fn size(&self, machine: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        let opened = self.unseal_for_machine(machine, sha256).await?;
        Ok(opened.map(|found| u64::try_from(found.encoded.expose_secret().len()).unwrap_or(u64::MAX)))
    }

    async fn piece(
        &self,
        machine: MachineId,
        sha256: Sha256,
        offset: u64,
    ) -> Result<Option<Vec<u8>>, BmdbError> {
        let Some(found) = self.unseal_for_machine(machine, sha256).await? else { return Ok(None) };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let rest = found.encoded.expose_secret().get(from..).filter(|rest| !rest.is_empty());
        Ok(rest.map(|rest| rest[..rest.len().min(PIECE_BYTES)].to_vec()))
    }
}
