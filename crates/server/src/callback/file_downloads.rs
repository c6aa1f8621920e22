//! File downloads of machines over the agent channel, with concurrency limits.
//!
//! A [`FileSource`] provides the bytes; the artefacts of the BMDB are one. A file is sent piece by piece, and each
//! piece is read when the client has taken the one before. So a stream holds no database connection, and at most two
//! pieces are in memory. The number of downloads is bounded, in total and per machine, so that a hundred machines that
//! update at once do not crowd out the heartbeats of the others. A download above the limit is rejected, and the
//! machine tries again. A client that takes no piece for a minute is cut off, and resumes later where it stopped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use bmdb::connection::Bmdb;
use bmdb::connection::error::BmdbError;
use bmdb::metrics::Metrics;
use bmdb::metrics::labels::ByResult;
use model::artefact::locate_offset;
use model::ids::MachineId;
use model::role_declaration::Sha256;
use proto::agent::v1::{ArtefactPiece, FilePart};

/// Most downloads at once.
const MAX_DOWNLOADS: usize = 32;
/// Most downloads of one machine: files of its services, and a new release of its role server.
const MAX_DOWNLOADS_PER_MACHINE: u32 = 2;
/// Most pieces that are read at once.
const MAX_CONCURRENT_READS: usize = 4;
/// Longest time in which a machine takes no piece.
const SEND_TIMEOUT: Duration = Duration::from_mins(1);

/// A source of files for machines.
#[tonic::async_trait]
pub trait FileSource: Send + Sync {
    /// The size of the file with this digest; `None` if the source has no such file for this machine.
    async fn size(&self, machine: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError>;
    /// Bytes of the file from `offset`, at most 256 KiB and at least one; `None` if the file is gone.
    async fn piece(
        &self,
        machine: MachineId,
        sha256: Sha256,
        offset: u64,
    ) -> Result<Option<Vec<u8>>, BmdbError>;
    /// The signature of the file; `None` if it is not signed.
    async fn signature(&self, _sha256: Sha256) -> Result<Option<String>, BmdbError> {
        Ok(None)
    }
}

/// The artefacts that operators added; they are available to every machine.
pub struct ArtefactSource(pub Bmdb);

#[tonic::async_trait]
impl FileSource for ArtefactSource {
    async fn size(&self, _: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        self.0.artefact_size(sha256).await
    }

    async fn piece(&self, _: MachineId, sha256: Sha256, offset: u64) -> Result<Option<Vec<u8>>, BmdbError> {
        let (number, inside) = locate_offset(offset);
        let piece = self.0.artefact_piece(sha256, number).await?;
        let inside = usize::try_from(inside).unwrap_or(usize::MAX);
        Ok(piece.filter(|piece| inside < piece.len()).map(|mut piece| piece.split_off(inside)))
    }

    async fn signature(&self, sha256: Sha256) -> Result<Option<String>, BmdbError> {
        self.0.artefact_signature(sha256).await
    }
}

/// The response stream of a download.
pub type PieceStream = ReceiverStream<Result<ArtefactPiece, Status>>;

/// Sends files to machines; cheap to clone.
#[derive(Clone)]
pub struct FileDownloads {
    sources: Arc<[Arc<dyn FileSource>]>,
    slots: Arc<Semaphore>,
    reads: Arc<Semaphore>,
    machines: Arc<Mutex<HashMap<MachineId, u32>>>,
    metrics: Metrics,
    stop: CancellationToken,
}

/// A slot among the concurrent downloads.
struct DownloadSlot {
    machine: MachineId,
    machines: Arc<Mutex<HashMap<MachineId, u32>>>,
    metrics: Metrics,
    _permit: OwnedSemaphorePermit,
}

impl Drop for DownloadSlot {
    fn drop(&mut self) {
        let mut machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = machines.get_mut(&self.machine) {
            *open -= 1;
            if *open == 0 {
                machines.remove(&self.machine);
            }
        }
        self.metrics.artefact_fetches_open.dec();
    }
}

impl FileDownloads {
    /// Creates downloads from these sources until `stop`. The first source that has a file provides it.
    #[must_use]
    pub fn new(sources: Vec<Arc<dyn FileSource>>, metrics: Metrics, stop: CancellationToken) -> Self {
        Self {
            sources: sources.into(),
            slots: Arc::new(Semaphore::new(MAX_DOWNLOADS)),
            reads: Arc::new(Semaphore::new(MAX_CONCURRENT_READS)),
            machines: Arc::default(),
            metrics,
            stop,
        }
    }

