//! Network listener of the fleet API: TLS, authentication, gRPC and JSON.

pub mod api_server;
pub mod auth;
pub mod openapi;
pub mod operator_acceptor;
mod public_calls;
pub mod source_limits;
pub mod transcode;
