//! `get audit`: orders that were given.

use clap::Args;

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, fetch_pages};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use model::humanize::{absolute_time, humanize_duration};
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::audit_client::AuditClient;

/// Page size of the list: a record may have the state of its target twice.
const PAGE_SIZE: i32 = 100;

const COLUMNS: [Column; 8] = [
    Column::always("AGE"),
    Column::always("AT"),
    Column::always("BY"),
    Column::always("ORDER"),
    Column::always("ABOUT"),
    Column::always("OUTCOME"),
    Column::always("REASON"),
    Column::always("AUDIT"),
];

/// Which orders `get audit` lists.
#[derive(Debug, Default, Args)]
pub struct AuditListArgs {
    /// Only orders about this machine
    #[arg(long, value_name = "M")]
    pub machine: Option<String>,
}

/// Lists orders, newest first.
pub(crate) async fn list_audit(
    client: &FleetClient,
    args: &AuditListArgs,
    limit: Option<u32>,
) -> Result<ObjectList, CliError> {
    let mut service = AuditClient::new(client.channel());
    let pages = fetch_pages(limit, String::new(), async |page| {
        let request = v1::ListAuditRequest {
            page_size: page.size.min(PAGE_SIZE),
            page_token: page.token,
            machine: args.machine.clone().unwrap_or_default(),
        };
        let mut response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let now = require_timestamp(response.read_at, "its read time")?;
        let records = std::mem::take(&mut response.records);
        let lines = records.iter().map(|record| record_object(record, now)).collect();
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await?;
    Ok(ObjectList::of_pages(ObjectKind::Audit, &COLUMNS, pages))
}

fn record_object(record: &v1::AuditRecord, now: Timestamp) -> ListedObject {
    let at = record.ordered_at.and_then(decode_timestamp);
    let row = vec![
        at.map_or_else(|| "-".to_owned(), |at| humanize_duration(between(at, now))),
        at.map_or_else(|| "-".to_owned(), absolute_time),
        record.actor.clone(),
        record.rpc.rsplit('.').next().unwrap_or(&record.rpc).to_owned(),
        record.target.clone(),
        if record.dry_run { format!("{} (dry run)", record.outcome) } else { record.outcome.clone() },
        record.reason.clone(),
        record.audit_id.clone(),
    ];
    ListedObject {
        names: ObjectNames::of_id(record.audit_id.clone()),
        rows: vec![row],
        document: ObjectDocument::of_message(record),
    }
}
