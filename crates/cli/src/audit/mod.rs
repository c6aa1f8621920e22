//! Orders that were given.
//!
//! `list` reads them, for `get audit` and others. `command` is `audit`, which prints the newest.

pub(crate) mod command;
pub(crate) mod list;
