//! TLS of the listeners: certificates, their rotation, and the verification of clients.
//!
//! Neither side needs a public certificate authority. A server has a certificate from files, or from an authority that
//! all shepherds of a BMDB share ([`callback_ca`][]). An agent has an Ed25519 key in a certificate that it signed
//! itself ([`client_verifier`][]). The BMDB decides whose key it is. An operator may have such a certificate too, or
//! connects without one and sends a token.
//!
//! * [`server_config`][]: the configuration of TLS, and a served certificate that can be replaced.
//! * [`server_certificate`][]: loads, issues and renews the certificate that is served.
//! * [`certificate_files`][]: reads a certificate from files.
//! * [`certificate_check`][]: whether the other side would accept a certificate from files now, with the reason.
//! * `certificate_expiry`: when clients stop to accept the served chain. Pure.
//! * [`certificate_rejection`][]: the alerts with which clients reject the certificate.
//! * [`certificate_rotation`][]: the order in which a new certificate and its authority reach agents. Pure.
//! * [`tracked_connection`][]: an accepted connection, with what is known of its peer, that can be closed from outside.
//!
//! # Invariants
//!
//! * TLS 1.3 only, and no session resumption: every connection proves its keys by new signatures.
//! * A certificate that no agent would accept yet is not served, unless the old one expires before the next check.
//! * A pair of files that cannot be used, or that clients would reject, is not served. A reload leaves the old
//!   certificate in place.
//! * The private key of an issued certificate never leaves the memory of the process.

pub mod callback_ca;
pub mod certificate_check;
mod certificate_expiry;
pub mod certificate_files;
pub mod certificate_rejection;
pub mod certificate_rotation;
pub mod client_verifier;
pub mod server_certificate;
pub mod server_config;
pub mod tracked_connection;
