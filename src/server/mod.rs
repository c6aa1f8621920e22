//! What listens: the callback server that agents report to, the [`api`] that operators call, and metrics.
//!
//! # How a heartbeat comes in
//!
//! [`accept`] takes connections and lets handshakes run beside each other, bounded by
//! [`half_open`]; [`tls`] says whose key is believed to be proven; [`callback_service`] checks form
//! and rate and answers in gRPC; the BMDB decides and stores. Who has said no heartbeat that is an
//! agent's is borne for a while ([`unproven`]). What logs are wanted of a
//! machine goes out with the answer; the parts that it brings are checked by [`log_form`]. [`callback_server`] ties these
//! together and ends them in order, and [`presence`] makes it known. The server's own certificate comes from files, replaced as
//! [`rotation`] says, or from [`authority`], one for all shepherds of a BMDB ([`certificate`]).
//!
//! # What an agent can do to us
//!
//! Anyone who reaches the port can open connections, so nothing here waits for a peer without a
//! deadline or keeps memory for one without a bound; and anyone can make a key, so proving one
//! means nothing until the BMDB knows it. Errors say what was malformed, never what is known.

pub mod accept;
pub mod api;
pub mod authority;
pub mod callback_server;
pub mod callback_service;
pub mod carried;
pub mod certificate;
pub mod error;
pub mod fetching;
pub mod half_open;
pub mod hardware_summary;
pub mod heartbeat_form;
pub mod log_form;
pub mod metrics;
pub mod presence;
pub mod rotation;
pub mod snapshot_source;
pub mod tls;
pub mod unproven;
