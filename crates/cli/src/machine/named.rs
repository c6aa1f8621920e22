//! Machines that a command names: the API finds them.

use std::collections::HashSet;

use crate::client::decode::{decode_machine_name, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::machine::get::MAX_NAMES;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

/// The machines of some names.
#[derive(Debug)]
pub(crate) struct NamedMachines {
    /// Each machine once, in the order of the names.
    pub(crate) machines: Vec<v1::Machine>,
    /// A sentence for each name that fits no machine, or several.
    pub(crate) unresolved: Vec<String>,
    /// The database's time when the last of them was read.
    pub(crate) read_at: Timestamp,
}

/// Fetches the machines of these names. There is at least one name.
pub(crate) async fn fetch_named_machines(
    client: &FleetClient,
    names: &[String],
) -> Result<NamedMachines, CliError> {
    let mut service = MachinesClient::new(client.channel());
    let (mut machines, mut unresolved, mut read_at) = (Vec::new(), Vec::new(), None);
    let mut known = HashSet::new();
    for names in names.chunks(MAX_NAMES) {
        let request = v1::ListMachinesRequest { names: names.to_vec(), ..v1::ListMachinesRequest::default() };
        let page = service.list(request).await.map_err(status_to_error)?.into_inner();
        for machine in page.machines {
            // Another chunk may name a machine again.
            if known.insert(decode_machine_name(machine.name.clone())?.machine) {
                machines.push(machine);
            }
        }
        unresolved.extend(page.unresolved.into_iter().map(|name| name.message));
        read_at = page.read_at;
    }
    Ok(NamedMachines { machines, unresolved, read_at: require_timestamp(read_at, "its read time")? })
}
