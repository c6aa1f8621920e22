//! The servers that this machine can reach: connections and artefact downloads.
//!
//! After each heartbeat the agent publishes its endpoints and which one worked last ([`crate::agent`]). A
//! file is fetched over a connection of its own, so that no heartbeat waits behind it. Every shepherd has the same
//! files: a download that one of them broke off is continued at the next. One of an earlier release may lack the files of
//! a kind that it does not know, so a file is absent only if every shepherd has denied it. The sender need not be trusted,
//! because a fetched file counts only if its digest matches.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use curator_client::identity::Identity;
use curator_client::status_text::describe_status;
use model::ids::MachineId;
use model::role_declaration::Sha256;
use proto::agent::v1::agent_callback_client::AgentCallbackClient;
use proto::agent::v1::{ArtefactPiece, FetchArtefactRequest};
use tokio::io::AsyncWriteExt as _;
use tonic::transport::Channel;
use tonic::{Code, Response, Status, Streaming};

use crate::connection;
use crate::http_fetch::{MAX_FILE_BYTES, open_at_offset};
use crate::trusted_time::TrustedTime;

/// How long a server may take to accept a connection, and to send the next chunk.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One endpoint of a shepherd, and the certificates to verify it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerEndpoint {
    /// The address as `host:port`.
    pub endpoint: String,
    /// DER certificates to verify the server against; empty means the machine's own trust store.
    pub ca_certificates: Vec<Vec<u8>>,
}

/// The endpoints of the shepherds, the one that worked last first, and the machine's identity for them.
#[derive(Clone)]
pub struct ServerEndpoints {
    /// The identity of the machine in the database.
    pub machine_id: MachineId,
    /// The key that the machine proves to own.
    pub identity: Arc<Identity>,
    /// The time to verify certificates by.
    pub time: Arc<TrustedTime>,
    /// All endpoints; empty if none is known.
    pub endpoints: Vec<ServerEndpoint>,
}

/// Decides by the signature of a file whether it is fetched.
pub type AcceptSignature<'a> = dyn Fn(&str) -> Result<(), String> + Send + Sync + 'a;

/// Why a file was not fetched.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// No shepherd has it for this machine.
    #[error("no shepherd has it")]
    Absent,
    /// The download failed; the text is a sentence.
    #[error("{0}")]
    Failed(String),
}

/// The shepherds of a machine; cheap to clone. It has no endpoints until they are set.
#[derive(Clone, Default)]
pub struct ServerPool(Arc<Mutex<Option<ServerEndpoints>>>);

impl std::fmt::Debug for ServerPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let servers = self.endpoints().map(|servers| servers.endpoints).unwrap_or_default();
        f.debug_tuple("Shepherds").field(&servers).finish()
    }
}

