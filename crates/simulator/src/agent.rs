//! Simulated agent: the role server's agent with simulated clock, hardware and disk.
//!
//! Heartbeat loop, enrolment rules, TLS and identity are the real role server's. Simulated are the boot clock, the
//! hardware, and the disk that stores the enrolment. It has no log file, so the agent's last lines are in memory and
//! start over with each start of the agent. What a machine runs as a node has real logs.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use curator_client::identity::{Identity, IdentityError};
use proto::agent::v1 as wire;
use roleserver::agent::{Agent, AgentEvent, no_cluster, no_release};
use roleserver::boot_clock::BootClock;
use roleserver::enrolment::{self, EnrollError};
use roleserver::logs::LogUploads;
use roleserver::logs::ring::LogRing;
use roleserver::logs::sources::LogSources;
use roleserver::server_pool::ServerPool;
use roleserver::trusted_time::TrustedTime;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fleet::{SimulatedFleet, host_now};
use crate::hardware;
use crate::journal::OpenCall;
use crate::machine::{MachineEvent, SimulatedState, StepRejected};
use crate::node::MachineNode;
use crate::state::MachineRecord;

/// The version that simulated agents report.
const AGENT_VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+simulated");

/// Why the agent of a machine cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// The machine was never enrolled.
    #[error("this machine was never enrolled")]
    NotEnrolled,
    /// The stored key is not a valid identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The stored key is not hexadecimal.
    #[error("its key is not hex")]
    NotHex(#[from] hex::FromHexError),
}

/// The clock of a simulated boot. It continues over restarts of the simulator, as a machine's clock would.
#[derive(Debug)]
struct SimulatedClock {
    boot_id: Uuid,
    booted_at: DateTime<Utc>,
}

impl BootClock for SimulatedClock {
    fn boot_id(&self) -> String {
        self.boot_id.hyphenated().to_string()
    }

    fn milliseconds(&self) -> u64 {
        u64::try_from((host_now() - self.booted_at).num_milliseconds()).unwrap_or(0)
    }
}

/// Builds the agent of a machine from the state of its disk. `stop` is the token it will run under: an agent that was
/// stopped must not write to the disk of the next one.
pub(crate) fn build_agent(
    fleet: &Arc<SimulatedFleet>,
    index: usize,
    record: &MachineRecord,
    stop: CancellationToken,
) -> Result<(Agent, Option<MachineNode>), AgentError> {
    let enrolment = record.enrolment.as_ref().ok_or(AgentError::NotEnrolled)?;
    let identity = load_identity(record)?.ok_or(AgentError::NotEnrolled)?;
    let seed = fleet.profile.seed;
    let place = record.machine.index;
    let hostname = record.id.clone();
    let node = fleet.nodes.as_ref().map(|nodes| nodes.for_machine(enrolment.machine_id, &record.id));
    let own_address = record.node_address.map(|address| address.to_string()).unwrap_or_default();
    let inbox = node.as_ref().map(|node| node.orders.clone());
    let standing = inbox.clone();
    let shepherds = node.as_ref().map_or_else(ServerPool::default, |node| node.shepherds.clone());
    let (ring, incarnation) = (LogRing::default(), Uuid::new_v4());
    ring.append_line(&format!(
        "the agent of {} runs: a simulated machine, whose log begins with each start of its agent",
        record.id
    ));
    let source = LogSources::of_ring(ring.clone(), node.as_ref().map(MachineNode::disk));
    let logs = LogUploads::new(source, shepherds.clone(), incarnation);
    let observer = {
        let (fleet, id) = (Arc::downgrade(fleet), record.id.clone());
        Arc::new(move |event: &AgentEvent| {
            let Some(fleet) = fleet.upgrade() else { return };
            if stop.is_cancelled() {
                return;
            }
            log_event(&ring, event);
            match (event, &inbox) {
                (AgentEvent::LogRequests { requests }, _) => {
                    for work in logs.start_uploads(requests) {
                        let over = stop.clone();
                        // The task ends by itself, at the latest with the agent.
                        tokio::spawn(async move { over.run_until_cancelled_owned(work).await });
                    }
                }
                (AgentEvent::ClusterOrder { order }, Some(inbox)) => {
                    // All machines share the host's addresses. Each has one more of its own.
                    inbox.accept(&wire::ClusterOrder { address: own_address.clone(), ..order.clone() });
                }
                _ => handle_event(&fleet, index, &id, event),
            }
        })
    };
    let clock = Arc::new(SimulatedClock {
        boot_id: record.machine.boot_id(seed),
        booted_at: record.machine.booted_at,
    });
    let agent = Agent {
        machine_id: enrolment.machine_id,
        identity: Arc::new(identity),
        settings: enrolment.settings.clone(),
        fallback: record.fallback.clone(),
        access_fence: enrolment.access_fence(),
        incarnation,
        agent_version: AGENT_VERSION.to_owned(),
        clock: clock.clone(),
        // All machines of the simulator use its host's clock, which is right.
        time: Arc::new(TrustedTime::new(clock, None)),
        hardware: Arc::new(move || hardware::hardware_report(seed, place, &hostname)),
        cluster: standing.map_or_else(no_cluster, |inbox| Arc::new(move || inbox.report())),
        release: no_release(),
        uploads_logs: true,
        server_pool: Some(shepherds),
        observer,
    };
    Ok((agent, node))
}

