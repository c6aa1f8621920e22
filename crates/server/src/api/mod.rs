//! Fleet API: gRPC and JSON for operators.
//!
//! # How a call comes in
//!
//! `listener` accepts TLS connections, with or without a client certificate. A gRPC call goes to the service of its
//! path. `transcode` converts a JSON call into the same gRPC call by the descriptors, and converts the response
//! back. Both pass through `auth`: it finds the credential, and checks it against the one table of [`authorization`].
//! [`services`] then finds the service by the path of the call.
//!
//! `shepherdctl --bmdb_url` runs the same services in its own process ([`in_process`]), checked against the same table
//! with the rights of an admin. There is no other way to a service.
//!
//! * [`machines`], [`fleet`], [`credentials`], [`audits`]: the services. They read through
//!   [`ReadPool`](bmdb::read_pool::ReadPool), a bounded pool of their own, and give orders through
//!   [`Bmdb::execute_on_machine`](bmdb::connection::Bmdb::execute_on_machine), which writes the audit.
//! * [`plan_service`], [`describe`]: what is computed from all machines, sent in chunks by [`fleet_stream`], and
//!   everything about one machine.
//! * [`machine_watch`]: streams, which end with the credential that opened them. [`closing_stream`] defines how they
//!   end, [`stream_limits`] how many there may be.
//! * `openapi`: the same descriptors as an OpenAPI document.
//! * [`validate`], [`pagination`]: checks of a request before anything else is done with it.
//! * [`api_error`]: errors as sentences, with the standard details of gRPC.
//!
//! # What a caller can do to us
//!
//! Nothing is decided here that the engine does not decide for itself. A caller can use a bounded number of
//! connections and watches, a bounded rate of calls, and database queries of bounded duration. A list is read in
//! pages, and a page examines a bounded number of machines. Queries over all machines run for a bounded number of
//! callers at once. A caller without a credential is rejected by the headers of the call, and nothing more of the call
//! is read.
//!
//! What listens exists only in the service: `shepherdctl` links neither a web server nor reflection.

pub mod api_error;
pub mod authorization;
pub mod caller;
pub mod closing_stream;
pub mod context;
pub mod convert;
pub mod credential_checks;
pub mod fleet_stream;
pub mod in_process;
pub mod incoming_order;
#[cfg(feature = "listeners")]
pub mod listener;
pub mod pagination;
pub mod services;
mod stream_end;
pub mod stream_limits;
pub mod validate;
