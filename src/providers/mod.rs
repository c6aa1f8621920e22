//! Sources of machines, and of power over them.
//!
//! # Purpose
//!
//! [`provider::Provider`] is what the control loops know of a source of
//! machines; one file per kind stands behind it. A provider is asked what there
//! is and told what to do with one machine; it decides nothing. When to create,
//! whom to reboot and how often is the manager's.
//!
//! # Non-goals
//!
//! A provider knows no SQL and no SSH. It keeps nothing that must survive it:
//! what was asked of it is recorded by the caller, under an intent id, before
//! the call.

pub mod http;
pub mod provider;
pub mod simulated;
pub mod simulated_answers;
pub mod static_commands;
pub mod static_list;
pub mod static_provider;
pub mod static_source;
