//! Machines that a command names: the API finds them.

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::FleetClient;
use crate::error::CliError;
use crate::machine::fetch::fetch_named_pages;
use model::time::Timestamp;
use proto::fleet::v1;

/// What the API finds by some names.
#[derive(Debug)]
pub(crate) struct NameResolution {
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
) -> Result<NameResolution, CliError> {
    let (mut machines, mut unresolved, mut read_at) = (Vec::new(), Vec::new(), None);
    for page in fetch_named_pages(client, names).await? {
        machines.extend(page.machines);
        unresolved.extend(page.unresolved.into_iter().map(|name| name.message));
        read_at = page.read_at;
    }
    Ok(NameResolution { machines, unresolved, read_at: require_timestamp(read_at, "its read time")? })
}