/// Logs an event of the agent in the machine's log.
fn log_event(ring: &LogRing, event: &AgentEvent) {
    match event {
        AgentEvent::Delivered { endpoint, ack: delivered, .. } if delivered.first => {
            ring.append_line(&format!("heartbeat delivered endpoint={endpoint}"));
        }
        AgentEvent::Delivered { endpoint, ack: delivered, .. } if delivered.with_report => {
            ring.append_line(&format!("hardware report delivered endpoint={endpoint}"));
        }
        AgentEvent::Failed { endpoint, error, failures, .. } if failures.is_power_of_two() => {
            ring.append_line(&format!(
                "heartbeat not delivered endpoint={endpoint} failures={failures} error={error}"
            ));
        }
        AgentEvent::SettingsChanged { settings, .. } => {
            ring.append_line(&format!(
                "the shepherd changed the settings endpoints={:?}",
                settings.endpoints
            ));
        }
        AgentEvent::LogRequests { requests } => {
            ring.append_line(&format!("logs are wanted requests={}", requests.len()));
        }
        _ => {}
    }
}

fn handle_event(fleet: &Arc<SimulatedFleet>, index: usize, id: &str, event: &AgentEvent) {
    let kept: Result<(), StepRejected> = match event {
        AgentEvent::Delivered { endpoint, seq, ack: delivered } => {
            fleet.count_delivered(index);
            if delivered.first {
                tracing::info!(machine = id, endpoint, seq, "first heartbeat");
            }
            Ok(())
        }
        AgentEvent::Failed { endpoint, error, failures, pause } => {
            fleet.count_failed(index, *pause);
            tracing::debug!(machine = id, endpoint, error, failures, ?pause, "heartbeat failed");
            Ok(())
        }
        AgentEvent::SettingsChanged { settings, fallback } => fleet.change(index, |record| {
            if let Some(enrolment) = &mut record.enrolment {
                enrolment.settings = settings.clone();
            }
            record.fallback.clone_from(fallback);
            Ok(((), None))
        }),
        AgentEvent::SettingsConfirmed => fleet.change(index, |record| {
            record.fallback = None;
            Ok(((), None))
        }),
        AgentEvent::SettingsRejected { reason } => {
            tracing::warn!(machine = id, reason, "settings refused");
            Ok(())
        }
        AgentEvent::ClusterOrder { .. } => {
            tracing::warn!(
                machine = id,
                "an order about a cluster is ignored: start the simulator with --roleserver_path FILE, and \
                 machines can be nodes"
            );
            Ok(())
        }
        // It has no release that could be replaced. Its logs are uploaded by the code that builds it.
        AgentEvent::TimeSampled { .. }
        | AgentEvent::SigningKeys { .. }
        | AgentEvent::ReleaseOrder { .. }
        | AgentEvent::LogRequests { .. } => Ok(()),
    };
    // A change without an event is never rejected.
    let _ = kept;
}