impl ServerPool {
    /// Replaces the endpoints and the identity.
    pub fn set_endpoints(&self, servers: ServerEndpoints) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(servers);
    }

    fn endpoints(&self) -> Option<ServerEndpoints> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens a new connection to a shepherd, and returns it with the machine's id. It goes to the endpoint that worked
    /// last, or to the one `skipped` places after it. The error is a sentence.
    pub async fn connect(&self, skipped: usize) -> Result<(AgentCallbackClient<Channel>, MachineId), String> {
        let nobody = || "this role server knows no shepherd".to_owned();
        let servers = self.endpoints().ok_or_else(nobody)?;
        let server = servers.endpoints.get(skipped % servers.endpoints.len().max(1)).ok_or_else(nobody)?;
        let config = connection::client_config(&servers.identity, &server.ca_certificates, &servers.time)
            .map_err(|error| error.to_string())?;
        let client =
            connection::connect_server(&server.endpoint, config).await.map_err(|error| error.to_string())?;
        Ok((client, servers.machine_id))
    }

    /// Completes the file at `path`, whatever part of it exists; returns its length. After an error, the part that was
    /// fetched stays.
    ///
    /// Cancel-safe: only the connection is lost.
    pub async fn fetch_artefact(&self, sha256: Sha256, path: &Path) -> Result<u64, FetchError> {
        self.fetch_file(sha256, path, &|_| Ok(())).await.map(|(length, _)| length)
    }

    /// The same for a file that may have to be signed. `accept` decides by the signature, empty if there is none, before
    /// the first byte is stored; its error is a sentence. Returns the signature.
    ///
    /// Cancel-safe: only the connection is lost.
    pub async fn fetch_signed_artefact(
        &self,
        sha256: Sha256,
        path: &Path,
        accept: &AcceptSignature<'_>,
    ) -> Result<String, FetchError> {
        self.fetch_file(sha256, path, accept).await.map(|(_, signature)| signature)
    }

    async fn fetch_file(
        &self,
        sha256: Sha256,
        path: &Path,
        accept: &AcceptSignature<'_>,
    ) -> Result<(u64, String), FetchError> {
        let servers = self.endpoints().ok_or_else(unknown_servers)?;
        let mut failures = FetchFailures::default();
        for server in &servers.endpoints {
            match fetch_from_server(&servers, server, (sha256, path), accept).await {
                Ok(fetched) => return Ok(fetched),
                Err(error) => failures.record(server, error),
            }
        }
        Err(failures.into_error())
    }

    /// The signature of a file of this length that is here already; empty if it is not signed. Nothing else is fetched.
    ///
    /// Cancel-safe: only the connection is lost.
    pub async fn fetch_signature(&self, sha256: Sha256, length: u64) -> Result<String, FetchError> {
        let servers = self.endpoints().ok_or_else(unknown_servers)?;
        let (mut failures, mut is_unsigned) = (FetchFailures::default(), false);
        for server in &servers.endpoints {
            match fetch_signature_from_server(&servers, server, (sha256, length)).await {
                Ok(signature) if !signature.is_empty() => return Ok(signature),
                // One of an earlier release sends no signatures.
                Ok(_) => is_unsigned = true,
                Err(error) => failures.record(server, error),
            }
        }
        if is_unsigned { Ok(String::new()) } else { Err(failures.into_error()) }
    }
}

fn unknown_servers() -> FetchError {
    FetchError::Failed("this role server knows no shepherd".to_owned())
}

/// What the shepherds of one fetch have answered, none of which sent the file.
#[derive(Default)]
struct FetchFailures {
    is_denied: bool,
    /// The newest failure, as a sentence.
    failed: Option<String>,
}

impl FetchFailures {
    fn record(&mut self, server: &ServerEndpoint, error: FetchError) {
        match error {
            FetchError::Absent => self.is_denied = true,
            FetchError::Failed(text) => {
                self.failed = Some(format!("fetching it from shepherd {} failed: {text}", server.endpoint));
            }
        }
    }

    /// The file is absent if every shepherd has denied it.
    fn into_error(self) -> FetchError {
        match (self.failed, self.is_denied) {
            (None, false) => unknown_servers(),
            (None, true) => FetchError::Absent,
            (Some(text), false) => FetchError::Failed(text),
            (Some(text), true) => FetchError::Failed(format!("{text}; another shepherd does not have it")),
        }
    }
}

fn timed_out(what: &str) -> FetchError {
    FetchError::Failed(format!("{what} for {} s", TIMEOUT.as_secs()))
}

/// The answer of a shepherd to a request for a file.
type PiecesAnswer = Result<Streaming<ArtefactPiece>, Status>;

