//! Takeover: installs and enrols the role server on a machine over SSH.
//!
//! A new machine has an operating system with an SSH server, and nothing of ours. This crate turns it into a machine
//! that reports by itself: [`machine_takeover::take_over_machine`][] connects, checks the host key, probes the machine,
//! uploads the role server unless the right one is there already, starts its enrolment, and checks the response. The
//! same connection runs the commands by which a recovery reboots a machine ([`SshSession::run_argv`]).
//!
//! It takes values and returns values. Which host key is pinned, which fence the work has, and which facts change is
//! decided by the caller. No database is known here.
//!
//! # How it works
//!
//! The machine needs only a POSIX shell, and for an upload one of three programs that make SHA-256 digests. Each step
//! is a shell script in a single SSH exec request. Its arguments and the first line of its output are a contract in
//! [`model::remote_step`], so that a simulated machine can answer without a shell.
//!
//! Each layer uses only those before it:
//!
//! * [`ssh_error`][]: why a connection failed, and where to look for the cause ([`Blame`](ssh_error::Blame)).
//! * `time_limit`: the limit of one operation, which the deadline of the caller may shorten.
//! * [`client_key`][] and [`host_keys`][]: how both sides authenticate.
//! * `tcp_connection`, `first_byte`, `ssh_handler`: the socket, the detection of a hung server, and the callbacks of
//!   the SSH library, which also store what the host sends for the reader of an error.
//! * [`session`][]: an authenticated connection that is closed when its owner drops it.
//! * [`exec`][]: one command on it, with limits on time and output.
//! * [`agent_binary`][]: the program to upload.
//! * [`program_path`][]: where the program goes, and why.
//! * [`steps`][]: the scripts of probe, upload and enrolment, and the parsing of their output.
//! * [`takeover_error`][]: the error for each way in which a takeover ends early.
//! * `enroll_response`: the verification of what the agent returns.
//! * [`machine_takeover`][]: the sequence.
//!
//! # Invariants
//!
//! * Nothing here outlives the deadline of the caller, except that a command may be sent a `TERM` for 0.1 s after it.
//!   SSH cannot carry a fence, so work whose lease has ended must not still use its connection. Every wait has a limit,
//!   and dropping a future shuts its socket down at once. Before each step of a takeover a callback of the caller says
//!   whether it still may work on the machine.
//! * A host whose key is not accepted receives nothing beyond the key exchange: no user name, no key, no password.
//! * An upload is whole or absent, and a takeover can be started again from the beginning after any failure. Enrolment
//!   is idempotent and carries the fence, which the machine compares.
//! * Root runs only a program that no other user of the machine can change: each script checks the path before it does
//!   anything.
//! * A machine cannot fill the memory of a shepherd: output beyond a cap is counted and dropped, and channels that a
//!   server opens are rejected.
//! * Words of the machine become part of an error only as an excerpt ([`model::excerpt`]) or sanitized: the output of
//!   commands, the message of a disconnect, banners, and what comes before the version line.
//!
//! # Notes for the next implementor
//!
//! * A script must not contain a single quote, a backslash or a line feed: login shells disagree on them. A test checks
//!   it, and others run the scripts with `/bin/sh`.
//! * A new variant of an error needs a blame, and a sentence that states what failed, on which machine, and what to do.
//! * RSA is not accepted, neither for host keys nor for the client key ([`host_keys`][] has the reason).
//! * OpenSSH does not deliver signals to commands of root. A script must end by itself when its input or output ends.
//!
//! [`SshSession::run_argv`]: session::SshSession::run_argv

pub mod agent_binary;
pub mod client_key;
mod enroll_response;
pub mod exec;
mod first_byte;
pub mod host_keys;
pub mod machine_takeover;
pub mod program_path;
mod scripts;
pub mod session;
pub mod ssh_error;
mod ssh_handler;
pub mod steps;
pub mod takeover_error;
mod tcp_connection;
mod time_limit;
