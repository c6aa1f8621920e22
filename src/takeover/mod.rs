//! Getting the role server onto a machine: over SSH, in place, with nothing
//! installed there beforehand.
//!
//! [`take_over::take_over`] is the whole of it: connect, check the host's key,
//! probe, upload when the right binary is not there yet, enrol, check the
//! answer. It takes values and returns values: which key is pinned, which fence
//! is held and what becomes of the result is the caller's affair, and no
//! database is known here.
//!
//! Layers, each of which knows only those above it:
//!
//! * [`error`]: what can go wrong with a connection, and whose fault that is.
//! * [`client_key`] and [`host_keys`]: how both sides prove who they are.
//! * [`session`]: a logged-in connection that dies with its owner.
//! * [`exec`]: one command on it, within limits.
//! * [`agent_binary`]: what is uploaded.
//! * [`steps`]: probe, upload and enrol as shell scripts and their answers.
//! * [`take_over`]: the sequence, and the sentence for each way it ends.
//!
//! # Time
//!
//! SSH cannot carry a fence, so work whose lease has ended must not still be
//! talking to the machine. Every function takes the caller's deadline; nothing
//! here waits beyond it, and dropping a future closes its connection at once.

pub mod agent_binary;
pub mod client_key;
mod connection;
pub mod error;
pub mod exec;
mod heard;
pub mod host_keys;
pub mod session;
pub mod steps;
pub mod take_over;
