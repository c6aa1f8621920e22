//! Server: the services of the fleet [`api`][], and what listens for agents, operators and Prometheus.
//!
//! Three kinds of clients connect to a shepherd. Agents report and fetch what they need ([`callback`][]). Operators and
//! their programs read the fleet and give orders ([`api`][]). Monitoring reads metrics and health
//! ([`metrics_server`][]). Nothing is decided here. This crate checks who calls, whether the request has the
//! right form, and how much one client may use. The BMDB and the model decide, and this crate encodes their answers.
//!
//! # Modules
//!
//! * [`callback`][]: the server of agents.
//! * [`api`][]: the fleet API: its services, its network listener, and the same services in the process of
//!   `shepherdctl`.
//! * [`tls`][]: certificates, their rotation, and the verification of clients, for both.
//! * [`endpoint_registration`][]: publishes the addresses of a listener in the BMDB for as long as it runs.
//! * [`rate_limiter`][]: the rates of agents and operators.
//! * [`metrics_server`][]: metrics and health.
//! * `gate_metrics`: what the [gates](transport::gate) of the three listeners count.
//! * [`error`][]: why a listener could not start.
//!
//! # Invariants
//!
//! * Anyone who reaches the port of agents or of operators can open connections. So these servers do not wait for a
//!   peer without a deadline, or use memory for one without a bound, and one source cannot use up what all share.
//! * Anyone can generate a key. To prove one means nothing until the BMDB knows it.
//! * Errors name what is malformed, never what is known. Details of a failure go to the log.
//! * A server listens before it publishes itself. It stops in this order: no more connections, calls in progress are
//!   answered, what waits is stored, the session is closed.
//! * There is one implementation of every call of the fleet API.
//!
//! # Notes for the next implementor
//!
//! What listens is behind the feature `listeners`, which `shepherdctl` does not enable: it links neither a web server
//! nor TLS for servers. Code that only a listener needs belongs below [`callback`][], [`tls`][] or [`api::listener`][].

pub mod api;
#[cfg(feature = "listeners")]
pub mod callback;
#[cfg(feature = "listeners")]
pub mod endpoint_registration;
#[cfg(feature = "listeners")]
pub mod error;
#[cfg(feature = "listeners")]
mod gate_metrics;
#[cfg(feature = "listeners")]
pub mod metrics_server;
#[cfg(feature = "listeners")]
pub mod rate_limiter;
#[cfg(feature = "listeners")]
pub mod tls;
