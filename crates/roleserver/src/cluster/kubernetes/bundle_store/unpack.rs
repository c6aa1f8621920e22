//! Unpack a bundle archive, and verify an unpacked bundle against its manifest.
//!
//! The digest of the bundle vouches for the manifest only. The rest of the archive is checked against the manifest, and
//! later the disk is too.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use flate2::read::GzDecoder;
use model::kubernetes::archive::{self, BLOCK_BYTES, TarHeader};
use model::kubernetes::bundle_manifest::{self, BundleManifest, MANIFEST, MAX_MANIFEST_BYTES};
use model::role_declaration::Sha256;
use model::signed_artefact::compare_content;
use model::signed_artefact::signature::FileVerification;
use ring::digest;

use crate::signing_store::SignedBy;

/// Bytes of the disk that stay free for everything else when a bundle is unpacked.
pub(super) const RESERVE: u64 = 256 << 20;
/// File with the SHA-256 of the manifest, written when the bundle was unpacked.
pub(super) const MANIFEST_DIGEST: &str = "manifest.sha256";
/// File with the minimum version in the signature of the archive. A bundle without a signature has none.
pub(super) const MINIMUM_VERSION: &str = "minimum-version";

/// Why an archive was not unpacked.
#[derive(Debug)]
pub(super) enum UnpackError {
    /// The content of the archive is invalid; it will never unpack.
    Invalid(String),
    /// The disk or the system failed; a later attempt may succeed.
    Failed(String),
    /// It has no valid signature; it may be signed later.
    Refused(String),
}

impl From<std::io::Error> for UnpackError {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// An archive with a signature that is verified while it is read.
struct VerifiedArchive<'s> {
    file: File,
    verification: Option<FileVerification<'s>>,
}

impl<'s> VerifiedArchive<'s> {
    fn open(path: &Path, signed_by: Option<&'s SignedBy>) -> Result<Self, UnpackError> {
        let begin = |signed_by: &'s SignedBy| FileVerification::begin(&signed_by.signature, &signed_by.key);
        let verification = signed_by.map(begin).transpose();
        let verification = verification.map_err(|error| UnpackError::Refused(error.to_string()))?;
        Ok(Self { file: File::open(path)?, verification })
    }

    /// Reads what is left, and verifies the signature of everything that was read.
    fn finish(mut self) -> Result<(), UnpackError> {
        std::io::copy(&mut self, &mut std::io::sink())?;
        let verified = self.verification.map_or(Ok(()), FileVerification::finish);
        verified.map_err(|error| UnpackError::Refused(error.to_string()))
    }
}

impl Read for VerifiedArchive<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.file.read(buffer)?;
        if let Some(verification) = &mut self.verification {
            verification.update(&buffer[..count]);
        }
        Ok(count)
    }
}

