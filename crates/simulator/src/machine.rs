//! Simulated machine as a pure state machine.
//!
//! ```text
//!            power on                    boot done              enrolled
//!   off ───────────────▶ booting ───────────────────▶ up ─────────────────▶ agent running
//!    ▲                      ▲   └── agent persists ─────────────────────────▲   │  │
//!    │ power off            │ reboot, cycle power                            │   │  │ agent-hang
//!    └── any powered state ─┴── any powered state                   enrolled │   │  ▼
//!                                                                            │   │ agent hung
//!   kill: agent running, agent hung ─▶ up                                    └───┼──┘
//!   hang: up, agent running, agent hung ─▶ hung     (a reboot revives)           │
//!   dead: any powered state ─▶ dead                 (cycling power revives) ◀────┘
//!   power-fail: any state ─▶ power failing          (only heal revives)
//! ```
//!
//! A step never states "open the SSH server". It computes what is observable of the machine ([`Observable`][]) before
//! and after, and the effects are the difference. So no path through the states can forget to close what it left open,
//! and a restarted simulator gets its effects as the difference from nothing.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::faults::{Fault, FaultProfile};
use crate::observable::{Effect, Observable, ObservableAgent, ObservableSsh};
use crate::seed::Seed;

/// The properties that all machines of a fleet share.
#[derive(Clone, Copy, Debug)]
pub struct FleetProfile {
    /// The seed of all random values.
    pub seed: Seed,
    /// The profile of random faults.
    pub fault_profile: FaultProfile,
    /// The mean duration of a boot; each takes 0.5 to 1.5 times as long.
    pub boot: TimeDelta,
    /// How many of a thousand machines start their agent again after a boot.
    pub persistent_per_mille: u64,
}

/// The state of a simulated machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum SimulatedState {
    /// Switched off, without power.
    Off,
    /// Powered, but not answering yet.
    Booting {
        /// When the boot ends.
        until: DateTime<Utc>,
    },
    /// Answering SSH, without an agent.
    Up,
    /// With an agent that heartbeats.
    AgentRunning,
    /// With an agent that has fallen silent.
    AgentHung,
    /// Powered, but hanging as a whole.
    Hung,
    /// Powered, but gone from the network; a reboot has no effect.
    Dead,
    /// Without power, and its power cannot be switched on.
    PowerFailing,
}

impl SimulatedState {
    /// The name of the state in the API and in logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Booting { .. } => "booting",
            Self::Up => "up",
            Self::AgentRunning => "agent-running",
            Self::AgentHung => "agent-hung",
            Self::Hung => "hung",
            Self::Dead => "dead",
            Self::PowerFailing => "power-failing",
        }
    }

    /// Whether the programs on its disk run, even if the agent hangs.
    #[must_use]
    pub const fn runs_programs(self) -> bool {
        matches!(self, Self::AgentRunning | Self::AgentHung)
    }

    /// Whether the machine has power.
    #[must_use]
    pub const fn is_powered(self) -> bool {
        !matches!(self, Self::Off | Self::PowerFailing)
    }
}

/// An event that a machine reacts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// Time has passed, possibly past [`SimulatedMachine::next_tick_at`].
    Tick,
    /// The power is switched on.
    PowerOn,
    /// The power is switched off.
    PowerOff,
    /// The power is switched off and on again.
    PowerCycle,
    /// A reboot, ordered by its provider or by a command over SSH.
    Reboot,
    /// An agent was enrolled, and starts or restarts.
    Enrolled,
    /// The provider takes it back: it is switched off, and its disk is wiped.
    Released,
    /// A fault is injected.
    Fault(Fault),
}

/// Why an event is impossible in the machine's state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StepRejected(pub &'static str);

/// One machine. All fields survive a restart of the simulator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimulatedMachine {
    /// Its index in the fleet, from 0.
    pub index: u32,
    /// Its state in the diagram.
    pub state: SimulatedState,
    /// How many times it has booted.
    pub boots: u64,
    /// When the present boot started.
    pub booted_at: DateTime<Utc>,
    /// How many times an agent was enrolled; 0 means that none is on its disk.
    pub enrolments: u64,
    /// Whether a fault has stopped its SSH server.
    pub ssh_refused: bool,
    /// Whether a fault makes it slow.
    pub slow: bool,
    /// Whether a fault fills its disk.
    pub disk_full: bool,
    /// The generation of its SSH host key.
    pub host_key: u32,
    /// How many random faults have occurred.
    pub faults: u64,
    /// When the next random fault occurs; `None` if none is scheduled.
    pub next_fault_at: Option<DateTime<Utc>>,
}

