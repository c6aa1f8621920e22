//! Stop the agent that runs, and wait for the one that should run.

use std::time::{Duration, Instant};

use crate::child::log::last_lines;
use crate::init_system::{DesiredAgent, SupervisionError};
use crate::process::ProcessRecord;
use crate::state_directory::StateDirectory;

/// How long an agent may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a started agent may take to record itself on a busy host.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(30);
/// What is left of an enrolment for the question why an agent does not run.
pub(super) const EXPLANATION_TIME: Duration = Duration::from_secs(2);

/// Stops the supervisor and the agent, if they run.
pub(super) fn stop_detached(state: &StateDirectory, until: Instant) -> Result<(), SupervisionError> {
    // The supervisor first: it would start the agent again.
    if let Some(supervisor) = state.find_supervisor_process() {
        stop_process(&supervisor, "supervisor", until)?;
    }
    if let Some(agent) = state.find_agent_process() {
        stop_process(&agent, "agent", until)?;
    }
    Ok(())
}

/// Stops a process, within the usual time and before `until`. `what` names it in errors.
pub(super) fn stop_process(
    process: &ProcessRecord,
    what: &str,
    until: Instant,
) -> Result<(), SupervisionError> {
    let patience = STOP_TIMEOUT.min(until.saturating_duration_since(Instant::now()));
    let doing = || format!("stopping the {what}, process {}", process.pid);
    process.stop(patience).map_err(|source| SupervisionError::Io { operation: doing(), source })
}

/// Whether the desired agent runs.
pub(super) fn is_agent_running(state: &StateDirectory, wanted: &DesiredAgent) -> bool {
    state.find_agent_process().is_some_and(|agent| {
        agent.is_alive() && agent.revision == wanted.revision && agent.program_sha256 == wanted.program_sha256
    })
}

/// Waits until the desired agent runs. Leaves [`EXPLANATION_TIME`] before `until`.
pub(super) fn wait_for_agent(
    state: &StateDirectory,
    wanted: &DesiredAgent,
    until: Instant,
) -> Result<(), SupervisionError> {
    let begin = Instant::now();
    let end = until.checked_sub(EXPLANATION_TIME).unwrap_or(begin).min(begin + START_TIMEOUT);
    while !is_agent_running(state, wanted) {
        if Instant::now() >= end {
            return Err(SupervisionError::DoesNotRun { after: begin.elapsed(), output: log_tail(state) });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn log_tail(state: &StateDirectory) -> String {
    let lines = last_lines(&state.log_path(), 3);
    if lines.is_empty() { "nothing".to_owned() } else { lines }
}
