//! gRPC service Loops: list and pause control loops.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::{encode_pause, encode_timestamp};
use crate::api::incoming_order::IncomingOrder;
use crate::api::services::order_fields::{parse_expiry_after, parse_expiry_at};
use crate::api::validate::single_line;
use bmdb::orders::loop_pause::{NewPause, list_loops};
use model::pause::{LoopKind, describe_target};
use model::rpc_name::{PAUSE_LOOP_RPC, RESUME_LOOP_RPC};
use proto::fleet::v1;
use proto::fleet::v1::loops_server::Loops;

const MAX_PROVIDER_CHARS: usize = 100;

/// The gRPC service `Loops`.
pub struct LoopsService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl Loops for LoopsService {
    async fn list(
        &self,
        _: Request<v1::ListLoopsRequest>,
    ) -> Result<Response<v1::ListLoopsResponse>, Status> {
        let (loops, now) = self
            .context
            .read_pool
            .read(|tx| Box::pin(async move { list_loops(tx).await }))
            .await
            .map_err(bmdb_status)?;
        let loops = loops.iter().map(|state| v1::Loop {
            name: state.loop_kind.as_str().to_owned(),
            workers: state.workers,
            pauses: state.pauses.iter().map(encode_pause).collect(),
        });
        Ok(Response::new(v1::ListLoopsResponse {
            loops: loops.collect(),
            read_at: Some(encode_timestamp(now)),
        }))
    }

    async fn pause(
        &self,
        request: Request<v1::PauseLoopRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let (of, provider) = (parse_loop(&body.name)?, parse_provider(&body.provider)?);
        let until = match &body.expiry {
            None => None,
            Some(v1::pause_loop_request::Expiry::ExpiresAt(time)) => Some(parse_expiry_at(*time)?),
            Some(v1::pause_loop_request::Expiry::ExpiresAfter(text)) => Some(parse_expiry_after(text)?),
        };
        let target = describe_target(of, provider.as_deref());
        let new = NewPause { paused_loop: of, provider, until, actor: caller.name().to_owned() };
        IncomingOrder { rpc: PAUSE_LOOP_RPC, request: &request, order: body.order.as_ref() }
            .execute(target, |order| self.context.bmdb.pause_loop(order, new))
            .await
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeLoopRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let (of, provider) = (parse_loop(&body.name)?, parse_provider(&body.provider)?);
        IncomingOrder { rpc: RESUME_LOOP_RPC, request: &request, order: body.order.as_ref() }
            .execute(describe_target(of, provider.as_deref()), |order| {
                self.context.bmdb.resume_loop(order, of, provider)
            })
            .await
    }
}

fn parse_loop(text: &str) -> Result<LoopKind, Status> {
    text.parse().map_err(|error: model::process::UnknownName| invalid_argument("name", error.to_string()))
}

/// Validates the name of the provider; `None` if it is empty.
fn parse_provider(text: &str) -> Result<Option<String>, Status> {
    let provider = single_line("provider", text, MAX_PROVIDER_CHARS)?;
    if provider == "*" {
        return Err(invalid_argument("provider", "leave the provider out to mean the machines of all"));
    }
    Ok(Some(provider.to_owned()).filter(|provider| !provider.is_empty()))
}