    /// Starts a download for a machine that has proven its key.
    pub async fn start(
        &self,
        machine: MachineId,
        sha256: Sha256,
        offset: u64,
    ) -> Result<PieceStream, Status> {
        let slot = self.acquire_slot(machine).inspect_err(|_| self.count_result("busy"))?;
        let (source, size) = self.find_source(machine, sha256).await?;
        if offset > size {
            self.count_result("malformed");
            return Err(Status::out_of_range(format!("this file has {size} bytes, and not {offset}")));
        }
        let signature = source.signature(sha256).await.map_err(|error| {
            self.count_result("unavailable");
            read_error_status(&error)
        })?;
        let file = (source, size, signature.unwrap_or_default());
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(self.clone().send_file((machine, sha256), file, offset, sender, slot));
        Ok(ReceiverStream::new(receiver))
    }

    fn acquire_slot(&self, machine: MachineId) -> Result<DownloadSlot, Status> {
        let all = || {
            Status::resource_exhausted(
                "too many machines fetch from this server now; try again in some seconds",
            )
        };
        let slot = self.slots.clone().try_acquire_owned().map_err(|_| all())?;
        let mut machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        let open = machines.entry(machine).or_default();
        if *open >= MAX_DOWNLOADS_PER_MACHINE {
            let text =
                format!("this machine fetches {open} files from this server now; try again in some seconds");
            return Err(Status::resource_exhausted(text));
        }
        *open += 1;
        drop(machines);
        self.metrics.artefact_fetches_open.inc();
        let (machines, metrics) = (self.machines.clone(), self.metrics.clone());
        Ok(DownloadSlot { machine, machines, metrics, _permit: slot })
    }

    async fn find_source(
        &self,
        machine: MachineId,
        sha256: Sha256,
    ) -> Result<(Arc<dyn FileSource>, u64), Status> {
        for source in self.sources.iter() {
            match source.size(machine, sha256).await {
                Ok(Some(size)) => return Ok((source.clone(), size)),
                Ok(None) => {}
                Err(error) => {
                    self.count_result("unavailable");
                    return Err(read_error_status(&error));
                }
            }
        }
        self.count_result("not-found");
        Err(Status::not_found(format!("no shepherd has the file {}", hex::encode(sha256.0))))
    }

    async fn send_file(
        self,
        (machine, sha256): (MachineId, Sha256),
        (source, size, mut signature): (Arc<dyn FileSource>, u64, String),
        mut offset: u64,
        sender: mpsc::Sender<Result<ArtefactPiece, Status>>,
        _slot: DownloadSlot,
    ) {
        // At least one piece is sent: a machine that has the whole file learns its size.
        let mut begun = false;
        while offset < size || !begun {
            begun = true;
            let piece = if offset == size {
                Ok(Vec::new())
            } else {
                tokio::select! {
                    () = self.stop.cancelled() => Err(Status::unavailable("this server is stopping; go on at another")),
                    piece = self.read_piece(source.as_ref(), (machine, sha256), offset) => piece,
                }
            };
            let failed = piece.is_err();
            let piece = piece.map(|bytes| {
                offset = offset.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                let signature = std::mem::take(&mut signature);
                ArtefactPiece { part: Some(FilePart { bytes }), size, signature }
            });
            let taken = sender.send_timeout(piece, SEND_TIMEOUT).await;
            if failed || taken.is_err() {
                tracing::info!(%machine, sha256 = hex::encode(sha256.0), offset, "sending a file broke off");
                return self.count_result(if failed { "unavailable" } else { "aborted" });
            }
        }
        tracing::info!(%machine, sha256 = hex::encode(sha256.0), size, "a file was sent");
        self.count_result("sent");
    }

    async fn read_piece(
        &self,
        source: &dyn FileSource,
        (machine, sha256): (MachineId, Sha256),
        offset: u64,
    ) -> Result<Vec<u8>, Status> {
        let _read = self.reads.acquire().await;
        match source.piece(machine, sha256, offset).await {
            Ok(Some(bytes)) if !bytes.is_empty() => Ok(bytes),
            Ok(_) => Err(Status::not_found("this file is gone; somebody has deleted it")),
            Err(error) => Err(read_error_status(&error)),
        }
    }

