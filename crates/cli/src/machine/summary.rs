//! Summary of a machine, as lists and watches show it.

use crate::client::decode::{decode_machine_name, decode_timestamp, require_timestamp};
use crate::error::CliError;
use bmdb::fleet::listing::{HoldSummary, MachineSummary};
use proto::fleet::v1;

/// Decodes a machine of a list.
pub fn decode_machine(machine: v1::Machine) -> Result<MachineSummary, CliError> {
    Ok(MachineSummary {
        name: decode_machine_name(machine.name)?,
        phase: machine.phase,
        phase_since: require_timestamp(
            machine.phase_since,
            "the time since which a machine is in its state",
        )?,
        address: machine.address,
        location: machine.location,
        heartbeat_at: machine.heartbeat_at.and_then(decode_timestamp),
        working: machine.working,
        process: machine.process,
        ready_at: machine.ready_at.and_then(decode_timestamp),
        reason: machine.reason,
        labels: machine.labels.into_iter().collect(),
        priority: machine.priority,
        cluster: machine.cluster,
        hold: machine.hold.map(decode_hold),
    })
}

fn decode_hold(hold: v1::MachineHold) -> HoldSummary {
    HoldSummary {
        scope: hold.scope,
        reason: hold.reason,
        held_by: hold.held_by,
        until: hold.until.and_then(decode_timestamp),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_with_a_missing_field_is_an_error() {
        let text = decode_machine(v1::Machine::default()).unwrap_err().to_string();
        assert!(text.starts_with("the response lacks a machine's name"), "{text}");
    }
}
