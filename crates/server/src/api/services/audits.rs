//! gRPC service Audit: list the audit log.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::api_error::bmdb_status;
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::{encode_optional_struct, encode_timestamp};
use crate::api::pagination;
use bmdb::machine::lookup::machine_id;
use bmdb::orders::audit::{self, AuditRecord};
use proto::fleet::v1;
use proto::fleet::v1::audit_server::Audit;

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
        let after = match pagination::decode_page_token("audit", &body.page_token)? {
            None => None,
            Some(place) => Some(
                pagination::parse_time_cursor(&place)
                    .ok_or_else(|| pagination::invalid_page_token("audit"))?,
            ),
        };
        let machine = match body.machine.as_str() {
            "" => None,
            text => Some(machine_id(&self.context.find_machine(&caller, text).await?)),
        };
        let (mut lines, now) = self
            .context
            .read_pool
            .read(move |tx| {
                Box::pin(async move {
                    let now = bmdb::connection::database_now(tx).await?;
                    let after = after.unwrap_or((now, Uuid::max()));
                    Ok((audit::list_audit(tx, machine, after, size + 1).await?, now))
                })
            })
            .await
            .map_err(bmdb_status)?;
        let more = pagination::drop_surplus(&mut lines, size);
        let next =
            lines.last().filter(|_| more).map(|line| pagination::encode_time_cursor(line.at, line.audit_id));
        Ok(Response::new(v1::ListAuditResponse {
            records: lines.into_iter().map(encode_audit_line).collect(),
            next_page_token: next
                .map_or_else(String::new, |place| pagination::encode_page_token("audit", &place)),
            read_at: Some(encode_timestamp(now)),
        }))
    }
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
