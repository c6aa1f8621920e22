//! Receives an etcd snapshot as a stream or in a file, and verifies its digest.
//!
//! etcd sends its database file and then the SHA-256 of it, and `etcdctl snapshot restore` takes exactly this (`etcdutl
//! snapshot restore` from etcd 3.6 on). The file gets its final name only when all of it is on the disk and the digest
//! is right, so a file of that name is a snapshot. A crash leaves a file with `.partial` behind the name, which the
//! next snapshot of that name replaces.
//!
//! A reader that stores no file gets the chunks as etcd sends them ([`SnapshotStream`]), and must use nothing of them before
//! the digest is verified at the end. Both ways have one chunk in memory at most.
//!
//! The digest proves that nothing was lost on the way, not who sent it. A snapshot holds every secret of the cluster,
//! so only the owner can read the file (0600).

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::etcdserverpb as wire;
use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use tokio::fs::{File, OpenOptions};
use tokio::io::AsyncWriteExt as _;
use tonic::Streaming;

use crate::client::{Client, EtcdError, MemberStatus};

/// How long etcd may take from one chunk to the next.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);
/// Every database file consists of sectors of this size, so the bytes that remain must be the digest. etcd's own tools
/// find the digest in the same way.
const SECTOR_BYTES: u64 = 512;
/// The operation in errors.
const RECEIVING: &str = "receiving a snapshot of etcd";

/// A snapshot whose digest is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Size of the file, the appended digest included.
    pub bytes: u64,
    /// SHA-256 of the whole file, as `sha256sum` prints it.
    pub sha256: [u8; SHA256_OUTPUT_LEN],
}

/// A snapshot that was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedSnapshot {
    /// Size and digest of the saved file.
    pub snapshot: SnapshotFile,
    /// The snapshot has every write up to this revision of the store, and may have more: etcd 3.4 does not report the
    /// revision of a snapshot, so this is the revision that the same etcd reported right before.
    pub revision: i64,
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFileError {
    /// etcd did not send it.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// An operation on the file system failed.
    #[error("{operation} {} failed: {source}", path.display())]
    File {
        /// The operation that failed.
        operation: &'static str,
        /// The file it failed on.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is cut off, changed, or not a snapshot.
    #[error("{} is not a complete snapshot of etcd: {flaw}; take another", path.display())]
    Corrupt {
        /// The file that was checked.
        path: PathBuf,
        /// What is wrong with it.
        flaw: SnapshotFlaw,
    },
}

/// What is wrong with a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotFlaw {
    /// Cut off, or a database file without a digest. The value is the size in bytes.
    #[error("its size of {0} bytes is not that of whole sectors and a digest")]
    Size(u64),
    /// The content does not match its digest.
    #[error("the digest at its end does not match the data before it")]
    Digest,
}

/// All data of one member, in chunks as etcd sends them: the database file, and then its digest.
pub struct SnapshotStream {
    client: Client,
    source: MemberStatus,
    chunks: Streaming<wire::SnapshotResponse>,
    digests: SnapshotDigests,
}

impl SnapshotStream {
    /// The status of the member right before. The snapshot has every write up to its revision, and may have more.
    #[must_use]
    pub const fn source(&self) -> &MemberStatus {
        &self.source
    }

    /// The next chunk; `None` after the last one.
    pub async fn next_chunk(&mut self) -> Result<Option<Vec<u8>>, EtcdError> {
        let answered = tokio::time::timeout(CHUNK_TIMEOUT, self.chunks.message()).await;
        let answered = answered
            .map_err(|_| EtcdError::Deadline { operation: RECEIVING.to_owned(), within: CHUNK_TIMEOUT })?;
        let chunk = answered.map_err(|status| self.client.stream_error(RECEIVING, &status))?;
        Ok(chunk.map(|chunk| {
            self.digests.update(&chunk.blob);
            chunk.blob
        }))
    }

    /// Verifies the digest at the end of what was received.
    pub fn finish(self) -> Result<SnapshotFile, SnapshotFlaw> {
        self.digests.finish()
    }
}

impl Client {
    /// Begins to receive all data of the connected member.
    pub async fn open_snapshot(&self) -> Result<SnapshotStream, EtcdError> {
        let source = self.status().await?;
        let mut maintenance = self.maintenance();
        let request = wire::SnapshotRequest {};
        let chunks =
            self.open_stream(RECEIVING, request, async |request| maintenance.snapshot(request).await).await?;
        Ok(SnapshotStream { client: self.clone(), source, chunks, digests: SnapshotDigests::new() })
    }

    /// Saves all data of the connected member. Nothing is left behind on a failure.
    pub async fn save_snapshot(&self, path: &Path) -> Result<SavedSnapshot, SnapshotFileError> {
        let stream = self.open_snapshot().await?;
        let revision = stream.source().revision;
        let partial = partial_path(path);
        let saved = write_snapshot(stream, &partial, path).await;
        if saved.is_err() {
            // The first error is returned, not that of the clean-up.
            let _ = tokio::fs::remove_file(&partial).await;
        }
        Ok(SavedSnapshot { snapshot: saved?, revision })
    }
}