/// Requests a file from an offset. The caller keeps the client until it has the last piece.
async fn request_pieces(
    servers: &ServerEndpoints,
    server: &ServerEndpoint,
    (sha256, offset): (Sha256, u64),
) -> Result<(AgentCallbackClient<Channel>, PiecesAnswer), FetchError> {
    let failed = |error: &dyn std::fmt::Display| FetchError::Failed(error.to_string());
    let config = connection::client_config(&servers.identity, &server.ca_certificates, &servers.time)
        .map_err(|error| failed(&error))?;
    let connecting = tokio::time::timeout(TIMEOUT, connection::connect_server(&server.endpoint, config));
    let mut client = connecting
        .await
        .map_err(|_| timed_out("the connection was not accepted"))?
        .map_err(|error| failed(&error))?;
    let request = FetchArtefactRequest {
        machine_id: servers.machine_id.to_string(),
        sha256: sha256.0.to_vec(),
        offset,
    };
    let fetching = tokio::time::timeout(TIMEOUT, client.fetch_artefact(request));
    let answer = fetching.await.map_err(|_| timed_out("there was no answer"))?;
    Ok((client, answer.map(Response::into_inner)))
}

async fn fetch_signature_from_server(
    servers: &ServerEndpoints,
    server: &ServerEndpoint,
    file: (Sha256, u64),
) -> Result<String, FetchError> {
    let (_client, answer) = request_pieces(servers, server, file).await?;
    let mut pieces = answer.map_err(|status| status_error(&status))?;
    let first = tokio::time::timeout(TIMEOUT, pieces.message())
        .await
        .map_err(|_| timed_out("nothing came"))?
        .map_err(|status| status_error(&status))?;
    Ok(first.map(|piece| piece.signature).unwrap_or_default())
}

async fn fetch_from_server(
    servers: &ServerEndpoints,
    server: &ServerEndpoint,
    (sha256, path): (Sha256, &Path),
    accept: &AcceptSignature<'_>,
) -> Result<(u64, String), FetchError> {
    let failed = |error: &dyn std::fmt::Display| FetchError::Failed(error.to_string());
    let mut there = tokio::fs::metadata(path).await.map_or(0, |data| data.len());
    let (_client, answer) = request_pieces(servers, server, (sha256, there)).await?;
    let mut pieces = match answer {
        Ok(pieces) => pieces,
        Err(status) if status.code() == Code::OutOfRange => {
            // The existing part is longer than the file, so it belongs to another one.
            tokio::fs::remove_file(path).await.map_err(|error| failed(&error))?;
            return Err(FetchError::Failed(
                "the local part is longer than the file; the next attempt starts at byte 0".to_owned(),
            ));
        }
        Err(status) => return Err(status_error(&status)),
    };
    let mut file = open_at_offset(path, there).await.map_err(|error| failed(&error))?;
    let mut signature = None;
    let received = async {
        let mut size = None;
        while size != Some(there) {
            let piece = tokio::time::timeout(TIMEOUT, pieces.message())
                .await
                .map_err(|_| timed_out("nothing more came"))?
                .map_err(|status| status_error(&status))?;
            let Some(piece) = piece else {
                return Err(FetchError::Failed(format!("it ended after {there} bytes")));
            };
            if signature.is_none() {
                accept(&piece.signature).map_err(FetchError::Failed)?;
                signature = Some(piece.signature);
            }
            let bytes = piece.part.unwrap_or_default().bytes;
            there = there.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
            if there > piece.size.min(MAX_FILE_BYTES) {
                return Err(FetchError::Failed("it is longer than announced or allowed".to_owned()));
            }
            file.write_all(&bytes).await.map_err(|error| failed(&error))?;
            size = Some(piece.size);
        }
        Ok(())
    };
    let received = received.await;
    // However it ended, received bytes are in the file before its length is read again.
    file.flush().await.map_err(|error| failed(&error))?;
    received?;
    file.sync_all().await.map_err(|error| failed(&error))?;
    Ok((there, signature.unwrap_or_default()))
}

fn status_error(status: &Status) -> FetchError {
    match status.code() {
        Code::NotFound => FetchError::Absent,
        // The shepherd is of a release before this one.
        Code::Unimplemented => FetchError::Failed("its release cannot send files".to_owned()),
        _ => FetchError::Failed(describe_status(status)),
    }
}
