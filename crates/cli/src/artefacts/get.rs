//! `artefacts get`: list of artefacts.

use serde_json::json;

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use model::artefact::{ArtefactView, piece_count};
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::artefacts_client::ArtefactsClient;

pub(crate) const GET_EXAMPLES: &str = "\
Example:
  shepherdctl artefacts get -o json | jq -r '.artefacts[] | .sha256 + \" \" + .name'";

pub(crate) async fn show_artefacts(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let (found, now) = fetch_artefacts(client).await?;
    if format == Format::Json {
        return format_json(&json!({ "artefacts": found }));
    }
    if found.is_empty() {
        return Ok("no artefacts; shepherdctl artefacts add FILE adds one\n".to_owned());
    }
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|artefact| {
            let state = match artefact.added_at {
                Some(_) if artefact.signing_key_id.is_some() => "whole, signed".to_owned(),
                Some(_) => "whole".to_owned(),
                None => format!("{} of {} pieces", artefact.pieces, piece_count(artefact.size)),
            };
            let dash = || "-".to_owned();
            vec![
                artefact.name.clone().unwrap_or_else(dash),
                artefact.sha256.clone(),
                artefact.size.to_string(),
                state,
                humanize_duration(between(artefact.added_at.unwrap_or(artefact.upload_started_at), now)),
                artefact.added_by.clone().unwrap_or_else(dash),
            ]
        })
        .collect();
    Ok(format_table(&["NAME", "SHA-256", "BYTES", "STATE", "AGE", "ADDED BY"], &rows, terminal_width()))
}

async fn fetch_artefacts(client: &FleetClient) -> Result<(Vec<ArtefactView>, Timestamp), CliError> {
    let result = ArtefactsClient::new(client.channel()).list(v1::ListArtefactsRequest {}).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let found = response.artefacts.into_iter().map(decode_artefact).collect::<Result<_, _>>()?;
    Ok((found, require_timestamp(response.read_at, "its read time")?))
}

fn decode_artefact(artefact: v1::Artefact) -> Result<ArtefactView, CliError> {
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    Ok(ArtefactView {
        sha256: artefact.sha256,
        size: artefact.size,
        name: some(artefact.name),
        upload_started_at: require_timestamp(artefact.upload_started_at, "the start time of an upload")?,
        added_at: artefact.added_at.and_then(decode_timestamp),
        added_by: some(artefact.added_by),
        pieces: artefact.uploaded_pieces,
        kubernetes: artefact.kubernetes_version,
        signing_key_id: some(artefact.signing_key_id),
        signed_comment: some(artefact.signed_comment),
    })
}
