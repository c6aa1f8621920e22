//! Providers: sources of machines, power and reboots.
//!
//! # Purpose
//!
//! [`provider::Provider`] is the interface between the control loops and a source of machines. Each kind of source is
//! implemented in one file. A provider lists machines and carries out orders for single machines; it decides nothing.
//! The manager decides when to create, which machine to reboot, and how often.
//!
//! # Non-goals
//!
//! A provider knows no SQL and no SSH. It keeps nothing that must survive it: the caller records each order under an
//! intent id before the call.

pub mod http;
pub mod provider;
pub mod simulated;
pub mod simulated_responses;
pub mod static_commands;
pub mod static_list;
pub mod static_provider;
pub mod static_source;