/// Unpacks an archive durably into a new directory, and verifies its signature on the way if there is one. `free` returns
/// the bytes that are free on a directory's disk.
pub(super) fn unpack_archive(
    archive: &Path,
    into: &Path,
    signed_by: Option<&SignedBy>,
    free: impl Fn(&Path) -> std::io::Result<u64>,
) -> Result<BundleManifest, UnpackError> {
    let mut archive = VerifiedArchive::open(archive, signed_by)?;
    let mut tar = GzDecoder::new(&mut archive);
    let text = archive::read_manifest_text(&mut tar).map_err(UnpackError::Invalid)?;
    let manifest =
        BundleManifest::parse(&text).map_err(|problems| UnpackError::Invalid(problems.to_string()))?;
    if let Some(signed_by) = signed_by {
        let content = Some((manifest.name.as_str(), manifest.kubernetes));
        compare_content(signed_by.signature.fields(), content)
            .map_err(|error| UnpackError::Refused(error.to_string()))?;
    }
    create_directory(into, 0o700)?;
    let (wanted, left) = (manifest.total_bytes(), free(into)?);
    if left < wanted.saturating_add(RESERVE) {
        return Err(UnpackError::Failed(format!(
            "it needs {} MiB; the disk of {} has {} MiB left, and {} MiB must stay free: make room there",
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
            create_directory(parent, 0o755)?;
        }
        let header =
            next_header(&mut tar)?.ok_or_else(|| invalid(format!("it ends before {:?}", file.path)))?;
        if header.path != file.path || header.size != file.size {
            return Err(invalid(format!(
                "its manifest names {:?} of {} bytes, and in its place is {:?} of {}",
                file.path, file.size, header.path, header.size
            )));
        }
        if copy_file(&mut tar, &path, file)? != file.sha256 {
            return Err(invalid(format!(
                "{:?} is another file: its digest is not that of the manifest",
                file.path
            )));
        }
        let mut rest = [0; BLOCK_BYTES];
        tar.read_exact(&mut rest[..header.padding()]).map_err(read_error)?;
    }
    if let Some(header) = next_header(&mut tar)? {
        return Err(invalid(format!("it holds {:?}, which its manifest does not name", header.path)));
    }
    drop(tar);
    archive.finish()?;
    write_new_file(&into.join(MANIFEST), &text)?;
    write_new_file(&into.join(MANIFEST_DIGEST), hex::encode(sha256(&text).0).as_bytes())?;
    if let Some(signed_by) = signed_by {
        let minimum = signed_by.signature.fields().minimum_version.to_string();
        write_new_file(&into.join(MINIMUM_VERSION), minimum.as_bytes())?;
    }
    for directory in &directories {
        File::open(directory)?.sync_all()?;
    }
    for finding in manifest.version_faults() {
        if finding.is_certain {
            tracing::warn!(bundle = manifest.name, "{finding}");
        } else {
            tracing::info!(bundle = manifest.name, "{finding}");
        }
    }
    Ok(manifest)
}

fn invalid(why: String) -> UnpackError {
    UnpackError::Invalid(why)
}

fn read_error(error: std::io::Error) -> UnpackError {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::InvalidInput | ErrorKind::InvalidData => {
            invalid(format!("it is damaged or cut off: {error}"))
        }
        _ => error.into(),
    }
}

/// The header of the next file; `None` at the end of the archive.
fn next_header(tar: &mut impl Read) -> Result<Option<TarHeader>, UnpackError> {
    let mut block = [0; BLOCK_BYTES];
    tar.read_exact(&mut block).map_err(read_error)?;
    TarHeader::parse(&block).map_err(UnpackError::Invalid)
}

/// Writes a file of exactly its declared length, and returns its digest.
fn copy_file(
    tar: &mut impl Read,
    path: &Path,
    file: &bundle_manifest::BundleFile,
) -> Result<Sha256, UnpackError> {
    let mode = if file.is_program { 0o755 } else { 0o644 };
    let mut written = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    // Independent of the umask.
    written.set_permissions(fs::Permissions::from_mode(mode))?;
    let mut context = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; 128 << 10];
    let mut left = file.size;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let count = match tar.read(&mut buffer[..most]) {
            Ok(0) => return Err(read_error(ErrorKind::UnexpectedEof.into())),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.map_err(read_error)?,
        };
        context.update(&buffer[..count]);
        written.write_all(&buffer[..count])?;
        left -= count as u64;
    }
    written.sync_all()?;
    Ok(finish_digest(context))
}

/// Verifies every file of an unpacked bundle, and returns its manifest. Blocks. The error is part of a sentence.
pub(super) fn verify_bundle(directory: &Path) -> Result<BundleManifest, String> {
    let failed = |path: &str, error: std::io::Error| format!("reading {path} failed: {error}");
    let mut text = Vec::new();
    File::open(directory.join(MANIFEST))
        .and_then(|file| file.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut text))
        .map_err(|error| failed(MANIFEST, error))?;
    let expected =
        fs::read(directory.join(MANIFEST_DIGEST)).map_err(|error| failed(MANIFEST_DIGEST, error))?;
    if hex::encode(sha256(&text).0).as_bytes() != expected {
        return Err(format!("its {MANIFEST} is not what was unpacked"));
    }
    let manifest = BundleManifest::parse(&text).map_err(|problems| problems.to_string())?;
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
        if finish_digest(context) != file.sha256 {
            return Err(format!("the digest of {} is not that of the manifest", file.path));
        }
    }
    Ok(manifest)
}

fn write_new_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Bytes that are free for this process on the disk of this directory.
pub(super) fn free_bytes(directory: &Path) -> std::io::Result<u64> {
    let disk = rustix::fs::statvfs(directory)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

pub(super) fn sha256(bytes: &[u8]) -> Sha256 {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(bytes);
    finish_digest(context)
}

fn finish_digest(context: digest::Context) -> Sha256 {
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    Sha256(digest)
}

pub(super) fn create_directory(directory: &Path, mode: u32) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(directory)
}
