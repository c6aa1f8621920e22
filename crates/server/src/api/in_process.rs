//! The fleet API in the caller's own process, over its connection to the database.
//!
//! `shepherdctl --bmdb-url` works without a shepherd: it runs the services of the API itself and calls them through
//! this channel. Calls are encoded and decoded as over the network, but no socket is opened, and one connection to the
//! database suffices. The caller is [`Caller::DatabaseLogin`], which needs no credential of ours.
//!
//! No service may hold the one connection while it waits for another one. Errors contain their cause, for example what
//! the database answered ([`Caller::reveal_cause`]), because there is no log of a server to look it up in.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::{Code, Status};

use crate::api::api_error::error_status;
use crate::api::authorization::{authorize_call, find_rule};
use crate::api::caller::Caller;
use crate::api::context::ApiContext;
use crate::api::credential_checks::CredentialChecks;
use crate::api::services::FleetServices;
use crate::api::stream_limits::StreamLimits;
use bmdb::connection::Bmdb;
use bmdb::connection::error::BmdbError;
use bmdb::connection::read_pool::ReadPool;

/// Most watches at once; one caller may have a quarter of them.
const MAX_WATCHES: usize = 16;

/// A channel to the services in this process; cheap to clone.
#[derive(Clone)]
pub struct InProcessChannel {
    services: FleetServices,
    caller: Caller,
}

impl InProcessChannel {
    /// The services over this handle, called in the name of `user`, for example `kim@workstation`. Reads the policy,
    /// which a shepherd has read since its start.
    pub async fn connect(bmdb: &Bmdb, user: &str) -> Result<Self, BmdbError> {
        bmdb.read_policy().await?;
        let read_pool = ReadPool::from_handle(bmdb.clone());
        let context = ApiContext {
            bmdb: bmdb.clone(),
            credential_checks: CredentialChecks::new(read_pool.clone()),
            auth_pool: read_pool.clone(),
            read_pool,
            // The keys are in files of shepherds, so a caller at the database adds no signature.
            signing: Arc::default(),
            watch_limits: StreamLimits::new(MAX_WATCHES),
            stop: CancellationToken::new(),
        };
        Ok(Self { services: FleetServices::new(&context), caller: Caller::DatabaseLogin(Arc::from(user)) })
    }
}

impl Service<http::Request<Body>> for InProcessChannel {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let rpc = request.uri().path().trim_start_matches('/');
        let admitted =
            find_rule(rpc).map(|rule| authorize_call(&rule, self.caller.role(), self.caller.scope()));
        let rejected = match admitted {
            Some(Ok(())) => {
                request.extensions_mut().insert(self.caller.clone());
                let (answered, caller) = (self.services.call(request), self.caller.clone());
                return Box::pin(async move {
                    let Ok(response) = answered.await;
                    // tonic leaves the status of a failed call in the extensions, with its source.
                    Ok(match response.extensions().get::<Status>() {
                        Some(status) => caller.reveal_cause(status.clone()).into_http(),
                        None => response,
                    })
                });
            }
            Some(Err(reason)) => error_status(Code::PermissionDenied, "PERMISSION_DENIED", reason),
            None => error_status(Code::Unimplemented, "UNKNOWN_RPC", format!("there is no call {rpc}")),
        };
        Box::pin(std::future::ready(Ok(rejected.into_http())))
    }
}
