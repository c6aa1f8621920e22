//! Children of the role server as real processes, with a stand-in for systemd, orders to its machine, health
//! checks, and reports of its hardware.

mod authority_orders;
mod fake_systemd;
mod hardware;
mod health_checks;
mod host;
mod lost_record;
mod migration;
mod root_filesystem;
mod scopes;
mod services;
mod systemd_calls;
