//! `artefacts add|get|delete`: files that machines fetch from any shepherd.
//!
//! Adding one asks first what is missing of it, brings that piece by piece, and gives the order to add it in the end. So
//! an upload that was cut off goes on where it ended, at whichever server of the context answers, and a file that is there
//! already is not brought again.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use ring::digest::{Context, SHA256};
use serde_json::json;
use tonic::{Code, Response, Status};

use crate::bmdb::action::Done;
use crate::bmdb::artefact::{Begun, artefacts, target};
use crate::cli::again;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get;
use crate::cli::operate::direct;
use crate::cli::output::{Format, say, table, width};
use crate::cli::remote::{Authorized, Remote, refused};
use crate::cli::remote_read::{at, moment};
use crate::cli::source::Source;
use crate::model::artefact::{
    ArtefactView, PIECE, check_name, check_size, piece_length, pieces, read_digest,
};
use crate::model::declaration::Sha256;
use crate::model::telling::rough;
use crate::model::time::{Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::artefacts_client::ArtefactsClient;

/// How often it is said how far an upload is.
const TELL: Duration = Duration::from_secs(2);
/// How long one piece is tried for.
const BOUND: Duration = Duration::from_secs(30);
const MOST_TRIES: u32 = 30;

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

/// What an artefacts command answers.
pub async fn artefacts_command(
    source: &Source,
    command: &ArtefactsCommand,
    format: Format,
) -> Result<String, CliError> {
    match command {
        ArtefactsCommand::Add(asked) => add(source, asked, format).await,
        ArtefactsCommand::Get => list(source, format).await,
        ArtefactsCommand::Delete(asked) => delete(source, asked, format).await,
    }
}

async fn read(source: &Source) -> Result<(Vec<ArtefactView>, Timestamp), CliError> {
    match source {
        Source::Direct(bmdb) => Ok(bmdb.inspect(|tx| Box::pin(async move { artefacts(tx).await })).await?),
        Source::Api(remote) => {
            let said = ArtefactsClient::new(remote.service()).list(v1::ListArtefactsRequest {}).await;
            let said = said.map_err(refused)?.into_inner();
            let found = said.artefacts.into_iter().map(artefact).collect::<Result<_, _>>()?;
            Ok((found, at(said.at, "its moment")?))
        }
    }
}

fn artefact(said: v1::Artefact) -> Result<ArtefactView, CliError> {
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    Ok(ArtefactView {
        sha256: said.sha256,
        size: said.size,
        name: some(said.name),
        begun_at: at(said.begun_at, "when an artefact was begun")?,
        added_at: said.added_at.and_then(moment),
        added_by: some(said.added_by),
        pieces: said.pieces,
        kubernetes: said.kubernetes,
    })
}

async fn list(source: &Source, format: Format) -> Result<String, CliError> {
    let (found, now) = read(source).await?;
    if format == Format::Json {
        return get::json(&json!({ "artefacts": found }));
    }
    if found.is_empty() {
        return Ok("no artefacts; shepherdctl artefacts add FILE adds one\n".to_owned());
    }
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|artefact| {
            let state = match artefact.added_at {
                Some(_) => "whole".to_owned(),
                None => format!("{} of {} pieces", artefact.pieces, pieces(artefact.size)),
            };
            let dash = || "-".to_owned();
            vec![
                artefact.name.clone().unwrap_or_else(dash),
                artefact.sha256.clone(),
                artefact.size.to_string(),
                state,
                rough(between(artefact.added_at.unwrap_or(artefact.begun_at), now)),
                artefact.added_by.clone().unwrap_or_else(dash),
            ]
        })
        .collect();
    Ok(table(&["NAME", "SHA-256", "BYTES", "STATE", "AGE", "ADDED BY"], &rows, width()))
}

fn given(reason: &str) -> Result<(), CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever reads the audit will want to know".into()));
    }
    Ok(())
}

/// A file with its digest.
struct Local {
    file: File,
    path: PathBuf,
    size: u64,
    sha256: Sha256,
}

impl Local {
    fn open(path: &Path) -> Result<Self, CliError> {
        let cannot =
            |error: std::io::Error| CliError::Wrong(format!("cannot read {}: {error}", path.display()));
        let mut file = File::open(path).map_err(cannot)?;
        let data = file.metadata().map_err(cannot)?;
        if !data.is_file() {
            return Err(CliError::Wrong(format!("{} is no file", path.display())));
        }
        // Before all of it is read.
        let refuse = |said| CliError::Wrong(format!("{}: {said}", path.display()));
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
        let digest = context.finish();
        let sha256 = read_digest(&hex::encode(digest.as_ref())).map_err(CliError::Failed)?;
        Ok(Self { file, path: path.to_owned(), size, sha256 })
    }

    fn piece(&mut self, number: u64) -> Result<Vec<u8>, CliError> {
        let length = piece_length(self.size, number).unwrap_or_default();
        let mut piece = vec![0; usize::try_from(length).unwrap_or_default()];
        let read = self
            .file
            .seek(SeekFrom::Start(number.saturating_mul(PIECE)))
            .and_then(|_| self.file.read_exact(&mut piece));
        read.map_err(|error| {
            CliError::Failed(format!("cannot read {} again: {error}", self.path.display()))
        })?;
        Ok(piece)
    }
}

