//! The service as one process: flags, configuration, and everything started and
//! stopped in the right order.
//!
//! The one room that knows both the loops and what listens, so that neither of
//! those has to know the other.
//!
//! * [`flags`]: what can be said on the command line, with its defaults.
//! * [`configuration`]: the same said in a TOML file, and providers.
//! * [`plan`]: flags and file checked and turned into what will run; what
//!   `--check` prints.
//! * [`check`]: the same, having looked.
//! * [`callback`]: the callback server of this process.
//! * [`counted`]: everything that it counts.
//! * [`run`]: running it.
//! * [`preflight`]: looking at everything before anything is done.
//! * [`demo`]: a fleet in a box.
//! * [`scratch`]: directories that go when we go.
//! * [`traces`]: what became of each work item, for a receiver of traces.

pub mod callback;
pub mod check;
pub mod configuration;
pub mod counted;
pub mod demo;
pub mod failure;
pub mod flags;
pub mod logging;
pub mod plan;
pub mod preflight;
pub mod run;
pub mod scratch;
pub mod traces;
