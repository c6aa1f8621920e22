//! The gRPC service that agents call.
//!
//! It decides nothing: form is checked by `heartbeat_form.rs`, everything else
//! by the BMDB. What stands here is how that is said in gRPC.
//!
//! A refusal for a machine id and key that do not belong together has always the
//! same words, and comes at a multiple of a quarter of a second after the call:
//! an unknown id, a known id with another key and a machine without an agent
//! cost the database different amounts of work, and the time of the answer must
//! not tell which of them it was.

use std::num::NonZeroU32;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use prost::Message as _;
use secrecy::ExposeSecret as _;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};

use crate::bmdb::artefact::Keyed;
use crate::bmdb::connection::Bmdb;
use crate::bmdb::group_commit::{HeartbeatError, Heartbeats};
use crate::bmdb::heartbeat::{Outcome, PendingClusterOrder, Wants};
use crate::bmdb::metrics::{ByResult, Metrics};
use crate::bmdb::secret::SecretsKey;
use crate::model::declaration::Sha256;
use crate::model::ids::MachineId;
use crate::model::log_request::Keep;
use crate::model::time::{Rate, unix_milliseconds};
use crate::proto::agent::v1::agent_callback_server::AgentCallback;
use crate::proto::agent::v1::{
    BringLogRequest, BringLogResponse, ClusterOrder, FetchArtefactRequest, HeartbeatRequest,
    HeartbeatResponse, InstallationRequest, LogRequest, ReleaseOrder,
};
use crate::server::accept::AgentPeer;
use crate::server::certificate::Authorities;
use crate::server::fetching::{Fetching, Pieces};
use crate::server::heartbeat_form::{read_heartbeat, uuid};
use crate::server::log_form::read_part;

/// How long an agent waits for the database; its own patience is ten seconds.
const PATIENCE: Duration = Duration::from_secs(9);
/// How long an answer to a heartbeat waits for what logs are wanted: it is durable already, and its agent waits.
const HANDING_PATIENCE: Duration = Duration::from_secs(2);
/// Refusals are given at multiples of this.
const REFUSAL_STEP: Duration = Duration::from_millis(250);
/// Keys whose rates are remembered. Anyone can make keys, so there is an end to it.
const REMEMBERED_KEYS: usize = 250_000;

/// How many calls agents may make.
pub struct CallRates {
    quota: Quota,
    remembered: usize,
    by_key: RwLock<Arc<DefaultKeyedRateLimiter<[u8; 32]>>>,
}

impl CallRates {
    /// Every key may call at this rate.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        Self::remembering(REMEMBERED_KEYS, rate)
    }

    fn remembering(remembered: usize, rate: Rate) -> Self {
        let quota = Quota::with_period(rate.period.0).unwrap_or(Quota::per_second(NonZeroU32::MIN));
        let quota = quota.allow_burst(rate.burst);
        Self { quota, remembered, by_key: RwLock::new(Arc::new(RateLimiter::keyed(quota))) }
    }

    pub(crate) fn allows(&self, key: [u8; 32]) -> bool {
        self.within_bounds().check_key(&key).is_ok()
    }

    /// The rates, forgotten when they have become too many.
    ///
    /// Forgetting lets each key have its burst once more, which whoever made so many keys has
    /// anyway. Letting them share a rate instead would refuse the honest ones.
    fn within_bounds(&self) -> Arc<DefaultKeyedRateLimiter<[u8; 32]>> {
        let known = self.by_key.read().unwrap_or_else(PoisonError::into_inner).clone();
        if known.len() < self.remembered {
            return known;
        }
        let mut by_key = self.by_key.write().unwrap_or_else(PoisonError::into_inner);
        // Somebody else may have been here first.
        if by_key.len() >= self.remembered {
            *by_key = Arc::new(RateLimiter::keyed(self.quota));
        }
        by_key.clone()
    }

    /// Forgets keys that have not called for long.
    pub fn forget_idle(&self) {
        let by_key = self.by_key.read().unwrap_or_else(PoisonError::into_inner).clone();
        by_key.retain_recent();
        by_key.shrink_to_fit();
    }
}

