//! A copy of everything that etcd keeps, in a file.
//!
//! etcd sends its database file and after that the SHA-256 of it, and `etcdctl snapshot restore` takes exactly this
//! (`etcdutl snapshot restore` from etcd 3.6 on).
//! The file gets its name only when all of it is on the disk and the digest is right: whoever sees the name has a
//! snapshot. The rest of one that was cut off by a crash has the name with `.partial` behind it, and is overwritten by
//! the next.
//!
//! The digest says that nothing was lost on the way, not who sent it; a snapshot holds every secret of the cluster, so
//! the file is ours alone (0600).

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
use tokio::fs::{File, OpenOptions};
use tokio::io::AsyncWriteExt as _;

use crate::etcd::client::{Client, EtcdError};
use crate::proto::etcdserverpb as wire;

/// How long etcd may take from one piece to the next.
const NEXT_PIECE: Duration = Duration::from_secs(30);
/// Every database file is made of sectors of this size, so that what is more must be the digest (etcd's own tools tell
/// by the same whether there is one).
const SECTOR: u64 = 512;

/// A snapshot whose digest is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Size of the file, the appended digest included.
    pub bytes: u64,
    /// SHA-256 of the whole file, as `sha256sum` tells it.
    pub sha256: [u8; SHA256_OUTPUT_LEN],
}

/// A snapshot that was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The file.
    pub snapshot: Snapshot,
    /// It has all that was written up to this revision of the store, and may have more: etcd 3.4 does not say with a
    /// snapshot of which revision it is, so this is what the same etcd said right before.
    pub revision: i64,
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// etcd did not send it.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// A file did not do what files do.
    #[error("{doing} {} failed: {source}", path.display())]
    File {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// It is cut off, changed, or no snapshot.
    #[error("{} is no whole snapshot of etcd: {why}; take another", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: Flaw,
    },
}

/// What is wrong with a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// Cut off, or a database file without a digest.
    #[error("its {0} bytes are not whole sectors and a digest")]
    Size(u64),
    /// Changed.
    #[error("the digest at its end is not that of what stands before")]
    Digest,
}

impl Client {
    /// Saves all that the member we are connected to keeps. Nothing is left behind when it fails.
    pub async fn save_snapshot(&self, path: &Path) -> Result<Saved, SnapshotError> {
        let revision = self.status().await?.revision;
        let partial = partial(path);
        let saved = self.receive(&partial, path).await;
        if saved.is_err() {
            // Why it failed is what is to be told.
            let _ = tokio::fs::remove_file(&partial).await;
        }
        Ok(Saved { snapshot: saved?, revision })
    }

    async fn receive(&self, partial: &Path, path: &Path) -> Result<Snapshot, SnapshotError> {
        let doing = format!("receiving a snapshot of etcd for {}", path.display());
        let at = |doing, path: &Path| {
            let path = path.to_owned();
            move |source| SnapshotError::File { doing, path, source }
        };
        let mut file = create(partial).await.map_err(at("creating", partial))?;
        let mut maintenance = self.maintenance();
        let ask = wire::SnapshotRequest {};
        let mut pieces = self.open(&doing, ask, async |ask| maintenance.snapshot(ask).await).await?;
        let mut digests = Digests::new();
        loop {
            let piece = tokio::time::timeout(NEXT_PIECE, pieces.message());
            let piece =
                piece.await.map_err(|_| EtcdError::Deadline { doing: doing.clone(), within: NEXT_PIECE })?;
            let Some(piece) = piece.map_err(|status| self.stream_error(&doing, &status))? else { break };
            digests.update(&piece.blob);
            file.write_all(&piece.blob).await.map_err(at("writing", partial))?;
        }
        let snapshot =
            digests.finish().map_err(|why| SnapshotError::Broken { path: path.to_owned(), why })?;
        file.sync_all().await.map_err(at("writing", partial))?;
        drop(file);
        tokio::fs::rename(partial, path).await.map_err(at("naming", path))?;
        // Or the name may be gone after a power cut.
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let directory_file = File::open(directory).await.map_err(at("opening", directory))?;
        directory_file.sync_all().await.map_err(at("writing", directory))?;
        Ok(snapshot)
    }
}

