//! Store of unpacked Kubernetes bundles by digest, safe against crashes.
//!
//! | below the directory | content |
//! | --- | --- |
//! | `archives/DIGEST` | an archive to unpack: fetched from a shepherd, or put there by hand |
//! | `archives/DIGEST.minisig` | its signature |
//! | `archives/DIGEST.part` | an incomplete download, which can be resumed |
//! | `DIGEST.new/` | a bundle that is being unpacked |
//! | `DIGEST/` | a complete bundle: the files of its manifest, the manifest, the manifest's digest, and the `minimum-version` of its signature |
//! | `DIGEST.gone/` | a bundle that is being removed |
//!
//! A directory gets the name of its digest by a rename, only when every byte in it is verified and on the disk. It
//! loses that name by a rename before the first byte is removed. So a crash at any point leaves a complete bundle or
//! none, and other leftovers are recognised by their names and removed. A new bundle is unpacked beside the current one
//! and never over it: running programs keep their files, and a rollback only names another digest.
//!
//! In each life of the role server a bundle is verified before anything in it is started, as artefacts are. A bundle
//! that was damaged on the disk is removed and fetched again. An archive is removed once it is unpacked, because
//! shepherds have it. One without an acceptable signature is not unpacked, and stays: an operator may have put it there,
//! and its signature may come later, also from a shepherd.
//!
//! The right digest does not make an archive trusted: it only proves that the archive is the one that an operator
//! named. On a machine with pinned keys, its signature must be valid as well. It is verified while the archive is unpacked,
//! so the bytes that were unpacked are those that were verified. It is unpacked as [`model::kubernetes::archive`] describes: only plain files that its manifest names,
//! in that order, each of exactly the declared length, and only if the disk has room for all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::kubernetes::bundle_manifest::{self, BundleAddOn, BundleComponent, BundleImage, BundleManifest};
use model::kubernetes::version::ReleaseVersion;
use model::role_declaration::Sha256;
use model::signed_artefact::ExpectedFields;
use model::signed_artefact::signed_fields::ArtefactKind;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::cluster::kubernetes::bundle_store::unpack::{
    MINIMUM_VERSION, UnpackError, create_directory, free_bytes, sha256, unpack_archive, verify_bundle,
};
use crate::cluster::services::artefact_store::ArtefactStore;
use crate::server_pool::{FetchError, ServerPool};
use crate::signing_store::{SignedBy, SigningStore};

mod unpack;

const ARCHIVES: &str = "archives";
const NEW_SUFFIX: &str = ".new";
const REMOVED_SUFFIX: &str = ".gone";

/// The bundles of a node. Cheap to clone; clones share their state.
#[derive(Clone, Debug)]
pub struct BundleStore {
    directory: PathBuf,
    server_pool: ServerPool,
    /// Keys that archives must be signed with; `None` in tests.
    signing: Option<SigningStore>,
    /// Locked by every operation that changes the directory.
    state: Arc<Mutex<StoreState>>,
}

/// What this process knows about bundles.
#[derive(Debug, Default)]
struct StoreState {
    /// Bundles that were verified in this life.
    complete: BTreeMap<Sha256, Bundle>,
    /// Bundles that can never be used, and why.
    rejected: BTreeMap<Sha256, String>,
}

/// A bundle that is unpacked and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// SHA-256 of its archive.
    pub digest: Sha256,
    /// Manifest of the programs, images and add-ons.
    pub manifest: Arc<BundleManifest>,
    /// Directory that it is unpacked in.
    pub directory: PathBuf,
}

/// Why a bundle cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// It may become available: the caller tries again.
    #[error("the Kubernetes bundle {} is not on this node yet: {why}", short_digest(*.digest))]
    Unavailable {
        /// Digest of the bundle.
        digest: Sha256,
        /// The reason as a sentence.
        why: String,
    },
    /// It is here, but can never be used.
    #[error("the Kubernetes bundle {} cannot be used: {why}", short_digest(*.digest))]
    Rejected {
        /// Digest of the bundle.
        digest: Sha256,
        /// The reason as a sentence.
        why: String,
    },
}

impl Bundle {
    /// Path of the program of that component; the error is a sentence.
    pub fn program_path(&self, component: BundleComponent) -> Result<PathBuf, String> {
        let program = self.manifest.program(component);
        let program = program.ok_or_else(|| format!("bundle {} holds no {component}", self.manifest.name))?;
        Ok(self.directory.join(&program.file.path))
    }

    /// Directory of programs that look each other up in `PATH`.
    #[must_use]
    pub fn bin_directory(&self) -> PathBuf {
        self.directory.join("bin")
    }

