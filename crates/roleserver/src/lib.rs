//! The role server: the program that runs on each machine.
//!
//! A shepherd takes a machine over by SSH: it uploads this program and calls `roleserver enroll`. From then on the
//! machine calls its shepherds with a heartbeat each interval, for as long as it lives. No shepherd connects to the
//! agent; only the curator of a cluster, if it runs here, takes calls. Whatever a shepherd wants from the machine comes
//! with the response to a heartbeat: other settings, another release, the order to become a node of a cluster, a
//! request for logs. The roles of a node and what it has to run come from the curator of its cluster.
//!
//! # How it works
//!
//! 1. `roleserver enroll` reads a request from its standard input. [`enrolment`][] decides by fences whether it is
//!    accepted. The result is stored in the [`state_directory`][], and [`init_system`][] ensures that the right agent
//!    runs.
//! 2. `roleserver run` ([`commands::run`][]) starts a tree of runnables, which are restarted one by one when they fail:
//!    the heartbeat loop of the [`agent`][], the node's part in a [`cluster`][], uploads of [`logs`][], [`update`][]s,
//!    and the sockets for status and metrics.
//! 3. The parts decide from what is on the disk and from what last arrived, and decide again after every change. So the
//!    first start, a restart, a reboot and a changed order use the same code.
//! 4. Programs that must outlive the role server, such as etcd and services, are started as [`child`][]ren and adopted
//!    by the next role server.
//!
//! # Modules by subject
//!
//! * Enrolment: [`enrolment`][] (the decision), [`state_directory`][] (what survives a restart, and lock files),
//!   [`state_error`][] (why it could not be used), [`init_system`][] (systemd, or a detached supervisor).
//! * Calls to shepherds: [`agent`][] (the heartbeat loop), [`connection`][] (TLS), [`endpoint`][], [`trust_store`][],
//!   [`server_verifier`][] and [`trusted_time`][] (certificates are verified by a reported time if the machine's clock
//!   is wrong), [`boot_clock`][].
//! * Downloads: [`server_pool`][] (from shepherds), [`http_fetch`][] (from a URL).
//! * What the machine runs: [`cluster`][] (etcd, the curator, services, Kubernetes), [`child`][] (programs that outlive
//!   the role server), [`systemd_manager`][] (scopes for them), [`process`][] (processes by pid and start time), [`mountinfo`][], [`update`][] (another release
//!   of the role server), [`signing_store`][] (the keys that it must be signed with).
//! * What the machine reports: [`hardware`][], [`host_findings`][], [`file_systems`][] (space and inodes), [`logs`][], [`metrics`][], [`status_socket`][].
//! * The program: [`program`][] (flags), [`commands`][] (subcommands), [`bounded_command`][] (other programs, within a time
//!   limit), [`atomic_file`][] (files are replaced as a
//!   whole), [`leftovers`][] (what a crash left half written), [`state_format`][] (files of a newer release), [`disk`][], [`state_writer`][] and [`settings_store`][] (a slow disk holds up no lease, and hides nothing
//!   that was learned).
//!
//! # Invariants
//!
//! * The machine has the last word. It stores the highest fence of each lane and the highest epoch that it has seen,
//!   and rejects lower ones, whatever a database says.
//! * Heartbeats go on. No full disk, hanging device, bad setting or failing part ends the loop.
//! * A start finds what an earlier one has begun. Files are written in an order that allows this after every single
//!   write, and a program is recorded before it runs.
//! * A damaged file is never read as "nothing to run". It counts as absent, or is an error that an operator must look
//!   at.
//! * The wall clock decides nothing about a heartbeat. Its position in time is the boot and the milliseconds since it
//!   began.
//! * A decision is a function of its inputs, without I/O. A module that does nothing else is marked as *pure* in its
//!   first line.
//! * No SQL, no HTTP framework (axum) and no SSH are linked. `tests/all/dependencies.rs` reads `cargo tree`.
//!
//! # Notes for the next implementor
//!
//! * The simulator runs thousands of agents in one process. So [`agent`][], [`enrolment`][] and [`logs`][] take their
//!   clock, hardware, identity and files as values. Its nodes run [`cluster`][] with real files.
//! * Machines of a fleet do not change their release at the same moment. Names in stored files and in messages stay,
//!   and new fields have a default: a release that is rolled back reads what a later one has written. If that is not
//!   possible, raise the format of the file ([`state_format`][]), so that the other release refuses it in words.
//! * What a child is started with has a digest. If a release changes it, the update restarts that program on every
//!   node.
//! * The feature `reconciler` has everything that needs the Kubernetes API. Role servers with and without it must
//!   build.

pub mod agent;
pub mod atomic_file;
pub mod boot_clock;
pub mod bounded_command;
pub mod child;
pub mod cluster;
pub mod commands;
pub mod connection;
pub mod disk;
pub mod endpoint;
pub mod enrolment;
pub mod file_systems;
pub mod hardware;
pub mod host_findings;
pub mod http_fetch;
pub mod init_system;
pub mod leftovers;
pub mod lock_holder;
pub mod logs;
pub mod metrics;
pub mod mountinfo;
pub mod process;
pub mod program;
pub mod server_pool;
pub mod server_verifier;
pub mod settings_store;
pub mod signing_store;
pub mod state_directory;
pub mod state_error;
pub mod state_format;
pub mod state_writer;
pub mod status_socket;
pub mod systemd_manager;
pub mod trust_store;
pub mod trusted_time;
pub mod update;
