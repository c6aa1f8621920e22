//! Subcommands of `roleserver`: a file for each one, or for those that are alike.
//!
//! [`program`](crate::program) parses flags and calls one of these. Each returns its error as a sentence, and none
//! prints it.
//!
//! * [`enroll`][]: accepts the request of a shepherd. Its standard output is the response and nothing else.
//! * [`run`][]: the agent and everything below it. `agent_event_handler` handles the events of the agent.
//! * [`supervise`][]: restarts the agent where no init system does.
//! * [`follow_authority`][]: another authority of the cluster after a theft, by a person.
//! * [`hardware`][]: the hardware of this machine, for people and for programs.
//! * [`status`][]: reads the state directory, and works without a running role server. [`pages`][]
//!   are read from the running one ([`status_socket`](crate::status_socket)), and fail without it.
//!
//! `roleserver launch` and `roleserver watch-update` are steps of [`child::launch`](crate::child::launch) and
//! [`update::watchdog`](crate::update::watchdog). Only a role server calls them.

mod agent_event_handler;
pub mod enroll;
pub mod follow_authority;
pub mod hardware;
pub mod pages;
pub mod run;
pub mod status;
pub mod supervise;

/// Why a subcommand failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The caller's flags or input are wrong.
    #[error("{0}")]
    Usage(String),
    /// The operation failed; the text is the whole message.
    #[error("{0}")]
    Failed(String),
}

impl CommandError {
    /// The exit code of the program: 2 for the caller's mistakes, 1 for failures.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) => 1,
        }
    }

    /// A failure with the text of any error.
    pub fn from_error(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}
