//! Machines as test data: the facts of a Ready one, and its view.

use std::sync::Arc;

use crate::facts::{AgentStarted, HeartbeatFact, MachineFacts, ProviderRecord};
use crate::ids::MachineId;
use crate::machine_view::MachineView;
use crate::policy::Policy;
use crate::provider_status::ProviderStatus;
use crate::time::Timestamp;

/// A moment, in seconds since 0 of the tests.
pub(crate) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

/// The record of a running machine with an address, at the provider `rack-a` since 0.
pub(crate) fn provider_record() -> ProviderRecord {
    ProviderRecord {
        provider: "rack-a".into(),
        provider_id: "1".into(),
        reservation: None,
        address: Some("192.0.2.1".into()),
        ssh_port: None,
        ssh_user: None,
        location: None,
        status: ProviderStatus::Running,
        acquired_at: at(0),
        polled_at: None,
        unchanged: false,
    }
}

/// An agent that was enrolled at this moment.
pub(crate) fn agent_started(seconds: i64) -> AgentStarted {
    AgentStarted { started_at: at(seconds), public_key: vec![1; 32], boot_id: None, fence: 1 }
}

/// A heartbeat of this moment, from the boot `b`.
pub(crate) fn heartbeat(seconds: i64) -> HeartbeatFact {
    HeartbeatFact { received_at: at(seconds), boot_id: "b".into(), incarnation: "i".into(), sequence: 1 }
}

/// A machine of a provider, without an agent. Heartbeats are received since 0.
pub(crate) fn provided_machine() -> MachineFacts {
    let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
    facts.listening_since = Some(at(0));
    facts.provider_record = Some(provider_record());
    facts
}

/// The same with an agent, which was enrolled at 10 and has never reported.
pub(crate) fn enrolled_machine() -> MachineFacts {
    MachineFacts { agent_started: Some(agent_started(10)), ..provided_machine() }
}

/// The same, last reported at this moment.
pub(crate) fn ready_machine(reported: i64) -> MachineFacts {
    MachineFacts { heartbeat: Some(heartbeat(reported)), ..enrolled_machine() }
}

/// The view of a machine with these facts at `now`, in a quiet fleet: no lanes, brakes, pauses or cluster.
pub(crate) fn machine_view(facts: MachineFacts, now: i64) -> MachineView {
    MachineView {
        facts,
        at: at(now),
        policy: Arc::new(Policy::default()),
        policy_version: 1,
        lanes: Vec::new(),
        host_keys: None,
        brakes: Vec::new(),
        pauses: Vec::new(),
        open_sessions: 1,
        unknown_fence: None,
        cluster: None,
        roll_out_note: None,
        placement: None,
        findings: Vec::new(),
        recent_steps: Vec::new(),
    }
}
