//! The service: parses flags and calls the library.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use shepherd::model::arguments::accept_dashes;
use shepherd::service::configuration::{self, ConfigurationFile};
use shepherd::service::failure::Failure;
use shepherd::service::flags::{self, Command, Flags};
use shepherd::service::{check, demo, logging, plan, run};
use shepherd::simulator::fault_command;
use shepherd::simulator::service::{self as simulator, SimulatorArgs, SimulatorCommand};
use tokio_util::sync::CancellationToken;

fn main() -> ExitCode {
    // One provider of cryptography in the process, for the clients that ask for a default. An error
    // means that it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return end(&Failure::failed(format!("cannot start the runtime: {error}"))),
    };
    match runtime.block_on(dispatch(accept_dashes(std::env::args_os()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => end(&failure),
    }
}

fn end(failure: &Failure) -> ExitCode {
    // Nobody is left to tell if this fails.
    let _ = writeln!(std::io::stderr(), "shepherd: {failure}");
    ExitCode::from(failure.code)
}

async fn dispatch(arguments: Vec<OsString>) -> Result<(), Failure> {
    let (parsed, file) = parse(arguments)?;
    match parsed.command {
        Some(Command::Demo(flags)) => demo::run(flags).await,
        Some(Command::Simulator(args)) => run_simulator(args).await,
        None => {
            logging::start(parsed.service.log_format, "info");
            let only_check = parsed.service.check;
            let plan = plan::plan(parsed.service, file)?;
            if only_check {
                let report = check::check(&plan).await?;
                return writeln!(std::io::stdout(), "{report}")
                    .map_err(|error| Failure::failed(format!("cannot write to standard output: {error}")));
            }
            run::serve(plan).await
        }
    }
}

/// Parses the command line, and the configuration file it names in front of it.
fn parse(mut arguments: Vec<OsString>) -> Result<(Flags, ConfigurationFile), Failure> {
    let mut file = ConfigurationFile::default();
    let is_service = !arguments.iter().skip(1).any(|argument| argument == "demo" || argument == "simulator");
    if is_service && let Some(path) = configuration::named(&arguments) {
        file = configuration::read(&path, &arguments)?;
        let given = arguments.split_off(1.min(arguments.len()));
        arguments.extend(file.arguments.iter().cloned());
        arguments.extend(given);
    }
    match flags::parse(arguments) {
        Ok(flags) => Ok((flags, file)),
        Err(error) if !error.use_stderr() => {
            // --help and --version.
            error
                .print()
                .map_err(|error| Failure::failed(format!("cannot write to standard output: {error}")))?;
            Err(Failure { code: 0, sentence: String::new() })
        }
        Err(error) => {
            let text = error.render().to_string();
            Err(Failure::usage(text.trim_start_matches("error: ").trim_end().to_owned()))
        }
    }
}

async fn run_simulator(args: SimulatorArgs) -> Result<(), Failure> {
    logging::start(flags::LogFormat::Text, "info");
    if let Some(SimulatorCommand::Fault(fault)) = args.command {
        let said = fault_command::strike(&fault).await.map_err(|error| code(error.is_usage(), &error))?;
        return writeln!(std::io::stdout(), "{said}")
            .map_err(|error| Failure::failed(format!("cannot write to standard output: {error}")));
    }
    let run =
        args.run.ok_or_else(|| Failure::usage("give --state FILE, where the simulated fleet is kept"))?;
    let (mut terminate, mut interrupt) = run::signals()?;
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    let signals = tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    let result = simulator::run(run, std::io::stdout(), shutdown).await;
    signals.abort();
    result.map_err(|error| code(error.is_usage(), &error))
}

fn code(usage: bool, error: &dyn std::fmt::Display) -> Failure {
    if usage { Failure::usage(error.to_string()) } else { Failure::failed(error.to_string()) }
}