/// The service; one for all connections.
pub struct CallbackService {
    /// Where heartbeats go.
    pub heartbeats: Heartbeats,
    /// For the interval that agents are told.
    pub bmdb: Bmdb,
    /// Endpoints of every callback server alive.
    pub endpoints: watch::Receiver<Vec<String>>,
    /// What agents verify callback servers against.
    pub authorities: Authorities,
    /// Limits.
    pub rates: Arc<CallRates>,
    /// What opens orders that hold secrets.
    pub secrets: Option<Arc<SecretsKey>>,
    /// What machines fetch.
    pub fetching: Fetching,
    /// Counters.
    pub metrics: Metrics,
}

#[tonic::async_trait]
impl AgentCallback for CallbackService {
    type FetchArtefactStream = Pieces;

    async fn fetch_artefact(
        &self,
        request: Request<FetchArtefactRequest>,
    ) -> Result<Response<Self::FetchArtefactStream>, Status> {
        let called = Instant::now();
        let answer = self.fetch(request).await;
        if answer.as_ref().is_err_and(|status| status.code() == Code::Unauthenticated) {
            self.metrics.artefact_fetches.get_or_create(&ByResult { result: UNAUTHENTICATED }).inc();
            tokio::time::sleep_until(called + next_step(called.elapsed())).await;
        }
        answer.map(Response::new)
    }

    async fn bring_log(
        &self,
        request: Request<BringLogRequest>,
    ) -> Result<Response<BringLogResponse>, Status> {
        let called = Instant::now();
        let answer = self.keep_log(request).await;
        if answer.as_ref().is_err_and(|status| status.code() == Code::Unauthenticated) {
            tokio::time::sleep_until(called + next_step(called.elapsed())).await;
        }
        answer.map(Response::new)
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let called = Instant::now();
        let (answer, result) = self.answer(request).await;
        self.metrics.heartbeats.get_or_create(&ByResult { result }).inc();
        if result == UNAUTHENTICATED {
            tokio::time::sleep_until(called + next_step(called.elapsed())).await;
        }
        answer.map(Response::new)
    }
}

const UNAUTHENTICATED: &str = "unauthenticated";

fn nobody() -> Status {
    Status::unauthenticated("machine id and key do not belong together")
}

fn retired() -> Status {
    Status::permission_denied(
        "this machine is retired, and its key counts no more: stop the role server on it and remove its state directory",
    )
}

impl CallbackService {
    /// Begins to send a file to whoever proves to be the machine that it says.
    async fn fetch(&self, request: Request<FetchArtefactRequest>) -> Result<Pieces, Status> {
        let Some(peer) = request.extensions().get::<AgentPeer>().cloned() else {
            return Err(Status::internal("the connection carries no key"));
        };
        if !self.rates.allows(peer.public_key) {
            return Err(Status::resource_exhausted("too many calls from this agent"));
        }
        let asked = request.into_inner();
        let machine = uuid("machine_id", &asked.machine_id)
            .map(MachineId)
            .map_err(|malformed| Status::invalid_argument(malformed.to_string()))?;
        let sha256: [u8; 32] =
            asked.sha256.try_into().map_err(|_| Status::invalid_argument("sha256 has not 32 bytes"))?;
        self.proven(&peer, machine, "a file").await?;
        self.fetching.begin(machine, Sha256(sha256), asked.offset).await
    }

    /// Keeps a part of a log of whoever proves to be the machine that it says.
    async fn keep_log(&self, request: Request<BringLogRequest>) -> Result<BringLogResponse, Status> {
        let Some(peer) = request.extensions().get::<AgentPeer>().cloned() else {
            return Err(Status::internal("the connection carries no key"));
        };
        if !self.rates.allows(peer.public_key) {
            return Err(Status::resource_exhausted("too many calls from this agent"));
        }
        let part = read_part(request.into_inner()).map_err(Status::invalid_argument)?;
        let machine = part.machine;
        self.proven(&peer, machine, "a part of a log").await?;
        let kept = self.bmdb.keep_log(machine, part.request, part.brought);
        match tokio::time::timeout(PATIENCE, kept).await {
            Ok(Ok(kept)) => Ok(BringLogResponse {
                wanted: !matches!(kept, Keep::Over | Keep::End(_)),
                later: kept == Keep::Later,
            }),
            Ok(Err(error)) => {
                tracing::warn!(%machine, %error, "a part of a log could not be kept");
                Err(Status::unavailable("the database is away; try again"))
            }
            Err(_) => Err(Status::unavailable("the database did not answer in time; try again")),
        }
    }

