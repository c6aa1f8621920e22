//! `get sessions`: sessions of the shepherds that work on the BMDB.

use crate::client::decode::{parse_uuid, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, fetch_pages};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::output::table::or_dash;
use bmdb::fleet::sessions::SessionSummary;
use model::humanize::{humanize_duration, relative_time};
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::sessions_client::SessionsClient;

const COLUMNS: [Column; 8] = [
    Column::always("SESSION"),
    Column::always("COMPONENT"),
    Column::always("HOST"),
    Column::always("PID"),
    Column::always("VERSION"),
    Column::always("AGE"),
    Column::always("ENDS"),
    Column::always("WORK"),
];

/// Lists the open sessions, oldest first.
pub(crate) async fn list_sessions(client: &FleetClient, limit: Option<u32>) -> Result<ObjectList, CliError> {
    let mut service = SessionsClient::new(client.channel());
    let pages = fetch_pages(limit, String::new(), async |page| {
        let request = v1::ListSessionsRequest { page_size: page.size, page_token: page.token };
        let mut response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let now = require_timestamp(response.read_at, "its read time")?;
        let sessions = std::mem::take(&mut response.sessions).into_iter();
        let lines: Vec<ListedObject> =
            sessions.map(|session| session_object(session, now)).collect::<Result<_, _>>()?;
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await?;
    Ok(ObjectList::of_pages(ObjectKind::Session, &COLUMNS, pages))
}

fn session_object(session: v1::Session, now: Timestamp) -> Result<ListedObject, CliError> {
    let document = ObjectDocument::of_message(&session);
    let line = decode_session(session)?;
    let row = vec![
        line.session.to_string(),
        line.component,
        or_dash(line.host.as_deref()),
        or_dash(line.pid.map(|pid| pid.to_string()).as_deref()),
        or_dash(line.version.as_deref()),
        humanize_duration(between(line.started_at, now)),
        relative_time(line.deadline, now),
        line.work.to_string(),
    ];
    Ok(ListedObject { names: ObjectNames::of_id(line.session.to_string()), rows: vec![row], document })
}

/// Decodes an open session of a process.
fn decode_session(session: v1::Session) -> Result<SessionSummary, CliError> {
    Ok(SessionSummary {
        session: parse_uuid(&session.session, "a session's id")?,
        process: parse_uuid(&session.process, "a process's id")?,
        component: session.component,
        host: session.host,
        pid: session.pid,
        version: session.version,
        started_at: require_timestamp(session.started_at, "the start time of a session")?,
        deadline: require_timestamp(session.deadline, "a session's deadline")?,
        work: session.work_items,
    })
}
