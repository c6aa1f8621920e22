//! `get work`: live work items, and who holds them.

use crate::client::decode::{
    decode_machine_name, decode_timestamp, missing_field, parse_uuid, require_timestamp,
};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, fetch_pages};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::output::table::or_dash;
use bmdb::fleet::sessions::WorkSummary;
use model::humanize::{humanize_duration, relative_time};
use model::machine_view::WorkHolder;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::work_client::WorkClient;

const COLUMNS: [Column; 9] = [
    Column::always("NAME"),
    Column::always("PROCESS"),
    Column::always("FOR"),
    Column::always("FENCE"),
    Column::always("COMPONENT"),
    Column::always("HOST"),
    Column::always("PID"),
    Column::wide("UUID"),
    Column::always("SESSION ENDS"),
];

/// Lists the live work items, longest running first.
pub(crate) async fn list_work(client: &FleetClient, limit: Option<u32>) -> Result<ObjectList, CliError> {
    let mut service = WorkClient::new(client.channel());
    let pages = fetch_pages(limit, String::new(), async |page| {
        let request = v1::ListWorkRequest { page_size: page.size, page_token: page.token };
        let mut response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let now = require_timestamp(response.read_at, "its read time")?;
        let items = std::mem::take(&mut response.work).into_iter();
        let lines: Vec<ListedObject> = items.map(|item| work_object(item, now)).collect::<Result<_, _>>()?;
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await?;
    Ok(ObjectList::of_pages(ObjectKind::Work, &COLUMNS, pages))
}

fn work_object(item: v1::WorkItem, now: Timestamp) -> Result<ListedObject, CliError> {
    let document = ObjectDocument::of_message(&item);
    let line = decode_work(item)?;
    let who = &line.work;
    let row = vec![
        line.name.short_name(),
        who.process.clone(),
        humanize_duration(between(who.since, now)),
        who.fence.to_string(),
        or_dash(who.component.as_deref()),
        or_dash(who.host.as_deref()),
        or_dash(who.pid.map(|pid| pid.to_string()).as_deref()),
        line.name.machine.to_string(),
        match (who.session_closed_at, who.session_deadline) {
            (Some(at), _) => format!("lost {}", relative_time(at, now)),
            (None, Some(at)) => relative_time(at, now),
            (None, None) => "-".to_owned(),
        },
    ];
    Ok(ListedObject { names: work_names(&line), rows: vec![row], document })
}

/// A work item is named after its machine and its lane, or after the machine alone.
fn work_names(line: &WorkSummary) -> ObjectNames {
    let machine = line.name.short_name();
    let mut names = vec![machine.clone(), line.name.machine.to_string()];
    if let Some(id) = &line.name.provider_id {
        names.extend([id.clone(), format!("{id}/{}", line.lane)]);
    }
    ObjectNames { name: format!("{machine}/{}", line.lane), others: names, id: None }
}

/// Decodes a live work item.
pub fn decode_work(item: v1::WorkItem) -> Result<WorkSummary, CliError> {
    Ok(WorkSummary {
        name: decode_machine_name(item.name)?,
        lane: item.lane,
        work: decode_holder(item.holder.ok_or_else(|| missing_field("the holder of a work item"))?)?,
    })
}

/// Decodes the process that holds a work item or a lease.
pub fn decode_holder(holder: v1::WorkHolder) -> Result<WorkHolder, CliError> {
    Ok(WorkHolder {
        process: holder.process,
        fence: holder.fence,
        since: require_timestamp(holder.since, "the start time of a work item")?,
        session: parse_uuid(&holder.session, "a session's id")?,
        component: holder.component,
        host: holder.host,
        pid: holder.pid,
        session_deadline: holder.session_deadline.and_then(decode_timestamp),
        session_closed_at: holder.session_closed_at.and_then(decode_timestamp),
    })
}