    /// Whether this is the machine that it says; an error if not. `what` is what is refused then, for the log.
    async fn proven(&self, peer: &AgentPeer, machine: MachineId, what: &str) -> Result<(), Status> {
        let keyed = tokio::time::timeout(PATIENCE, self.bmdb.keyed(machine, peer.public_key)).await;
        let Ok(Ok(keyed)) = keyed else {
            peer.proof.excused();
            return Err(Status::unavailable("the database is away; try again"));
        };
        match keyed {
            Keyed::Agent => {
                peer.proof.proven();
                Ok(())
            }
            Keyed::Retired => Err(retired()),
            Keyed::Nobody => {
                tracing::info!(%machine, key = %hex::encode(peer.public_key), address = %peer.address,
                    "{what} was refused: no machine of that id has an agent with that key");
                Err(nobody())
            }
        }
    }

    async fn answer(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> (Result<HeartbeatResponse, Status>, &'static str) {
        let Some(peer) = request.extensions().get::<AgentPeer>().cloned() else {
            return (Err(Status::internal("the connection carries no key")), "internal");
        };
        if !self.rates.allows(peer.public_key) {
            return (Err(Status::resource_exhausted("too many heartbeats from this agent")), "too-many");
        }
        let request = request.into_inner();
        let brings_logs = request.brings_logs;
        let heartbeat = match read_heartbeat(request, peer.public_key) {
            Ok(heartbeat) => heartbeat,
            Err(malformed) => return (Err(Status::invalid_argument(malformed.to_string())), "malformed"),
        };
        let machine = heartbeat.machine;
        let (incarnation, version) = (heartbeat.beat.incarnation.clone(), heartbeat.beat.version.clone());
        let logs = async |wanted: bool| {
            if wanted { self.logs(machine, &incarnation, &version, brings_logs).await } else { Vec::new() }
        };
        let stored = tokio::time::timeout(PATIENCE, self.heartbeats.store(heartbeat)).await;
        match &stored {
            Ok(Ok(Outcome::Stored(_) | Outcome::Repeated(_) | Outcome::Stale)) => peer.proof.proven(),
            Ok(Ok(Outcome::Unauthenticated | Outcome::Retired)) => {}
            // Nobody could say whose it is.
            Ok(Err(_)) | Err(_) => peer.proof.excused(),
        }
        match stored {
            Ok(Ok(Outcome::Stored(wants))) => {
                let logs = logs(wants.logs).await;
                (Ok(self.response(machine, wants, logs)), "stored")
            }
            Ok(Ok(Outcome::Repeated(wants))) => {
                let logs = logs(wants.logs).await;
                (Ok(self.response(machine, wants, logs)), "repeated")
            }
            Ok(Ok(Outcome::Stale)) => {
                let said = "a heartbeat newer than this one is already stored";
                (Err(Status::failed_precondition(said)), "stale")
            }
            Ok(Ok(Outcome::Unauthenticated)) => {
                tracing::info!(%machine, key = %hex::encode(peer.public_key), address = %peer.address,
                    "a heartbeat was refused: no machine of that id has an agent with that key");
                (Err(nobody()), UNAUTHENTICATED)
            }
            Ok(Ok(Outcome::Retired)) => {
                tracing::info!(%machine, address = %peer.address, "a heartbeat of a retired machine was refused");
                (Err(retired()), "retired")
            }
            Ok(Err(HeartbeatError::Busy)) => {
                (Err(Status::unavailable("too many heartbeats wait; try again")), "busy")
            }
            Ok(Err(HeartbeatError::Stopped)) => {
                (Err(Status::unavailable("this server is stopping; try another")), "stopping")
            }
            Ok(Err(HeartbeatError::Database(error))) => {
                tracing::warn!(%machine, %error, "a heartbeat could not be stored");
                (Err(Status::unavailable("the database is away; try again")), "unavailable")
            }
            Err(_) => {
                (Err(Status::unavailable("the database did not answer in time; try again")), "unavailable")
            }
        }
    }

    /// Opens an order about a cluster. One that cannot be opened is left for a shepherd that can: this one still
    /// answers the heartbeat.
    fn opened(&self, machine: MachineId, asked: &PendingClusterOrder) -> Option<ClusterOrder> {
        let Some(secrets) = &self.secrets else {
            tracing::warn!(%machine, "an order about a cluster cannot be handed on: this shepherd has no secrets key");
            return None;
        };
        let opened = secrets
            .unseal("an order about a cluster", &asked.sealed)
            .map_err(|error| error.to_string())
            .and_then(|plain| {
                ClusterOrder::decode(plain.expose_secret()).map_err(|error| format!("it is damaged: {error}"))
            });
        match opened {
            Ok(order) => Some(ClusterOrder { generation: asked.generation, ..order }),
            Err(error) => {
                tracing::error!(%machine, error, "an order about a cluster cannot be handed on");
                None
            }
        }
    }

    /// What logs the machine is to bring. A heartbeat is answered without them when that cannot be found out: they are
    /// handed on with the next one.
    async fn logs(
        &self,
        machine: MachineId,
        incarnation: &str,
        version: &str,
        brings: bool,
    ) -> Vec<LogRequest> {
        let handing = self.bmdb.hand_logs(machine, incarnation, version, brings);
        let handed = match tokio::time::timeout(HANDING_PATIENCE, handing).await {
            Ok(Ok(handed)) => handed,
            Ok(Err(error)) => {
                tracing::warn!(%machine, %error, "which logs are wanted of a machine could not be read");
                Vec::new()
            }
            Err(_) => Vec::new(),
        };
        let told = handed.into_iter().map(|handed| LogRequest {
            request: handed.id.to_string(),
            log: handed.wanted.log,
            lines: handed.wanted.lines,
            since_seconds: handed.wanted.since.map_or(0, |since| since.0.as_secs()),
            follow: handed.wanted.follow,
        });
        told.collect()
    }

    fn response(&self, machine: MachineId, wants: Wants, log_requests: Vec<LogRequest>) -> HeartbeatResponse {
        let interval = self.bmdb.policy().1.heartbeat_interval.0.as_secs();
        HeartbeatResponse {
            installation_request: wants.installation.map(|asked| InstallationRequest {
                generation: asked.generation,
                artefact_url: asked.artefact_url,
                artefact_sha256: asked.artefact_sha256,
            }),
            endpoints: self.endpoints.borrow().clone(),
            ca_certificates: self.authorities.borrow().clone(),
            heartbeat_interval_seconds: u32::try_from(interval).unwrap_or(u32::MAX),
            wants_hardware_report: wants.hardware_report,
            shepherd_time_ms: unix_milliseconds(SystemTime::now()),
            cluster_order: wants.cluster.and_then(|asked| self.opened(machine, &asked)),
            release_order: wants.release.map(|asked| ReleaseOrder {
                generation: asked.generation,
                sha256: asked.sha256,
                deadline_seconds: u32::try_from(asked.deadline_seconds).unwrap_or_default(),
            }),
            log_requests,
        }
    }
}

/// The first multiple of the step that is not over after `elapsed`.
fn next_step(elapsed: Duration) -> Duration {
    let steps = elapsed.as_millis() / REFUSAL_STEP.as_millis() + 1;
    REFUSAL_STEP * u32::try_from(steps).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_come_at_fixed_times() {
        let milliseconds =
            |given| u64::try_from(next_step(Duration::from_millis(given)).as_millis()).unwrap();
        assert_eq!([0, 1, 249, 250, 600].map(milliseconds), [250, 250, 250, 500, 750]);
    }

    #[test]
    fn one_key_that_calls_too_often_does_not_stop_another() {
        let rates = CallRates::new("1h,2".parse().unwrap());
        let calls = |key: u8| (0..4).filter(|_| rates.allows([key; 32])).count();
        assert_eq!((calls(1), calls(2)), (2, 2));
        rates.forget_idle();
        assert_eq!((calls(1), calls(3)), (0, 2));
    }

    #[test]
    fn who_makes_many_keys_takes_no_call_from_an_honest_one() {
        let rates = CallRates::remembering(100, "1h,2".parse().unwrap());
        for made in 0..1000_u16 {
            let mut key = [7; 32];
            key[..2].copy_from_slice(&made.to_be_bytes());
            assert!(rates.allows(key), "{made}");
            assert!(rates.by_key.read().unwrap().len() <= 100);
        }
        assert!(rates.allows([1; 32]));
    }
}
