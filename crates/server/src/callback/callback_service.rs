//! gRPC service `AgentCallback`: heartbeats, file downloads, log uploads.
//!
//! The service decides nothing. `heartbeat_validation.rs` validates requests, the BMDB makes all other decisions, and
//! this module encodes them in gRPC.
//!
//! The rejection of a machine id and key that do not belong together always has the same text, and is sent at a
//! multiple of a quarter of a second after the call. An unknown id, a known id with another key and a machine without
//! an agent cost the database different amounts of work, and the response time must not reveal which of them it was.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};

use crate::callback::agent_acceptor::AgentPeer;
use crate::callback::file_downloads::{FileDownloads, PieceStream};
use crate::callback::heartbeat_validation::{
    add_findings, find_pinning_flaw, find_refused_release, parse_heartbeat, parse_uuid,
};
use crate::callback::log_validation::parse_log_part;
use crate::callback::sealed_order::{check_recipient, open_order};
use crate::rate_limiter::CallRateLimiter;
use crate::tls::server_certificate::CaCertificates;
use bmdb::connection::Bmdb;
use bmdb::fleet::artefact::AgentKeyOwner;
use bmdb::fleet::secret::SecretsKey;
use bmdb::machine::heartbeat::group_commit::{HeartbeatError, HeartbeatQueue};
use bmdb::machine::heartbeat::{AgentInstructions, HeartbeatOutcome, PendingClusterOrder, PendingRelease};
use bmdb::metrics::Metrics;
use bmdb::metrics::labels::ByResult;
use model::ids::MachineId;
use model::log_request::PartDecision;
use model::role_declaration::Sha256;
use model::signed_artefact::signing_configuration::SigningConfiguration;
use model::signed_artefact::signing_trust::KeyRotation;
use model::time::unix_milliseconds;
use proto::agent::v1::agent_callback_server::AgentCallback;
use proto::agent::v1::{
    ClusterOrder, FetchArtefactRequest, HeartbeatRequest, HeartbeatResponse, InstallationRequest, LogRequest,
    ReleaseOrder, UploadLogRequest, UploadLogResponse,
};
use transport::gate::NoPlace;

/// Longest wait for the database; an agent's own timeout is ten seconds.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(9);
/// Longest wait for log requests before a heartbeat is answered: the heartbeat is durable already, and its agent
/// waits.
const LOG_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the signature of an ordered release, for the same reason.
const SIGNATURE_TIMEOUT: Duration = Duration::from_secs(2);
/// Rejections are sent at multiples of this.
const REJECTION_INTERVAL: Duration = Duration::from_millis(250);
/// The service; one for all connections.
pub struct CallbackService {
    /// Queue that stores heartbeats in groups.
    pub heartbeats: HeartbeatQueue,
    /// The database, also for the heartbeat interval of agents.
    pub bmdb: Bmdb,
    /// Endpoints of every live callback server.
    pub endpoints: watch::Receiver<Vec<String>>,
    /// The CA certificates that agents verify callback servers with.
    pub ca_certificates: CaCertificates,
    /// Limits the calls of each key.
    pub rate_limiter: Arc<CallRateLimiter>,
    /// Key that unseals orders with secrets; `None` without one.
    pub secrets: Option<Arc<SecretsKey>>,
    /// Keys that releases must be signed with, which machines pin.
    pub signing: Arc<SigningConfiguration>,
    /// Files that machines download.
    pub downloads: FileDownloads,
    /// Metrics of the agent channel.
    pub metrics: Metrics,
}

#[tonic::async_trait]
impl AgentCallback for CallbackService {
    type FetchArtefactStream = PieceStream;

    async fn fetch_artefact(
        &self,
        request: Request<FetchArtefactRequest>,
    ) -> Result<Response<Self::FetchArtefactStream>, Status> {
        let called = Instant::now();
        let answer = self.start_download(request).await;
        if answer.as_ref().is_err_and(|status| status.code() == Code::Unauthenticated) {
            self.metrics.artefact_fetches.get_or_create(&ByResult { result: UNAUTHENTICATED }).inc();
            tokio::time::sleep_until(called + rejection_delay(called.elapsed())).await;
        }
        answer.map(Response::new)
    }