impl SimulatedMachine {
    /// A machine that was never switched on.
    #[must_use]
    pub fn new(index: u32, now: DateTime<Utc>) -> Self {
        Self {
            index,
            state: SimulatedState::Off,
            boots: 0,
            booted_at: now,
            enrolments: 0,
            ssh_refused: false,
            slow: false,
            disk_full: false,
            host_key: 0,
            faults: 0,
            next_fault_at: None,
        }
    }

    /// The id of the present boot.
    #[must_use]
    pub fn boot_id(&self, seed: Seed) -> Uuid {
        seed.uuid("boot id", self.index, self.boots)
    }

    /// Whether its agent starts again after a boot.
    fn restarts_agent_after_boot(&self, profile: &FleetProfile) -> bool {
        profile.seed.chance(profile.persistent_per_mille, "persists", self.index, 0)
    }

    /// What is observable of it from outside.
    #[must_use]
    pub fn observable(&self) -> Observable {
        let ssh = match self.state {
            SimulatedState::Up | SimulatedState::AgentRunning | SimulatedState::AgentHung
                if !self.ssh_refused =>
            {
                ObservableSsh::Open { host_key: self.host_key }
            }
            SimulatedState::Hung => ObservableSsh::Silent,
            _ => ObservableSsh::Closed,
        };
        let agent = match self.state {
            SimulatedState::AgentRunning => {
                ObservableAgent::Running { boot: self.boots, enrolment: self.enrolments }
            }
            SimulatedState::Up => ObservableAgent::Absent,
            _ => ObservableAgent::Silent,
        };
        Observable { ssh, agent }
    }

    /// When [`MachineEvent::Tick`] next has an effect; `None` if never.
    #[must_use]
    pub fn next_tick_at(&self) -> Option<DateTime<Utc>> {
        match self.state {
            SimulatedState::Booting { until } => Some(until),
            SimulatedState::AgentRunning => self.next_fault_at,
            _ => None,
        }
    }

    /// Applies an event. If it is rejected, nothing has changed.
    pub fn step(
        &mut self,
        event: MachineEvent,
        now: DateTime<Utc>,
        profile: &FleetProfile,
    ) -> Result<Vec<Effect>, StepRejected> {
        let before = self.observable();
        match event {
            MachineEvent::Tick => self.tick(now, profile),
            MachineEvent::PowerOn | MachineEvent::PowerOff | MachineEvent::PowerCycle
                if self.state == SimulatedState::PowerFailing =>
            {
                return Err(StepRejected("the machine's power control does not answer"));
            }
            MachineEvent::PowerOn => {
                if self.state == SimulatedState::Off {
                    self.boot(now, profile);
                }
            }
            MachineEvent::PowerOff => self.state = SimulatedState::Off,
            MachineEvent::PowerCycle => self.boot(now, profile),
            MachineEvent::Reboot => match self.state {
                SimulatedState::Off => return Err(StepRejected("the machine is off")),
                SimulatedState::PowerFailing => return Err(StepRejected("the machine has no power")),
                // A dead machine accepts the order and does nothing: only the missing boot shows it.
                SimulatedState::Dead => {}
                _ => self.boot(now, profile),
            },
            MachineEvent::Enrolled => match self.state {
                SimulatedState::Up | SimulatedState::AgentRunning | SimulatedState::AgentHung => {
                    self.enrolments += 1;
                    self.start_agent(now, profile);
                }
                _ => return Err(StepRejected("nothing runs on the machine")),
            },
            MachineEvent::Released => {
                // The provider takes a machine back even if its power cannot be switched.
                if self.state != SimulatedState::PowerFailing {
                    self.state = SimulatedState::Off;
                }
                (self.enrolments, self.host_key) = (0, 0);
                (self.ssh_refused, self.slow, self.disk_full) = (false, false, false);
                self.next_fault_at = None;
            }
            MachineEvent::Fault(fault) => self.apply_fault(fault, now, profile)?,
        }
        Ok(self.observable().effects_from(before))
    }

