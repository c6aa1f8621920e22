//! `roleserver supervise`: keep `roleserver run` alive without an init system.

use std::path::Path;

use crate::roleserver::commands::CommandError;
use crate::roleserver::running::{Process, program_digest};
use crate::roleserver::state_directory::{Lock, StateDirectory};
use crate::roleserver::supervise;

/// Supervises until SIGTERM or SIGINT.
pub fn execute(state_directory: &Path) -> Result<(), CommandError> {
    // Leads a session of its own, so no terminal's end reaches it. Refused when
    // it already leads one, which is as good.
    let _ = rustix::process::setsid();
    let state = StateDirectory::open(state_directory).map_err(CommandError::failed)?;
    let _held = state.lock(Lock::Supervisor).map_err(CommandError::failed)?;
    let program = std::env::current_exe().map_err(CommandError::failed)?;
    let digest = program_digest(Path::new("/proc/self/exe")).map_err(CommandError::failed)?;
    let record = Process::this(0, digest).map_err(CommandError::failed)?;
    state.record_supervisor(&record).map_err(CommandError::failed)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::failed)?;
    runtime.block_on(supervise::supervise(&program, &state)).map_err(CommandError::failed)
}