/// The response to an enrolment, decided and applied, but not yet durable.
enum EnrollOutcome {
    Success { public_key: [u8; 32], boot_id: Uuid },
    Error(EnrollError),
}

impl From<StepRejected> for EnrollError {
    fn from(refusal: StepRejected) -> Self {
        Self::Failed(refusal.to_string())
    }
}

/// Does what `roleserver enroll` does on a machine: decides by the role server's rules, stores the decision, starts the
/// agent, and answers when all that is on disk. `call` notes the result before that.
pub(crate) async fn enroll_machine(
    fleet: &Arc<SimulatedFleet>,
    index: usize,
    request: wire::EnrollRequest,
    call: &mut OpenCall,
) -> wire::EnrollResponse {
    let decided = fleet.change(index, |record| {
        if record.machine.disk_full {
            return Err(EnrollError::Failed("no space left on device".to_owned()));
        }
        let enrolment = enrolment::accept_enrolment(record.enrolment.as_ref(), &request)?;
        let failed = |error: AgentError| EnrollError::Failed(error.to_string());
        let identity = match load_identity(record).map_err(failed)? {
            Some(identity) => identity,
            None => Identity::generate().map_err(|error| failed(error.into()))?,
        };
        record.identity = Some(hex::encode(identity.pkcs8()));
        // If the request is repeated while its agent is running, the agent stays as it is.
        let again = record.enrolment.as_ref().is_some_and(|kept| kept.revision == enrolment.revision)
            && record.machine.state == SimulatedState::AgentRunning;
        record.enrolment = Some(enrolment);
        if !again {
            record.fallback = None;
        }
        let answer = EnrollOutcome::Success {
            public_key: identity.public_key(),
            boot_id: record.machine.boot_id(fleet.profile.seed),
        };
        Ok((answer, (!again).then_some(MachineEvent::Enrolled)))
    });
    let mut answer = decided.unwrap_or_else(EnrollOutcome::Error);
    if let EnrollOutcome::Success { public_key, .. } = &answer {
        call.note_result(&json!({ "public_key": hex::encode(public_key) }));
    }
    if let Err(error) = fleet.wait_durable().await {
        answer = EnrollOutcome::Error(EnrollError::Failed(error.to_string()));
    }
    match answer {
        EnrollOutcome::Success { public_key, boot_id } => wire::EnrollResponse {
            result: Some(wire::enroll_response::Result::Success(wire::EnrollSuccess {
                request: Some(request),
                public_key: public_key.to_vec(),
                warnings: Vec::new(),
                boot_id: boot_id.hyphenated().to_string(),
                agent_version: AGENT_VERSION.to_owned(),
                supervision: wire::Supervision::External.into(),
            })),
        },
        EnrollOutcome::Error(error) => error.to_response(),
    }
}

/// The journal's record of an enrolment's response.
#[must_use]
pub(crate) fn describe_response(response: &wire::EnrollResponse) -> serde_json::Value {
    match &response.result {
        Some(wire::enroll_response::Result::Success(success)) => json!({
            "public_key": hex::encode(&success.public_key),
            "boot_id": success.boot_id,
        }),
        Some(wire::enroll_response::Result::Error(error)) => json!({
            "kind": error.kind().as_str_name(),
            "message": error.message,
            "known_fence": error.current_fence,
        }),
        None => json!({}),
    }
}

fn load_identity(record: &MachineRecord) -> Result<Option<Identity>, AgentError> {
    let Some(kept) = &record.identity else { return Ok(None) };
    Ok(Some(Identity::from_pkcs8(&hex::decode(kept)?)?))
}
