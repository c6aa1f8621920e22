//! gRPC service Updates: roll-outs of role server releases.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::IncomingOrder;
use crate::api::validate::single_line;
use bmdb::fleet::roll_out::{NewRollOut, RollOutChange, list_roll_outs, order_target};
use model::roll_out_view::{RollOutMachineView, RollOutView};
use model::rpc_name::{ABORT_UPDATE_RPC, CREATE_UPDATE_RPC, PAUSE_UPDATE_RPC, RESUME_UPDATE_RPC};
use model::selector::error::SelectorError;
use proto::fleet::v1;
use proto::fleet::v1::updates_server::Updates;

/// Longest name of a release in a request, in characters.
const MAX_NAME_CHARS: usize = 100;
/// Default time limit for one machine, in seconds.
const DEFAULT_DEADLINE_SECONDS: u32 = 120;

/// The gRPC service `Updates`.
pub struct UpdatesService {
    /// Context shared by all services.
    pub context: ApiContext,
}

impl UpdatesService {
    async fn change_update(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
        (rpc, change): (&'static str, RollOutChange),
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let id = single_line("id", &body.id, MAX_NAME_CHARS)?.to_owned();
        IncomingOrder { rpc, request: &request, order: body.order.as_ref() }
            .execute(order_target(&id), |order| self.context.bmdb.change_roll_out(order, id, change))
            .await
    }
}

#[tonic::async_trait]
impl Updates for UpdatesService {
    async fn list(
        &self,
        request: Request<v1::ListUpdatesRequest>,
    ) -> Result<Response<v1::ListUpdatesResponse>, Status> {
        let id = Some(request.into_inner().id).filter(|id| !id.is_empty());
        let look = self.context.read_pool.read_with(id, |tx, id| Box::pin(list_roll_outs(tx, id.as_deref())));
        let (found, now) = look.await.map_err(bmdb_status)?;
        let updates = found.into_iter().map(encode_update).collect();
        Ok(Response::new(v1::ListUpdatesResponse { updates, read_at: Some(encode_timestamp(now)) }))
    }

    async fn create(
        &self,
        request: Request<v1::CreateUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let new = NewRollOut {
            release: single_line("release", &body.release, MAX_NAME_CHARS)?.to_owned(),
            selector: body
                .selector
                .parse()
                .map_err(|error: SelectorError| invalid_argument("selector", error.to_string()))?,
            parallelism: body.parallelism.max(1),
            deadline_seconds: if body.deadline_seconds == 0 {
                DEFAULT_DEADLINE_SECONDS
            } else {
                body.deadline_seconds
            },
        };
        IncomingOrder { rpc: CREATE_UPDATE_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&new.release), |order| self.context.bmdb.create_roll_out(order, new))
            .await
    }

    async fn pause(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_update(request, (PAUSE_UPDATE_RPC, RollOutChange::Pause)).await
    }

    async fn resume(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_update(request, (RESUME_UPDATE_RPC, RollOutChange::Resume)).await
    }

    async fn abort(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change_update(request, (ABORT_UPDATE_RPC, RollOutChange::Abort)).await
    }
}

fn encode_update(view: RollOutView) -> v1::Update {
    v1::Update {
        id: view.id,
        release: view.release,
        sha256: view.sha256,
        selector: view.selector,
        parallelism: view.parallelism,
        deadline_seconds: view.deadline_seconds,
        created_at: Some(encode_timestamp(view.created_at)),
        created_by: view.created_by,
        reason: view.reason,
        pause_reason: view.pause_reason,
        ended_at: view.ended_at.map(encode_timestamp),
        outcome: view.outcome,
        counts: view.counts,
        machines: view.machines.into_iter().map(encode_machine).collect(),
    }
}

fn encode_machine(view: RollOutMachineView) -> v1::UpdateMachine {
    v1::UpdateMachine {
        machine: view.machine,
        name: view.name,
        state: view.state,
        message: view.message,
        state_since: Some(encode_timestamp(view.state_since)),
    }
}
