//! Download source for images of etcd, restricted to the machine that restores.
//!
//! An image contains every secret of its cluster. As with snapshots, it is sent only to the machine that currently has the
//! order to restore it, and that is checked for every piece, by the sealed order (`sealed_order`). Its parts are
//! opened one by one, and each of them is sealed with its cluster. The one that was sent last is cached for a minute at
//! most, because a part makes several pieces.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use secrecy::{ExposeSecret as _, SecretSlice};

use crate::callback::file_downloads::FileSource;
use crate::callback::sealed_order::{RestoredFile, check_cluster, restored_cluster};
use bmdb::cluster::restore::ImageToRestore;
use bmdb::cluster::sealed_image::{PART_BYTES, PartPlace, unseal_part};
use bmdb::connection::Bmdb;
use bmdb::connection::error::BmdbError;
use bmdb::fleet::secret::{SecretError, SecretsKey};
use model::ids::MachineId;
use model::role_declaration::Sha256;

/// Bytes of a piece.
const PIECE_BYTES: usize = 256 << 10;
/// How long an unsealed part is cached.
const CACHE_TTL: Duration = Duration::from_mins(1);

/// Source of images of etcd for machines.
pub struct ImageSource {
    bmdb: Bmdb,
    secrets: Arc<SecretsKey>,
    cache: PartCache,
}

/// The part that was opened last, and its place.
type PartCache = Arc<Mutex<Option<(PartPlace, Arc<SecretSlice<u8>>)>>>;

impl ImageSource {
    /// Creates a source for the images of this database.
    #[must_use]
    pub fn new(bmdb: Bmdb, secrets: Arc<SecretsKey>) -> Self {
        Self { bmdb, secrets, cache: PartCache::default() }
    }

    /// The image with this digest, if the machine has the order to restore it.
    async fn find_ordered(
        &self,
        machine: MachineId,
        sha256: Sha256,
    ) -> Result<Option<ImageToRestore>, BmdbError> {
        let Some(image) = self.bmdb.image_to_restore(machine, sha256.0).await? else { return Ok(None) };
        let requested = (RestoredFile::Image, sha256);
        let cluster = restored_cluster(&self.secrets, &image.sealed_order, machine, requested)?;
        check_cluster(RestoredFile::Image, cluster, image.cluster)?;
        Ok(Some(image))
    }

    /// Opens a part of an image. A part that is missing is an error.
    async fn open_part(
        &self,
        image: &ImageToRestore,
        number: u64,
    ) -> Result<Arc<SecretSlice<u8>>, BmdbError> {
        let last_of = Some(image.parts).filter(|parts| number.saturating_add(1) == *parts);
        let &ImageToRestore { image, cluster, snapshot, .. } = image;
        let place = PartPlace { cluster, snapshot, image, number, last_of };
        if let Some((_, part)) = lock_cache(&self.cache).as_ref().filter(|(known, _)| *known == place) {
            return Ok(part.clone());
        }
        let Some(sealed) = self.bmdb.read_image_part(image, number).await? else {
            return Err(BmdbError::Corrupt(format!("{place}: it is missing; restore another snapshot")));
        };
        let secrets = self.secrets.clone();
        let opened = tokio::task::spawn_blocking(move || unseal_part(&secrets, &place, &sealed)).await;
        let opened = opened.map_err(|error| BmdbError::Corrupt(format!("{place}: {error}")))?;
        let part = opened.map_err(|error| match error {
            SecretError::Database(error) => error,
            other => BmdbError::Corrupt(other.to_string()),
        })?;
        let part = Arc::new(part);
        *lock_cache(&self.cache) = Some((place, part.clone()));
        // The task removes it even if no further piece is requested.
        let cache = self.cache.clone();
        tokio::spawn(async move {
            tokio::time::sleep(CACHE_TTL).await;
            let mut cache = lock_cache(&cache);
            if cache.as_ref().is_some_and(|(known, _)| *known == place) {
                *cache = None;
            }
        });
        Ok(part)
    }
}

fn lock_cache(cache: &PartCache) -> MutexGuard<'_, Option<(PartPlace, Arc<SecretSlice<u8>>)>> {
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

#[tonic::async_trait]
impl FileSource for ImageSource {
    async fn size(&self, machine: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        Ok(self.find_ordered(machine, sha256).await?.map(|image| image.bytes))
    }

    async fn piece(
        &self,
        machine: MachineId,
        sha256: Sha256,
        offset: u64,
    ) -> Result<Option<Vec<u8>>, BmdbError> {
        let Some(image) = self.find_ordered(machine, sha256).await? else { return Ok(None) };
        let part_bytes = u64::try_from(PART_BYTES).unwrap_or(u64::MAX);
        let part = self.open_part(&image, offset / part_bytes).await?;
        let from = usize::try_from(offset % part_bytes).unwrap_or(usize::MAX);
        let rest = part.expose_secret().get(from..).filter(|rest| !rest.is_empty());
        Ok(rest.map(|rest| rest[..rest.len().min(PIECE_BYTES)].to_vec()))
    }
}
