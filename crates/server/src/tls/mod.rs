//! TLS of the listeners: configuration, certificates and connections.

pub mod callback_ca;
pub mod certificate_rotation;
pub mod client_verifier;
pub mod server_certificate;
pub mod server_config;
pub mod tracked_connection;