    fn count_result(&self, result: &'static str) {
        self.metrics.artefact_fetches.get_or_create(&ByResult { result }).inc();
    }
}

fn read_error_status(error: &BmdbError) -> Status {
    tracing::warn!(%error, "a file could not be read for a machine");
    match error {
        BmdbError::Corrupt(reason) => {
            Status::failed_precondition(format!("this shepherd cannot open the stored file: {reason}"))
        }
        BmdbError::OrderRejected { message, .. } => Status::failed_precondition(message.as_str()),
        _ => Status::unavailable("the database is not available; try again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokio_stream::StreamExt as _;

    /// A file of zeros, and the offsets of the pieces that were read.
    struct Zeros(u64, Arc<Mutex<Vec<u64>>>);

    #[tonic::async_trait]
    impl FileSource for Zeros {
        async fn size(&self, _: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
            Ok((sha256.0[0] == 1).then_some(self.0))
        }

        async fn piece(&self, _: MachineId, _: Sha256, offset: u64) -> Result<Option<Vec<u8>>, BmdbError> {
            self.1.lock().unwrap().push(offset);
            Ok(Some(vec![0; usize::try_from((self.0 - offset).min(10)).unwrap()]))
        }
    }

    fn downloads(size: u64) -> (FileDownloads, Arc<Mutex<Vec<u64>>>) {
        let read = Arc::new(Mutex::new(Vec::new()));
        let sources: Vec<Arc<dyn FileSource>> = vec![Arc::new(Zeros(size, read.clone()))];
        (FileDownloads::new(sources, Metrics::new(), CancellationToken::new()), read)
    }

    const EXISTING: Sha256 = Sha256([1; 32]);

    #[tokio::test]
    async fn file_is_read_on_demand_from_the_requested_offset() {
        let (fetching, read) = downloads(95);
        let mut pieces = fetching.start(MachineId::generate(), EXISTING, 5).await.unwrap();
        // The runtime has one thread, and these reads never wait. So the loop gives a read-ahead all the turns it
        // needs.
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        assert!(read.lock().unwrap().len() <= 2, "the file was read ahead of the client");
        let mut bytes = 0;
        while let Some(piece) = pieces.next().await {
            let piece = piece.unwrap();
            assert_eq!(piece.size, 95);
            bytes += piece.part.unwrap_or_default().bytes.len();
        }
        assert_eq!((bytes, read.lock().unwrap()[0]), (90, 5));
        let mut nothing = fetching.start(MachineId::generate(), EXISTING, 95).await.unwrap();
        assert_eq!(
            nothing.next().await.unwrap().unwrap(),
            ArtefactPiece { part: Some(FilePart::default()), size: 95, signature: String::new() }
        );
        assert!(nothing.next().await.is_none());
        let code = async |sha256, offset| fetching.start(MachineId::generate(), sha256, offset).await.err();
        assert_eq!(code(EXISTING, 96).await.map(|status| status.code()), Some(tonic::Code::OutOfRange));
        let none = code(Sha256([2; 32]), 0).await;
        assert_eq!(none.map(|status| status.code()), Some(tonic::Code::NotFound));
        assert_eq!(fetching.slots.available_permits(), MAX_DOWNLOADS, "every place is given back");
    }

    #[tokio::test]
    async fn downloads_are_bounded_per_machine_and_in_total() {
        let (fetching, _) = downloads(1_000);
        let one = MachineId::generate();
        let mut open = Vec::new();
        for _ in 0..MAX_DOWNLOADS_PER_MACHINE {
            open.push(fetching.start(one, EXISTING, 0).await.unwrap());
        }
        let status = fetching.start(one, EXISTING, 0).await.err().unwrap();
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        assert!(status.message().contains("this machine fetches 2 files"), "{status}");
        while open.len() < MAX_DOWNLOADS {
            open.push(fetching.start(MachineId::generate(), EXISTING, 0).await.unwrap());
        }
        let status = fetching.start(MachineId::generate(), EXISTING, 0).await.err().unwrap();
        assert!(status.message().starts_with("too many machines fetch"), "{status}");
        drop(open);
        // Each download ends with the next piece that cannot be sent.
        while fetching.slots.available_permits() < MAX_DOWNLOADS {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(fetching.machines.lock().unwrap().is_empty());
        fetching.start(one, EXISTING, 0).await.unwrap();
    }

    #[tokio::test]
    async fn stopping_server_ends_downloads_with_unavailable() {
        let (fetching, _) = downloads(1_000);
        let mut pieces = fetching.start(MachineId::generate(), EXISTING, 0).await.unwrap();
        fetching.stop.cancel();
        let mut last = None;
        while let Some(piece) = pieces.next().await {
            last = Some(piece);
        }
        assert_eq!(last.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
    }
}
