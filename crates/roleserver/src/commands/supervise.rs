//! `roleserver supervise`: run the detached supervisor.

use std::path::Path;
use std::time::Duration;

use crate::commands::CommandError;
use crate::init_system::detached_supervisor;
use crate::process::{ProcessRecord, program_digest};
use crate::state_directory::{Lock, LockGuard, StateDirectory};
use crate::state_error::StateError;

/// Longest wait for the lock of a supervisor that was killed. The enrolment that starts this one waits longer for its agent.
const LOCK_TIMEOUT: Duration = Duration::from_secs(20);

/// Supervises until SIGTERM or SIGINT.
pub fn execute(state_directory: &Path) -> Result<(), CommandError> {
    // In a session of its own, so that the end of a terminal does not reach it. The call fails if this process leads a
    // session already, which is as good.
    let _ = rustix::process::setsid();
    let state = StateDirectory::open(state_directory).map_err(CommandError::from_error)?;
    let _held = acquire_lock(&state).map_err(CommandError::from_error)?;
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

/// Takes the lock of the supervisor. A child that a killed supervisor was starting has inherited its lock, and keeps it
/// until its `execve`. An agent ends then, and its supervisor starts it again. Nothing starts a supervisor again before the
/// next takeover, so it waits.
fn acquire_lock(state: &StateDirectory) -> Result<LockGuard, StateError> {
    match state.acquire_lock(Lock::Supervisor) {
        Err(StateError::Locked { .. }) => {
            tracing::warn!(
                patience_seconds = LOCK_TIMEOUT.as_secs(),
                "another supervisor holds the lock of this state directory; waiting until it has ended"
            );
            state.wait_for_lock(Lock::Supervisor, LOCK_TIMEOUT)
        }
        outcome => outcome,
    }
}
