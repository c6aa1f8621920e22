//! `Machines.Describe`: everything that is known of one machine, so that whoever asks can show it as the
//! database does.
//!
//! Rows go out as the JSON text that the database makes of them: a protobuf `Struct` has no integers.

use tonic::Status;

use crate::bmdb::find::id_of;
use crate::bmdb::inspect::{self, HistoryLine, Tag};
use crate::bmdb::tags::tags;
use crate::model::machine_view::{MachineName, MachineView};
use crate::model::phase::phase_of;
use crate::model::waits::{backoffs, postponements};
use crate::proto::fleet::v1;
use crate::server::api::convert::{self, at};
use crate::server::api::refusal::of_bmdb;
use crate::server::api::site::Site;

/// How many of the last events are told.
const EVENTS: i64 = 10;

/// Describes the machine of that name.
pub async fn describe(site: &Site, name: &MachineName) -> Result<v1::DescribeMachineResponse, Status> {
    let (id, bmdb) = (id_of(name), site.looks.bmdb().clone());
    let (view, tags, events) = site
        .looks
        .look(move |tx| {
            let bmdb = bmdb.clone();
            Box::pin(async move {
                let view = inspect::view(&bmdb, tx, id).await?;
                Ok((view, tags(tx, id).await?, inspect::history(tx, id, None, EVENTS).await?))
            })
        })
        .await
        .map_err(of_bmdb)?;
    Ok(answer(&view, tags, events))
}

fn answer(view: &MachineView, tags: Vec<Tag>, events: Vec<HistoryLine>) -> v1::DescribeMachineResponse {
    let (facts, now) = (&view.facts, view.at);
    v1::DescribeMachineResponse {
        name: Some(convert::name(&view.name())),
        phase: phase_of(facts, &view.policy, now).as_str().to_owned(),
        created_at: Some(at(facts.created_at)),
        at: Some(at(now)),
        facts: tags.into_iter().map(fact).collect(),
        schedule: view.lanes.iter().map(convert::lane).collect(),
        backoffs: backoffs(facts, now).into_iter().map(convert::wait).collect(),
        postponements: postponements(facts, now).into_iter().map(convert::wait).collect(),
        events: events.into_iter().map(convert::event).collect(),
    }
}

fn fact(tag: Tag) -> v1::Fact {
    let column = |column: inspect::TagColumn| v1::FactColumn { name: column.name, r#type: column.kind };
    v1::Fact {
        table: tag.table,
        columns: tag.columns.into_iter().map(column).collect(),
        row: serde_json::Value::Object(tag.row).to_string(),
    }
}
