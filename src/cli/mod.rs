//! `shepherdctl`: the operators' command line, straight to the BMDB.
//!
//! [`command`] is the grammar, one file a verb group does what it says, and
//! [`run`] joins them. A command reads everything it shows in one transaction
//! ([`crate::bmdb::connection::Bmdb::inspect`]), turns it into text by pure
//! functions, and writes that at once. What changes something goes the way that
//! every change goes: decided under the machine's lock, with a line of history
//! that names who asked and why.

pub mod command;
pub mod describe;
pub mod error;
pub mod get;
pub mod hardware;
pub mod issues;
pub mod machine;
pub mod operate;
pub mod output;
pub mod plan;
pub mod restored;
pub mod run;
pub mod timeline;
pub mod why;
pub mod yaml;
