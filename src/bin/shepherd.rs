//! `shepherd`: parses flags and runs the service, the demo or the simulator.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use shepherd::model::arguments::normalize_flag_dashes;
use shepherd::model::usage_error::{flag_name, format_usage_error};
use shepherd::service::configuration::{self, ConfigurationFile};
use shepherd::service::failure::ExitFailure;
use shepherd::service::flags::{self, ShepherdCommand, ShepherdFlags};
use shepherd::service::os_process::StopSignals;
use shepherd::service::traces::Traces;
use shepherd::service::{check, demo, logging, run, service_plan};
use shepherd::simulator::fault_command;
use shepherd::simulator::service::{self as simulator, SimulatorArgs, SimulatorCommand};
use tokio_util::sync::CancellationToken;

fn main() -> ExitCode {
    // One provider of cryptography in the process, for the clients that ask for a default. An error
    // means that it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return report_failure(&ExitFailure::failed(format!("cannot start the runtime: {error}")));
        }
    };
    let ended = match runtime.block_on(dispatch_command(&normalize_flag_dashes(std::env::args_os()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report_failure(&failure),
    };
    // Work that a cancelled start left on threads of its own (a database server that is starting) ends before this
    // process.
    drop(runtime);
    ended
}

fn report_failure(failure: &ExitFailure) -> ExitCode {
    // Nobody can be informed if this write fails.
    let _ = writeln!(std::io::stderr(), "shepherd: {failure}");
    ExitCode::from(failure.code)
}

async fn dispatch_command(arguments: &[OsString]) -> Result<(), ExitFailure> {
    let Some((parsed, file)) = parse_arguments(arguments)? else { return Ok(()) };
    match parsed.command {
        Some(ShepherdCommand::Demo(flags)) => Box::pin(demo::run_demo(flags)).await,
        Some(ShepherdCommand::Simulator(args)) => run_simulator(args).await,
        None => {
            let mut traces = Traces::new(parsed.service.otlp_endpoint.as_deref())?;
            logging::start_logging(parsed.service.log_format, "info", traces.tracer.take());
            let only_check = parsed.service.check;
            let plan = service_plan::plan_service(parsed.service, file)?;
            if only_check {
                let report = check::check_plan(&plan).await?;
                return writeln!(std::io::stdout(), "{report}").map_err(|error| {
                    ExitFailure::failed(format!("cannot write to standard output: {error}"))
                });
            }
            run::serve_until_signal(plan, traces).await
        }
    }
}

/// Parses the command line and the configuration file that it names. Arguments of the file come before those of the
/// command line. Returns `None` after help or the version was printed.
fn parse_arguments(given: &[OsString]) -> Result<Option<(ShepherdFlags, ConfigurationFile)>, ExitFailure> {
    let command = flags::build_command();
    let mut file = ConfigurationFile::default();
    let mut arguments = given.to_vec();
    // A subcommand is only valid as the first argument: flags of the service cannot be combined with it.
    let is_service = given.get(1).is_none_or(|word| command.find_subcommand(word).is_none());
    let path = if is_service { configuration::configuration_path(given) } else { None };
    if let Some(path) = &path {
        file = configuration::read_configuration(path, given)?;
        arguments.splice(1.min(given.len())..1.min(given.len()), file.arguments.iter().cloned());
    }
    match flags::parse_flags(arguments) {
        Ok(flags) => Ok(Some((flags, file))),
        Err(error) if !error.use_stderr() => {
            // --help and --version. A reader that closes the pipe early is no failure.
            let _ = error.print();
            Ok(None)
        }
        Err(error) => {
            let place = path.filter(|_| is_from_file(&error, &file, given));
            let place =
                place.map_or_else(String::new, |path| format!("the configuration file {}: ", path.display()));
            Err(ExitFailure::usage(format!("{place}{}", format_usage_error(&error, &command, given))))
        }
    }
}

/// Whether the flag that an error is about was set by the file and not on the command line.
fn is_from_file(error: &clap::Error, file: &ConfigurationFile, given: &[OsString]) -> bool {
    let names = |arguments: &[OsString], flag: &str| {
        arguments.iter().any(|argument| {
            argument.to_str().and_then(|text| text.split('=').next()).is_some_and(|name| name == flag)
        })
    };
    flag_name(error).is_some_and(|flag| names(&file.arguments, &flag) && !names(given, &flag))
}

async fn run_simulator(args: SimulatorArgs) -> Result<(), ExitFailure> {
    logging::start_logging(flags::LogFormat::Text, "info", None);
    if let Some(SimulatorCommand::Fault(fault)) = args.command {
        let text =
            fault_command::send_fault(&fault).await.map_err(|error| to_failure(error.is_usage(), &error))?;
        return writeln!(std::io::stdout(), "{text}")
            .map_err(|error| ExitFailure::failed(format!("cannot write to standard output: {error}")));
    }
    let run = args
        .run
        .ok_or_else(|| ExitFailure::usage("give --state_path FILE, where the simulated fleet is kept"))?;
    let mut signals = StopSignals::listen()?;
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    if run.exit_with_parent {
        let orphaned = shutdown.clone();
        // A thread and not a task: a read of standard input cannot be cancelled, and would keep the
        // runtime from ending.
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