    async fn bring_log(
        &self,
        request: Request<UploadLogRequest>,
    ) -> Result<Response<UploadLogResponse>, Status> {
        let called = Instant::now();
        let answer = self.store_log_part(request).await;
        if answer.as_ref().is_err_and(|status| status.code() == Code::Unauthenticated) {
            tokio::time::sleep_until(called + rejection_delay(called.elapsed())).await;
        }
        answer.map(Response::new)
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let called = Instant::now();
        let (answer, result) = self.handle_heartbeat(request).await;
        self.metrics.heartbeats.get_or_create(&ByResult { result }).inc();
        if result == UNAUTHENTICATED {
            tokio::time::sleep_until(called + rejection_delay(called.elapsed())).await;
        }
        answer.map(Response::new)
    }
}

const UNAUTHENTICATED: &str = "unauthenticated";

fn key_mismatch() -> Status {
    Status::unauthenticated("machine id and key do not belong together")
}

/// The agent tries its next endpoint.
fn no_place(error: NoPlace) -> Status {
    Status::unavailable(error.to_string())
}

fn machine_retired() -> Status {
    Status::permission_denied(
        "this machine is retired, and its key is no longer accepted: stop the role server on it and remove its \
         state directory",
    )
}

impl CallbackService {
    /// Starts a download for a machine that proves its identity with the key of its connection.
    async fn start_download(&self, request: Request<FetchArtefactRequest>) -> Result<PieceStream, Status> {
        let Some(peer) = request.extensions().get::<AgentPeer>().cloned() else {
            return Err(Status::internal("the connection carries no key"));
        };
        if !self.rate_limiter.allows(peer.public_key) {
            return Err(Status::resource_exhausted("too many calls from this agent"));
        }
        let _answered = peer.place.begin_request();
        let body = request.into_inner();
        let machine = parse_uuid("machine_id", &body.machine_id)
            .map(MachineId)
            .map_err(|malformed| Status::invalid_argument(malformed.to_string()))?;
        let sha256: [u8; 32] =
            body.sha256.try_into().map_err(|_| Status::invalid_argument("sha256 does not have 32 bytes"))?;
        self.authenticate(&peer, machine, "a file").await?;
        self.downloads.start(machine, Sha256(sha256), body.offset).await
    }

    /// Stores a part of a log of a machine that proves its identity with the key of its connection.
    async fn store_log_part(&self, request: Request<UploadLogRequest>) -> Result<UploadLogResponse, Status> {
        let Some(peer) = request.extensions().get::<AgentPeer>().cloned() else {
            return Err(Status::internal("the connection carries no key"));
        };
        if !self.rate_limiter.allows(peer.public_key) {
            return Err(Status::resource_exhausted("too many calls from this agent"));
        }
        let _answered = peer.place.begin_request();
        let part = parse_log_part(request.into_inner()).map_err(Status::invalid_argument)?;
        let machine = part.machine;
        self.authenticate(&peer, machine, "a part of a log").await?;
        let kept = self.bmdb.store_log_part(machine, part.request_id, part.part);
        match tokio::time::timeout(DATABASE_TIMEOUT, kept).await {
            Ok(Ok(kept)) => Ok(UploadLogResponse {
                continue_upload: !matches!(kept, PartDecision::Discard | PartDecision::End(_)),
                retry_later: kept == PartDecision::Defer,
            }),
            Ok(Err(error)) => {
                tracing::warn!(%machine, %error, "a part of a log could not be kept");
                Err(Status::unavailable("the database is not available; try again"))
            }
            Err(_) => Err(Status::unavailable("the database did not answer in time; try again")),
        }
    }

    /// Checks that the connection's key belongs to this machine. `what` names the rejected request in the log.
    async fn authenticate(&self, peer: &AgentPeer, machine: MachineId, what: &str) -> Result<(), Status> {
        let keyed =
            tokio::time::timeout(DATABASE_TIMEOUT, self.bmdb.agent_key_owner(machine, peer.public_key)).await;
        let Ok(Ok(keyed)) = keyed else {
            peer.place.defer();
            return Err(Status::unavailable("the database is not available; try again"));
        };
        match keyed {
            AgentKeyOwner::Agent => peer.place.prove().map_err(no_place),
            AgentKeyOwner::RetiredAgent => Err(machine_retired()),
            AgentKeyOwner::Unknown => {
                tracing::info!(%machine, key = %hex::encode(peer.public_key), address = %peer.address,
                    "{what} was refused: no machine of that id has an agent with that key");
                Err(key_mismatch())
            }
        }
    }

