//! Unpacking a bundle, and finding later whether all of it is still what was unpacked.
//!
//! The manifest is believed as far as the digest of the bundle goes; the archive behind it is not, nor is the disk later on.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use flate2::read::GzDecoder;
use ring::digest;

use crate::model::declaration::Sha256;
use crate::model::kubernetes::archive::{self, BLOCK, Header};
use crate::model::kubernetes::bundle::{self, LARGEST_MANIFEST, MANIFEST, Manifest};

/// What the disk keeps for everybody else when a bundle is unpacked.
pub(super) const RESERVE: u64 = 256 << 20;
/// The digest of the manifest, as it was unpacked.
pub(super) const MANIFEST_DIGEST: &str = "manifest.sha256";

/// Why an archive was not unpacked.
#[derive(Debug)]
pub(super) enum Unpacking {
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

/// Unpacks an archive into a new directory, so that all of it is on the disk. `free` says how many bytes the disk has left.
pub(super) fn unpack(
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
pub(super) fn verified(directory: &Path) -> Result<Manifest, String> {
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

fn put(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Bytes that the disk of this directory has left for us.
pub(super) fn free(directory: &Path) -> std::io::Result<u64> {
    let disk = rustix::fs::statvfs(directory)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

pub(super) fn sha256(bytes: &[u8]) -> Sha256 {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(bytes);
    of(context)
}

fn of(context: digest::Context) -> Sha256 {
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    Sha256(digest)
}

pub(super) fn make(directory: &Path, mode: u32) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(directory)
}
