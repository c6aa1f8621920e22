//! Callback server: agents send heartbeats, fetch files and upload logs.
//!
//! An agent opens its connection and keeps it. It may call any shepherd: each response to a heartbeat contains the
//! endpoints of all live servers.
//!
//! # How a heartbeat comes in
//!
//! 1. [`agent_acceptor`][] accepts the connection. Handshakes run concurrently, and the [gate](transport::gate) bounds
//!    their number and time. [`tls::certificate_rejection`](crate::tls::certificate_rejection) has the alerts with which
//!    clients reject the certificate.
//! 2. [`tls::client_verifier`](crate::tls::client_verifier) verifies that the peer has proven its key.
//! 3. [`callback_service`][] checks the rate of the key. [`heartbeat_validation`][] checks the form of the request, and
//!    [`hardware_summary`][] shortens what a hardware report contains for lists.
//! 4. The BMDB finds the machine of the key and stores the heartbeat. Until then the connection is only tolerated.
//! 5. The response contains the orders for the machine, and the logs that are requested of it. [`log_validation`][]
//!    checks the parts that it uploads, and [`file_downloads`][] sends it artefacts, and the snapshot that it restores
//!    ([`snapshot_source`][]) with its image of etcd ([`image_source`][]), as its sealed order says (`sealed_order`).
//!
//! [`callback_server`][] connects these and stops them in order.
//!
//! # Invariants
//!
//! * A connection on which no call proves a known agent is closed after a while. Beyond a limit an older one is closed,
//!   by the rules of the gate. So silent peers cannot lock out agents.
//! * The rejection of a machine id and key that do not belong together has one text, and comes at fixed times: it does
//!   not reveal what the database knows.
//! * Text of a machine is cleaned where it enters, because it is shown on terminals.
//! * While the database is away, agents keep their connections, and a call is answered with an error after which
//!   the agent retries.
//!
//! # Notes for the next implementor
//!
//! The services and messages are on the wire: in a roll-out, agents of an earlier release call this server. A new field
//! of a request is optional, and is checked before it is stored. A new call authenticates with the key of its
//! connection, as the others do.

pub mod agent_acceptor;
pub mod callback_server;
pub mod callback_service;
pub mod file_downloads;
pub mod hardware_summary;
pub mod heartbeat_validation;
pub mod image_source;
pub mod log_validation;
mod sealed_order;
pub mod snapshot_source;
