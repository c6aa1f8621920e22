//! Calls of `Machines.List`: the pages of a selection, and the machines of some names.

use std::collections::HashSet;

use crate::client::decode::decode_machine_name;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, PageRequest, fetch_pages_within};
use crate::error::CliError;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

/// Most names that one call of the API takes.
const MAX_NAMES: usize = 100;

/// Fetches what a request selects, from its page on, in at most `max_calls` calls: all of it, or as many machines as have
/// `limit` lines. `take_lines` moves the machines out of a response.
pub(crate) async fn fetch_machine_pages<T>(
    client: &FleetClient,
    request: v1::ListMachinesRequest,
    limit: Option<u32>,
    max_calls: usize,
    take_lines: fn(&mut v1::ListMachinesResponse) -> Result<Vec<T>, CliError>,
) -> Result<Page<T, v1::ListMachinesResponse>, CliError> {
    let mut service = MachinesClient::new(client.channel());
    let first = request.page_token.clone();
    fetch_pages_within(max_calls, limit, first, async |page: PageRequest| {
        let request =
            v1::ListMachinesRequest { page_size: page.size, page_token: page.token, ..request.clone() };
        let mut response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let lines = take_lines(&mut response)?;
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await
}

/// Fetches the machines of these names, in the order of the names: one response for each call. Each machine is in the first
/// response that has it, because the names of several calls may fit one machine.
pub(super) async fn fetch_named_pages(
    client: &FleetClient,
    names: &[String],
) -> Result<Vec<v1::ListMachinesResponse>, CliError> {
    let mut service = MachinesClient::new(client.channel());
    let (mut pages, mut fetched) = (Vec::new(), HashSet::new());
    for names in names.chunks(MAX_NAMES) {
        let request = v1::ListMachinesRequest { names: names.to_vec(), ..v1::ListMachinesRequest::default() };
        let mut page = service.list(request).await.map_err(status_to_error)?.into_inner();
        for machine in std::mem::take(&mut page.machines) {
            if fetched.insert(decode_machine_name(machine.name.clone())?.machine) {
                page.machines.push(machine);
            }
        }
        pages.push(page);
    }
    Ok(pages)
}
