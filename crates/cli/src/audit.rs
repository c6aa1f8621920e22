//! `get audit`: orders that were given.

use clap::Args;

use crate::client::decode::decode_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::page_size;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use proto::fleet::v1;
use proto::fleet::v1::audit_client::AuditClient;

/// Page size of the list: a record may have the state of its target twice.
const PAGE_SIZE: i32 = 100;

const COLUMNS: [Column; 7] = [
    Column::always("AT (UTC)"),
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
    let (mut objects, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListAuditRequest {
            page_size: page_size(limit, objects.len()).min(PAGE_SIZE),
            page_token: page_token.clone(),
            machine: args.machine.clone().unwrap_or_default(),
        };
        let mut page = service.list(request).await.map_err(status_to_error)?.into_inner();
        objects.extend(std::mem::take(&mut page.records).iter().map(record_object));
        page_token.clone_from(&page.next_page_token);
        if page_size(limit, objects.len()) == 0 || page_token.is_empty() {
            let list = ObjectList::of_response(ObjectKind::Audit, &page, &COLUMNS, objects);
            return Ok(ObjectList { has_more: !page_token.is_empty(), ..list });
        }
    }
}

fn record_object(record: &v1::AuditRecord) -> ListedObject {
    let at = record.ordered_at.and_then(decode_timestamp);
    let row = vec![
        at.map_or_else(|| "-".to_owned(), |at| at.format("%Y-%m-%d %H:%M:%S").to_string()),
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