    async fn handle_heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> (Result<HeartbeatResponse, Status>, &'static str) {
        let Some(peer) = request.extensions().get::<AgentPeer>().cloned() else {
            return (Err(Status::internal("the connection carries no key")), "internal");
        };
        if !self.rate_limiter.allows(peer.public_key) {
            return (Err(Status::resource_exhausted("too many heartbeats from this agent")), "rate-limited");
        }
        let _answered = peer.place.begin_request();
        let request = request.into_inner();
        let brings_logs = request.supports_log_upload;
        let report = request.release_report.as_ref();
        let flaw = report.and_then(|report| find_pinning_flaw(report, self.signing.keys()));
        let refused = report.and_then(find_refused_release);
        let findings = flaw.into_iter().chain(refused).collect();
        let heartbeat = match parse_heartbeat(request, peer.public_key) {
            Ok(heartbeat) => add_findings(heartbeat, findings),
            Err(malformed) => return (Err(Status::invalid_argument(malformed.to_string())), "malformed"),
        };
        let machine = heartbeat.machine;
        let (incarnation, version) = (heartbeat.beat.incarnation.clone(), heartbeat.beat.version.clone());
        let logs = async |wanted: bool| {
            if wanted {
                self.pending_log_requests(machine, &incarnation, &version, brings_logs).await
            } else {
                Vec::new()
            }
        };
        let stored = tokio::time::timeout(DATABASE_TIMEOUT, self.heartbeats.store(heartbeat)).await;
        match &stored {
            Ok(Ok(
                HeartbeatOutcome::Stored(_) | HeartbeatOutcome::Duplicate(_) | HeartbeatOutcome::Stale,
            )) => {
                // The heartbeat is stored: a machine must not count as silent because a listener is full.
                if let Err(error) = peer.place.prove() {
                    return (Err(no_place(error)), "full");
                }
            }
            Ok(Ok(HeartbeatOutcome::Unauthenticated | HeartbeatOutcome::Retired)) => {}
            // The database did not answer, so the owner of the key is unknown.
            Ok(Err(_)) | Err(_) => peer.place.defer(),
        }
        match stored {
            Ok(Ok(HeartbeatOutcome::Stored(wants))) => {
                let logs = logs(wants.logs).await;
                (Ok(self.heartbeat_response(machine, wants, logs).await), "stored")
            }
            Ok(Ok(HeartbeatOutcome::Duplicate(wants))) => {
                let logs = logs(wants.logs).await;
                (Ok(self.heartbeat_response(machine, wants, logs).await), "duplicate")
            }
            Ok(Ok(HeartbeatOutcome::Stale)) => {
                let text = "a heartbeat newer than this one is already stored";
                (Err(Status::failed_precondition(text)), "stale")
            }
            Ok(Ok(HeartbeatOutcome::Unauthenticated)) => {
                tracing::info!(%machine, key = %hex::encode(peer.public_key), address = %peer.address,
                    "a heartbeat was refused: no machine of that id has an agent with that key");
                (Err(key_mismatch()), UNAUTHENTICATED)
            }
            Ok(Ok(HeartbeatOutcome::Retired)) => {
                tracing::info!(%machine, address = %peer.address, "a heartbeat of a retired machine was refused");
                (Err(machine_retired()), "retired")
            }
            Ok(Err(HeartbeatError::Busy)) => {
                (Err(Status::unavailable("too many heartbeats wait; try again")), "busy")
            }
            Ok(Err(HeartbeatError::Stopped)) => {
                (Err(Status::unavailable("this server is stopping; try another")), "stopping")
            }
            Ok(Err(HeartbeatError::Database(error))) => {
                tracing::warn!(%machine, %error, "a heartbeat could not be stored");
                (Err(Status::unavailable("the database is not available; try again")), "unavailable")
            }
            Err(_) => {
                (Err(Status::unavailable("the database did not answer in time; try again")), "unavailable")
            }
        }
    }

    /// Unseals an order about a cluster. If it cannot be unsealed, it stays for a shepherd that can, and this one
    /// still answers the heartbeat.
    fn unseal_cluster_order(
        &self,
        machine: MachineId,
        pending_cluster_order: &PendingClusterOrder,
    ) -> Option<ClusterOrder> {
        let Some(secrets) = &self.secrets else {
            tracing::warn!(%machine, "an order about a cluster cannot be handed on: this shepherd has no secrets key");
            return None;
        };
        let opened = open_order(secrets, &pending_cluster_order.sealed)
            .and_then(|order| check_recipient(&order, machine).map(|()| order));
        match opened {
            Ok(order) => Some(ClusterOrder { generation: pending_cluster_order.generation, ..order }),
            Err(error) => {
                tracing::error!(%machine, error, "an order about a cluster cannot be handed on");
                None
            }
        }
    }

