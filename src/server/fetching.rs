//! Files that machines fetch over the agent channel.
//!
//! Where the bytes come from is a [`Source`]; artefacts of the BMDB are one. A file goes out piece by piece, each read
//! when the one before it was taken: nothing of the database is held over a stream, and no more than two pieces of it are
//! in memory. How many fetch at a time is bounded, of one machine too, so that a hundred machines that update at once do
//! not crowd out the heartbeats of the others; who is one too many is told so and comes back. Whoever takes no piece for a
//! minute is cut off, and goes on later from where it was.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::metrics::{ByResult, Metrics};
use crate::model::artefact::place;
use crate::model::declaration::Sha256;
use crate::model::ids::MachineId;
use crate::proto::agent::v1::{ArtefactPiece, FilePart};

/// Most that are sent at a time.
const MOST: usize = 32;
/// Most of them to one machine: what its services are made of, and what replaces its role server.
const MOST_OF_A_MACHINE: u32 = 2;
/// Most pieces that are read at a time.
const READS: usize = 4;
/// How long a machine may take no piece.
const TAKEN_WITHIN: Duration = Duration::from_mins(1);

/// Where the bytes of files come from.
#[tonic::async_trait]
pub trait Source: Send + Sync {
    /// How large the file of this digest is; none when there is none of it for this machine.
    async fn size(&self, machine: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError>;
    /// Some of its bytes from `offset` on, 256 KiB at the most and one at the least; none when it is gone.
    async fn piece(
        &self,
        machine: MachineId,
        sha256: Sha256,
        offset: u64,
    ) -> Result<Option<Vec<u8>>, BmdbError>;
}

/// The artefacts that operators added, which are for every machine.
pub struct Artefacts(pub Bmdb);

#[tonic::async_trait]
impl Source for Artefacts {
    async fn size(&self, _: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
        self.0.artefact_size(sha256).await
    }

    async fn piece(&self, _: MachineId, sha256: Sha256, offset: u64) -> Result<Option<Vec<u8>>, BmdbError> {
        let (number, inside) = place(offset);
        let piece = self.0.artefact_piece(sha256, number).await?;
        let inside = usize::try_from(inside).unwrap_or(usize::MAX);
        Ok(piece.filter(|piece| inside < piece.len()).map(|mut piece| piece.split_off(inside)))
    }
}

/// A stream of pieces.
pub type Pieces = ReceiverStream<Result<ArtefactPiece, Status>>;

/// Sends files; cheap to clone.
#[derive(Clone)]
pub struct Fetching {
    sources: Arc<[Arc<dyn Source>]>,
    slots: Arc<Semaphore>,
    reads: Arc<Semaphore>,
    machines: Arc<Mutex<HashMap<MachineId, u32>>>,
    metrics: Metrics,
    stop: CancellationToken,
}

/// A place among those that are sent to.
struct Slot {
    machine: MachineId,
    machines: Arc<Mutex<HashMap<MachineId, u32>>>,
    metrics: Metrics,
    _place: OwnedSemaphorePermit,
}

impl Drop for Slot {
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

impl Fetching {
    /// Of these sources, the first one that has a file; until `stop`.
    #[must_use]
    pub fn new(sources: Vec<Arc<dyn Source>>, metrics: Metrics, stop: CancellationToken) -> Self {
        Self {
            sources: sources.into(),
            slots: Arc::new(Semaphore::new(MOST)),
            reads: Arc::new(Semaphore::new(READS)),
            machines: Arc::default(),
            metrics,
            stop,
        }
    }

    /// Begins to send a file to a machine that has proven its key.
    pub async fn begin(&self, machine: MachineId, sha256: Sha256, offset: u64) -> Result<Pieces, Status> {
        let slot = self.slot(machine).inspect_err(|_| self.count("busy"))?;
        let (source, size) = self.find(machine, sha256).await?;
        if offset > size {
            self.count("malformed");
            return Err(Status::out_of_range(format!("this file has {size} bytes, and not {offset}")));
        }
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(self.clone().send((machine, sha256), (source, size), offset, sender, slot));
        Ok(ReceiverStream::new(receiver))
    }

