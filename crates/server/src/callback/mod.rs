//! Callback server: heartbeats, file downloads and log uploads of agents.

pub mod agent_acceptor;
pub mod callback_server;
pub mod callback_service;
pub mod file_downloads;
pub mod half_open;
pub mod hardware_summary;
pub mod heartbeat_validation;
pub mod log_validation;
pub mod preauth;
pub mod snapshot_source;
