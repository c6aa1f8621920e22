//! Transport: TLS with the base of every certificate verifier, and the gate of every listener.
//!
//! # The threat
//!
//! Anyone who reaches a port can connect to it, and anyone on the path can answer in the place of a server. A
//! certificate does not stop them, because it is public: each peer shows it in every handshake, so anyone can show a
//! copy. What nobody can copy is the signature of one handshake by the key in the certificate.
//!
//! rustls leaves both checks to the verifier. A verifier that accepts a certificate and forgets the signature compiles,
//! and no test with honest peers fails. So only this crate implements verifiers, and a test of the workspace rejects
//! others. Its verifiers always check the signature. A user supplies only the decision about the certificate, and the
//! users differ there for good reasons: a pinned key, the authority of a cluster, a chain to given authorities, or any
//! certificate at all.
//!
//! # How the files fit
//!
//! * [`verifier`][]: the two verifiers, and what a user supplies. [`signature`][]: the handshake signatures that they
//!   accept.
//! * [`certificate`][]: the size, key and signature of an Ed25519 certificate, for users that pin a key or sign
//!   certificates themselves.
//! * [`config`][]: TLS 1.3 configurations without session resumption. A resumed session would replace a new signature
//!   by one made hours ago.
//! * [`gate`][]: how many connections a listener has, and which one gives way. Every listener has one.
//! * [`accept`][]: the handshake of a connection that a gate admitted.
//!
//! The provider of cryptography is named here (`ring`), because a library must not rely on the one that its process has
//! chosen.

pub mod accept;
pub mod certificate;
pub mod config;
pub mod gate;
pub mod signature;
#[cfg(test)]
mod testing;
pub mod verifier;
