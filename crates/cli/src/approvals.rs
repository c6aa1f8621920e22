//! `get approvals`, `approve`: orders that need a second admin (two-person rule).

use clap::Args;

use crate::client::decode::{decode_timestamp, parse_uuid, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, fetch_pages};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::object::resolve::{NameSpace, NamedId, parse_name, resolve_id, whole_id};
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use bmdb::orders::approval::ApprovalRecord;
use model::humanize::relative_time;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::approvals_client::ApprovalsClient;

const COLUMNS: [Column; 8] = [
    Column::always("APPROVAL"),
    Column::always("STATE"),
    Column::always("ENDS"),
    Column::always("REQUESTED BY"),
    Column::always("ORDER"),
    Column::always("ABOUT"),
    Column::always("APPROVED BY"),
    Column::always("REASON"),
];

pub(crate) const APPROVE_EXAMPLES: &str = "\
Example:
  shepherdctl approve 0d9e2a4c-6f1b-4c7e-9a53-2b8f6c1d7e90 --reason 'I looked at the row'

The requester cannot approve the order: the approver needs another credential and another name. After the
approval the requester gives the same order again, with the idempotency key of the first answer.";

/// Arguments of `approve`: the order, and the reason.
#[derive(Debug, Args)]
pub struct ApproveArgs {
    /// Request: its UUID, as `get approvals` lists it, or the beginning of it
    #[arg(value_name = "APPROVAL", value_parser = parse_name)]
    pub approval: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Lists orders with the state of their approval, newest first.
pub(crate) async fn list_approvals(client: &FleetClient, limit: Option<u32>) -> Result<ObjectList, CliError> {
    let mut service = ApprovalsClient::new(client.channel());
    let pages = fetch_pages(limit, String::new(), async |page| {
        let request = v1::ListApprovalsRequest { page_size: page.size, page_token: page.token };
        let mut response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let now = require_timestamp(response.read_at, "its read time")?;
        let approvals = std::mem::take(&mut response.approvals);
        let lines = approvals.into_iter().map(|approval| approval_object(approval, now));
        let lines = lines.collect::<Result<Vec<_>, _>>()?;
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await?;
    Ok(ObjectList::of_pages(ObjectKind::Approval, &COLUMNS, pages))
}

fn approval_object(approval: v1::Approval, now: Timestamp) -> Result<ListedObject, CliError> {
    let document = ObjectDocument::of_message(&approval);
    let line = decode_approval(approval)?;
    let names = ObjectNames::of_id(line.approval_id.to_string());
    Ok(ListedObject { names, rows: vec![approval_row(line, now)], document })
}

fn approval_row(line: ApprovalRecord, now: Timestamp) -> Vec<String> {
    vec![
        line.approval_id.to_string(),
        line.state,
        relative_time(line.expires_at, now),
        line.requested_by,
        line.rpc.rsplit('.').next().unwrap_or(&line.rpc).to_owned(),
        line.target,
        line.approved_by.unwrap_or_else(|| "-".to_owned()),
        line.reason,
    ]
}

fn decode_approval(approval: v1::Approval) -> Result<ApprovalRecord, CliError> {
    Ok(ApprovalRecord {
        approval_id: parse_uuid(&approval.approval_id, "an approval's id")?,
        state: approval.state,
        requested_by: approval.requested_by,
        rpc: approval.rpc,
        target: approval.target,
        reason: approval.reason,
        requested_at: require_timestamp(approval.requested_at, "the time of its request")?,
        expires_at: require_timestamp(approval.expires_at, "the time of its end")?,
        approved_by: approval.approved_by,
        approved_at: approval.approved_at.and_then(decode_timestamp),
        approve_reason: approval.approval_reason,
        used_at: approval.used_at.and_then(decode_timestamp),
    })
}

/// The id of a request. What the order is about is no name of it, because another order may be about the same.
async fn resolve_approval(client: &FleetClient, text: &str) -> Result<String, CliError> {
    if let Some(id) = whole_id(text) {
        return Ok(id);
    }
    let approvals = list_approvals(client, None).await?.objects;
    // The name of a request is its whole UUID.
    let named = |approval: ListedObject| NamedId { id: approval.names.name, name: None, is_current: true };
    let objects: Vec<NamedId> = approvals.into_iter().map(named).collect();
    let space = NameSpace { noun: "approval", list_command: "shepherdctl get approvals" };
    resolve_id(space, text, &objects)
}

/// Runs `approve`: approves an order that another admin gave.
pub async fn approve_order(context: &CommandContext, args: &ApproveArgs) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let approval = resolve_approval(&context.client, &args.approval).await?;
    let give = async |service, order| {
        let request = v1::ApproveRequest { order: Some(order), approval_id: approval.clone() };
        ApprovalsClient::new(service).approve(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    let text = format!("{approval} {}", response.message);
    context.format_outcome(&response, &text)
}
