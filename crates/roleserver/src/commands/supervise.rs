//! `roleserver supervise`: run the detached supervisor.

use std::path::Path;

use crate::commands::CommandError;
use crate::init_system::detached_supervisor;
use crate::process::{ProcessRecord, program_digest};
use crate::state_directory::{Lock, StateDirectory};

/// Supervises until SIGTERM or SIGINT.
pub fn execute(state_directory: &Path) -> Result<(), CommandError> {
    // In a session of its own, so that the end of a terminal does not reach it. The call fails if this process leads a
    // session already, which is as good.
    let _ = rustix::process::setsid();
    let state = StateDirectory::open(state_directory).map_err(CommandError::from_error)?;
    let _held = state.acquire_lock(Lock::Supervisor).map_err(CommandError::from_error)?;
    let program = std::env::current_exe().map_err(CommandError::from_error)?;
    let digest = program_digest(Path::new("/proc/self/exe")).map_err(CommandError::from_error)?;
    let record = ProcessRecord::current(0, digest).map_err(CommandError::from_error)?;
    state.record_supervisor(&record).map_err(CommandError::from_error)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CommandError::from_error)?;
    runtime.block_on(detached_supervisor::supervise_agent(&program, &state)).map_err(CommandError::from_error)
}
