//! `artefacts add|get|delete`: resumable upload of files that machines download.
//!
//! `add` first queries which pieces of the file are missing, uploads those, and gives the order to add the file at the
//! end. So an interrupted upload continues where it stopped, at whichever server of the context answers, and a file
//! that exists already is not uploaded again.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use ring::digest::{Context, SHA256};
use serde_json::json;
use tonic::{Code, Response, Status};

use crate::api_decode::{decode_timestamp, require_timestamp};
use crate::dry_run;
use crate::error::CliError;
use crate::examples;
use crate::fleet_client::{ApiChannel, FleetClient, status_to_error};
use crate::get;
use crate::order_retry;
use crate::output::{Format, format_table, print_stderr, terminal_width};
use bmdb::action::OrderOutcome;
use bmdb::artefact::order_target;
use model::artefact::{ArtefactView, PIECE_BYTES, check_name, check_size, piece_count, piece_length};
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::artefacts_client::ArtefactsClient;

/// Interval between two reports of an upload's progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// How long one piece is retried.
const RETRY_WINDOW: Duration = Duration::from_secs(30);
const MAX_ATTEMPTS: u32 = 30;

/// What can be done with artefacts.
#[derive(Debug, Subcommand)]
pub enum ArtefactsCommand {
    /// Add a file that machines can fetch from any shepherd
    #[command(after_help = examples::ARTEFACTS_ADD)]
    Add(AddArtefact),
    /// List artefacts, newest first
    #[command(after_help = examples::ARTEFACTS_GET)]
    Get,
    /// Remove an artefact; machines that have fetched it keep it
    #[command(after_help = examples::ARTEFACTS_DELETE)]
    Delete(DeleteArtefact),
}

/// A file to add.
#[derive(Debug, Args)]
pub struct AddArtefact {
    /// The file, 256 MiB at the most
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What people call it [default: the name of the file]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// An artefact to remove.
#[derive(Debug, Args)]
pub struct DeleteArtefact {
    /// Its digest, the beginning of it (8 digits or more), or its name
    #[arg(value_name = "ARTEFACT")]
    pub artefact: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Runs an `artefacts` command and returns its output.
pub async fn run_artefacts_command(
    client: &FleetClient,
    command: &ArtefactsCommand,
    format: Format,
) -> Result<String, CliError> {
    match command {
        ArtefactsCommand::Add(args) => add_artefact(client, args, format).await,
        ArtefactsCommand::Get => show_artefacts(client, format).await,
        ArtefactsCommand::Delete(args) => delete_artefact(client, args, format).await,
    }
}

async fn fetch_artefacts(client: &FleetClient) -> Result<(Vec<ArtefactView>, Timestamp), CliError> {
    let result = ArtefactsClient::new(client.channel()).list(v1::ListArtefactsRequest {}).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let found = response.artefacts.into_iter().map(decode_artefact).collect::<Result<_, _>>()?;
    Ok((found, require_timestamp(response.read_at, "its read time")?))
}

fn decode_artefact(artefact: v1::Artefact) -> Result<ArtefactView, CliError> {
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    Ok(ArtefactView {
        sha256: artefact.sha256,
        size: artefact.size,
        name: some(artefact.name),
        upload_started_at: require_timestamp(artefact.upload_started_at, "the start time of an upload")?,
        added_at: artefact.added_at.and_then(decode_timestamp),
        added_by: some(artefact.added_by),
        pieces: artefact.uploaded_pieces,
        kubernetes: artefact.kubernetes_version,
    })
}

async fn show_artefacts(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let (found, now) = fetch_artefacts(client).await?;
    if format == Format::Json {
        return get::format_json(&json!({ "artefacts": found }));
    }
    if found.is_empty() {
        return Ok("no artefacts; shepherdctl artefacts add FILE adds one\n".to_owned());
    }
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|artefact| {
            let state = match artefact.added_at {
                Some(_) => "whole".to_owned(),
                None => format!("{} of {} pieces", artefact.pieces, piece_count(artefact.size)),
            };
            let dash = || "-".to_owned();
            vec![
                artefact.name.clone().unwrap_or_else(dash),
                artefact.sha256.clone(),
                artefact.size.to_string(),
                state,
                humanize_duration(between(artefact.added_at.unwrap_or(artefact.upload_started_at), now)),
                artefact.added_by.clone().unwrap_or_else(dash),
            ]
        })
        .collect();
    Ok(format_table(&["NAME", "SHA-256", "BYTES", "STATE", "AGE", "ADDED BY"], &rows, terminal_width()))
}

fn require_reason(reason: &str) -> Result<(), CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid("--reason is empty; give one for operators who read the audit".into()));
    }
    Ok(())
}

/// A local file with its size and its SHA-256 digest, in hexadecimal digits.
struct LocalFile {
    file: File,
    path: PathBuf,
    size: u64,
    sha256: String,
}

impl LocalFile {
    fn open(path: &Path) -> Result<Self, CliError> {
        let cannot =
            |error: std::io::Error| CliError::Invalid(format!("cannot read {}: {error}", path.display()));
        let mut file = File::open(path).map_err(cannot)?;
        let data = file.metadata().map_err(cannot)?;
        if !data.is_file() {
            return Err(CliError::Invalid(format!("{} is no file", path.display())));
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

async fn add_artefact(client: &FleetClient, args: &AddArtefact, format: Format) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let of_file = || args.file.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = args.name.clone().or_else(of_file).unwrap_or_default();
    check_name(&name).map_err(|reason| CliError::Invalid(format!("--name: {reason}")))?;
    let mut local = LocalFile::open(&args.file)?;
    let mut client = client.clone();
    if !dry_run::is_active() {
        upload_missing_pieces(&mut client, &mut local).await?;
    }
    let sha256 = local.sha256;
    let give = async |service, order| {
        let request =
            v1::AddArtefactRequest { sha256: sha256.clone(), order: Some(order), name: name.clone() };
        ArtefactsClient::new(service).add(request).await
    };
    let done = order_retry::send_order(&mut client, &args.reason, give).await?;
    let done = OrderOutcome { changed: done.changed, message: done.message };
    format_outcome(&name, &sha256, &done, format)
}

/// Uploads the pieces of a file that the fleet does not have yet.
async fn upload_missing_pieces(client: &mut FleetClient, local: &mut LocalFile) -> Result<(), CliError> {
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
                "shepherdctl: {percent} % is there ({} of {} pieces)",
                self.uploaded, self.total
            ));
        }
    }
}

fn format_outcome(name: &str, sha256: &str, done: &OrderOutcome, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = json!({ "artefact": name, "sha256": sha256, "changed": done.changed, "message": done.message });
            dry_run::annotate_json(&mut answer);
            get::format_json(&answer)
        }
        Format::Table => {
            let line = dry_run::annotate_text(&format!("{} {}", order_target(name), done.message));
            Ok(if sha256.is_empty() { format!("{line}\n") } else { format!("{line}\n{sha256}\n") })
        }
    }
}

async fn delete_artefact(
    client: &FleetClient,
    args: &DeleteArtefact,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let name = &args.artefact;
    let give = async |service, order| {
        let request = v1::DeleteArtefactRequest { artefact: name.clone(), order: Some(order) };
        ArtefactsClient::new(service).delete(request).await
    };
    let done = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    let done = OrderOutcome { changed: done.changed, message: done.message };
    format_outcome(name, "", &done, format)
}
