//! The program `shepherd`: parses the command line, and runs the service, the demo or the simulator.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::model::arguments::spell_flags_with_underscores;
use crate::service::command_line::parse_command_line;
use crate::service::configuration::ConfigurationFile;
use crate::service::database::open_database;
use crate::service::failure::ExitFailure;
use crate::service::flags::{LogFormat, ShepherdCommand, ShepherdFlags};
use crate::service::os_process::StopSignals;
use crate::service::preflight::{OnUnreachableProvider, RecordedMachines, inspect_plan};
use crate::service::service_plan::ServicePlan;
use crate::service::start::start_service;
use crate::service::stop_deadline::{StopDeadline, StopStep};
use crate::service::traces::Traces;
use crate::service::{check, demo, logging, service_plan};
use crate::simulator::fault_command;
use crate::simulator::service::{self as simulator, SimulatorArgs, SimulatorCommand};
use crate::transport::gate::open_files::{check_files, raise_limit};

/// How long the end waits for threads that read a file or resolve a name for a service that has stopped.
const THREADS_TIMEOUT: Duration = Duration::from_millis(100);

/// Runs the program with the arguments of this process, and returns its exit code.
#[must_use]
pub fn run_program() -> ExitCode {
    hardening::protect_process("shepherd");
    // One provider of cryptography in the process, for clients that use the default one. An error means that it is
    // installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let files = raise_limit();
    let (parsed, file) = match parse_command_line(&spell_flags_with_underscores(std::env::args_os())) {
        Ok(Some(parsed)) => parsed,
        Ok(None) => return ExitCode::SUCCESS,
        Err(failure) => return report_failure(&failure),
    };
    let has_own_server = parsed.command.is_some() || parsed.service.bmdb_url.is_none();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return report_failure(&ExitFailure::failed(format!("cannot start the runtime: {error}")));
        }
    };
    let ended = match runtime.block_on(dispatch_command(parsed, file, files)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report_failure(&failure),
    };
    end_runtime(runtime, has_own_server);
    ended
}

/// Ends the runtime. Work on threads of its own cannot be cancelled. The start of a private database server is waited
/// for, or the server would stay. A service without one does not wait for a disk or a name server that does not answer:
/// its stop ends within the documented time.
fn end_runtime(runtime: Runtime, has_own_server: bool) {
    if has_own_server {
        drop(runtime);
    } else {
        runtime.shutdown_timeout(THREADS_TIMEOUT);
    }
}

fn report_failure(failure: &ExitFailure) -> ExitCode {
    // If this write fails, the exit code is the only report.
    let _ = writeln!(std::io::stderr(), "shepherd: {failure}");
    ExitCode::from(failure.code)
}

async fn dispatch_command(
    parsed: ShepherdFlags,
    file: ConfigurationFile,
    files: u64,
) -> Result<(), ExitFailure> {
    match parsed.command {
        Some(ShepherdCommand::Demo(flags)) => Box::pin(demo::run_demo(flags)).await,
        Some(ShepherdCommand::Simulator(args)) => run_simulator(args).await,
        None => {
            let mut traces = Traces::new(parsed.service.otlp_endpoint.as_deref())?;
            logging::start_logging(parsed.service.log_format, "info", traces.tracer.take());
            let only_check = parsed.service.check;
            // Before a database is opened, which takes files too.
            check_files(files).map_err(|error| ExitFailure::usage(error.to_string()))?;
            let plan = service_plan::plan_service(parsed.service, file)?;
            if only_check {
                let report = check::check_plan(&plan).await?;
                return print_text(&report);
            }
            serve_until_signal(&plan, traces).await
        }
    }
}

