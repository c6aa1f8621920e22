//! `get artefacts`: list of artefacts.

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use model::artefact::{ArtefactView, piece_count};
use model::byte_size::ByteSize;
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::artefacts_client::ArtefactsClient;

const COLUMNS: [Column; 6] = [
    Column::always("NAME"),
    Column::always("SHA-256"),
    Column::always("SIZE"),
    Column::always("STATE"),
    Column::always("AGE"),
    Column::always("ADDED BY"),
];

/// Lists the artefacts: complete ones first, newest first.
pub(crate) async fn list_artefacts(client: &FleetClient) -> Result<ObjectList, CliError> {
    let result = ArtefactsClient::new(client.channel()).list(v1::ListArtefactsRequest {}).await;
    let mut response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    let mut objects = Vec::new();
    for message in std::mem::take(&mut response.artefacts) {
        let document = ObjectDocument::of_message(&message);
        let artefact = decode_artefact(message)?;
        let names = ObjectNames {
            name: artefact.name.clone().unwrap_or_else(|| artefact.sha256.clone()),
            others: Vec::new(),
            id: Some(artefact.sha256.clone()),
        };
        objects.push(ListedObject { names, rows: vec![artefact_row(&artefact, now)], document });
    }
    Ok(ObjectList::of_response(ObjectKind::Artefact, &response, &COLUMNS, objects))
}

fn artefact_row(artefact: &ArtefactView, now: Timestamp) -> Vec<String> {
    let state = match artefact.added_at {
        Some(_) if artefact.signing_key_id.is_some() => "whole, signed".to_owned(),
        Some(_) => "whole".to_owned(),
        None => format!("{} of {} pieces", artefact.pieces, piece_count(artefact.size)),
    };
    let dash = || "-".to_owned();
    vec![
        artefact.name.clone().unwrap_or_else(dash),
        artefact.sha256.clone(),
        ByteSize(artefact.size).humanize(),
        state,
        humanize_duration(between(artefact.added_at.unwrap_or(artefact.upload_started_at), now)),
        artefact.added_by.clone().unwrap_or_else(dash),
    ]
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
