//! Fleet API: services for operators, over gRPC, JSON, and in the process of `shepherdctl`.
//!
//! Every question and every order of an operator goes through the services of this module, except `declare restored`
//! and `tokens bootstrap`. There are two ways to them. The network `listener` authenticates a call by its credential.
//! `shepherdctl --bmdb-url` runs the same services in its own process ([`in_process`][]), with the rights of an admin,
//! because a user who may write to the database can change everything in it. Both check the same table
//! ([`authorization`][]) and call the same entrance ([`services`][]).
//!
//! # How a call is answered
//!
//! 1. A [`Caller`](caller::Caller) is attached to the call: who makes it, with which role, and for which machines.
//! 2. The service validates the request ([`validate`][], [`pagination`][]). An error names the field ([`api_error`][]).
//! 3. A query reads through [`ReadPool`](bmdb::connection::read_pool::ReadPool), a bounded pool of its own. An order
//!    ([`incoming_order`][]) goes through one function of [`Bmdb`](bmdb::connection::Bmdb) that decides, carries it out
//!    and writes the audit in one transaction. A bulk order is one such transaction for each machine.
//! 4. [`convert`][] encodes the result.
//!
//! Some answers are streams. Watches send changes until they end. A plan or a list of issues is computed from all
//! machines and sent in chunks ([`fleet_stream`][]). A stream ends with the server, with its credential
//! ([`credential_checks`][]), or when its client is gone or reads too slowly (`stream_end`). [`closing_stream`][]
//! defines how it ends, [`stream_limits`][] how many there may be.
//!
//! # Invariants
//!
//! * Nothing is decided here that the engine does not decide for itself.
//! * A caller can use a bounded number of connections and streams, a bounded rate of calls, and queries of bounded
//!   duration. A list is read in pages, and a page examines a bounded number of machines. A bounded number of queries
//!   over all machines runs at once.
//! * An order has a reason, and an idempotency key unless it is a dry run. If it is carried out, it is in the audit.
//! * The scope of a credential is checked wherever a machine is named or listed.
//! * The cause of an internal failure goes to the log. Only a login to the database gets it, since no shepherd has a
//!   log of its call.
//!
//! # Notes for the next implementor
//!
//! `CONTRIBUTING.md` has the steps for a new call. A call that has no row in the table is rejected, and a test fails
//! for it. A service must not hold a connection to the database while it waits for another one: in the process of
//! `shepherdctl` there is only one.

pub mod api_error;
pub mod authorization;
pub mod caller;
pub mod closing_stream;
pub mod context;
pub mod convert;
pub mod credential_checks;
pub mod error_json;
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
