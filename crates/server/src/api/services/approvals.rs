//! gRPC service Approvals: two-person rule.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::IncomingOrder;
use crate::api::pagination;
use bmdb::orders::approval::{ApprovalRecord, list_approvals};
use model::rpc_name::APPROVE_RPC;
use model::two_person_rule::Principal;
use proto::fleet::v1;
use proto::fleet::v1::approvals_server::Approvals;

/// The gRPC service `Approvals`.
pub struct ApprovalsService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl Approvals for ApprovalsService {
    async fn list(
        &self,
        request: Request<v1::ListApprovalsRequest>,
    ) -> Result<Response<v1::ListApprovalsResponse>, Status> {
        let body = request.into_inner();
        let size = pagination::parse_page_size(body.page_size, 100, "page_size")?;
        let after = match pagination::decode_page_token("approvals", &body.page_token)? {
            None => None,
            Some(place) => Some(
                pagination::parse_time_cursor(&place)
                    .ok_or_else(|| pagination::invalid_page_token("approvals"))?,
            ),
        };
        let look = self
            .context
            .read_pool
            .read(move |tx| Box::pin(async move { list_approvals(tx, after, size + 1).await }));
        let (mut found, now) = look.await.map_err(bmdb_status)?;
        let more = pagination::drop_surplus(&mut found, size);
        let next = found
            .last()
            .filter(|_| more)
            .map(|last| pagination::encode_time_cursor(last.requested_at, last.approval_id));
        Ok(Response::new(v1::ListApprovalsResponse {
            approvals: found.into_iter().map(encode_approval).collect(),
            read_at: Some(encode_timestamp(now)),
            next_page_token: next
                .map_or_else(String::new, |place| pagination::encode_page_token("approvals", &place)),
        }))
    }

    async fn approve(
        &self,
        request: Request<v1::ApproveRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let approval = Uuid::try_parse(&body.approval_id).map_err(|_| {
            invalid_argument("approval_id", format!("{:?} is no approval's UUID", body.approval_id))
        })?;
        let by = Principal { name: caller.name().to_owned(), credential: caller.credential_id() };
        IncomingOrder { rpc: APPROVE_RPC, request: &request, order: body.order.as_ref() }
            .execute(format!("approval {approval}"), |order| {
                self.context.bmdb.approve_order(order, approval, by)
            })
            .await
    }
}

fn encode_approval(line: ApprovalRecord) -> v1::Approval {
    v1::Approval {
        approval_id: line.approval_id.to_string(),
        state: line.state,
        requested_by: line.requested_by,
        rpc: line.rpc,
        target: line.target,
        reason: line.reason,
        requested_at: Some(encode_timestamp(line.requested_at)),
        expires_at: Some(encode_timestamp(line.expires_at)),
        approved_by: line.approved_by,
        approved_at: line.approved_at.map(encode_timestamp),
        approval_reason: line.approve_reason,
        used_at: line.used_at.map(encode_timestamp),
    }
}
