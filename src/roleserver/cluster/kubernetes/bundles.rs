//! Bundles of Kubernetes on this node, each unpacked below its digest.
//!
//! | below the directory | what |
//! | --- | --- |
//! | `archives/DIGEST` | a bundle that is to be unpacked: fetched from a shepherd, or put there by hand |
//! | `archives/DIGEST.part` | one that is being fetched, and goes on from there |
//! | `DIGEST.new/` | one that is being unpacked |
//! | `DIGEST/` | a whole one: the files of its manifest, the manifest, and the manifest's digest |
//! | `DIGEST.gone/` | one that is being removed |
//!
//! A directory gets the name of its digest only when every byte of it is right and on the disk, by a rename, and loses it by
//! a rename before the first byte goes. So a crash at any point leaves a whole bundle or none, and what it left besides is
//! recognised by its name and removed. Another bundle stands beside the one that runs and never in its place: programs that
//! run keep their files, and going back is naming another digest.
//!
//! In each life of the role server a bundle is verified before anything is started of it, as artefacts are; one that the disk
//! has damaged is removed and fetched anew. The archive goes when it was unpacked: shepherds have it.
//!
//! An archive is not trusted for having the right digest, which says only that it is the one that an operator named. It is
//! unpacked as [`crate::model::kubernetes::archive`] describes: plain files that its manifest names, in that order, each of
//! exactly that length, and only where the disk has room for all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::model::declaration::Sha256;
use crate::model::kubernetes::bundle::{self, AddOn, Component, Image, Manifest};
use crate::roleserver::cluster::kubernetes::bundles::unpacking::{
    Unpacking, free, make, sha256, unpack, verified,
};
use crate::roleserver::cluster::services::artefacts::Store;
use crate::roleserver::shepherds::{FetchError, Shepherds};

const ARCHIVES: &str = "archives";
const NEW: &str = ".new";
const GONE: &str = ".gone";

/// The bundles of a node; cheap to clone, and clones are one.
#[derive(Clone, Debug)]
pub struct Bundles {
    directory: PathBuf,
    shepherds: Shepherds,
    /// Held by whoever changes anything in the directory.
    known: Arc<Mutex<Known>>,
}

/// What is known in this life.
#[derive(Debug, Default)]
struct Known {
    /// Those that are whole.
    whole: BTreeMap<Sha256, Bundle>,
    /// Those that will never do, and why.
    refused: BTreeMap<Sha256, String>,
}

/// A bundle that is here, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Its digest.
    pub digest: Sha256,
    /// What it holds.
    pub manifest: Arc<Manifest>,
    /// Where.
    pub directory: PathBuf,
}

/// Why there is no bundle to run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// It may come: whoever waits asks again.
    #[error("the Kubernetes bundle {} is not on this node yet: {why}", name(*.digest))]
    NotYet {
        /// Which.
        digest: Sha256,
        /// A sentence.
        why: String,
    },
    /// It is here and will not do, today or tomorrow.
    #[error("the Kubernetes bundle {} cannot be used: {why}", name(*.digest))]
    Refused {
        /// Which.
        digest: Sha256,
        /// A sentence.
        why: String,
    },
}

impl Bundle {
    /// The program of that component; the error is a sentence.
    pub fn program(&self, component: Component) -> Result<PathBuf, String> {
        let program = self.manifest.program(component);
        let program = program.ok_or_else(|| format!("bundle {} holds no {component}", self.manifest.name))?;
        Ok(self.directory.join(&program.file.path))
    }

    /// Where programs find each other.
    #[must_use]
    pub fn programs(&self) -> PathBuf {
        self.directory.join("bin")
    }

    /// Where the plugins for networks are.
    #[must_use]
    pub fn plugins(&self) -> PathBuf {
        self.directory.join(Component::CniPlugin.path())
    }

    /// What it wants in the cluster.
    #[must_use]
    pub fn add_ons(&self) -> &[AddOn] {
        &self.manifest.add_ons
    }

