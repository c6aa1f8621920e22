//! What a machine shows to the world, and how that changes.

/// What the SSH port shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SshFace {
    /// Connections are refused.
    Closed,
    /// Connections are taken and nothing is ever said.
    Silent,
    /// A server answers, with the host key of this generation.
    Open {
        /// Which host key it presents.
        host_key: u32,
    },
}

/// What the agent shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentFace {
    /// Nothing. What it had open stays open: whoever waits for a word on it, waits. So do a hanging
    /// agent and a machine without power look, because neither says goodbye.
    Silent,
    /// There is none on a machine that is well: the kernel closed what a dead one had open.
    Absent,
    /// It heartbeats.
    Running {
        /// Which boot it runs in.
        boot: u64,
        /// Which enrolment it runs under.
        enrolment: u64,
    },
}

/// What a machine shows to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Face {
    /// Its SSH port.
    pub ssh: SshFace,
    /// Its agent.
    pub agent: AgentFace,
}

/// A machine that shows nothing.
pub const NOTHING: Face = Face { ssh: SshFace::Closed, agent: AgentFace::Silent };

/// A change of what a machine shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The SSH port becomes this; connections of before are cut.
    Ssh(SshFace),
    /// The agent becomes this; one that ran before says no more.
    Agent(AgentFace),
}

impl Face {
    /// What has to change for a machine that showed `before` to show this.
    #[must_use]
    pub fn since(self, before: Self) -> Vec<Effect> {
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
