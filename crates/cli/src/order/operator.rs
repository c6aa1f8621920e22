//! Operator of an order, as history and audit record it.
//!
//! A server identifies the operator by the credential. With `--bmdb-url` it is the user of the environment, because an
//! operator with write access to the database is trusted.

use bmdb::orders::order::{Actor, Order, request_digest};
use model::plain_text::visible_text;

/// The operator for the history: `kim@workstation`.
pub(crate) fn current_user() -> String {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
    let user = variable("USER")
        .or_else(|| variable("LOGNAME"))
        .unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    visible_text(&format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy()))
}

/// An order of a command that writes to the BMDB without any API (`FleetClient::require_bmdb`).
pub(crate) fn direct_order(rpc: &str, target: String, reason: Option<&str>) -> Order {
    Order {
        actor: Actor { name: current_user(), credential: None },
        rpc: rpc.to_owned(),
        target,
        reason: visible_text(reason.unwrap_or_default()),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    }
}
