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
//! unpacked as [`archive`] describes: plain files that its manifest names, in that order, each of exactly that
//! length, and only where the disk has room for all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::read::GzDecoder;
use ring::digest;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::model::declaration::Sha256;
use crate::model::kubernetes::archive::{self, BLOCK, Header};
use crate::model::kubernetes::bundle::{self, AddOn, Component, Image, LARGEST_MANIFEST, MANIFEST, Manifest};
use crate::roleserver::cluster::services::artefacts::Store;
use crate::roleserver::shepherds::{FetchError, Shepherds};

/// What the disk keeps for everybody else when a bundle is unpacked.
const RESERVE: u64 = 256 << 20;
/// The digest of the manifest, as it was unpacked.
const MANIFEST_DIGEST: &str = "manifest.sha256";
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

/// Why an archive was not unpacked.
#[derive(Debug)]
enum Unpacking {
    /// What it is made of.
    Wrong(String),
    /// The disk, or what else there is around it.
    Failed(String),
}

impl From<std::io::Error> for Unpacking {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
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
        let unpacked = unpack(&archive, &new, |path| free(path));
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

/// Unpacks an archive into a new directory, so that all of it is on the disk. `free` says how many bytes the disk has left.
fn unpack(
    archive: &Path,
    into: &Path,
    free: impl Fn(&Path) -> std::io::Result<u64>,
) -> Result<Manifest, Unpacking> {
    let mut tar = GzDecoder::new(File::open(archive)?);
    let text = archive::read_manifest(&mut tar).map_err(Unpacking::Wrong)?;
    let manifest = Manifest::read(&text).map_err(|problems| Unpacking::Wrong(problems.to_string()))?;
    make(into, 0o700)?;
    let (wanted, left) = (manifest.size(), free(into)?);
    if left < wanted.saturating_add(RESERVE) {
        return Err(Unpacking::Failed(format!(
            "it takes {} MiB, and the disk of {} has {} MiB left, of which {} MiB stay free; make room there",
            wanted >> 20,
            into.display(),
            left >> 20,
            RESERVE >> 20
        )));
    }
    let mut directories = BTreeSet::from([into.to_owned()]);
    for file in manifest.files() {
        let path = into.join(&file.path);
        if let Some(parent) = path.parent()
            && directories.insert(parent.to_owned())
        {
            make(parent, 0o755)?;
        }
        let header = next(&mut tar)?.ok_or_else(|| wrong(format!("it ends before {:?}", file.path)))?;
        if header.path != file.path || header.size != file.size {
            return Err(wrong(format!(
                "its manifest names {:?} of {} bytes, and in its place is {:?} of {}",
                file.path, file.size, header.path, header.size
            )));
        }
        if copy(&mut tar, &path, file)? != file.sha256 {
            return Err(wrong(format!(
                "{:?} is another file: its digest is not that of the manifest",
                file.path
            )));
        }
        let mut rest = [0; BLOCK];
        tar.read_exact(&mut rest[..header.padding()]).map_err(cut_off)?;
    }
    if let Some(header) = next(&mut tar)? {
        return Err(wrong(format!("it holds {:?}, which its manifest does not name", header.path)));
    }
    put(&into.join(MANIFEST), &text)?;
    put(&into.join(MANIFEST_DIGEST), hex::encode(sha256(&text).0).as_bytes())?;
    for directory in &directories {
        File::open(directory)?.sync_all()?;
    }
    Ok(manifest)
}

fn wrong(why: String) -> Unpacking {
    Unpacking::Wrong(why)
}

fn cut_off(error: std::io::Error) -> Unpacking {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::InvalidInput | ErrorKind::InvalidData => {
            wrong(format!("it is damaged or cut off: {error}"))
        }
        _ => error.into(),
    }
}

/// The header of the next file; none at the end.
fn next(tar: &mut impl Read) -> Result<Option<Header>, Unpacking> {
    let mut block = [0; BLOCK];
    tar.read_exact(&mut block).map_err(cut_off)?;
    Header::read(&block).map_err(Unpacking::Wrong)
}

/// Writes a file of exactly its length; gives its digest.
fn copy(tar: &mut impl Read, path: &Path, file: &bundle::File) -> Result<Sha256, Unpacking> {
    let mode = if file.is_program { 0o755 } else { 0o644 };
    let mut written = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    // Whatever the umask made of it.
    written.set_permissions(fs::Permissions::from_mode(mode))?;
    let mut context = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; 128 << 10];
    let mut left = file.size;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let count = match tar.read(&mut buffer[..most]) {
            Ok(0) => return Err(cut_off(ErrorKind::UnexpectedEof.into())),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.map_err(cut_off)?,
        };
        context.update(&buffer[..count]);
        written.write_all(&buffer[..count])?;
        left -= count as u64;
    }
    written.sync_all()?;
    Ok(of(context))
}

/// What an unpacked bundle holds, once every file was found right. Blocks. The error is a part of a sentence.
fn verified(directory: &Path) -> Result<Manifest, String> {
    let failed = |path: &str, error: std::io::Error| format!("reading {path} failed: {error}");
    let mut text = Vec::new();
    File::open(directory.join(MANIFEST))
        .and_then(|file| file.take(LARGEST_MANIFEST + 1).read_to_end(&mut text))
        .map_err(|error| failed(MANIFEST, error))?;
    let expected =
        fs::read(directory.join(MANIFEST_DIGEST)).map_err(|error| failed(MANIFEST_DIGEST, error))?;
    if hex::encode(sha256(&text).0).as_bytes() != expected {
        return Err(format!("its {MANIFEST} is not what was unpacked"));
    }
    let manifest = Manifest::read(&text).map_err(|problems| problems.to_string())?;
    for file in manifest.files() {
        let path = directory.join(&file.path);
        let metadata = fs::symlink_metadata(&path).map_err(|error| failed(&file.path, error))?;
        let started = metadata.permissions().mode() & 0o111 != 0;
        if !metadata.is_file() || metadata.len() != file.size || started != file.is_program {
            return Err(format!("{} is not the file that was unpacked", file.path));
        }
        let mut opened = File::open(&path).map_err(|error| failed(&file.path, error))?;
        let mut context = digest::Context::new(&digest::SHA256);
        let mut buffer = vec![0; 128 << 10];
        loop {
            match opened.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => context.update(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(&file.path, error)),
            }
        }
        if of(context) != file.sha256 {
            return Err(format!("the digest of {} is not that of the manifest", file.path));
        }
    }
    Ok(manifest)
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

fn put(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Bytes that the disk of this directory has left for us.
fn free(directory: &Path) -> std::io::Result<u64> {
    let disk = rustix::fs::statvfs(directory)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

fn make(directory: &Path, mode: u32) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(directory)
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

fn sha256(bytes: &[u8]) -> Sha256 {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(bytes);
    of(context)
}

fn of(context: digest::Context) -> Sha256 {
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    Sha256(digest)
}

/// As much of a digest as people say.
fn name(digest: Sha256) -> String {
    hex::encode(&digest.0[..8])
}

#[cfg(test)]
mod tests;
