//! Children of the role server as real processes, with a stand-in for systemd.

mod fake_systemd;
mod host;
mod migration;
mod root_filesystem;
mod scopes;
mod systemd_calls;
