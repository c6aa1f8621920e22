//! `get providers`: providers with the result of their last call, and engaged brakes.

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::output::table::{format_table, or_dash, terminal_width};
use bmdb::fleet::provider::ProviderSummary;
use model::adoption::NotAdopted;
use model::humanize::{humanize_duration, relative_time};
use model::machine_view::EngagedBrake;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::providers_client::ProvidersClient;

const COLUMNS: [Column; 6] = [
    Column::always("NAME"),
    Column::always("KIND"),
    Column::always("MACHINES"),
    Column::always("NOT ADOPTED"),
    Column::always("LISTED"),
    Column::always("STATE"),
];

/// Lists providers, with the engaged brakes below them.
pub(crate) async fn list_providers(client: &FleetClient) -> Result<ObjectList, CliError> {
    let request = v1::ListProvidersRequest {};
    let mut response =
        ProvidersClient::new(client.channel()).list(request).await.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    let objects = std::mem::take(&mut response.providers).into_iter().map(|provider| {
        let document = ObjectDocument::of_message(&provider);
        let line = decode_provider(provider);
        let row = provider_row(&line, now);
        ListedObject { names: ObjectNames::of_name(line.provider), rows: vec![row], document }
    });
    let list = ObjectList::of_response(ObjectKind::Provider, &response, &COLUMNS, objects.collect());
    let brakes: Vec<EngagedBrake> =
        response.brakes.into_iter().map(decode_brake).collect::<Result<_, _>>()?;
    Ok(ObjectList { appendix: format_brakes(&brakes, now), ..list })
}

/// Table of the engaged brakes; empty if none is.
fn format_brakes(brakes: &[EngagedBrake], now: Timestamp) -> String {
    if brakes.is_empty() {
        return String::new();
    }
    let rows: Vec<Vec<String>> = brakes
        .iter()
        .map(|line| {
            vec![
                line.kind.clone(),
                line.scope.clone(),
                humanize_duration(between(line.engaged_at, now)),
                line.reason.clone(),
            ]
        })
        .collect();
    format_table(&["BRAKE", "SCOPE", "FOR", "REASON"], &rows, terminal_width())
}

fn provider_row(line: &ProviderSummary, now: Timestamp) -> Vec<String> {
    let failed = line.error.as_ref().map(|error| match line.error_at {
        Some(at) => format!("failed {}: {error}", relative_time(at, now)),
        None => format!("failed: {error}"),
    });
    let braked = line.brake.as_ref().map(|brake| match line.brake_since {
        Some(since) => format!("takes no machines for {}: {brake}", humanize_duration(between(since, now))),
        None => format!("takes no machines: {brake}"),
    });
    let states: Vec<String> = failed.into_iter().chain(braked).collect();
    vec![
        line.provider.clone(),
        line.kind.clone(),
        or_dash(line.machines.map(|count| count.to_string()).as_deref()),
        not_adopted_cell(line),
        line.listed_at.map_or_else(|| "never".to_owned(), |at| relative_time(at, now)),
        if states.is_empty() { "ok".to_owned() } else { states.join("; ") },
    ]
}

/// How many machines of its list are not adopted, and its limit; a dash if no list was received.
fn not_adopted_cell(line: &ProviderSummary) -> String {
    match line.not_adopted {
        Some(surplus) => surplus.format_cell(),
        None if line.machines.is_some() => "0".to_owned(),
        None => "-".to_owned(),
    }
}

/// Decodes a provider with the result of its last call.
#[must_use]
pub fn decode_provider(provider: v1::Provider) -> ProviderSummary {
    let (not_adopted, not_adopted_since) = match provider.not_adopted {
        Some(v1::NotAdopted { machines, limit, since, .. }) => {
            (NotAdopted::from_numbers(machines, limit), since.and_then(decode_timestamp))
        }
        None => (None, None),
    };
    ProviderSummary {
        provider: provider.provider,
        kind: provider.kind,
        listed_at: provider.listed_at.and_then(decode_timestamp),
        machines: provider.machines,
        error: provider.error,
        error_at: provider.error_at.and_then(decode_timestamp),
        brake: provider.brake,
        brake_since: provider.brake_since.and_then(decode_timestamp),
        not_adopted,
        not_adopted_since,
    }
}

/// Decodes a brake that is engaged.
pub fn decode_brake(brake: v1::Brake) -> Result<EngagedBrake, CliError> {
    Ok(EngagedBrake {
        kind: brake.kind,
        scope: brake.scope,
        reason: brake.reason,
        engaged_at: require_timestamp(brake.engaged_at, "the time when a brake was engaged")?,
        confirmed_at: require_timestamp(brake.confirmed_at, "the time when a brake was confirmed")?,
    })
}
