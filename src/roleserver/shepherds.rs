//! Fetching files from shepherds, and other connections beside the heartbeats, by the way that the agent has to them.
//!
//! The agent says after each heartbeat which ways it has and which one worked last ([`crate::roleserver::agent`]); a file
//! is fetched by a connection of its own, so that no heartbeat waits behind it. Every shepherd has the same files: what one
//! of them broke off goes on at the next. Nothing of this has to be trusted: what was fetched is what was wanted only if its
//! digest says so.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::curator::identity::Identity;
use crate::model::declaration::Sha256;
use crate::model::ids::MachineId;
use crate::proto::agent::v1::FetchArtefactRequest;
use crate::proto::agent::v1::agent_callback_client::AgentCallbackClient;
use crate::roleserver::cluster::services::fetch::{LARGEST, opened};
use crate::roleserver::connection;
use crate::roleserver::known_time::KnownTime;

/// How long a server may take to take a connection, and to send the next piece.
const PATIENCE: Duration = Duration::from_secs(30);

/// One way to a shepherd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// `host:port`.
    pub endpoint: String,
    /// What it is verified against, DER; empty: what this machine trusts.
    pub ca_certificates: Vec<Vec<u8>>,
}

/// The ways to shepherds, and as whom they are gone; the one that worked last comes first.
#[derive(Clone)]
pub struct Ways {
    /// Who the machine is.
    pub machine_id: MachineId,
    /// The key it proves.
    pub identity: Arc<Identity>,
    /// By what it judges certificates.
    pub time: Arc<KnownTime>,
    /// All of them.
    pub ways: Vec<Way>,
}

/// Why a file is not here.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// No shepherd has it for this machine.
    #[error("no shepherd has it")]
    Absent,
    /// A sentence.
    #[error("{0}")]
    Failed(String),
}

/// The shepherds of a machine; cheap to clone. Without any, until somebody says which there are.
#[derive(Clone, Default)]
pub struct Shepherds(Arc<Mutex<Option<Ways>>>);

impl std::fmt::Debug for Shepherds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ways = self.ways().map(|ways| ways.ways).unwrap_or_default();
        f.debug_tuple("Shepherds").field(&ways).finish()
    }
}

impl Shepherds {
    /// Says which ways there are from now on.
    pub fn learn(&self, ways: Ways) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(ways);
    }

    fn ways(&self) -> Option<Ways> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A connection of its own to a shepherd, and as which machine it is made: by the way that worked last, or by the one
    /// that comes so many after it. The error is a sentence.
    pub async fn connect(&self, skipped: usize) -> Result<(AgentCallbackClient<Channel>, MachineId), String> {
        let nobody = || "this role server knows no shepherd".to_owned();
        let ways = self.ways().ok_or_else(nobody)?;
        let way = ways.ways.get(skipped % ways.ways.len().max(1)).ok_or_else(nobody)?;
        let config = connection::client_config(&ways.identity, &way.ca_certificates, &ways.time)
            .map_err(|error| error.to_string())?;
        let client = connection::connect(&way.endpoint, config).await.map_err(|error| error.to_string())?;
        Ok((client, ways.machine_id))
    }

    /// Brings the file at `path` to its end, whatever part of it is there; gives its length. What was fetched until an
    /// error stays.
    ///
    /// Whoever drops this has lost nothing but the connection.
    pub async fn fetch(&self, sha256: Sha256, path: &Path) -> Result<u64, FetchError> {
        let nobody = || FetchError::Failed("this role server knows no shepherd".to_owned());
        let ways = self.ways().ok_or_else(nobody)?;
        let mut failed = nobody();
        for way in &ways.ways {
            match fetch_by(&ways, way, sha256, path).await {
                Ok(length) => return Ok(length),
                Err(FetchError::Absent) => return Err(FetchError::Absent),
                Err(FetchError::Failed(said)) => {
                    failed = FetchError::Failed(format!(
                        "fetching it from shepherd {} failed: {said}",
                        way.endpoint
                    ));
                }
            }
        }
        Err(failed)
    }
}

async fn fetch_by(ways: &Ways, way: &Way, sha256: Sha256, path: &Path) -> Result<u64, FetchError> {
    let failed = |error: &dyn std::fmt::Display| FetchError::Failed(error.to_string());
    let in_time = |what: &str| FetchError::Failed(format!("{what} for {} s", PATIENCE.as_secs()));
    let config = connection::client_config(&ways.identity, &way.ca_certificates, &ways.time)
        .map_err(|error| failed(&error))?;
    let connecting = tokio::time::timeout(PATIENCE, connection::connect(&way.endpoint, config));
    let mut client = connecting
        .await
        .map_err(|_| in_time("nobody took the connection"))?
        .map_err(|error| failed(&error))?;
    let mut there = tokio::fs::metadata(path).await.map_or(0, |data| data.len());
    let request = FetchArtefactRequest {
        machine_id: ways.machine_id.to_string(),
        sha256: sha256.0.to_vec(),
        offset: there,
    };
    let asking = tokio::time::timeout(PATIENCE, client.fetch_artefact(request));
    let mut pieces = match asking.await.map_err(|_| in_time("there was no answer"))? {
        Ok(answer) => answer.into_inner(),
        Err(status) if status.code() == Code::OutOfRange => {
            // What is there is no part of it.
            tokio::fs::remove_file(path).await.map_err(|error| failed(&error))?;
            return Err(FetchError::Failed("what was here is longer than it; it begins anew".to_owned()));
        }
        Err(status) => return Err(refused(&status)),
    };
    let mut file = opened(path, there).await.map_err(|error| failed(&error))?;
    let received = async {
        let mut size = None;
        while size != Some(there) {
            let piece = tokio::time::timeout(PATIENCE, pieces.message())
                .await
                .map_err(|_| in_time("nothing more came"))?
                .map_err(|status| refused(&status))?;
            let Some(piece) = piece else {
                return Err(FetchError::Failed(format!("it ended after {there} bytes")));
            };
            let bytes = piece.part.unwrap_or_default().bytes;
            there = there.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
            if there > piece.size.min(LARGEST) {
                return Err(FetchError::Failed("it is longer than was said".to_owned()));
            }
            file.write_all(&bytes).await.map_err(|error| failed(&error))?;
            size = Some(piece.size);
        }
        Ok(())
    };
    let received = received.await;
    // Whatever ended it: what the file has taken is in it before anybody looks how far it came.
    file.flush().await.map_err(|error| failed(&error))?;
    received?;
    file.sync_all().await.map_err(|error| failed(&error))?;
    Ok(there)
}

fn refused(status: &Status) -> FetchError {
    match status.code() {
        Code::NotFound => FetchError::Absent,
        // A shepherd of a release before this one.
        Code::Unimplemented => FetchError::Failed("it is of a release that sends no files".to_owned()),
        code if status.message().is_empty() => FetchError::Failed(code.description().to_owned()),
        _ => FetchError::Failed(status.message().chars().take(500).collect()),
    }
}
