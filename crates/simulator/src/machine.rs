//! Simulated machine as a pure state machine.
//!
//! ```text
//!            power on                    boot done              enrolled
//!   off ───────────────▶ booting ───────────────────▶ up ─────────────────▶ agent running
//!    ▲                      ▲   └── agent persists ─────────────────────────▲   │  │
//!    │ power off            │ reboot, power cycle                            │   │  │ agent-hang
//!    └── any powered state ─┴── any powered state                   enrolled │   │  ▼
//!                                                                            │   │ agent hung
//!   kill: agent running, agent hung ─▶ up                                    └───┼──┘
//!   hang: up, agent running, agent hung ─▶ hung     (a reboot revives)           │
//!   dead: any powered state ─▶ dead                 (a power cycle revives) ◀────┘
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
    #[must_use]
    pub fn restarts_agent_after_boot(&self, nature: &FleetProfile) -> bool {
        nature.seed.chance(nature.persistent_per_mille, "persists", self.index, 0)
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
        nature: &FleetProfile,
    ) -> Result<Vec<Effect>, StepRejected> {
        let before = self.observable();
        match event {
            MachineEvent::Tick => self.tick(now, nature),
            MachineEvent::PowerOn | MachineEvent::PowerOff | MachineEvent::PowerCycle
                if self.state == SimulatedState::PowerFailing =>
            {
                return Err(StepRejected("the machine's power control does not answer"));
            }
            MachineEvent::PowerOn => {
                if self.state == SimulatedState::Off {
                    self.boot(now, nature);
                }
            }
            MachineEvent::PowerOff => self.state = SimulatedState::Off,
            MachineEvent::PowerCycle => self.boot(now, nature),
            MachineEvent::Reboot => match self.state {
                SimulatedState::Off => return Err(StepRejected("the machine is off")),
                SimulatedState::PowerFailing => return Err(StepRejected("the machine has no power")),
                // A dead machine accepts the order and does nothing: only the missing boot shows it.
                SimulatedState::Dead => {}
                _ => self.boot(now, nature),
            },
            MachineEvent::Enrolled => match self.state {
                SimulatedState::Up | SimulatedState::AgentRunning | SimulatedState::AgentHung => {
                    self.enrolments += 1;
                    self.start_agent(now, nature);
                }
                _ => return Err(StepRejected("nothing runs on the machine")),
            },
            MachineEvent::Released => {
                // A machine whose power cannot be switched is taken back all the same.
                if self.state != SimulatedState::PowerFailing {
                    self.state = SimulatedState::Off;
                }
                (self.enrolments, self.host_key) = (0, 0);
                (self.ssh_refused, self.slow, self.disk_full) = (false, false, false);
                self.next_fault_at = None;
            }
            MachineEvent::Fault(fault) => self.apply_fault(fault, now, nature)?,
        }
        Ok(self.observable().effects_from(before))
    }

    fn tick(&mut self, now: DateTime<Utc>, nature: &FleetProfile) {
        if let SimulatedState::Booting { until } = self.state
            && until <= now
        {
            self.booted_at = now;
            if self.enrolments > 0 && self.restarts_agent_after_boot(nature) {
                self.start_agent(now, nature);
            } else {
                self.state = SimulatedState::Up;
            }
        }
        if self.state == SimulatedState::AgentRunning && self.next_fault_at.is_some_and(|at| at <= now) {
            let struck = nature.fault_profile.draw_fault(nature.seed, self.index, self.faults);
            self.faults += 1;
            self.next_fault_at = None;
            if let Some((_, fault)) = struck {
                // A drawn fault that does not fit the state leaves the machine as it is.
                let _ = self.apply_fault(fault, now, nature);
            }
            if self.state == SimulatedState::AgentRunning {
                self.schedule_fault(now, nature);
            }
        }
    }

    fn boot(&mut self, now: DateTime<Utc>, nature: &FleetProfile) {
        self.boots += 1;
        let mut takes = nature.seed.spread(nature.boot, "boot", self.index, self.boots);
        if nature.fault_profile.is_slow_boot(nature.seed, self.index, self.boots) {
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

    fn start_agent(&mut self, now: DateTime<Utc>, nature: &FleetProfile) {
        self.state = SimulatedState::AgentRunning;
        if self.next_fault_at.is_none() {
            self.schedule_fault(now, nature);
        }
    }

    fn schedule_fault(&mut self, now: DateTime<Utc>, nature: &FleetProfile) {
        self.next_fault_at = nature
            .fault_profile
            .draw_fault(nature.seed, self.index, self.faults)
            .map(|(after, _)| now + after);
    }

    fn apply_fault(
        &mut self,
        fault: Fault,
        now: DateTime<Utc>,
        nature: &FleetProfile,
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
                        self.boot(now, nature);
                    }
                    SimulatedState::AgentHung => self.start_agent(now, nature),
                    SimulatedState::Up if self.enrolments > 0 => self.start_agent(now, nature),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observable::NOTHING_OBSERVABLE;

    fn nature(profile: FaultProfile) -> FleetProfile {
        FleetProfile {
            seed: Seed(1),
            fault_profile: profile,
            boot: TimeDelta::seconds(4),
            persistent_per_mille: 1000,
        }
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000 + seconds, 0).unwrap()
    }

    fn in_state(state: SimulatedState) -> SimulatedMachine {
        let mut machine = SimulatedMachine::new(0, at(0));
        machine.state = state;
        machine.boots = 1;
        machine.enrolments = 1;
        machine
    }

    const STATES: [SimulatedState; 8] = [
        SimulatedState::Off,
        SimulatedState::Booting { until: DateTime::from_timestamp_nanos(i64::MAX) },
        SimulatedState::Up,
        SimulatedState::AgentRunning,
        SimulatedState::AgentHung,
        SimulatedState::Hung,
        SimulatedState::Dead,
        SimulatedState::PowerFailing,
    ];

    /// The whole table: a row per event, a column per state of `STATES`; `-` means rejected.
    #[test]
    fn every_event_in_every_state_follows_the_diagram() {
        use crate::faults;
        use MachineEvent::{Enrolled, Fault, PowerCycle, PowerOff, PowerOn, Reboot, Released};
        let table: &[(MachineEvent, &str)] = &[
            (PowerOn, "booting booting up agent-running agent-hung hung dead -"),
            (PowerOff, "off off off off off off off -"),
            (PowerCycle, "booting booting booting booting booting booting booting -"),
            (Reboot, "- booting booting booting booting booting dead -"),
            (Released, "off off off off off off off power-failing"),
            (Enrolled, "- - agent-running agent-running agent-running - - -"),
            (Fault(faults::Fault::Kill), "- - - up up - - -"),
            (Fault(faults::Fault::AgentHang), "- - - agent-hung - - - -"),
            (Fault(faults::Fault::Hang), "- - hung hung hung - - -"),
            (Fault(faults::Fault::Dead), "- dead dead dead dead dead dead -"),
            (
                Fault(faults::Fault::PowerFail),
                "power-failing power-failing power-failing power-failing power-failing power-failing power-failing power-failing",
            ),
            (Fault(faults::Fault::SshRefuse), "- - up agent-running agent-hung - - -"),
            (
                Fault(faults::Fault::Heal),
                "off booting agent-running agent-running agent-running booting booting booting",
            ),
            (
                Fault(faults::Fault::NewHostKey),
                "off booting up agent-running agent-hung hung dead power-failing",
            ),
        ];
        for (event, row) in table {
            for (state, expected) in STATES.into_iter().zip(row.split(' ')) {
                let mut machine = in_state(state);
                let untouched = machine.clone();
                if machine.step(*event, at(1), &nature(FaultProfile::None)).is_ok() {
                    assert_eq!(machine.state.as_str(), expected, "{event:?} in {state:?}");
                } else {
                    assert_eq!(expected, "-", "{event:?} in {state:?}");
                    assert_eq!(machine, untouched, "a refusal changes nothing");
                }
            }
        }
    }

    #[test]
    fn an_agent_comes_back_after_a_boot_only_where_it_persists() {
        for (per_mille, expected) in [(1000, SimulatedState::AgentRunning), (0, SimulatedState::Up)] {
            let nature = FleetProfile { persistent_per_mille: per_mille, ..nature(FaultProfile::None) };
            let mut machine = in_state(SimulatedState::AgentRunning);
            let first = machine.boot_id(nature.seed);
            machine.step(MachineEvent::Reboot, at(0), &nature).unwrap();
            machine.step(MachineEvent::Tick, at(60), &nature).unwrap();
            assert_eq!(machine.state, expected);
            assert_ne!(machine.boot_id(nature.seed), first, "a boot has an id of its own");
        }
    }

    #[test]
    fn only_a_dead_agent_on_a_live_machine_closes_its_connections() {
        for (fault, expected) in [
            (Fault::Kill, ObservableAgent::Absent),
            (Fault::AgentHang, ObservableAgent::Silent),
            (Fault::Hang, ObservableAgent::Silent),
            (Fault::Dead, ObservableAgent::Silent),
            (Fault::PowerFail, ObservableAgent::Silent),
        ] {
            let mut machine = in_state(SimulatedState::AgentRunning);
            let effects =
                machine.step(MachineEvent::Fault(fault), at(0), &nature(FaultProfile::None)).unwrap();
            assert!(effects.contains(&Effect::Agent(expected)), "{fault:?}: {effects:?}");
        }
    }

    #[test]
    fn enrolling_again_restarts_the_agent() {
        let mut machine = in_state(SimulatedState::AgentRunning);
        let effects = machine.step(MachineEvent::Enrolled, at(0), &nature(FaultProfile::None)).unwrap();
        assert_eq!(effects, [Effect::Agent(ObservableAgent::Running { boot: 1, enrolment: 2 })]);
    }

    #[test]
    fn a_new_host_key_reopens_the_server() {
        let mut machine = in_state(SimulatedState::Up);
        let effects =
            machine.step(MachineEvent::Fault(Fault::NewHostKey), at(0), &nature(FaultProfile::None)).unwrap();
        assert_eq!(effects, [Effect::Ssh(ObservableSsh::Open { host_key: 1 })]);
    }

    fn any_event() -> impl Strategy<Value = MachineEvent> {
        prop_oneof![
            4 => Just(MachineEvent::Tick),
            1 => Just(MachineEvent::PowerOn),
            1 => Just(MachineEvent::PowerOff),
            1 => Just(MachineEvent::PowerCycle),
            1 => Just(MachineEvent::Reboot),
            1 => Just(MachineEvent::Released),
            2 => Just(MachineEvent::Enrolled),
            3 => (0..Fault::ALL.len()).prop_map(|fault| MachineEvent::Fault(Fault::ALL[fault])),
        ]
    }

    proptest! {
        #[test]
        fn effects_determine_the_observable_state(
            seed in any::<u64>(),
            events in proptest::collection::vec((any_event(), 0..400_i64), 0..80),
        ) {
            let nature = FleetProfile { seed: Seed(seed), ..nature(FaultProfile::Harsh) };
            let run = || {
                let mut machine = SimulatedMachine::new(3, at(0));
                let mut shown = NOTHING_OBSERVABLE;
                let mut now = at(0);
                let mut trace = Vec::new();
                for (event, later) in &events {
                    now += TimeDelta::seconds(*later);
                    for effect in machine.step(*event, now, &nature).unwrap_or_default() {
                        match effect {
                            Effect::Ssh(face) => shown.ssh = face,
                            Effect::Agent(face) => shown.agent = face,
                        }
                    }
                    trace.push((machine.clone(), shown));
                }
                trace
            };
            let trace = run();
            for (machine, shown) in &trace {
                prop_assert_eq!(machine.observable(), *shown);
                if !machine.state.is_powered() {
                    prop_assert_eq!(*shown, NOTHING_OBSERVABLE, "a machine without power shows nothing");
                }
                if matches!(shown.agent, ObservableAgent::Running { .. }) {
                    prop_assert!(machine.enrolments > 0, "an agent was never enrolled");
                }
            }
            for pair in trace.windows(2) {
                prop_assert!(pair[0].0.boots <= pair[1].0.boots, "boots never go back");
            }
            prop_assert_eq!(trace, run(), "the same seed gives the same run");
        }

        #[test]
        fn heal_and_power_make_any_machine_answer_again(
            events in proptest::collection::vec(any_event(), 0..40),
        ) {
            let nature = nature(FaultProfile::None);
            let mut machine = SimulatedMachine::new(0, at(0));
            for event in events {
                let _ = machine.step(event, at(0), &nature);
            }
            machine.step(MachineEvent::Fault(Fault::Heal), at(0), &nature).unwrap();
            machine.step(MachineEvent::PowerOn, at(0), &nature).unwrap();
            machine.step(MachineEvent::Tick, at(10_000), &nature).unwrap();
            prop_assert_eq!(machine.observable().ssh, ObservableSsh::Open { host_key: 0 });
        }
    }
}