    fn tick(&mut self, now: DateTime<Utc>, profile: &FleetProfile) {
        if let SimulatedState::Booting { until } = self.state
            && until <= now
        {
            self.booted_at = now;
            if self.enrolments > 0 && self.restarts_agent_after_boot(profile) {
                self.start_agent(now, profile);
            } else {
                self.state = SimulatedState::Up;
            }
        }
        if self.state == SimulatedState::AgentRunning && self.next_fault_at.is_some_and(|at| at <= now) {
            let struck = profile.fault_profile.draw_fault(profile.seed, self.index, self.faults);
            self.faults += 1;
            self.next_fault_at = None;
            if let Some((_, fault)) = struck {
                // A drawn fault that does not fit the state leaves the machine as it is.
                let _ = self.apply_fault(fault, now, profile);
            }
            if self.state == SimulatedState::AgentRunning {
                self.schedule_fault(now, profile);
            }
        }
    }

    fn boot(&mut self, now: DateTime<Utc>, profile: &FleetProfile) {
        self.boots += 1;
        let mut takes = profile.seed.spread(profile.boot, "boot", self.index, self.boots);
        if profile.fault_profile.is_slow_boot(profile.seed, self.index, self.boots) {
            takes = takes * 5;
        }
        if self.slow {
            takes = takes * 10;
        }
        self.ssh_refused = false;
        self.next_fault_at = None;
        self.booted_at = now;
        self.state = SimulatedState::Booting { until: now + takes };
    }

    fn start_agent(&mut self, now: DateTime<Utc>, profile: &FleetProfile) {
        self.state = SimulatedState::AgentRunning;
        if self.next_fault_at.is_none() {
            self.schedule_fault(now, profile);
        }
    }

    fn schedule_fault(&mut self, now: DateTime<Utc>, profile: &FleetProfile) {
        self.next_fault_at = profile
            .fault_profile
            .draw_fault(profile.seed, self.index, self.faults)
            .map(|(after, _)| now + after);
    }

    fn apply_fault(
        &mut self,
        fault: Fault,
        now: DateTime<Utc>,
        profile: &FleetProfile,
    ) -> Result<(), StepRejected> {
        match fault {
            Fault::Kill => match self.state {
                SimulatedState::AgentRunning | SimulatedState::AgentHung => self.state = SimulatedState::Up,
                _ => return Err(StepRejected("no agent runs on the machine")),
            },
            Fault::AgentHang => match self.state {
                SimulatedState::AgentRunning => self.state = SimulatedState::AgentHung,
                _ => return Err(StepRejected("no agent runs on the machine")),
            },
            Fault::Hang => match self.state {
                SimulatedState::Up | SimulatedState::AgentRunning | SimulatedState::AgentHung => {
                    self.state = SimulatedState::Hung;
                }
                _ => return Err(StepRejected("the machine is not up")),
            },
            Fault::Dead => {
                if !self.state.is_powered() {
                    return Err(StepRejected("the machine is off"));
                }
                self.state = SimulatedState::Dead;
            }
            Fault::PowerFail => self.state = SimulatedState::PowerFailing,
            Fault::SshRefuse => match self.state {
                SimulatedState::Up | SimulatedState::AgentRunning | SimulatedState::AgentHung => {
                    self.ssh_refused = true;
                }
                _ => return Err(StepRejected("the machine is not up")),
            },
            Fault::Slow => self.slow = true,
            Fault::DiskFull => self.disk_full = true,
            Fault::NewHostKey => self.host_key += 1,
            Fault::Heal => {
                self.ssh_refused = false;
                self.slow = false;
                self.disk_full = false;
                self.host_key = 0;
                match self.state {
                    SimulatedState::PowerFailing | SimulatedState::Dead | SimulatedState::Hung => {
                        self.boot(now, profile);
                    }
                    SimulatedState::AgentHung => self.start_agent(now, profile),
                    SimulatedState::Up if self.enrolments > 0 => self.start_agent(now, profile),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
