//! Commands about machines: lists, explanations and orders.
//!
//! A command that reads names one machine, or selects many by filters ([`selection`][]). An order names any number of
//! machines, also on standard input, or selects them ([`order_targets`][]). An order for many is a bulk order
//! ([`bulk_order`][]): the machines of a filter are listed, and their number is confirmed before anything is sent.
//! `machine_order` chooses between both. An order for one machine is decided by the server, under the machine's lock and on the facts that are read there
//! ([`bmdb::orders::machine_decision`]). It writes one line of history and one of the audit, with the operator and the
//! reason.

pub mod allow_host_key;
pub mod allow_signing_keys;
pub mod bulk_order;
pub mod describe;
pub mod fetch;
pub mod footer;
pub mod get;
pub mod history;
pub mod hold;
pub mod label;
pub mod logs;
mod machine_order;
pub mod named;
pub mod order_targets;
pub mod outcome;
pub mod power;
mod printed_machines;
pub mod prioritize;
pub mod quarantine;
pub mod retire;
pub mod retry;
pub mod selection;
pub mod summary;
pub mod timeline;
pub mod watch;
pub mod why;
