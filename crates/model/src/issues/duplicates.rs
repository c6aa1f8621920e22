//! Issues of machine pairs: duplicate addresses, keys, serial numbers, MACs.

use std::collections::BTreeMap;

use crate::firmware_text;
use crate::issues::inputs::{IssueInputs, MachineIssueInputs};
use crate::issues::{Issue, IssueKind};

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    let shared = |each: &dyn Fn(&MachineIssueInputs) -> Vec<String>| shared_values(evidence, each);
    for (address, machines) in shared(&|machine| ssh_address(machine).into_iter().collect()) {
        found.push(duplicate_issue(
            IssueKind::AddressConflict,
            &machines,
            format!("providers give them one address, {address}: what is done to one may reach the other"),
            "correct the address at the provider or in the device list; until then hold all but the one that is there",
        ));
    }
    for (key, machines) in shared(&|machine| key_prefix(machine).into_iter().collect()) {
        found.push(duplicate_issue(
            IssueKind::DuplicateKey,
            &machines,
            format!("their agents prove themselves with one key, {key}…: one was cloned from the other's disk"),
            "delete the role server's state directory on the clone, and `shepherdctl retry` it: it makes a key of its \
             own when a shepherd takes it over again",
        ));
    }
    for (serial, machines) in shared(&|machine| assigned_serial(machine).into_iter().collect()) {
        found.push(duplicate_issue(
            IssueKind::DuplicateSerial,
            &machines,
            format!(
                "they report one serial number, {serial}: one computer is known twice, or a board was copied"
            ),
            "find out whether they are one computer under two names; if so retire one of the names",
        ));
    }
    for (mac, machines) in shared(&|machine| assigned_macs(machine)) {
        found.push(duplicate_issue(
            IssueKind::DuplicateMac,
            &machines,
            format!("they report one network address, {mac}"),
            "if they are not one computer under two names, give one of the interfaces another address: in one network \
             neither is reached reliably",
        ));
    }
    found
}

fn duplicate_issue(
    kind: IssueKind,
    machines: &[&MachineIssueInputs],
    evidence: String,
    remedy: &str,
) -> Issue {
    let names = machines.iter().map(|machine| machine.name()).collect();
    Issue::for_machines(kind, names, evidence, None, remedy.to_owned())
}

/// Values that several machines share, with those machines in the order of their ids.
fn shared_values<'a>(
    evidence: &'a IssueInputs,
    each: &dyn Fn(&MachineIssueInputs) -> Vec<String>,
) -> BTreeMap<String, Vec<&'a MachineIssueInputs>> {
    let mut owners: BTreeMap<String, Vec<&MachineIssueInputs>> = BTreeMap::new();
    for machine in evidence.machines.iter().filter(|machine| !machine.is_retiring()) {
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

fn ssh_address(machine: &MachineIssueInputs) -> Option<String> {
    let provided = machine.facts.provider_record.as_ref()?;
    let address = provided.address.as_ref()?;
    Some(format!("{address} port {}", provided.ssh_port.unwrap_or(22)))
}

/// The beginning of an agent's public key, as people compare it.
fn key_prefix(machine: &MachineIssueInputs) -> Option<String> {
    let key = &machine.facts.agent_started.as_ref()?.public_key;
    (!key.is_empty()).then(|| hex::encode(key.get(..16).unwrap_or(key)))
}

fn assigned_serial(machine: &MachineIssueInputs) -> Option<String> {
    firmware_text::meaningful_text(machine.serial_number.as_deref()?).map(str::to_owned)
}

fn assigned_macs(machine: &MachineIssueInputs) -> Vec<String> {
    machine.macs.iter().filter_map(|mac| firmware_text::meaningful_mac(mac)).map(str::to_owned).collect()
}
