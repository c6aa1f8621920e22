//! The service.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser;
use shepherd::simulator::fault_command;
use shepherd::simulator::service::{self, SimulatorArgs, SimulatorCommand};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

#[derive(Parser)]
#[command(name = "shepherd", version, about = "Takes bare-metal servers and keeps them useful")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Simulator(SimulatorArgs),
}

#[tokio::main]
async fn main() -> ExitCode {
    // One provider of cryptography in the process, for the clients that ask for a default.
    let _ = rustls::crypto::ring::default_provider().install_default();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let Command::Simulator(args) = Cli::parse().command;
    match simulator(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, sentence)) => {
            let _ = writeln!(std::io::stderr(), "{sentence}");
            ExitCode::from(code)
        }
    }
}

async fn simulator(args: SimulatorArgs) -> Result<(), (u8, String)> {
    if let Some(SimulatorCommand::Fault(fault)) = args.command {
        let said = fault_command::strike(&fault)
            .await
            .map_err(|error| (if error.is_usage() { 2 } else { 1 }, error.to_string()))?;
        return writeln!(std::io::stdout(), "{said}").map_err(|error| (1, error.to_string()));
    }
    let run = args.run.ok_or((2, "give --state FILE, where the fleet is kept".to_owned()))?;
    let shutdown = CancellationToken::new();
    let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    let (Ok(mut terminate), Ok(mut interrupt)) = signals else {
        return Err((1, "cannot listen for signals".to_owned()));
    };
    let stop = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    service::run(run, std::io::stdout(), shutdown)
        .await
        .map_err(|error| (if error.is_usage() { 2 } else { 1 }, error.to_string()))
}