async fn write_snapshot(
    mut stream: SnapshotStream,
    partial: &Path,
    path: &Path,
) -> Result<SnapshotFile, SnapshotFileError> {
    let at = |doing, path: &Path| {
        let path = path.to_owned();
        move |source| SnapshotFileError::File { operation: doing, path, source }
    };
    let mut file = create_private_file(partial).await.map_err(at("creating", partial))?;
    while let Some(chunk) = stream.next_chunk().await? {
        file.write_all(&chunk).await.map_err(at("writing", partial))?;
    }
    let snapshot =
        stream.finish().map_err(|why| SnapshotFileError::Corrupt { path: path.to_owned(), flaw: why })?;
    file.sync_all().await.map_err(at("writing", partial))?;
    drop(file);
    tokio::fs::rename(partial, path).await.map_err(at("naming", path))?;
    // Without this the name may be gone after a power cut.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory_file = File::open(directory).await.map_err(at("opening", directory))?;
    directory_file.sync_all().await.map_err(at("writing", directory))?;
    Ok(snapshot)
}

/// Reads a snapshot and verifies that it is whole. The file is read on a blocking thread.
pub async fn verify_snapshot(path: &Path) -> Result<SnapshotFile, SnapshotFileError> {
    let path = path.to_owned();
    let name = path.clone();
    let read = tokio::task::spawn_blocking(move || {
        let failed = |source| SnapshotFileError::File { operation: "reading", path: path.clone(), source };
        let mut file = std::fs::File::open(&path).map_err(failed)?;
        let mut digests = SnapshotDigests::new();
        let mut piece = vec![0; 1 << 20];
        loop {
            match file.read(&mut piece).map_err(failed)? {
                0 => break,
                read => digests.update(&piece[..read]),
            }
        }
        digests.finish().map_err(|why| SnapshotFileError::Corrupt { path: path.clone(), flaw: why })
    });
    read.await.map_err(|error| SnapshotFileError::File {
        operation: "reading",
        path: name,
        source: error.into(),
    })?
}

fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

async fn create_private_file(path: &Path) -> io::Result<File> {
    // A file that a crash left may be open to others.
    match tokio::fs::remove_file(path).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).await
}

/// The digest of the whole file, and that of the database: all but the last bytes.
struct SnapshotDigests {
    all: Context,
    database: Context,
    /// The last bytes so far, which may be the appended digest.
    pending: Vec<u8>,
    bytes: u64,
}

impl SnapshotDigests {
    fn new() -> Self {
        Self { all: Context::new(&SHA256), database: Context::new(&SHA256), pending: Vec::new(), bytes: 0 }
    }

    fn update(&mut self, piece: &[u8]) {
        self.all.update(piece);
        self.bytes += piece.len() as u64;
        self.pending.extend_from_slice(piece);
        let sure = self.pending.len().saturating_sub(SHA256_OUTPUT_LEN);
        self.database.update(&self.pending[..sure]);
        self.pending.drain(..sure);
    }

    fn finish(self) -> Result<SnapshotFile, SnapshotFlaw> {
        let database = self.bytes.checked_sub(SHA256_OUTPUT_LEN as u64);
        if database.is_none_or(|size| size == 0 || !size.is_multiple_of(SECTOR_BYTES)) {
            return Err(SnapshotFlaw::Size(self.bytes));
        }
        if self.database.finish().as_ref() != self.pending {
            return Err(SnapshotFlaw::Digest);
        }
        let mut sha256 = [0; SHA256_OUTPUT_LEN];
        sha256.copy_from_slice(self.all.finish().as_ref());
        Ok(SnapshotFile { bytes: self.bytes, sha256 })
    }
}

#[cfg(test)]
mod tests {
    use ring::digest::digest;

    use super::*;

    fn snapshot_of(database: &[u8]) -> Vec<u8> {
        [database, digest(&SHA256, database).as_ref()].concat()
    }

    fn verify_chunks(file: &[u8], piece: usize) -> Result<SnapshotFile, SnapshotFlaw> {
        let mut digests = SnapshotDigests::new();
        file.chunks(piece).for_each(|piece| digests.update(piece));
        digests.finish()
    }

    #[test]
    fn trailing_digest_is_found_for_any_chunking() {
        let file = snapshot_of(&[7; 1024]);
        let expected =
            SnapshotFile { bytes: 1056, sha256: digest(&SHA256, &file).as_ref().try_into().unwrap() };
        for piece in [1, 5, 31, 32, 33, 512, 1024, 1040, 5000] {
            assert_eq!(verify_chunks(&file, piece), Ok(expected.clone()), "{piece}");
        }
    }

    #[test]
    fn truncated_or_changed_snapshot_is_rejected() {
        let file = snapshot_of(&[7; 1024]);
        for end in [0, 1, 31, 32, 33, 512, 1024, 1055] {
            assert_eq!(verify_chunks(&file[..end], 100), Err(SnapshotFlaw::Size(end as u64)), "{end}");
        }
        assert_eq!(verify_chunks(&file[..544], 100), Err(SnapshotFlaw::Digest));
        for at in [0, 511, 1023, 1024, 1055] {
            let mut changed = file.clone();
            changed[at] ^= 1;
            assert_eq!(verify_chunks(&changed, 100), Err(SnapshotFlaw::Digest), "{at}");
        }
    }
}
