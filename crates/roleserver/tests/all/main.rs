//! Children of the role server as real processes, with a stand-in for systemd, and orders to its machine.

mod authority_orders;
mod fake_systemd;
mod host;
mod migration;
mod root_filesystem;
mod scopes;
mod systemd_calls;
