//! The service `Approvals`.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::bmdb::approval::{ApprovalLine, RPC, approvals};
use crate::model::second_person::Person;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::approvals_server::Approvals;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;

/// The service.
pub struct ApprovalsService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Approvals for ApprovalsService {
    async fn list(
        &self,
        _: Request<v1::ListApprovalsRequest>,
    ) -> Result<Response<v1::ListApprovalsResponse>, Status> {
        let look = self.site.looks.look(|tx| Box::pin(async move { approvals(tx).await }));
        let (found, now) = look.await.map_err(of_bmdb)?;
        Ok(Response::new(v1::ListApprovalsResponse {
            approvals: found.into_iter().map(told).collect(),
            at: Some(at(now)),
        }))
    }

    async fn approve(
        &self,
        request: Request<v1::ApproveRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let approval = Uuid::try_parse(&asked.approval)
            .map_err(|_| wrong("approval", format!("{:?} is no approval's UUID", asked.approval)))?;
        let order = Said { rpc: RPC, request: asked, order: asked.order.as_ref() }
            .read(&caller, format!("approval {approval}"))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let by = Person { name: caller.credential().name.clone(), credential: Some(caller.credential().id) };
        let carried = self.site.bmdb.approve(order, approval, by).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }
}

fn told(line: ApprovalLine) -> v1::Approval {
    v1::Approval {
        approval: line.approval.to_string(),
        state: line.state,
        asked_by: line.asked_by,
        rpc: line.rpc,
        target: line.target,
        reason: line.reason,
        asked_at: Some(at(line.asked_at)),
        expires_at: Some(at(line.expires_at)),
        approved_by: line.approved_by,
        approved_at: line.approved_at.map(at),
        approve_reason: line.approve_reason,
        used_at: line.used_at.map(at),
    }
}