    /// Directory of the CNI plugins.
    #[must_use]
    pub fn cni_directory(&self) -> PathBuf {
        self.directory.join(BundleComponent::CniPlugin.path())
    }

    /// Add-ons that the bundle installs in the cluster.
    #[must_use]
    pub fn add_ons(&self) -> &[BundleAddOn] {
        &self.manifest.add_ons
    }

    /// Reads and verifies the manifests of an add-on. Blocks.
    pub fn read_add_on(&self, add_on: &BundleAddOn) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(self.directory.join(&add_on.file.path))?
            .take(bundle_manifest::MAX_ADD_ON_BYTES)
            .read_to_end(&mut bytes)?;
        if sha256(&bytes) == add_on.file.sha256 {
            Ok(bytes)
        } else {
            Err(std::io::Error::new(ErrorKind::InvalidData, format!("{} is damaged", add_on.file.path)))
        }
    }

    /// The image of that name, and the path of its archive.
    #[must_use]
    pub fn find_image(&self, name: &str) -> Option<(&BundleImage, PathBuf)> {
        let image = self.manifest.image(name)?;
        Some((image, self.directory.join(&image.file.path)))
    }
}

impl BundleStore {
    /// The store in this directory, which is created with the first bundle.
    #[must_use]
    pub fn open(directory: PathBuf, server_pool: ServerPool) -> Self {
        Self { directory, server_pool, signing: None, state: Arc::default() }
    }

    /// The store, which unpacks only archives that a pinned key of the machine signed.
    #[must_use]
    pub fn with_signing(self, signing: SigningStore) -> Self {
        Self { signing: Some(signing), ..self }
    }

    /// Path of the signature of an archive that is put there by hand.
    #[must_use]
    pub fn signature_path(&self, digest: Sha256) -> PathBuf {
        self.archive_store().signature_path(digest)
    }

    /// Decides by the signature of an archive whether it may be unpacked. The error is a sentence.
    fn accept_signature(&self, text: &str) -> Result<Option<SignedBy>, String> {
        let Some(signing) = &self.signing else { return Ok(None) };
        let expected = ExpectedFields {
            kind: ArtefactKind::Bundle,
            name: None,
            version: None,
            architecture: Some(std::env::consts::ARCH.to_owned()),
        };
        signing.accept_signature(text, &expected)
    }

    /// The lowest version of bundles that this one permits once it has proved itself; `None` if it was unpacked without a
    /// signature. Blocks.
    #[must_use]
    pub fn minimum_version(&self, digest: Sha256) -> Option<ReleaseVersion> {
        let path = self.directory.join(hex::encode(digest.0)).join(MINIMUM_VERSION);
        fs::read_to_string(path).ok()?.parse().ok()
    }

    /// Path at which an operator can put an archive by hand.
    #[must_use]
    pub fn archive_path(&self, digest: Sha256) -> PathBuf {
        self.archive_store().path(digest)
    }

    /// The bundle of this digest: at once if it is here, and otherwise once it is fetched, verified and unpacked.
    ///
    /// Cancel safe: what was fetched stays, and unpacking continues to its end in the background.
    pub async fn ensure_bundle(&self, digest: &Sha256) -> Result<Bundle, BundleError> {
        let digest = *digest;
        let not_yet = |why| BundleError::Unavailable { digest, why };
        let known = self.state.clone().lock_owned().await;
        if let Some(bundle) = known.complete.get(&digest) {
            return Ok(bundle.clone());
        }
        if let Some(why) = known.rejected.get(&digest) {
            return Err(BundleError::Rejected { digest, why: why.clone() });
        }
        let here = self.clone();
        let (mut known, looked) =
            run_blocking(known, move || here.inspect_local(digest)).await.map_err(not_yet)?;
        if let LocalBundle::Complete(bundle) = looked.map_err(not_yet)? {
            known.complete.insert(digest, bundle.clone());
            return Ok(bundle);
        }
        self.fetch_archive(digest).await.map_err(not_yet)?;
        let here = self.clone();
        let (mut known, unpacked) =
            run_blocking(known, move || here.unpack_bundle(digest)).await.map_err(not_yet)?;
        match unpacked {
            Ok(bundle) => {
                let (name, kubernetes) = (&bundle.manifest.name, bundle.manifest.kubernetes);
                tracing::info!(name, %kubernetes, "a Kubernetes bundle was unpacked");
                known.complete.insert(digest, bundle.clone());
                Ok(bundle)
            }
            Err(UnpackError::Failed(why)) => Err(not_yet(format!("unpacking it failed: {why}"))),
            Err(UnpackError::Refused(why)) => Err(not_yet(format!("it was refused: {why}"))),
            Err(UnpackError::Invalid(why)) => {
                tracing::error!(reason = why, "a Kubernetes bundle cannot be used");
                known.rejected.insert(digest, why.clone());
                Err(BundleError::Rejected { digest, why })
            }
        }
    }

