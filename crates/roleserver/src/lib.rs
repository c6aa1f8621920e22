//! The role server: the program that runs on each machine.
//!
//! A shepherd enrols a machine once per takeover (over SSH, `roleserver enroll`), and from then on the machine calls: a
//! heartbeat each interval, for as long as it lives. Nothing connects *to* a role server.
//!
//! # How the files fit
//!
//! * [`enrolment`][]: decides which enrolment requests are accepted. Pure, so that a simulated machine rejects exactly
//!   what a real one rejects.
//! * [`endpoint`][], [`trust_store`][]: address and authority of a callback server.
//! * [`boot_clock`][]: the boot and the time since it began.
//! * [`trusted_time`][]: the current time, as a shepherd last reported it. [`server_verifier`][]: verifies a
//!   certificate by it.
//! * [`connection`][]: one TLS 1.3 connection to one callback server.
//! * [`agent`][]: the heartbeat loop.
//! * [`hardware`][]: the hardware inventory.
//! * [`state_directory`][]: what survives a restart, and the lock files.
//! * [`atomic_file`][]: files that are replaced, never rewritten.
//! * [`process`][]: processes recorded by pid *and* start time.
//! * [`child`][]: programs that it runs beside itself, and that outlive it.
//! * [`cluster`][]: its part in a cluster: etcd, the curator, and the node's calls to a curator.
//! * [`logs`][]: uploads the logs that shepherds request.
//! * [`init_system`][]: chooses and drives what keeps the agent running, such as systemd.
//! * [`status_socket`][]: the sockets that serve the state of a running role server. [`metrics`][]: its metrics.
//! * [`program`][]: the `roleserver` program: its flags. [`commands`][]: its subcommands.
//!
//! # What would break otherwise
//!
//! The loop takes its clock, its hardware and its identity as values, because the simulator runs thousands of loops in
//! one process. Everything that touches the host is in [`state_directory`][] and the files listed after it; of those
//! the simulator uses [`logs`] alone.

pub mod agent;
pub mod atomic_file;
pub mod boot_clock;
pub mod child;
pub mod cluster;
pub mod commands;
pub mod connection;
pub mod endpoint;
pub mod enrolment;
pub mod hardware;
pub mod http_fetch;
pub mod init_system;
pub mod logs;
pub mod metrics;
pub mod mountinfo;
pub mod process;
pub mod program;
pub mod server_pool;
pub mod server_verifier;
pub mod state_directory;
pub mod status_socket;
pub mod trust_store;
pub mod trusted_time;
pub mod update;
