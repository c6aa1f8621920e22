//! The agent of a simulated machine: the role server's own, with the world
//! around it made up.
//!
//! Heartbeat loop, enrolment rules, TLS and identity are the real role server's.
//! Simulated are the boot clock, the hardware, and the disk that the enrolment is
//! kept on. There is none for a log, so the agent's last lines are in memory, and
//! begin anew with each start of it; what a machine runs as a node has real logs.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::curator::identity::{Identity, IdentityError};
use crate::proto::agent::v1 as wire;
use crate::roleserver::agent::{Agent, Event as AgentEvent, no_cluster, no_release};
use crate::roleserver::clock::BootClock;
use crate::roleserver::enrolment::{self, EnrollError};
use crate::roleserver::known_time::KnownTime;
use crate::roleserver::logs::Logs;
use crate::roleserver::logs::ring::Ring;
use crate::roleserver::logs::there::Source;
use crate::roleserver::shepherds::Shepherds;
use crate::simulator::fleet::{Fleet, host_now};
use crate::simulator::hardware;
use crate::simulator::journal::OpenCall;
use crate::simulator::machine::{Event, Refusal, State};
use crate::simulator::node::NodeOfMachine;
use crate::simulator::state::Record;

/// What simulated agents say they are.
pub const AGENT_VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+simulated");

/// Why a machine has no agent to run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// It was never enrolled.
    #[error("nobody enrolled this machine")]
    NotEnrolled,
    /// Its kept key is none.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Its kept key is not even hex.
    #[error("its key is not hex")]
    NotHex(#[from] hex::FromHexError),
}

/// The clock of a simulated boot. It counts on over restarts of the simulator, as a machine would.
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