    /// The manifests of an add-on, verified. Blocks.
    pub fn read_add_on(&self, add_on: &AddOn) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(self.directory.join(&add_on.file.path))?
            .take(bundle::LARGEST_ADD_ON)
            .read_to_end(&mut bytes)?;
        if sha256(&bytes) == add_on.file.sha256 {
            Ok(bytes)
        } else {
            Err(std::io::Error::new(ErrorKind::InvalidData, format!("{} is damaged", add_on.file.path)))
        }
    }

    /// The image of that name, and its archive.
    #[must_use]
    pub fn image(&self, name: &str) -> Option<(&Image, PathBuf)> {
        let image = self.manifest.image(name)?;
        Some((image, self.directory.join(&image.file.path)))
    }
}

impl Bundles {
    /// Those in this directory, which is made when the first comes.
    #[must_use]
    pub fn open(directory: PathBuf, shepherds: Shepherds) -> Self {
        Self { directory, shepherds, known: Arc::default() }
    }

    /// Where an archive is put by whoever brings one by hand.
    #[must_use]
    pub fn place(&self, digest: Sha256) -> PathBuf {
        self.store().path(digest)
    }

    /// The bundle of this digest: at once when it is here, and otherwise as soon as it was fetched, verified and unpacked.
    ///
    /// Whoever drops this has lost nothing: what was fetched stays, and what is being unpacked is unpacked to its end.
    pub async fn have(&self, digest: &Sha256) -> Result<Bundle, BundleError> {
        let digest = *digest;
        let not_yet = |why| BundleError::NotYet { digest, why };
        let known = self.known.clone().lock_owned().await;
        if let Some(bundle) = known.whole.get(&digest) {
            return Ok(bundle.clone());
        }
        if let Some(why) = known.refused.get(&digest) {
            return Err(BundleError::Refused { digest, why: why.clone() });
        }
        let here = self.clone();
        let (mut known, looked) = blocking(known, move || here.look(digest)).await.map_err(not_yet)?;
        if let Here::Whole(bundle) = looked.map_err(not_yet)? {
            known.whole.insert(digest, bundle.clone());
            return Ok(bundle);
        }
        self.fetched(digest).await.map_err(not_yet)?;
        let here = self.clone();
        let (mut known, unpacked) = blocking(known, move || here.unpack(digest)).await.map_err(not_yet)?;
        match unpacked {
            Ok(bundle) => {
                let (name, kubernetes) = (&bundle.manifest.name, bundle.manifest.kubernetes);
                tracing::info!(name, %kubernetes, "a Kubernetes bundle is here");
                known.whole.insert(digest, bundle.clone());
                Ok(bundle)
            }
            Err(Unpacking::Failed(why)) => Err(not_yet(format!("unpacking it failed: {why}"))),
            Err(Unpacking::Wrong(why)) => {
                tracing::error!(why, "a Kubernetes bundle cannot be used");
                known.refused.insert(digest, why.clone());
                Err(BundleError::Refused { digest, why })
            }
        }
    }

    /// Removes all but these, and what was left half-way. Programs that run of one that goes keep their files.
    pub async fn keep_only(&self, digests: &[Sha256]) -> std::io::Result<()> {
        let names: BTreeSet<String> = digests.iter().map(|digest| hex::encode(digest.0)).collect();
        let mut known = self.known.clone().lock_owned().await;
        known.whole.retain(|digest, _| digests.contains(digest));
        known.refused.retain(|digest, _| digests.contains(digest));
        let here = self.clone();
        let digests: BTreeSet<Sha256> = digests.iter().copied().collect();
        let removing = move || {
            here.store().keep_only(&digests)?;
            for name in here.names()? {
                let digest = name.strip_suffix(NEW).or_else(|| name.strip_suffix(GONE)).unwrap_or(&name);
                if name != ARCHIVES && (digest != name || !names.contains(digest)) {
                    tracing::info!(name, "a Kubernetes bundle that is no longer kept is removed");
                    here.remove(&name)?;
                }
            }
            Ok(())
        };
        blocking(known, removing).await.map_err(std::io::Error::other)?.1
    }

    fn store(&self) -> Store {
        Store(self.directory.join(ARCHIVES))
    }

