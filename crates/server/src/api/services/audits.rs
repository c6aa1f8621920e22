//! gRPC service Audit: list the audit log.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::{decode_timestamp, encode_optional_struct, encode_timestamp};
use crate::api::pagination;
use bmdb::machine::lookup::machine_id;
use bmdb::orders::audit::{self, AuditFilter, AuditRecord};
use model::plain_text::is_hidden;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::audit_server::Audit;

/// Longest text of a filter, in bytes.
const MAX_FILTER_BYTES: usize = 512;

/// The gRPC service `Audit`.
pub struct AuditService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl Audit for AuditService {
    async fn list(
        &self,
        request: Request<v1::ListAuditRequest>,
    ) -> Result<Response<v1::ListAuditResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.into_inner();
        let size = pagination::parse_page_size(body.page_size, 100, "page_size")?;
        let before = parse_moment(body.before, "before")?;
        let after = match pagination::decode_page_token("audit", &body.page_token)? {
            // A page ends before a moment if it has the id that is less than all others there.
            None => before.map(|before| (before, Uuid::nil())),
            Some(place) => Some(
                pagination::parse_time_cursor(&place)
                    .ok_or_else(|| pagination::invalid_page_token("audit"))?,
            ),
        };
        let machine = match body.machine.as_str() {
            "" => None,
            text => Some(machine_id(&self.context.find_machine(&caller, text).await?)),
        };
        let filter = AuditFilter {
            machine,
            actor: parse_filter_text(body.actor, "actor")?,
            rpc: parse_filter_text(body.rpc, "rpc")?.to_lowercase(),
            since: parse_moment(body.since, "since")?.unwrap_or(Timestamp::UNIX_EPOCH),
        };
        let (page, now) = self
            .context
            .read_pool
            .read_with(filter, move |tx, filter| {
                Box::pin(async move {
                    let now = bmdb::connection::database_now(tx).await?;
                    let after = after.unwrap_or((now, Uuid::max()));
                    Ok((audit::list_audit(tx, filter, after, size).await?, now))
                })
            })
            .await
            .map_err(bmdb_status)?;
        let next = page.next.map(|(at, audit)| pagination::encode_time_cursor(at, audit));
        Ok(Response::new(v1::ListAuditResponse {
            records: page.records.into_iter().map(encode_audit_line).collect(),
            next_page_token: next
                .map_or_else(String::new, |place| pagination::encode_page_token("audit", &place)),
            read_at: Some(encode_timestamp(now)),
        }))
    }
}

/// A moment in a request; `None` if it has none.
fn parse_moment(time: Option<prost_types::Timestamp>, field: &str) -> Result<Option<Timestamp>, Status> {
    let Some(time) = time else { return Ok(None) };
    // No order is older than 1970, and the database supports no much earlier time.
    let moment = decode_timestamp(time).filter(|at| *at >= Timestamp::UNIX_EPOCH);
    moment.map(Some).ok_or_else(|| invalid_argument(field, format!("{field} is no valid time")))
}

/// A text to compare with those of the audit.
fn parse_filter_text(text: String, field: &str) -> Result<String, Status> {
    if text.len() > MAX_FILTER_BYTES || text.contains(is_hidden) {
        let problem = format!("{field} is longer than {MAX_FILTER_BYTES} bytes, or has a hidden character");
        return Err(invalid_argument(field, problem));
    }
    Ok(text)
}

fn encode_audit_line(line: AuditRecord) -> v1::AuditRecord {
    v1::AuditRecord {
        audit_id: line.audit_id.to_string(),
        ordered_at: Some(encode_timestamp(line.at)),
        actor: line.actor,
        credential_id: line.credential_id.map(|credential| credential.to_string()),
        rpc: line.rpc,
        target: line.target,
        reason: line.reason,
        idempotency_key: line.idempotency_key,
        dry_run: line.dry_run,
        outcome: line.outcome,
        message: line.message,
        before: encode_optional_struct(line.before.as_ref()),
        after: encode_optional_struct(line.after.as_ref()),
    }
}
