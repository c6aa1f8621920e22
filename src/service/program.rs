//! The program `shepherd`: parses the command line, and runs the service, the demo or the simulator.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use tokio_util::sync::CancellationToken;

use crate::model::arguments::normalize_flag_dashes;
use crate::service::command_line::parse_command_line;
use crate::service::failure::ExitFailure;
use crate::service::flags::{LogFormat, ShepherdCommand};
use crate::service::os_process::StopSignals;
use crate::service::traces::Traces;
use crate::service::{check, demo, logging, run, service_plan};
use crate::simulator::fault_command;
use crate::simulator::service::{self as simulator, SimulatorArgs, SimulatorCommand};
use crate::transport::gate::open_files::{check_files, raise_limit};

/// Runs the program with the arguments of this process, and returns its exit code.
#[must_use]
pub fn run_program() -> ExitCode {
    hardening::protect_process("shepherd");
    // One provider of cryptography in the process, for clients that use the default one. An error means that it is
    // installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let files = raise_limit();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return report_failure(&ExitFailure::failed(format!("cannot start the runtime: {error}")));
        }
    };
    let ended = match runtime.block_on(dispatch_command(&normalize_flag_dashes(std::env::args_os()), files)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report_failure(&failure),
    };
    // This waits for work that a cancelled start left on threads of its own, such as the start of a database server.
    drop(runtime);
    ended
}

fn report_failure(failure: &ExitFailure) -> ExitCode {
    // If this write fails, the exit code is the only report.
    let _ = writeln!(std::io::stderr(), "shepherd: {failure}");
    ExitCode::from(failure.code)
}

async fn dispatch_command(arguments: &[OsString], files: u64) -> Result<(), ExitFailure> {
    let Some((parsed, file)) = parse_command_line(arguments)? else { return Ok(()) };
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
            run::serve_until_signal(plan, traces).await
        }
    }
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