    fn slot(&self, machine: MachineId) -> Result<Slot, Status> {
        let all = || {
            Status::resource_exhausted(
                "too many machines fetch from this server now; try again in some seconds",
            )
        };
        let slot = self.slots.clone().try_acquire_owned().map_err(|_| all())?;
        let mut machines = self.machines.lock().unwrap_or_else(PoisonError::into_inner);
        let open = machines.entry(machine).or_default();
        if *open >= MOST_OF_A_MACHINE {
            let said =
                format!("this machine fetches {open} files from this server now; try again in some seconds");
            return Err(Status::resource_exhausted(said));
        }
        *open += 1;
        drop(machines);
        self.metrics.artefact_fetches_open.inc();
        let (machines, metrics) = (self.machines.clone(), self.metrics.clone());
        Ok(Slot { machine, machines, metrics, _place: slot })
    }

    async fn find(&self, machine: MachineId, sha256: Sha256) -> Result<(Arc<dyn Source>, u64), Status> {
        for source in self.sources.iter() {
            match source.size(machine, sha256).await {
                Ok(Some(size)) => return Ok((source.clone(), size)),
                Ok(None) => {}
                Err(error) => {
                    self.count("unavailable");
                    return Err(away(&error));
                }
            }
        }
        self.count("not-found");
        Err(Status::not_found(format!("no shepherd has the file {}", hex::encode(sha256.0))))
    }

    async fn send(
        self,
        (machine, sha256): (MachineId, Sha256),
        (source, size): (Arc<dyn Source>, u64),
        mut offset: u64,
        sender: mpsc::Sender<Result<ArtefactPiece, Status>>,
        _slot: Slot,
    ) {
        // Once at least: whoever has all of it hears how long it is.
        let mut begun = false;
        while offset < size || !begun {
            begun = true;
            let piece = if offset == size {
                Ok(Vec::new())
            } else {
                tokio::select! {
                    () = self.stop.cancelled() => Err(Status::unavailable("this server is stopping; go on at another")),
                    piece = self.read(source.as_ref(), (machine, sha256), offset) => piece,
                }
            };
            let failed = piece.is_err();
            let piece = piece.map(|bytes| {
                offset = offset.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                ArtefactPiece { part: Some(FilePart { bytes }), size }
            });
            let taken = sender.send_timeout(piece, TAKEN_WITHIN).await;
            if failed || taken.is_err() {
                tracing::info!(%machine, sha256 = hex::encode(sha256.0), offset, "sending a file broke off");
                return self.count(if failed { "unavailable" } else { "broken-off" });
            }
        }
        tracing::info!(%machine, sha256 = hex::encode(sha256.0), size, "a file was sent");
        self.count("sent");
    }

    async fn read(
        &self,
        source: &dyn Source,
        (machine, sha256): (MachineId, Sha256),
        offset: u64,
    ) -> Result<Vec<u8>, Status> {
        let _read = self.reads.acquire().await;
        match source.piece(machine, sha256, offset).await {
            Ok(Some(bytes)) if !bytes.is_empty() => Ok(bytes),
            Ok(_) => Err(Status::not_found("this file is gone; somebody has deleted it")),
            Err(error) => Err(away(&error)),
        }
    }

