//! `why`: explain the state of one machine.
//!
//! [`model::why`] derives the explanation. This module fetches and prints it.

use crate::api_decode;
use crate::error::CliError;
use crate::fleet_client::{FleetClient, status_to_error};
use crate::get::format_json;
use crate::output::{Format, terminal_width};
use model::why::render::render_explanation;
use proto::fleet::v1::WhyRequest;
use proto::fleet::v1::machines_client::MachinesClient;

/// Runs `why M`: explains the state of a machine.
pub async fn show_explanation(
    client: &FleetClient,
    machine: &str,
    format: Format,
) -> Result<String, CliError> {
    let request = WhyRequest { machine: machine.to_owned() };
    let response = MachinesClient::new(client.channel()).why(request).await.map_err(status_to_error)?;
    let why = api_decode::decode_explanation(response.into_inner())?;
    match format {
        Format::Json => format_json(&why),
        Format::Table => Ok(render_explanation(&why, terminal_width())),
    }
}