/// Makes the agent of a machine as its disk has it. `stop` is the token it will run under: an agent
/// that was stopped must not write to the disk of the one after it.
pub fn build(
    fleet: &Arc<Fleet>,
    index: usize,
    record: &Record,
    stop: CancellationToken,
) -> Result<(Agent, Option<NodeOfMachine>), AgentError> {
    let enrolment = record.enrolment.as_ref().ok_or(AgentError::NotEnrolled)?;
    let identity = identity_of(record)?.ok_or(AgentError::NotEnrolled)?;
    let seed = fleet.nature.seed;
    let place = record.machine.index;
    let hostname = record.id.clone();
    let node = fleet.nodes.as_ref().map(|nodes| nodes.of(enrolment.machine_id, &record.id));
    let own_address = record.node_address.map(|address| address.to_string()).unwrap_or_default();
    let asked = node.as_ref().map(|node| node.asked.clone());
    let standing = asked.clone();
    let shepherds = node.as_ref().map_or_else(Shepherds::default, |node| node.shepherds.clone());
    let (ring, incarnation) = (Ring::default(), Uuid::new_v4());
    ring.say(&format!(
        "the agent of {} runs: a simulated machine, whose log begins with each start of its agent",
        record.id
    ));
    let source = Source::of_ring(ring.clone(), node.as_ref().map(NodeOfMachine::disk));
    let logs = Logs::new(source, shepherds.clone(), incarnation);
    let observer = {
        let (fleet, id) = (Arc::downgrade(fleet), record.id.clone());
        Arc::new(move |event: &AgentEvent| {
            let Some(fleet) = fleet.upgrade() else { return };
            if stop.is_cancelled() {
                return;
            }
            note(&ring, event);
            match (event, &asked) {
                (AgentEvent::LogRequests { requests }, _) => {
                    for work in logs.begin(requests) {
                        let over = stop.clone();
                        // It ends by itself, at the latest with the agent.
                        tokio::spawn(async move { over.run_until_cancelled_owned(work).await });
                    }
                }
                (AgentEvent::ClusterOrder { order }, Some(asked)) => {
                    // All machines have the host's addresses; each has one more of its own.
                    asked.hear(&wire::ClusterOrder { address: own_address.clone(), ..order.clone() });
                }
                _ => observe(&fleet, index, &id, event),
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
        // All machines of the simulator have its host's clock, which is right.
        time: Arc::new(KnownTime::new(clock, None)),
        hardware: Arc::new(move || hardware::report(seed, place, &hostname)),
        cluster: standing.map_or_else(no_cluster, |asked| Arc::new(move || asked.report())),
        release: no_release(),
        brings_logs: true,
        shepherds: Some(shepherds),
        observer,
    };
    Ok((agent, node))
}

/// What the log of a machine says of what its agent does.
fn note(ring: &Ring, event: &AgentEvent) {
    match event {
        AgentEvent::Delivered { endpoint, delivered, .. } if delivered.first => {
            ring.say(&format!("heartbeat delivered endpoint={endpoint}"));
        }
        AgentEvent::Delivered { endpoint, delivered, .. } if delivered.with_report => {
            ring.say(&format!("hardware report delivered endpoint={endpoint}"));
        }
        AgentEvent::Failed { endpoint, error, failures, .. } if failures.is_power_of_two() => {
            ring.say(&format!(
                "heartbeat not delivered endpoint={endpoint} failures={failures} error={error}"
            ));
        }
        AgentEvent::Settings { settings, .. } => {
            ring.say(&format!("the shepherd changed the settings endpoints={:?}", settings.endpoints));
        }
        AgentEvent::LogRequests { requests } => {
            ring.say(&format!("logs are wanted requests={}", requests.len()));
        }
        _ => {}
    }
}

fn observe(fleet: &Arc<Fleet>, index: usize, id: &str, event: &AgentEvent) {
    let kept: Result<(), Refusal> = match event {
        AgentEvent::Delivered { endpoint, seq, delivered } => {
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
        AgentEvent::Settings { settings, fallback } => fleet.change(index, |record| {
            if let Some(enrolment) = &mut record.enrolment {
                enrolment.settings = settings.clone();
            }
            record.fallback.clone_from(fallback);
            Ok(((), None))
        }),
        AgentEvent::SettingsWork => fleet.change(index, |record| {
            record.fallback = None;
            Ok(((), None))
        }),
        AgentEvent::SettingsRefused { reason } => {
            tracing::warn!(machine = id, reason, "settings refused");
            Ok(())
        }
        AgentEvent::ClusterOrder { .. } => {
            tracing::warn!(
                machine = id,
                "an order about a cluster is passed over: give --roleserver FILE to the simulator, and machines can be nodes"
            );
            Ok(())
        }
        // It has no release that could be replaced, and its logs are brought by whoever built it.
        AgentEvent::Time { .. } | AgentEvent::ReleaseOrder { .. } | AgentEvent::LogRequests { .. } => Ok(()),
    };
    // A change without an event is never refused.
    let _ = kept;
}

/// What a machine answers to an enrolment, decided and carried out, not yet durable.
enum Answer {
    Success { public_key: [u8; 32], boot_id: Uuid },
    Error(EnrollError),
}

impl From<Refusal> for EnrollError {
    fn from(refusal: Refusal) -> Self {
        Self::Failed(refusal.to_string())
    }
}

/// Does what `roleserver enroll` does on a machine: decides by the role server's rules, keeps what
/// was decided, starts the agent, and answers when all that is on disk. `call` is told of it before that.
pub async fn enroll(
    fleet: &Arc<Fleet>,
    index: usize,
    request: wire::EnrollRequest,
    call: &mut OpenCall,
) -> wire::EnrollResponse {
    let decided = fleet.change(index, |record| {
        if record.machine.disk_full {
            return Err(EnrollError::Failed("no space left on device".to_owned()));
        }
        let enrolment = enrolment::enroll(record.enrolment.as_ref(), &request)?;
        let failed = |error: AgentError| EnrollError::Failed(error.to_string());
        let identity = match identity_of(record).map_err(failed)? {
            Some(identity) => identity,
            None => Identity::generate().map_err(|error| failed(error.into()))?,
        };
        record.identity = Some(hex::encode(identity.pkcs8()));
        // The same request again finds its agent running and leaves it so.
        let again = record.enrolment.as_ref().is_some_and(|kept| kept.revision == enrolment.revision)
            && record.machine.state == State::AgentRunning;
        record.enrolment = Some(enrolment);
        if !again {
            record.fallback = None;
        }
        let answer = Answer::Success {
            public_key: identity.public_key(),
            boot_id: record.machine.boot_id(fleet.nature.seed),
        };
        Ok((answer, (!again).then_some(Event::Enrolled)))
    });
    let mut answer = decided.unwrap_or_else(Answer::Error);
    if let Answer::Success { public_key, .. } = &answer {
        call.done(&json!({ "public_key": hex::encode(public_key) }));
    }
    if let Err(error) = fleet.durable().await {
        answer = Answer::Error(EnrollError::Failed(error.to_string()));
    }
    match answer {
        Answer::Success { public_key, boot_id } => wire::EnrollResponse {
            result: Some(wire::enroll_response::Result::Success(wire::EnrollSuccess {
                request: Some(request),
                public_key: public_key.to_vec(),
                warnings: Vec::new(),
                boot_id: boot_id.hyphenated().to_string(),
                agent_version: AGENT_VERSION.to_owned(),
                supervision: wire::Supervision::External.into(),
            })),
        },
        Answer::Error(error) => error.to_response(),
    }
}

/// What the journal says of an enrolment's answer.
#[must_use]
pub fn describe(response: &wire::EnrollResponse) -> serde_json::Value {
    match &response.result {
        Some(wire::enroll_response::Result::Success(success)) => json!({
            "public_key": hex::encode(&success.public_key),
            "boot_id": success.boot_id,
        }),
        Some(wire::enroll_response::Result::Error(error)) => json!({
            "kind": error.kind().as_str_name(),
            "message": error.message,
            "known_fence": error.known_fence,
        }),
        None => json!({}),
    }
}

fn identity_of(record: &Record) -> Result<Option<Identity>, AgentError> {
    let Some(kept) = &record.identity else { return Ok(None) };
    Ok(Some(Identity::from_pkcs8(&hex::decode(kept)?)?))
}
