//! The service: parses flags and calls the library.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use shepherd::model::arguments::accept_dashes;
use shepherd::model::usage::{flag_of, usage_sentence};
use shepherd::service::configuration::{self, ConfigurationFile};
use shepherd::service::failure::Failure;
use shepherd::service::flags::{self, Command, Flags};
use shepherd::service::traces::Traces;
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
    let ended = match runtime.block_on(dispatch(&accept_dashes(std::env::args_os()))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => end(&failure),
    };
    // What a cancelled start left to threads of its own (a database server that comes up) is ended
    // before we are.
    drop(runtime);
    ended
}

fn end(failure: &Failure) -> ExitCode {
    // Nobody is left to tell if this fails.
    let _ = writeln!(std::io::stderr(), "shepherd: {failure}");
    ExitCode::from(failure.code)
}

async fn dispatch(arguments: &[OsString]) -> Result<(), Failure> {
    let Some((parsed, file)) = parse(arguments)? else { return Ok(()) };
    match parsed.command {
        Some(Command::Demo(flags)) => Box::pin(demo::run(flags)).await,
        Some(Command::Simulator(args)) => run_simulator(args).await,
        None => {
            let mut traces = Traces::new(parsed.service.otlp_endpoint.as_deref())?;
            logging::start(parsed.service.log_format, "info", traces.layer.take());
            let only_check = parsed.service.check;
            let plan = plan::plan(parsed.service, file)?;
            if only_check {
                let report = check::check(&plan).await?;
                return writeln!(std::io::stdout(), "{report}")
                    .map_err(|error| Failure::failed(format!("cannot write to standard output: {error}")));
            }
            run::serve(plan, traces).await
        }
    }
}

/// Parses the command line, and the configuration file it names in front of it. `None` when help or
/// the version was asked for and given.
fn parse(given: &[OsString]) -> Result<Option<(Flags, ConfigurationFile)>, Failure> {
    let command = flags::command();
    let mut file = ConfigurationFile::default();
    let mut arguments = given.to_vec();
    // A subcommand stands first or nowhere: flags of the service cannot be given with it.
    let is_service = given.get(1).is_none_or(|word| command.find_subcommand(word).is_none());
    let path = if is_service { configuration::named(given) } else { None };
    if let Some(path) = &path {
        file = configuration::read(path, given)?;
        arguments.splice(1.min(given.len())..1.min(given.len()), file.arguments.iter().cloned());
    }
    match flags::parse(arguments) {
        Ok(flags) => Ok(Some((flags, file))),
        Err(error) if !error.use_stderr() => {
            // --help and --version; a reader that has seen enough and gone is no failure.
            let _ = error.print();
            Ok(None)
        }
        Err(error) => {
            let place = path.filter(|_| is_from_file(&error, &file, given));
            let place =
                place.map_or_else(String::new, |path| format!("the configuration file {}: ", path.display()));
            Err(Failure::usage(format!("{place}{}", usage_sentence(&error, &command, given))))
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
    flag_of(error).is_some_and(|flag| names(&file.arguments, &flag) && !names(given, &flag))
}

async fn run_simulator(args: SimulatorArgs) -> Result<(), Failure> {
    logging::start(flags::LogFormat::Text, "info", None);
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
    if run.exit_with_parent {
        let orphaned = shutdown.clone();
        // A thread and not a task: a read of standard input cannot be cancelled, and would keep the
        // runtime from ending.
        std::thread::spawn(move || {
            // Nothing is ever written; an error means the same as the end.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            orphaned.cancel();
        });
    }
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