/// Runs the service until a signal: the first one stops it in order, the second one at once.
async fn serve_until_signal(plan: &ServicePlan, traces: Traces) -> Result<(), ExitFailure> {
    let mut signals = StopSignals::listen()?;
    // Checked before the database is changed: another mistake must not leave an upgraded schema behind.
    inspect_plan(plan, OnUnreachableProvider::Warn, &RecordedMachines::new()).await?;
    let database = open_database(plan).await?;
    let stop_traces = CancellationToken::new();
    let trace_task = traces.sender.map(|sender| tokio::spawn(sender.run(stop_traces.clone())));
    let started = start_service(plan, &database, &traces.counts).await;
    let running = match started {
        Ok(running) => running,
        Err(failure) => {
            if let Err(error) = database.close(StopDeadline::from_now()).await {
                tracing::warn!(%error, "cannot close the database");
            }
            return Err(failure);
        }
    };
    tracing::info!(database = %database.bmdb.settings().address(), "running");
    signals.recv().await;
    tracing::info!(grace = ?plan.flags.shutdown_grace.0, "stopping; a second signal stops at once");
    let abort = running.abort_token();
    let second_signal = tokio::spawn(async move {
        signals.recv().await;
        abort.cancel();
    });
    let deadline = running.stop().await;
    second_signal.abort();
    // Stopped once no work is left, so that the last trace is complete.
    stop_traces.cancel();
    if let Some(trace_task) = trace_task
        && !matches!(deadline.limit(StopStep::Traces, trace_task).await, Some(Ok(())))
    {
        tracing::warn!("the last traces were not sent");
    }
    database.close(deadline).await
}

fn print_text(text: &str) -> Result<(), ExitFailure> {
    writeln!(std::io::stdout(), "{text}")
        .map_err(|error| ExitFailure::failed(format!("cannot write to standard output: {error}")))
}

async fn run_simulator(args: SimulatorArgs) -> Result<(), ExitFailure> {
    logging::start_logging(LogFormat::Text, "info", None);
    if let Some(SimulatorCommand::Fault(fault)) = args.command {
        let text =
            fault_command::send_fault(&fault).await.map_err(|error| to_failure(error.is_usage(), &error))?;
        return print_text(&text);
    }
    let run = args
        .run
        .ok_or_else(|| ExitFailure::usage("give --state_path FILE, where the simulated fleet is kept"))?;
    let mut signals = StopSignals::listen()?;
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    if run.exit_with_parent {
        let orphaned = shutdown.clone();
        // A thread and not a task: a read of standard input cannot be cancelled, and would keep the runtime from
        // ending.
        std::thread::spawn(move || {
            // Nothing is ever written to standard input. An error means the same as its end.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            orphaned.cancel();
        });
    }
    let signal_task = tokio::spawn(async move {
        signals.recv().await;
        stop.cancel();
    });
    let result = simulator::run_simulator(run, std::io::stdout(), shutdown).await;
    signal_task.abort();
    result.map_err(|error| to_failure(error.is_usage(), &error))
}

fn to_failure(usage: bool, error: &dyn std::fmt::Display) -> ExitFailure {
    if usage { ExitFailure::usage(error.to_string()) } else { ExitFailure::failed(error.to_string()) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    /// A runtime with work on a thread of its own that has begun.
    fn working_runtime(work: impl FnOnce() + Send + 'static) -> Runtime {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let (begin, begun) = mpsc::channel();
        runtime.spawn_blocking(move || {
            begin.send(()).unwrap();
            work();
        });
        begun.recv().unwrap();
        runtime
    }

    /// Without the limit this test would not end.
    #[test]
    fn disk_that_does_not_answer_does_not_keep_a_service_from_ending() {
        let (release, released) = mpsc::channel::<()>();
        let runtime = working_runtime(move || {
            let _ = released.recv();
        });
        end_runtime(runtime, false);
        drop(release);
    }

    #[test]
    fn start_of_a_private_database_server_is_waited_for() {
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = has_ended.clone();
        let runtime = working_runtime(move || {
            std::thread::sleep(2 * THREADS_TIMEOUT);
            ended.store(true, Ordering::SeqCst);
        });
        end_runtime(runtime, true);
        assert!(has_ended.load(Ordering::SeqCst));
    }
}
