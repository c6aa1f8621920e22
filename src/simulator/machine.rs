//! One simulated machine as a pure state machine.
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
//! A step never says "open the SSH server": it computes what the machine shows
//! to the world ([`Face`][]) before and after, and the effects are the difference.
//! So no path through the states can forget to close what it left open, and a
//! restarted simulator gets its effects as the difference from nothing.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::simulator::face::{AgentFace, Effect, Face, SshFace};
use crate::simulator::faults::{Fault, Profile};
use crate::simulator::seed::Seed;

/// What all machines of a fleet have in common.
#[derive(Clone, Copy, Debug)]
pub struct Nature {
    /// Where chance comes from.
    pub seed: Seed,
    /// What goes wrong unasked.
    pub profile: Profile,
    /// How long a boot takes, half as much more or less.
    pub boot: TimeDelta,
    /// How many of a thousand machines start their agent again after a boot.
    pub persistent_per_mille: u64,
}

/// Where a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum State {
    /// Without power.
    Off,
    /// Powered, not yet answering.
    Booting {
        /// When it will answer.
        until: DateTime<Utc>,
    },
    /// Answering SSH, with no agent.
    Up,
    /// With an agent that heartbeats.
    AgentRunning,
    /// With an agent that has fallen silent.
    AgentHung,
    /// Powered and hanging.
    Hung,
    /// Powered and gone; a reboot does nothing.
    Dead,
    /// Without power, and power cannot be given.
    PowerFailing,
}

impl State {
    /// The name shown on the API and in logs.
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

    /// Whether the programs on its disk run, the agent hung or not.
    #[must_use]
    pub const fn runs_programs(self) -> bool {
        matches!(self, Self::AgentRunning | Self::AgentHung)
    }

    /// Whether the machine has power.
    #[must_use]
    pub const fn powered(self) -> bool {
        !matches!(self, Self::Off | Self::PowerFailing)
    }
}

/// Something that happens to a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time passed.
    Tick,
    /// Power is given.
    PowerOn,
    /// Power is cut.
    PowerOff,
    /// Power is cut and given again.
    PowerCycle,
    /// It is told to reboot, by its provider or by a command over SSH.
    Reboot,
    /// An agent was enrolled, and starts (again).
    Enrolled,
    /// Its provider takes it back: it is switched off, and nothing is left on its disk.
    TakenBack,
    /// A fault strikes.
    Struck(Fault),
}

/// What was asked cannot happen to a machine in its state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub &'static str);

/// One machine. All fields are kept over a restart of the simulator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Its place in the fleet, from 0.
    pub index: u32,
    /// Where it is.
    pub state: State,
    /// How many times it booted.
    pub boots: u64,
    /// When the present boot began.
    pub booted_at: DateTime<Utc>,
    /// How many times an agent was enrolled; 0 means there is none on its disk.
    pub enrolments: u64,
    /// Whether its SSH server is stopped by a fault.
    pub ssh_refused: bool,
    /// Whether it is slow by a fault.
    pub slow: bool,
    /// Whether its disk is full by a fault.
    pub disk_full: bool,
    /// Which SSH host key it presents.
    pub host_key: u32,
    /// How many faults struck unasked.
    pub faults: u64,
    /// When the next one does.
    pub next_fault_at: Option<DateTime<Utc>>,
}

