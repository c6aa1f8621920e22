//! Resumable upload of a file in pieces.
//!
//! The upload first queries which pieces of the file are missing, and uploads those. So an interrupted upload continues
//! where it stopped, at whichever server of the context answers, and a file that exists already is not uploaded again.
//! The order to add the file follows at the end ([`crate::artefacts::orders`]).

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ring::digest::{Context, SHA256};
use tonic::{Code, Response, Status};

use crate::client::fleet_client::{ApiChannel, FleetClient, status_to_error};
use crate::error::CliError;
use crate::output::print_stderr;
use model::artefact::{PIECE_BYTES, check_size, piece_count, piece_length};
use proto::fleet::v1;
use proto::fleet::v1::artefacts_client::ArtefactsClient;

/// Interval between two reports of an upload's progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// How long one piece is retried.
const RETRY_WINDOW: Duration = Duration::from_secs(30);
const MAX_ATTEMPTS: u32 = 30;

/// A local file with its size and its SHA-256 digest, in hexadecimal digits.
pub(super) struct LocalFile {
    file: File,
    path: PathBuf,
    size: u64,
    pub(super) sha256: String,
}

impl LocalFile {
    pub(super) fn open(path: &Path) -> Result<Self, CliError> {
        let cannot =
            |error: std::io::Error| CliError::Invalid(format!("cannot read {}: {error}", path.display()));
        let mut file = File::open(path).map_err(cannot)?;
        let data = file.metadata().map_err(cannot)?;
        if !data.is_file() {
            return Err(CliError::Invalid(format!("{} is not a regular file", path.display())));
        }
        // Check the size before the whole file is read.
        let refuse = |text| CliError::Invalid(format!("{}: {text}", path.display()));
        check_size(data.len()).map_err(refuse)?;
        let mut context = Context::new(&SHA256);
        let (mut buffer, mut size) = (vec![0; 1 << 16], 0_u64);
        loop {
            let read = file.read(&mut buffer).map_err(cannot)?;
            if read == 0 {
                break;
            }
            size += u64::try_from(read).unwrap_or(u64::MAX);
            context.update(&buffer[..read]);
        }
        check_size(size).map_err(refuse)?;
        let sha256 = hex::encode(context.finish().as_ref());
        Ok(Self { file, path: path.to_owned(), size, sha256 })
    }

    fn read_piece(&mut self, number: u64) -> Result<Vec<u8>, CliError> {
        let length = piece_length(self.size, number).unwrap_or_default();
        let mut piece = vec![0; usize::try_from(length).unwrap_or_default()];
        let read = self
            .file
            .seek(SeekFrom::Start(number.saturating_mul(PIECE_BYTES)))
            .and_then(|_| self.file.read_exact(&mut piece));
        read.map_err(|error| {
            CliError::Failed(format!("cannot read {} again: {error}", self.path.display()))
        })?;
        Ok(piece)
    }
}

/// Uploads the pieces of a file that the fleet does not have yet.
pub(super) async fn upload_missing_pieces(
    client: &mut FleetClient,
    local: &mut LocalFile,
) -> Result<(), CliError> {
    let request = v1::BeginUploadRequest { sha256: local.sha256.clone(), size: local.size };
    let begun = call_with_retry(client, async |service| {
        ArtefactsClient::new(service).begin_upload(request.clone()).await
    })
    .await?;
    let mut progress = UploadProgress::new(local.size, &begun.missing_pieces);
    for number in begun.missing_pieces {
        let request = v1::PutPieceRequest {
            sha256: local.sha256.clone(),
            number,
            piece: Some(v1::ArtefactPiece { bytes: local.read_piece(number)? }),
        };
        call_with_retry(client, async |service| {
            ArtefactsClient::new(service).put_piece(request.clone()).await
        })
        .await?;
        progress.record_piece();
    }
    Ok(())
}

/// Makes an idempotent call, and repeats it until it has a response. If a server does not answer, the next attempt
/// goes to the next server of the context.
async fn call_with_retry<A>(
    client: &mut FleetClient,
    call: impl AsyncFn(ApiChannel) -> Result<Response<A>, Status>,
) -> Result<A, CliError> {
    let begun = Instant::now();
    let mut tries = 0;
    let mut elsewhere = false;
    loop {
        tries += 1;
        let gone_on = if elsewhere { client.connect_to_next().await } else { Ok(()) };
        let result = match gone_on {
            Ok(()) => call(client.channel()).await,
            Err(status) => Err(status),
        };
        let status = match result {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => status,
        };
        let busy = status.code() == Code::ResourceExhausted;
        let lost = matches!(
            status.code(),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown
        ) || std::error::Error::source(&status).is_some();
        if !(busy || lost) || tries >= MAX_ATTEMPTS || begun.elapsed() >= RETRY_WINDOW {
            return Err(status_to_error(status));
        }
        elsewhere = lost;
        tokio::time::sleep(Duration::from_millis(if busy { 1_000 } else { 300 })).await;
    }
}

/// Progress of an upload, reported every [`PROGRESS_INTERVAL`].
struct UploadProgress {
    total: u64,
    uploaded: u64,
    reported_at: Instant,
}

impl UploadProgress {
    fn new(size: u64, missing: &[u64]) -> Self {
        let all = piece_count(size);
        let missing = u64::try_from(missing.len()).unwrap_or(all);
        Self { total: all, uploaded: all.saturating_sub(missing), reported_at: Instant::now() }
    }

    fn record_piece(&mut self) {
        self.uploaded += 1;
        if self.reported_at.elapsed() >= PROGRESS_INTERVAL {
            self.reported_at = Instant::now();
            let percent = self.uploaded * 100 / self.total.max(1);
            print_stderr(&format!(
                "shepherdctl: {percent} % uploaded ({} of {} pieces)",
                self.uploaded, self.total
            ));
        }
    }
}
