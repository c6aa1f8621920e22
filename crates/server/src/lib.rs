//! Listeners: agent callback server, fleet [`api`], metrics.
//!
//! # How a heartbeat comes in
//!
//! [`agent_acceptor`] accepts connections and runs handshakes concurrently, bounded by [`half_open`]. [`tls`] verifies
//! that the peer has proven its key. [`callback_service`] checks form and rate, and answers in gRPC; the BMDB decides
//! and stores. A connection without a heartbeat of a known agent is tolerated for a while ([`preauth`]). The response
//! contains the logs that are requested of the machine, and [`log_validation`] checks the parts that it uploads.
//! [`callback_server`] connects these and stops them in order, and [`endpoint_registration`] publishes the server. The
//! server's own certificate comes from files, which are replaced in the order of [`certificate_rotation`], or from
//! [`callback_ca`], one authority for all shepherds of a BMDB ([`server_certificate`]).
//!
//! # What an agent can do to us
//!
//! Anyone who reaches the port can open connections. So nothing here waits for a peer without a deadline, or uses
//! memory for one without a bound. Anyone can also generate a key, so proving one means nothing until the BMDB has it.
//! Errors name what is malformed, never what is known.

pub mod api;
#[cfg(feature = "listeners")]
pub mod callback;
#[cfg(feature = "listeners")]
pub mod endpoint_registration;
#[cfg(feature = "listeners")]
pub mod error;
#[cfg(feature = "listeners")]
pub mod metrics_server;
#[cfg(feature = "listeners")]
pub mod rate_limiter;
#[cfg(feature = "listeners")]
pub mod tls;
