//! Machines.Describe: all that is recorded about one machine, so that a client can show it as the database does.
//!
//! Rows are sent as the JSON text that the database produces: a Protobuf `Struct` has no integers.

use tonic::Status;

use crate::api::api_error::bmdb_status;
use crate::api::context::ApiContext;
use crate::api::convert::{self, encode_timestamp};
use bmdb::machine::history;
use bmdb::machine::lookup::machine_id;
use bmdb::machine::tags::{self, Tag, list_tags};
use bmdb::machine::view;
use model::machine_view::{MachineName, MachineView};
use model::phase::phase_of;
use model::timeline::HistoryEntry;
use model::waits::{backoff_waits, postponement_waits};
use proto::fleet::v1;

/// Number of most recent events to send.
const EVENT_LIMIT: i64 = 10;

/// Describes the machine of that name.
pub async fn describe_machine(
    context: &ApiContext,
    name: &MachineName,
) -> Result<v1::DescribeMachineResponse, Status> {
    let (id, bmdb) = (machine_id(name), context.read_pool.bmdb().clone());
    let (view, tags, events) = context
        .read_pool
        .read_with(bmdb, move |tx, bmdb| {
            Box::pin(async move {
                let view = view::read_machine_view(bmdb, tx, id).await?;
                Ok((view, list_tags(tx, id).await?, history::list_history(tx, id, None, EVENT_LIMIT).await?))
            })
        })
        .await
        .map_err(bmdb_status)?;
    Ok(encode_description(&view, tags, events))
}

fn encode_description(
    view: &MachineView,
    tags: Vec<Tag>,
    events: Vec<HistoryEntry>,
) -> v1::DescribeMachineResponse {
    let (facts, now) = (&view.facts, view.at);
    v1::DescribeMachineResponse {
        name: Some(convert::encode_machine_name(&view.name())),
        phase: phase_of(facts, &view.policy, now).as_str().to_owned(),
        created_at: Some(encode_timestamp(facts.created_at)),
        read_at: Some(encode_timestamp(now)),
        facts: tags.into_iter().map(encode_fact).collect(),
        schedule: view.lanes.iter().map(convert::encode_lane).collect(),
        backoffs: backoff_waits(facts, now).into_iter().map(convert::encode_wait).collect(),
        postponements: postponement_waits(facts, now).into_iter().map(convert::encode_wait).collect(),
        events: events.into_iter().map(convert::encode_event).collect(),
    }
}

fn encode_fact(tag: Tag) -> v1::Fact {
    let column = |column: tags::TagColumn| v1::FactColumn { name: column.name, r#type: column.kind };
    v1::Fact {
        table: tag.table,
        columns: tag.columns.into_iter().map(column).collect(),
        row: serde_json::Value::Object(tag.row).to_string(),
    }
}
