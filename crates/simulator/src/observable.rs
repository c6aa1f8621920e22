//! Observable state of a simulated machine: SSH and agent.

/// The observable state of the SSH port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservableSsh {
    /// The port refuses connections.
    Closed,
    /// The port accepts connections and sends nothing.
    Silent,
    /// A server answers, with the host key of this generation.
    Open {
        /// The generation of its host key.
        host_key: u32,
    },
}

/// The observable state of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservableAgent {
    /// Nothing is sent, and open connections stay open, so a peer that waits for data waits for ever. A hanging agent
    /// and a machine without power are both observed as this, because both close no connections.
    Silent,
    /// No agent runs on a healthy machine: the kernel has closed the connections of a dead one.
    Absent,
    /// The agent runs and sends heartbeats.
    Running {
        /// The number of the boot that it runs in.
        boot: u64,
        /// The number of the enrolment that it runs under.
        enrolment: u64,
    },
}

/// What is observable of a machine from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observable {
    /// The state of its SSH port.
    pub ssh: ObservableSsh,
    /// The state of its agent.
    pub agent: ObservableAgent,
}

/// The state of a machine without anything observable.
pub const NOTHING_OBSERVABLE: Observable =
    Observable { ssh: ObservableSsh::Closed, agent: ObservableAgent::Silent };

/// A change of the observable state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The SSH port changes to this state; earlier connections are cut.
    Ssh(ObservableSsh),
    /// The agent changes to this state; an agent that ran before falls silent.
    Agent(ObservableAgent),
}

impl Observable {
    /// The changes that lead from `before` to this state.
    #[must_use]
    pub fn effects_from(self, before: Self) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.ssh != before.ssh {
            effects.push(Effect::Ssh(self.ssh));
        }
        if self.agent != before.agent {
            effects.push(Effect::Agent(self.agent));
        }
        effects
    }
}