impl Machine {
    /// A machine that was never switched on.
    #[must_use]
    pub fn new(index: u32, now: DateTime<Utc>) -> Self {
        Self {
            index,
            state: State::Off,
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

    /// Boot id of the present boot.
    #[must_use]
    pub fn boot_id(&self, seed: Seed) -> Uuid {
        seed.uuid("boot id", self.index, self.boots)
    }

    /// Whether its agent starts again after a boot.
    #[must_use]
    pub fn persists_agent(&self, nature: &Nature) -> bool {
        nature.seed.happens(nature.persistent_per_mille, "persists", self.index, 0)
    }

    /// What it shows to the world.
    #[must_use]
    pub fn face(&self) -> Face {
        let ssh = match self.state {
            State::Up | State::AgentRunning | State::AgentHung if !self.ssh_refused => {
                SshFace::Open { host_key: self.host_key }
            }
            State::Hung => SshFace::Silent,
            _ => SshFace::Closed,
        };
        let agent = match self.state {
            State::AgentRunning => AgentFace::Running { boot: self.boots, enrolment: self.enrolments },
            State::Up => AgentFace::Absent,
            _ => AgentFace::Silent,
        };
        Face { ssh, agent }
    }

    /// When [`Event::Tick`] next has something to do.
    #[must_use]
    pub fn wakes_at(&self) -> Option<DateTime<Utc>> {
        match self.state {
            State::Booting { until } => Some(until),
            State::AgentRunning => self.next_fault_at,
            _ => None,
        }
    }

    /// Lets something happen. On a refusal nothing changed.
    pub fn step(
        &mut self,
        event: Event,
        now: DateTime<Utc>,
        nature: &Nature,
    ) -> Result<Vec<Effect>, Refusal> {
        let before = self.face();
        match event {
            Event::Tick => self.tick(now, nature),
            Event::PowerOn | Event::PowerOff | Event::PowerCycle if self.state == State::PowerFailing => {
                return Err(Refusal("the machine's power control does not answer"));
            }
            Event::PowerOn => {
                if self.state == State::Off {
                    self.boot(now, nature);
                }
            }
            Event::PowerOff => self.state = State::Off,
            Event::PowerCycle => self.boot(now, nature),
            Event::Reboot => match self.state {
                State::Off => return Err(Refusal("the machine is off")),
                State::PowerFailing => return Err(Refusal("the machine has no power")),
                // A dead machine takes the order and does nothing: only the missing boot tells.
                State::Dead => {}
                _ => self.boot(now, nature),
            },
            Event::Enrolled => match self.state {
                State::Up | State::AgentRunning | State::AgentHung => {
                    self.enrolments += 1;
                    self.start_agent(now, nature);
                }
                _ => return Err(Refusal("nothing runs on the machine")),
            },
            Event::TakenBack => {
                // Whose power cannot be switched is taken back all the same.
                if self.state != State::PowerFailing {
                    self.state = State::Off;
                }
                (self.enrolments, self.host_key) = (0, 0);
                (self.ssh_refused, self.slow, self.disk_full) = (false, false, false);
                self.next_fault_at = None;
            }
            Event::Struck(fault) => self.strike(fault, now, nature)?,
        }
        Ok(self.face().since(before))
    }

    fn tick(&mut self, now: DateTime<Utc>, nature: &Nature) {
        if let State::Booting { until } = self.state
            && until <= now
        {
            self.booted_at = now;
            if self.enrolments > 0 && self.persists_agent(nature) {
                self.start_agent(now, nature);
            } else {
                self.state = State::Up;
            }
        }
        if self.state == State::AgentRunning && self.next_fault_at.is_some_and(|at| at <= now) {
            let struck = nature.profile.fault(nature.seed, self.index, self.faults);
            self.faults += 1;
            self.next_fault_at = None;
            if let Some((_, fault)) = struck {
                // Drawn faults fit a running machine; one that does not leaves it as it is.
                let _ = self.strike(fault, now, nature);
            }
            if self.state == State::AgentRunning {
                self.plan_fault(now, nature);
            }
        }
    }

    fn boot(&mut self, now: DateTime<Utc>, nature: &Nature) {
        self.boots += 1;
        let mut takes = nature.seed.around(nature.boot, "boot", self.index, self.boots);
        if nature.profile.slow_boot(nature.seed, self.index, self.boots) {
            takes = takes * 5;
        }
        if self.slow {
            takes = takes * 10;
        }
        self.ssh_refused = false;
        self.next_fault_at = None;
        self.booted_at = now;
        self.state = State::Booting { until: now + takes };
    }

    fn start_agent(&mut self, now: DateTime<Utc>, nature: &Nature) {
        self.state = State::AgentRunning;
        if self.next_fault_at.is_none() {
            self.plan_fault(now, nature);
        }
    }

    fn plan_fault(&mut self, now: DateTime<Utc>, nature: &Nature) {
        self.next_fault_at =
            nature.profile.fault(nature.seed, self.index, self.faults).map(|(after, _)| now + after);
    }

    fn strike(&mut self, fault: Fault, now: DateTime<Utc>, nature: &Nature) -> Result<(), Refusal> {
        match fault {
            Fault::Kill => match self.state {
                State::AgentRunning | State::AgentHung => self.state = State::Up,
                _ => return Err(Refusal("no agent runs on the machine")),
            },
            Fault::AgentHang => match self.state {
                State::AgentRunning => self.state = State::AgentHung,
                _ => return Err(Refusal("no agent runs on the machine")),
            },
            Fault::Hang => match self.state {
                State::Up | State::AgentRunning | State::AgentHung => self.state = State::Hung,
                _ => return Err(Refusal("the machine is not up")),
            },
            Fault::Dead => {
                if !self.state.powered() {
                    return Err(Refusal("the machine is off"));
                }
                self.state = State::Dead;
            }
            Fault::PowerFail => self.state = State::PowerFailing,
            Fault::SshRefuse => match self.state {
                State::Up | State::AgentRunning | State::AgentHung => self.ssh_refused = true,
                _ => return Err(Refusal("the machine is not up")),
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
                    State::PowerFailing | State::Dead | State::Hung => self.boot(now, nature),
                    State::AgentHung => self.start_agent(now, nature),
                    State::Up if self.enrolments > 0 => self.start_agent(now, nature),
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
    use crate::simulator::face::NOTHING;

    fn nature(profile: Profile) -> Nature {
        Nature { seed: Seed(1), profile, boot: TimeDelta::seconds(4), persistent_per_mille: 1000 }
    }

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000 + seconds, 0).unwrap()
    }

    fn in_state(state: State) -> Machine {
        let mut machine = Machine::new(0, at(0));
        machine.state = state;
        machine.boots = 1;
        machine.enrolments = 1;
        machine
    }

    const STATES: [State; 8] = [
        State::Off,
        State::Booting { until: DateTime::from_timestamp_nanos(i64::MAX) },
        State::Up,
        State::AgentRunning,
        State::AgentHung,
        State::Hung,
        State::Dead,
        State::PowerFailing,
    ];

    /// The whole table: a row per event, a column per state of `STATES`; `-` is a refusal.
    #[test]
    fn every_event_in_every_state_leads_where_the_picture_says() {
        use Event::{Enrolled, PowerCycle, PowerOff, PowerOn, Reboot, Struck, TakenBack};
        let table: &[(Event, &str)] = &[
            (PowerOn, "booting booting up agent-running agent-hung hung dead -"),
            (PowerOff, "off off off off off off off -"),
            (PowerCycle, "booting booting booting booting booting booting booting -"),
            (Reboot, "- booting booting booting booting booting dead -"),
            (TakenBack, "off off off off off off off power-failing"),
            (Enrolled, "- - agent-running agent-running agent-running - - -"),
            (Struck(Fault::Kill), "- - - up up - - -"),
            (Struck(Fault::AgentHang), "- - - agent-hung - - - -"),
            (Struck(Fault::Hang), "- - hung hung hung - - -"),
            (Struck(Fault::Dead), "- dead dead dead dead dead dead -"),
            (
                Struck(Fault::PowerFail),
                "power-failing power-failing power-failing power-failing power-failing power-failing power-failing power-failing",
            ),
            (Struck(Fault::SshRefuse), "- - up agent-running agent-hung - - -"),
            (
                Struck(Fault::Heal),
                "off booting agent-running agent-running agent-running booting booting booting",
            ),
            (Struck(Fault::NewHostKey), "off booting up agent-running agent-hung hung dead power-failing"),
        ];
        for (event, row) in table {
            for (state, expected) in STATES.into_iter().zip(row.split(' ')) {
                let mut machine = in_state(state);
                let untouched = machine.clone();
                if machine.step(*event, at(1), &nature(Profile::None)).is_ok() {
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
        for (per_mille, expected) in [(1000, State::AgentRunning), (0, State::Up)] {
            let nature = Nature { persistent_per_mille: per_mille, ..nature(Profile::None) };
            let mut machine = in_state(State::AgentRunning);
            let first = machine.boot_id(nature.seed);
            machine.step(Event::Reboot, at(0), &nature).unwrap();
            machine.step(Event::Tick, at(60), &nature).unwrap();
            assert_eq!(machine.state, expected);
            assert_ne!(machine.boot_id(nature.seed), first, "a boot has an id of its own");
        }
    }

    #[test]
    fn only_a_dead_agent_on_a_machine_that_is_well_closes_what_it_had_open() {
        for (fault, expected) in [
            (Fault::Kill, AgentFace::Absent),
            (Fault::AgentHang, AgentFace::Silent),
            (Fault::Hang, AgentFace::Silent),
            (Fault::Dead, AgentFace::Silent),
            (Fault::PowerFail, AgentFace::Silent),
        ] {
            let mut machine = in_state(State::AgentRunning);
            let effects = machine.step(Event::Struck(fault), at(0), &nature(Profile::None)).unwrap();
            assert!(effects.contains(&Effect::Agent(expected)), "{fault:?}: {effects:?}");
        }
    }

    #[test]
    fn enrolling_again_restarts_the_agent() {
        let mut machine = in_state(State::AgentRunning);
        let effects = machine.step(Event::Enrolled, at(0), &nature(Profile::None)).unwrap();
        assert_eq!(effects, [Effect::Agent(AgentFace::Running { boot: 1, enrolment: 2 })]);
    }

    #[test]
    fn a_new_host_key_reopens_the_server() {
        let mut machine = in_state(State::Up);
        let effects = machine.step(Event::Struck(Fault::NewHostKey), at(0), &nature(Profile::None)).unwrap();
        assert_eq!(effects, [Effect::Ssh(SshFace::Open { host_key: 1 })]);
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => Just(Event::Tick),
            1 => Just(Event::PowerOn),
            1 => Just(Event::PowerOff),
            1 => Just(Event::PowerCycle),
            1 => Just(Event::Reboot),
            1 => Just(Event::TakenBack),
            2 => Just(Event::Enrolled),
            3 => (0..Fault::ALL.len()).prop_map(|fault| Event::Struck(Fault::ALL[fault])),
        ]
    }

    proptest! {
        #[test]
        fn effects_alone_tell_what_a_machine_shows(
            seed in any::<u64>(),
            events in proptest::collection::vec((any_event(), 0..400_i64), 0..80),
        ) {
            let nature = Nature { seed: Seed(seed), ..nature(Profile::Harsh) };
            let run = || {
                let mut machine = Machine::new(3, at(0));
                let mut shown = NOTHING;
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
                prop_assert_eq!(machine.face(), *shown);
                if !machine.state.powered() {
                    prop_assert_eq!(*shown, NOTHING, "a machine without power shows nothing");
                }
                if matches!(shown.agent, AgentFace::Running { .. }) {
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
            let nature = nature(Profile::None);
            let mut machine = Machine::new(0, at(0));
            for event in events {
                let _ = machine.step(event, at(0), &nature);
            }
            machine.step(Event::Struck(Fault::Heal), at(0), &nature).unwrap();
            machine.step(Event::PowerOn, at(0), &nature).unwrap();
            machine.step(Event::Tick, at(10_000), &nature).unwrap();
            prop_assert_eq!(machine.face().ssh, SshFace::Open { host_key: 0 });
        }
    }
}