async fn add(source: &Source, asked: &AddArtefact, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let of_file = || asked.file.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = asked.name.clone().or_else(of_file).unwrap_or_default();
    check_name(&name).map_err(|said| CliError::Wrong(format!("--name: {said}")))?;
    let mut local = Local::open(&asked.file)?;
    let sha256 = hex::encode(local.sha256.0);
    let done = match source {
        Source::Direct(bmdb) => {
            if !dry_run::asked()
                && let Begun::Missing(missing) = bmdb.begin_artefact(local.sha256, local.size).await?
            {
                let mut told = Told::new(local.size, &missing);
                for number in missing {
                    bmdb.put_piece(local.sha256, number, local.piece(number)?).await?;
                    told.brought();
                }
            }
            let order = direct("shepherd.fleet.v1.Artefacts/Add", target(&name), Some(&asked.reason));
            bmdb.add_artefact(order, local.sha256, name.clone()).await?.done
        }
        Source::Api(remote) => {
            let mut remote = remote.clone();
            if !dry_run::asked() {
                bring(&mut remote, &mut local, &sha256).await?;
            }
            let give = async |service, order| {
                let request =
                    v1::AddArtefactRequest { sha256: sha256.clone(), order: Some(order), name: name.clone() };
                ArtefactsClient::new(service).add(request).await
            };
            let done = again::order(&mut remote, &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&name, &sha256, &done, format)
}

/// Brings what is missing of a file.
async fn bring(remote: &mut Remote, local: &mut Local, sha256: &str) -> Result<(), CliError> {
    let request = v1::BeginArtefactRequest { sha256: sha256.to_owned(), size: local.size };
    let begun =
        patiently(remote, async |service| ArtefactsClient::new(service).begin(request.clone()).await).await?;
    let mut told = Told::new(local.size, &begun.missing);
    for number in begun.missing {
        let request = v1::PutPieceRequest {
            sha256: sha256.to_owned(),
            number,
            piece: Some(v1::Piece { bytes: local.piece(number)? }),
        };
        patiently(remote, async |service| ArtefactsClient::new(service).put(request.clone()).await).await?;
        told.brought();
    }
    Ok(())
}

/// Makes a call that may be made again, until it is answered; at the next server where one does not answer.
async fn patiently<A>(
    remote: &mut Remote,
    call: impl AsyncFn(Authorized) -> Result<Response<A>, Status>,
) -> Result<A, CliError> {
    let begun = Instant::now();
    let mut tries = 0;
    let mut elsewhere = false;
    loop {
        tries += 1;
        let gone_on = if elsewhere { remote.go_on().await } else { Ok(()) };
        let said = match gone_on {
            Ok(()) => call(remote.service()).await,
            Err(status) => Err(status),
        };
        let status = match said {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => status,
        };
        let busy = status.code() == Code::ResourceExhausted;
        let lost = matches!(
            status.code(),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown
        ) || std::error::Error::source(&status).is_some();
        if !(busy || lost) || tries >= MOST_TRIES || begun.elapsed() >= BOUND {
            return Err(refused(status));
        }
        elsewhere = lost;
        tokio::time::sleep(Duration::from_millis(if busy { 1_000 } else { 300 })).await;
    }
}

/// How far an upload is, said from time to time.
struct Told {
    all: u64,
    there: u64,
    last: Instant,
}

impl Told {
    fn new(size: u64, missing: &[u64]) -> Self {
        let all = pieces(size);
        let missing = u64::try_from(missing.len()).unwrap_or(all);
        Self { all, there: all.saturating_sub(missing), last: Instant::now() }
    }

    fn brought(&mut self) {
        self.there += 1;
        if self.last.elapsed() >= TELL {
            self.last = Instant::now();
            let percent = self.there * 100 / self.all.max(1);
            say(&format!("shepherdctl: {percent} % is there ({} of {} pieces)", self.there, self.all));
        }
    }
}

fn told(name: &str, sha256: &str, done: &Done, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer =
                json!({ "artefact": name, "sha256": sha256, "changed": done.changed, "said": done.said });
            dry_run::mark(&mut answer);
            get::json(&answer)
        }
        Format::Table => {
            let line = dry_run::line(&format!("{} {}", target(name), done.said));
            Ok(if sha256.is_empty() { format!("{line}\n") } else { format!("{line}\n{sha256}\n") })
        }
    }
}

async fn delete(source: &Source, asked: &DeleteArtefact, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let name = &asked.artefact;
    let done = match source {
        Source::Direct(bmdb) => {
            let order = direct("shepherd.fleet.v1.Artefacts/Delete", target(name), Some(&asked.reason));
            bmdb.delete_artefact(order, name.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::DeleteArtefactRequest { artefact: name.clone(), order: Some(order) };
                ArtefactsClient::new(service).delete(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(name, "", &done, format)
}