    /// The logs that the machine has to upload. If they cannot be read, the heartbeat is answered without them, and
    /// they are sent with the next one.
    async fn pending_log_requests(
        &self,
        machine: MachineId,
        incarnation: &str,
        version: &str,
        brings: bool,
    ) -> Vec<LogRequest> {
        let handing = self.bmdb.deliver_log_requests(machine, incarnation, version, brings);
        let handed = match tokio::time::timeout(LOG_REQUEST_TIMEOUT, handing).await {
            Ok(Ok(handed)) => handed,
            Ok(Err(error)) => {
                tracing::warn!(%machine, %error, "which logs are wanted of a machine could not be read");
                Vec::new()
            }
            Err(_) => Vec::new(),
        };
        let reports = handed.into_iter().map(|handed| LogRequest {
            request_id: handed.id.to_string(),
            log: handed.query.log,
            lines: handed.query.lines,
            since_seconds: handed.query.since.map_or(0, |since| since.0.as_secs()),
            follow: handed.query.follow,
        });
        reports.collect()
    }

    /// The order for another release, with its signature. If that cannot be read, the order is sent with a later response:
    /// without it, the machine would refuse the release for good.
    async fn release_order(&self, machine: MachineId, release: PendingRelease) -> Option<ReleaseOrder> {
        let sha256 = Sha256(release.sha256.as_slice().try_into().ok()?);
        let reading = self.bmdb.artefact_signature(sha256);
        let signature = match tokio::time::timeout(SIGNATURE_TIMEOUT, reading).await {
            Ok(Ok(signature)) => signature.unwrap_or_default(),
            Ok(Err(error)) => {
                tracing::warn!(%machine, %error, "the signature of an ordered release could not be read");
                return None;
            }
            Err(_) => return None,
        };
        Some(ReleaseOrder {
            generation: release.generation,
            sha256: release.sha256,
            deadline_seconds: u32::try_from(release.deadline_seconds).unwrap_or_default(),
            is_unsigned: signature.is_empty(),
            signature,
        })
    }

    async fn heartbeat_response(
        &self,
        machine: MachineId,
        wants: AgentInstructions,
        log_requests: Vec<LogRequest>,
    ) -> HeartbeatResponse {
        let interval = self.bmdb.policy().1.heartbeat_interval.0.as_secs();
        let release_order = match wants.release {
            Some(release) => self.release_order(machine, release).await,
            None => None,
        };
        HeartbeatResponse {
            installation_request: wants.installation.map(|installation| InstallationRequest {
                generation: installation.generation,
                artefact_url: installation.artefact_url,
                artefact_sha256: installation.artefact_sha256,
            }),
            endpoints: self.endpoints.borrow().clone(),
            ca_certificates: self.ca_certificates.borrow().clone(),
            heartbeat_interval_seconds: u32::try_from(interval).unwrap_or(u32::MAX),
            hardware_report_requested: wants.hardware_report,
            shepherd_time_ms: unix_milliseconds(SystemTime::now()),
            cluster_order: wants.cluster.and_then(|order| self.unseal_cluster_order(machine, &order)),
            release_order,
            log_requests,
            signing_keys: self.signing.key_lines(),
            key_rotations: self.signing.rotations().iter().map(KeyRotation::to_wire).collect(),
            require_signed_declarations: self.signing.requires_signed_declarations(),
        }
    }
}

/// The first multiple of the step that is not below `elapsed`.
fn rejection_delay(elapsed: Duration) -> Duration {
    let steps = elapsed.as_millis() / REJECTION_INTERVAL.as_millis() + 1;
    REJECTION_INTERVAL * u32::try_from(steps).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejections_come_at_fixed_times() {
        let milliseconds =
            |given| u64::try_from(rejection_delay(Duration::from_millis(given)).as_millis()).unwrap();
        assert_eq!([0, 1, 249, 250, 600].map(milliseconds), [250, 250, 250, 500, 750]);
    }
}
