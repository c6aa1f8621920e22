//! What two machines have in common and must not: an address, a key, a serial number.

use std::collections::BTreeMap;

use crate::model::issues::evidence::{Evidence, MachineEvidence};
use crate::model::issues::{Issue, Kind};

/// Serial numbers that boards are shipped with when nobody wrote one.
const NO_SERIAL: [&str; 8] = [
    "to be filled by o.e.m.",
    "default string",
    "system serial number",
    "not specified",
    "not applicable",
    "none",
    "0123456789",
    "123456789",
];

/// Bits of an address's first byte that mark it as one of a group, or as made up by whoever uses it.
const NOT_ASSIGNED: u8 = 0b11;

/// Everything of this kind.
pub(super) fn found(evidence: &Evidence) -> Vec<Issue> {
    let mut found = Vec::new();
    let shared = |each: &dyn Fn(&MachineEvidence) -> Vec<String>| shared(evidence, each);
    for (address, machines) in shared(&|machine| address_of(machine).into_iter().collect()) {
        found.push(several(
            Kind::AddressConflict,
            &machines,
            format!("providers give them one address, {address}: what is done to one may reach the other"),
            "correct the address at the provider or in the device list; until then hold all but the one that is there",
        ));
    }
    for (key, machines) in shared(&|machine| key_of(machine).into_iter().collect()) {
        found.push(several(
            Kind::DuplicateKey,
            &machines,
            format!("their agents prove themselves with one key, {key}…: one was cloned from the other's disk"),
            "delete the role server's state directory on the clone, and `shepherdctl retry` it: it makes a key of its \
             own when it is taken over anew",
        ));
    }
    for (serial, machines) in shared(&|machine| serial_of(machine).into_iter().collect()) {
        found.push(several(
            Kind::DuplicateSerial,
            &machines,
            format!(
                "they report one serial number, {serial}: one computer is known twice, or a board was copied"
            ),
            "find out whether they are one computer under two names; if so retire one of the names",
        ));
    }
    for (mac, machines) in shared(&|machine| macs_of(machine)) {
        found.push(several(
            Kind::DuplicateMac,
            &machines,
            format!("they report one network address, {mac}"),
            "if they are not one computer under two names, give one of the interfaces another address: in one network \
             neither is reached reliably",
        ));
    }
    found
}

fn several(kind: Kind, machines: &[&MachineEvidence], evidence: String, remedy: &str) -> Issue {
    let names = machines.iter().map(|machine| machine.name()).collect();
    Issue::of_several(kind, names, evidence, None, remedy.to_owned())
}

/// What several machines have, with them in the order of their ids.
fn shared<'a>(
    evidence: &'a Evidence,
    each: &dyn Fn(&MachineEvidence) -> Vec<String>,
) -> BTreeMap<String, Vec<&'a MachineEvidence>> {
    let mut owners: BTreeMap<String, Vec<&MachineEvidence>> = BTreeMap::new();
    for machine in evidence.machines.iter().filter(|machine| !machine.is_leaving()) {
        let mut values = each(machine);
        values.sort_unstable();
        values.dedup();
        for value in values {
            owners.entry(value).or_default().push(machine);
        }
    }
    owners.retain(|_, machines| machines.len() > 1);
    for machines in owners.values_mut() {
        machines.sort_by_key(|machine| machine.facts.machine);
    }
    owners
}

fn address_of(machine: &MachineEvidence) -> Option<String> {
    let provided = machine.facts.provided.as_ref()?;
    let address = provided.address.as_ref()?;
    Some(format!("{address} port {}", provided.ssh_port.unwrap_or(22)))
}

/// The beginning of a key, as people compare it.
fn key_of(machine: &MachineEvidence) -> Option<String> {
    let key = &machine.facts.agent_started.as_ref()?.public_key;
    (!key.is_empty()).then(|| hex::encode(key.get(..16).unwrap_or(key)))
}

fn serial_of(machine: &MachineEvidence) -> Option<String> {
    let serial = machine.serial_number.as_deref()?.trim();
    let means_none = NO_SERIAL.contains(&serial.to_lowercase().as_str());
    let one_character = serial.chars().all(|c| serial.starts_with(c));
    (!means_none && !one_character).then(|| serial.to_owned())
}

/// Addresses that somebody assigned: not those that are made up at each boot, nor none at all.
fn macs_of(machine: &MachineEvidence) -> Vec<String> {
    let assigned = |mac: &&String| {
        let first = mac.split(':').next().and_then(|byte| u8::from_str_radix(byte, 16).ok());
        first.is_some_and(|first| first & NOT_ASSIGNED == 0) && mac.chars().any(|c| c != '0' && c != ':')
    };
    machine.macs.iter().filter(assigned).cloned().collect()
}