    /// What there is in the directory.
    fn names(&self) -> std::io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Has nothing of that name any more. What was a whole bundle is none from the first moment on.
    fn remove(&self, name: &str) -> std::io::Result<()> {
        let path = self.directory.join(name);
        let gone = self.directory.join(format!("{}{GONE}", name.trim_end_matches(GONE)));
        if path != gone {
            remove_all(&gone)?;
            match fs::rename(&path, &gone) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                other => other?,
            }
            File::open(&self.directory)?.sync_all()?;
        }
        remove_all(&gone)
    }

    /// What is here of it: what is not whole is removed. Blocks. The error is a sentence.
    fn look(&self, digest: Sha256) -> Result<Here, String> {
        let name = hex::encode(digest.0);
        let directory = self.directory.join(&name);
        let failed = |error: std::io::Error| format!("looking at {} failed: {error}", directory.display());
        match fs::symlink_metadata(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Here::Nothing),
            other => other.map_err(failed)?,
        };
        match verified(&directory) {
            Ok(manifest) => {
                // Left by who was cut off after it had unpacked it.
                remove_file(&self.store().path(digest)).map_err(failed)?;
                Ok(Here::Whole(Bundle { digest, manifest: Arc::new(manifest), directory }))
            }
            Err(why) => {
                tracing::error!(path = %directory.display(), why, "a Kubernetes bundle is damaged, and is fetched anew");
                self.remove(&name).map_err(failed)?;
                Ok(Here::Nothing)
            }
        }
    }

    /// Has the archive here. The error is a sentence.
    async fn fetched(&self, digest: Sha256) -> Result<(), String> {
        let store = self.store();
        let kept = |error: std::io::Error| format!("keeping its archive failed: {error}");
        let held = store.clone();
        let looking = move || {
            make(&held.0, 0o700)?;
            held.is_whole(digest)
        };
        if tokio::task::spawn_blocking(looking).await.map_err(|error| error.to_string())?.map_err(kept)? {
            return Ok(());
        }
        // What was here until now may be no part of it; then all of it comes once more.
        for _ in 0..2 {
            match self.shepherds.fetch(digest, &store.part(digest)).await {
                Ok(_) => {}
                Err(FetchError::Absent) => {
                    return Err(format!(
                        "no shepherd has it; add it with shepherdctl artefacts add, or put it at {}",
                        store.path(digest).display()
                    ));
                }
                Err(FetchError::Failed(why)) => return Err(why),
            }
            let held = store.clone();
            let taking = tokio::task::spawn_blocking(move || held.take(digest));
            if taking.await.map_err(|error| error.to_string())?.map_err(kept)? {
                return Ok(());
            }
        }
        Err("what a shepherd sends is another file: its digest is not that of the bundle".to_owned())
    }

    /// Unpacks the archive, which is here, and removes it. Blocks.
    fn unpack(&self, digest: Sha256) -> Result<Bundle, Unpacking> {
        let archive = self.store().path(digest);
        let name = hex::encode(digest.0);
        let (new, directory) = (self.directory.join(format!("{name}{NEW}")), self.directory.join(&name));
        remove_all(&new)?;
        let unpacked = unpack(&archive, &new, free);
        if unpacked.is_err() {
            // That this may fail too adds nothing to the first error; it is removed before the next try.
            let _ = remove_all(&new);
        }
        if let Err(Unpacking::Wrong(_)) = unpacked {
            remove_file(&archive)?;
        }
        let manifest = unpacked?;
        fs::rename(&new, &directory)?;
        File::open(&self.directory)?.sync_all()?;
        remove_file(&archive)?;
        Ok(Bundle { digest, manifest: Arc::new(manifest), directory })
    }
}

enum Here {
    Whole(Bundle),
    Nothing,
}

/// Does what blocks, with the lock in its hands for as long as it takes: also when nobody waits for it any more.
async fn blocking<T: Send + 'static>(
    known: OwnedMutexGuard<Known>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<(OwnedMutexGuard<Known>, T), String> {
    let done = tokio::task::spawn_blocking(move || {
        let done = work();
        (known, done)
    });
    done.await.map_err(|error| error.to_string())
}

fn remove_all(path: &Path) -> std::io::Result<()> {
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

/// As much of a digest as people say.
fn name(digest: Sha256) -> String {
    hex::encode(&digest.0[..8])
}

mod unpacking;

#[cfg(test)]
mod tests;
