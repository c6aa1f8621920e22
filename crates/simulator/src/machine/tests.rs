//! Tests of the machine: its whole table of states and events, and properties of any run.

use proptest::prelude::*;

use super::*;
use crate::observable::NOTHING_OBSERVABLE;

fn fleet_profile(profile: FaultProfile) -> FleetProfile {
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
        (Fault(faults::Fault::NewHostKey), "off booting up agent-running agent-hung hung dead power-failing"),
    ];
    for (event, row) in table {
        for (state, expected) in STATES.into_iter().zip(row.split(' ')) {
            let mut machine = in_state(state);
            let untouched = machine.clone();
            if machine.step(*event, at(1), &fleet_profile(FaultProfile::None)).is_ok() {
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
        let profile = FleetProfile { persistent_per_mille: per_mille, ..fleet_profile(FaultProfile::None) };
        let mut machine = in_state(SimulatedState::AgentRunning);
        let first = machine.boot_id(profile.seed);
        machine.step(MachineEvent::Reboot, at(0), &profile).unwrap();
        machine.step(MachineEvent::Tick, at(60), &profile).unwrap();
        assert_eq!(machine.state, expected);
        assert_ne!(machine.boot_id(profile.seed), first, "a boot has an id of its own");
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
            machine.step(MachineEvent::Fault(fault), at(0), &fleet_profile(FaultProfile::None)).unwrap();
        assert!(effects.contains(&Effect::Agent(expected)), "{fault:?}: {effects:?}");
    }
}

#[test]
fn enrolling_again_restarts_the_agent() {
    let mut machine = in_state(SimulatedState::AgentRunning);
    let effects = machine.step(MachineEvent::Enrolled, at(0), &fleet_profile(FaultProfile::None)).unwrap();
    assert_eq!(effects, [Effect::Agent(ObservableAgent::Running { boot: 1, enrolment: 2 })]);
}

#[test]
fn a_new_host_key_reopens_the_server() {
    let mut machine = in_state(SimulatedState::Up);
    let effects = machine
        .step(MachineEvent::Fault(Fault::NewHostKey), at(0), &fleet_profile(FaultProfile::None))
        .unwrap();
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
        let profile = FleetProfile { seed: Seed(seed), ..fleet_profile(FaultProfile::Harsh) };
        let run = || {
            let mut machine = SimulatedMachine::new(3, at(0));
            let mut shown = NOTHING_OBSERVABLE;
            let mut now = at(0);
            let mut trace = Vec::new();
            for (event, later) in &events {
                now += TimeDelta::seconds(*later);
                for effect in machine.step(*event, now, &profile).unwrap_or_default() {
                    match effect {
                        Effect::Ssh(ssh) => shown.ssh = ssh,
                        Effect::Agent(agent) => shown.agent = agent,
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
        let profile = fleet_profile(FaultProfile::None);
        let mut machine = SimulatedMachine::new(0, at(0));
        for event in events {
            let _ = machine.step(event, at(0), &profile);
        }
        machine.step(MachineEvent::Fault(Fault::Heal), at(0), &profile).unwrap();
        machine.step(MachineEvent::PowerOn, at(0), &profile).unwrap();
        machine.step(MachineEvent::Tick, at(10_000), &profile).unwrap();
        prop_assert_eq!(machine.observable().ssh, ObservableSsh::Open { host_key: 0 });
    }
}