/// Reads a snapshot and says whether it is whole. Takes as long as reading the file does, on a thread for that.
pub async fn verify(path: &Path) -> Result<Snapshot, SnapshotError> {
    let path = path.to_owned();
    let name = path.clone();
    let read = tokio::task::spawn_blocking(move || {
        let failed = |source| SnapshotError::File { doing: "reading", path: path.clone(), source };
        let mut file = std::fs::File::open(&path).map_err(failed)?;
        let mut digests = Digests::new();
        let mut piece = vec![0; 1 << 20];
        loop {
            match file.read(&mut piece).map_err(failed)? {
                0 => break,
                read => digests.update(&piece[..read]),
            }
        }
        digests.finish().map_err(|why| SnapshotError::Broken { path: path.clone(), why })
    });
    read.await.map_err(|error| SnapshotError::File { doing: "reading", path: name, source: error.into() })?
}

fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

async fn create(path: &Path) -> io::Result<File> {
    // One that a crash left may have been opened to others.
    match tokio::fs::remove_file(path).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).await
}

/// The digest of all, and of all but the last bytes, which are the other's.
struct Digests {
    all: Context,
    database: Context,
    /// What may be the digest at the end.
    held: Vec<u8>,
    bytes: u64,
}

impl Digests {
    fn new() -> Self {
        Self { all: Context::new(&SHA256), database: Context::new(&SHA256), held: Vec::new(), bytes: 0 }
    }

    fn update(&mut self, piece: &[u8]) {
        self.all.update(piece);
        self.bytes += piece.len() as u64;
        self.held.extend_from_slice(piece);
        let sure = self.held.len().saturating_sub(SHA256_OUTPUT_LEN);
        self.database.update(&self.held[..sure]);
        self.held.drain(..sure);
    }

    fn finish(self) -> Result<Snapshot, Flaw> {
        let database = self.bytes.checked_sub(SHA256_OUTPUT_LEN as u64);
        if database.is_none_or(|size| size == 0 || !size.is_multiple_of(SECTOR)) {
            return Err(Flaw::Size(self.bytes));
        }
        if self.database.finish().as_ref() != self.held {
            return Err(Flaw::Digest);
        }
        let mut sha256 = [0; SHA256_OUTPUT_LEN];
        sha256.copy_from_slice(self.all.finish().as_ref());
        Ok(Snapshot { bytes: self.bytes, sha256 })
    }
}

#[cfg(test)]
mod tests {
    use ring::digest::digest;

    use super::*;

    fn snapshot_of(database: &[u8]) -> Vec<u8> {
        [database, digest(&SHA256, database).as_ref()].concat()
    }

    fn judged(file: &[u8], piece: usize) -> Result<Snapshot, Flaw> {
        let mut digests = Digests::new();
        file.chunks(piece).for_each(|piece| digests.update(piece));
        digests.finish()
    }

    #[test]
    fn digest_at_the_end_is_found_however_the_pieces_fall() {
        let file = snapshot_of(&[7; 1024]);
        let expected = Snapshot { bytes: 1056, sha256: digest(&SHA256, &file).as_ref().try_into().unwrap() };
        for piece in [1, 5, 31, 32, 33, 512, 1024, 1040, 5000] {
            assert_eq!(judged(&file, piece), Ok(expected.clone()), "{piece}");
        }
    }

    #[test]
    fn what_is_cut_off_or_changed_is_refused() {
        let file = snapshot_of(&[7; 1024]);
        for end in [0, 1, 31, 32, 33, 512, 1024, 1055] {
            assert_eq!(judged(&file[..end], 100), Err(Flaw::Size(end as u64)), "{end}");
        }
        assert_eq!(judged(&file[..544], 100), Err(Flaw::Digest));
        for at in [0, 511, 1023, 1024, 1055] {
            let mut changed = file.clone();
            changed[at] ^= 1;
            assert_eq!(judged(&changed, 100), Err(Flaw::Digest), "{at}");
        }
    }
}
