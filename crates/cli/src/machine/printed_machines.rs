//! The machines that a watch has printed: which ones of a stream are new.
//!
//! A stream starts with all machines, and a resumed one repeats each machine once within some minutes. A machine that is
//! as it was printed is not printed again.

use std::collections::{HashMap, HashSet};

use model::phase::Phase;
use proto::fleet::v1;
use uuid::Uuid;

/// The printed state of each machine, and the machines of the current stream.
#[derive(Default)]
pub(super) struct PrintedMachines {
    machines: HashMap<Uuid, v1::Machine>,
    in_this_stream: HashSet<Uuid>,
    /// Whether a machine that was retired before is left out.
    omits_retired: bool,
}

impl PrintedMachines {
    /// No machine is printed yet. `omits_retired` is whether a machine that was retired before is left out.
    pub(super) fn new(omits_retired: bool) -> Self {
        Self { omits_retired, ..Self::default() }
    }

    /// Starts another stream: clears the set of its machines.
    pub(super) fn start_stream(&mut self) {
        self.in_this_stream.clear();
    }

    /// Whether to print this machine. A new stream repeats each machine, and an unchanged one is not printed again. A
    /// machine that is retired while it is watched is.
    pub(super) fn is_new(&mut self, id: Uuid, machine: &v1::Machine) -> bool {
        let steady = v1::Machine { heartbeat_at: None, ready_at: None, ..machine.clone() };
        let again = self.in_this_stream.insert(id);
        let former = self.machines.get(&id);
        if former.is_none() && self.omits_retired && machine.phase == Phase::Retired.as_str() {
            return false;
        }
        let same = former == Some(&steady);
        self.machines.insert(id, steady);
        !(again && same)
    }

    /// A printed machine, without the times of its heartbeats.
    pub(super) fn find(&self, machine: Uuid) -> Option<&v1::Machine> {
        self.machines.get(&machine)
    }

    /// Removes a machine, and returns it if it was printed before.
    pub(super) fn remove(&mut self, machine: Uuid) -> Option<v1::Machine> {
        self.in_this_stream.remove(&machine);
        self.machines.remove(&machine)
    }

    /// Printed machines that are not in the current stream, once it has sent all machines.
    pub(super) fn missing_machines(&self) -> Vec<Uuid> {
        self.machines.keys().filter(|machine| !self.in_this_stream.contains(machine)).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::decode::decode_machine_name;

    fn machine(number: u128, phase: &str) -> v1::Machine {
        let name = v1::MachineName {
            machine: Uuid::from_u128(number).to_string(),
            provider: Some("sim".to_owned()),
            provider_id: Some(format!("sim-{number}")),
        };
        v1::Machine {
            name: Some(name),
            phase: phase.to_owned(),
            phase_since: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
            ..v1::Machine::default()
        }
    }

    fn is_new(printed: &mut PrintedMachines, machine: &v1::Machine) -> bool {
        let id = decode_machine_name(machine.name.clone()).unwrap().machine;
        printed.is_new(id, machine)
    }

    #[test]
    fn new_stream_prints_only_changed_machines() {
        let mut printed = PrintedMachines::default();
        assert!(is_new(&mut printed, &machine(1, "Ready")) && is_new(&mut printed, &machine(2, "Ready")));
        assert!(is_new(&mut printed, &machine(1, "Silent")));
        printed.start_stream();
        let heartbeat_at = Some(prost_types::Timestamp { seconds: 2, nanos: 0 });
        let summary = v1::Machine { heartbeat_at, ..machine(1, "Silent") };
        assert!(!is_new(&mut printed, &summary), "nothing but a heartbeat is other");
        assert!(is_new(&mut printed, &summary), "the server sends what it knows to be other");
        let second = Uuid::from_u128(2);
        assert_eq!(printed.missing_machines(), [second]);
        assert!(printed.remove(second).is_some() && printed.remove(second).is_none());
        assert!(is_new(&mut printed, &machine(2, "New")), "it is back");
    }

    #[test]
    fn retired_machine_is_printed_only_if_it_was_there_before() {
        for (omits_retired, expected) in [(true, false), (false, true)] {
            let mut printed = PrintedMachines::new(omits_retired);
            assert!(is_new(&mut printed, &machine(1, "Retiring")));
            assert!(is_new(&mut printed, &machine(1, "Retired")), "it changed");
            assert_eq!(is_new(&mut printed, &machine(2, "Retired")), expected);
        }
    }
}