    fn count(&self, result: &'static str) {
        self.metrics.artefact_fetches.get_or_create(&ByResult { result }).inc();
    }
}

fn away(error: &BmdbError) -> Status {
    tracing::warn!(%error, "a file could not be read for a machine");
    match error {
        BmdbError::Corrupt(_) => Status::failed_precondition(
            "this shepherd cannot open what is kept of it; its log says why, and its --secrets_key_path may be another one's",
        ),
        _ => Status::unavailable("the database is away; try again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokio_stream::StreamExt as _;

    /// A file of zeros, and how many of its pieces were read.
    struct Zeros(u64, Arc<Mutex<Vec<u64>>>);

    #[tonic::async_trait]
    impl Source for Zeros {
        async fn size(&self, _: MachineId, sha256: Sha256) -> Result<Option<u64>, BmdbError> {
            Ok((sha256.0[0] == 1).then_some(self.0))
        }

        async fn piece(&self, _: MachineId, _: Sha256, offset: u64) -> Result<Option<Vec<u8>>, BmdbError> {
            self.1.lock().unwrap().push(offset);
            Ok(Some(vec![0; usize::try_from((self.0 - offset).min(10)).unwrap()]))
        }
    }

    fn fetching(size: u64) -> (Fetching, Arc<Mutex<Vec<u64>>>) {
        let read = Arc::new(Mutex::new(Vec::new()));
        let sources: Vec<Arc<dyn Source>> = vec![Arc::new(Zeros(size, read.clone()))];
        (Fetching::new(sources, Metrics::new(), CancellationToken::new()), read)
    }

    const THERE: Sha256 = Sha256([1; 32]);

    #[tokio::test]
    async fn file_is_read_no_faster_than_it_is_taken_and_from_where_it_is_asked() {
        let (fetching, read) = fetching(95);
        let mut pieces = fetching.begin(MachineId::generate(), THERE, 5).await.unwrap();
        // There is one thread, and no read of these ever waits: whoever reads has all the turns it would take.
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
        assert!(read.lock().unwrap().len() <= 2, "it was read ahead of whoever takes it");
        let mut bytes = 0;
        while let Some(piece) = pieces.next().await {
            let piece = piece.unwrap();
            assert_eq!(piece.size, 95);
            bytes += piece.part.unwrap_or_default().bytes.len();
        }
        assert_eq!((bytes, read.lock().unwrap()[0]), (90, 5));
        let mut nothing = fetching.begin(MachineId::generate(), THERE, 95).await.unwrap();
        assert_eq!(
            nothing.next().await.unwrap().unwrap(),
            ArtefactPiece { part: Some(FilePart::default()), size: 95 }
        );
        assert!(nothing.next().await.is_none());
        let code = async |sha256, offset| fetching.begin(MachineId::generate(), sha256, offset).await.err();
        assert_eq!(code(THERE, 96).await.map(|status| status.code()), Some(tonic::Code::OutOfRange));
        let none = code(Sha256([2; 32]), 0).await;
        assert_eq!(none.map(|status| status.code()), Some(tonic::Code::NotFound));
        assert_eq!(fetching.slots.available_permits(), MOST, "every place is given back");
    }

    #[tokio::test]
    async fn no_machine_and_not_all_together_fetch_too_much_at_a_time() {
        let (fetching, _) = fetching(1_000);
        let one = MachineId::generate();
        let mut open = Vec::new();
        for _ in 0..MOST_OF_A_MACHINE {
            open.push(fetching.begin(one, THERE, 0).await.unwrap());
        }
        let said = fetching.begin(one, THERE, 0).await.err().unwrap();
        assert_eq!(said.code(), tonic::Code::ResourceExhausted);
        assert!(said.message().contains("this machine fetches 2 files"), "{said}");
        while open.len() < MOST {
            open.push(fetching.begin(MachineId::generate(), THERE, 0).await.unwrap());
        }
        let said = fetching.begin(MachineId::generate(), THERE, 0).await.err().unwrap();
        assert!(said.message().starts_with("too many machines fetch"), "{said}");
        drop(open);
        // Each ends with the next piece that nobody takes.
        while fetching.slots.available_permits() < MOST {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(fetching.machines.lock().unwrap().is_empty());
        fetching.begin(one, THERE, 0).await.unwrap();
    }

    #[tokio::test]
    async fn server_that_stops_says_where_to_go_on() {
        let (fetching, _) = fetching(1_000);
        let mut pieces = fetching.begin(MachineId::generate(), THERE, 0).await.unwrap();
        fetching.stop.cancel();
        let mut last = None;
        while let Some(piece) = pieces.next().await {
            last = Some(piece);
        }
        assert_eq!(last.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
    }
}