    /// Removes all bundles but these, and incomplete ones. Running programs of a removed bundle keep their files.
    pub async fn remove_unneeded(&self, digests: &[Sha256]) -> std::io::Result<()> {
        let names: BTreeSet<String> = digests.iter().map(|digest| hex::encode(digest.0)).collect();
        let mut known = self.state.clone().lock_owned().await;
        known.complete.retain(|digest, _| digests.contains(digest));
        known.rejected.retain(|digest, _| digests.contains(digest));
        let here = self.clone();
        let digests: BTreeSet<Sha256> = digests.iter().copied().collect();
        let removing = move || {
            here.archive_store().remove_unneeded(&digests)?;
            for name in here.list_names()? {
                let digest = name
                    .strip_suffix(NEW_SUFFIX)
                    .or_else(|| name.strip_suffix(REMOVED_SUFFIX))
                    .unwrap_or(&name);
                if name != ARCHIVES && (digest != name || !names.contains(digest)) {
                    tracing::info!(name, "a Kubernetes bundle that is no longer kept is removed");
                    here.remove_bundle(&name)?;
                }
            }
            Ok(())
        };
        run_blocking(known, removing).await.map_err(std::io::Error::other)?.1
    }

    fn archive_store(&self) -> ArtefactStore {
        ArtefactStore(self.directory.join(ARCHIVES))
    }

