//! Network listener of the fleet API: TLS, authentication, gRPC and JSON.
//!
//! [`operator_acceptor`][] accepts TLS connections, with or without a client certificate. [`auth`][] finds the
//! credential of each call, limits its rate, and checks it against the one table of
//! [`authorization`](crate::api::authorization). Then a gRPC call goes to its service. [`transcode`][] converts a JSON
//! call into the same gRPC call, with the same authentication, and converts the response back. [`openapi`][] describes
//! the JSON calls. [`api_server`][] connects these, publishes the server and stops it in order.
//!
//! # Invariants
//!
//! * A call without a credential is rejected by its headers, and nothing more of it is read. Only the calls that the
//!   table calls public are excepted, and `public_calls` bounds them.
//! * A token is looked up for each call, so that revoking it takes effect with the next call.
//! * One source has only a part of all connections ([`source_limits`][]), and a bounded rate of calls.
//! * Another site's web page cannot make a browser call the API: the content types that are accepted need a CORS
//!   preflight.
//! * No code is written per call, so gRPC, JSON and the OpenAPI document cannot differ.

pub mod api_server;
pub mod auth;
pub mod openapi;
pub mod operator_acceptor;
mod public_calls;
pub mod source_limits;
pub mod transcode;
mod unread_body;
