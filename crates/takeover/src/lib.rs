//! Takeover: installs and enrols the role server on a machine over SSH.
//!
//! Nothing has to be installed on the machine beforehand. [`machine_takeover::take_over_machine`] is the whole
//! sequence: connect, check the host's key, probe, upload unless the right binary is there already, enrol, check the
//! response. It takes values and returns values: which key is pinned, which fence is held and what the result changes
//! is the caller's affair, and no database is known here.
//!
//! Layers, each of which knows only those above it:
//!
//! * [`ssh_error`]: the errors of a connection, and where to look for their cause.
//! * [`client_key`] and [`host_keys`]: how both sides authenticate.
//! * [`session`]: an authenticated connection that is closed when its owner drops it.
//! * [`exec`]: one command on it, within limits.
//! * [`agent_binary`]: the program to upload.
//! * [`steps`]: probe, upload and enrol as shell scripts, and the parsing of their output.
//! * [`machine_takeover`]: the sequence, and the message for each way it ends.
//!
//! # Time
//!
//! SSH cannot carry a fence, so work whose lease has ended must not still use its connection to the machine. Every
//! function takes the caller's deadline; nothing here waits beyond it, and dropping a future closes its connection at
//! once.

pub mod agent_binary;
pub mod client_key;
pub mod exec;
mod first_byte;
pub mod host_keys;
pub mod machine_takeover;
pub mod session;
pub mod ssh_error;
mod ssh_handler;
pub mod steps;