    /// Names of the entries in the directory.
    fn list_names(&self) -> std::io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Removes the directory of that name. A rename comes first, so that an interrupted removal leaves no bundle.
    fn remove_bundle(&self, name: &str) -> std::io::Result<()> {
        let path = self.directory.join(name);
        let gone = self.directory.join(format!("{}{REMOVED_SUFFIX}", name.trim_end_matches(REMOVED_SUFFIX)));
        if path != gone {
            remove_path(&gone)?;
            match fs::rename(&path, &gone) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                other => other?,
            }
            File::open(&self.directory)?.sync_all()?;
        }
        remove_path(&gone)
    }

    /// Verifies the local bundle and removes it if it is damaged. Blocks. The error is a sentence.
    fn inspect_local(&self, digest: Sha256) -> Result<LocalBundle, String> {
        let name = hex::encode(digest.0);
        let directory = self.directory.join(&name);
        let failed = |error: std::io::Error| format!("looking at {} failed: {error}", directory.display());
        match fs::symlink_metadata(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(LocalBundle::Missing),
            other => other.map_err(failed)?,
        };
        match verify_bundle(&directory) {
            Ok(manifest) => {
                // Left over if an earlier run was interrupted after unpacking.
                self.remove_archive(digest).map_err(failed)?;
                Ok(LocalBundle::Complete(Bundle { digest, manifest: Arc::new(manifest), directory }))
            }
            Err(why) => {
                tracing::error!(path = %directory.display(), reason = why, "a Kubernetes bundle is damaged: fetching it again");
                self.remove_bundle(&name).map_err(failed)?;
                Ok(LocalBundle::Missing)
            }
        }
    }

    /// Fetches the archive unless it is here. The error is a sentence.
    async fn fetch_archive(&self, digest: Sha256) -> Result<(), String> {
        let store = self.archive_store();
        let kept = |error: std::io::Error| format!("storing its archive failed: {error}");
        let held = store.clone();
        let looking = move || {
            create_directory(&held.0, 0o700)?;
            held.verify_artefact(digest)
        };
        if tokio::task::spawn_blocking(looking).await.map_err(|error| error.to_string())?.map_err(kept)? {
            return self.fetch_signature(digest).await;
        }
        // A stored part may come from another file; in that case the second attempt fetches all of it.
        for _ in 0..2 {
            let accept = |text: &str| self.accept_signature(text).map(drop);
            let fetched =
                self.server_pool.fetch_signed_artefact(digest, &store.part_path(digest), &accept).await;
            let signature = match fetched {
                Ok(signature) => signature,
                Err(FetchError::Absent) => {
                    return Err(format!(
                        "no shepherd has it; add it with shepherdctl artefacts add, or put it at {}",
                        store.path(digest).display()
                    ));
                }
                Err(FetchError::Failed(why)) => return Err(why),
            };
            let held = store.clone();
            let taking = tokio::task::spawn_blocking(move || {
                // Before the archive gets its name: an archive without its signature would be fetched again.
                if signature.is_empty() {
                    remove_file(&held.signature_path(digest))?;
                } else {
                    fs::write(held.signature_path(digest), signature)?;
                }
                held.commit_part(digest)
            });
            if taking.await.map_err(|error| error.to_string())?.map_err(kept)? {
                return Ok(());
            }
        }
        Err("a shepherd sent another file: its digest is not that of the bundle".to_owned())
    }

    /// Fetches the signature of an archive that is here, unless it has an acceptable one. Without that, unpacking says what
    /// is missing. The error is a sentence.
    async fn fetch_signature(&self, digest: Sha256) -> Result<(), String> {
        let kept = |error: std::io::Error| format!("reading its archive failed: {error}");
        let here = self.clone();
        let reading = move || match here.read_signature(digest) {
            Ok(_) => Ok(None),
            Err(_) => fs::metadata(here.archive_path(digest)).map(|data| Some(data.len())),
        };
        let length = tokio::task::spawn_blocking(reading).await.map_err(|error| error.to_string())?;
        let Some(length) = length.map_err(kept)? else { return Ok(()) };
        match self.server_pool.fetch_signature(digest, length).await {
            Ok(signature) if self.accept_signature(&signature).is_ok() => {
                let path = self.signature_path(digest);
                let writing = tokio::task::spawn_blocking(move || fs::write(path, signature));
                writing.await.map_err(|error| error.to_string())?.map_err(kept)
            }
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::info!(%error, "the signature of a bundle that is here could not be fetched");
                Ok(())
            }
        }
    }

    /// Reads the signature beside an archive. `None` if it needs none. Blocks.
    fn read_signature(&self, digest: Sha256) -> Result<Option<SignedBy>, UnpackError> {
        let text = match fs::read_to_string(self.signature_path(digest)) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            other => other?,
        };
        let path = self.signature_path(digest);
        self.accept_signature(&text).map_err(|why| {
            UnpackError::Refused(format!(
                "{why}; the signature of an archive is expected at {}",
                path.display()
            ))
        })
    }

    /// Removes an archive and its signature.
    fn remove_archive(&self, digest: Sha256) -> std::io::Result<()> {
        remove_file(&self.archive_store().path(digest))?;
        remove_file(&self.archive_store().signature_path(digest))
    }

    /// Unpacks the local archive, and removes the archive then. Blocks.
    fn unpack_bundle(&self, digest: Sha256) -> Result<Bundle, UnpackError> {
        let archive = self.archive_store().path(digest);
        let name = hex::encode(digest.0);
        let (new, directory) =
            (self.directory.join(format!("{name}{NEW_SUFFIX}")), self.directory.join(&name));
        remove_path(&new)?;
        let signed_by = self.read_signature(digest)?;
        let unpacked = unpack_archive(&archive, &new, signed_by.as_ref(), free_bytes);
        if unpacked.is_err() {
            // A second failure adds nothing to the first error; the directory is removed before the next attempt.
            let _ = remove_path(&new);
        }
        match &unpacked {
            Err(UnpackError::Invalid(_)) => self.remove_archive(digest)?,
            // The archive has the digest of the order, so the signature is the wrong one.
            Err(UnpackError::Refused(_)) => remove_file(&self.signature_path(digest))?,
            Ok(_) | Err(UnpackError::Failed(_)) => {}
        }
        let manifest = unpacked?;
        fs::rename(&new, &directory)?;
        File::open(&self.directory)?.sync_all()?;
        self.remove_archive(digest)?;
        Ok(Bundle { digest, manifest: Arc::new(manifest), directory })
    }
}

enum LocalBundle {
    Complete(Bundle),
    Missing,
}

/// Runs blocking work with the lock held until it ends, even if the caller is gone by then.
async fn run_blocking<T: Send + 'static>(
    known: OwnedMutexGuard<StoreState>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<(OwnedMutexGuard<StoreState>, T), String> {
    let done = tokio::task::spawn_blocking(move || {
        let done = work();
        (known, done)
    });
    done.await.map_err(|error| error.to_string())
}

fn remove_path(path: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == ErrorKind::NotADirectory => fs::remove_file(path),
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn remove_file(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The beginning of a digest, as texts show it.
fn short_digest(digest: Sha256) -> String {
    hex::encode(&digest.0[..8])
}

#[cfg(test)]
mod tests;
