//! `shepherd demo`: a simulated fleet, a private database and the real service.
//!
//! The real service runs on a real PostgreSQL, against simulated machines in a process of their own behind real
//! protocols. Nothing in the service knows that it is a demo. Only the limits are short, so that a person can watch.
//!
//! * `directory`: where the fleet is stored, and whether it is persistent.
//! * `simulator_process`: the simulator, a child process.
//! * `fleet_service`: the service, with the flags of a demo.
//! * `watch`: the output meanwhile; `progress`, `phase_changes` and `not_ready` are its parts.
//! * `shepherdctl`: builds `shepherdctl` if the demo is run from source.
//!
//! The reader of the output may go away (`| head`). Everything that was started is stopped in order all the same, and
//! the failed write is the failure that is returned.

use std::io::Write as _;
use std::path::PathBuf;

use clap::Args;
use tokio::signal::unix::Signal;

use crate::model::time::Span;
use crate::service::demo::directory::FleetDirectory;
use crate::service::demo::simulator_process::SimulatorProcess;
use crate::service::failure::ExitFailure;
use crate::service::flags;
use crate::service::listeners::Listeners;
use crate::service::logging;
use crate::service::run::{OpenDatabase, RunningService, database_failure, stop_signals};
use crate::simulator::faults::FaultProfile;

mod directory;
mod fleet_service;
mod not_ready;
mod phase_changes;
mod progress;
mod shepherdctl;
mod simulator_process;
mod watch;

/// How the demo is run.
#[expect(clippy::doc_markdown, reason = "the documentation of each is its help text, which shows no marks")]
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DemoFlags {
    /// How many machines there are, 1 to 2000.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=2000))]
    pub machines: u32,
    /// Faults that occur by themselves.
    #[arg(long, value_enum, value_name = "PROFILE", default_value = "none")]
    pub faults: FaultProfile,
    /// Where all chance of the simulated machines comes from: the same number, the same fleet.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Stop when every machine is Ready, with exit code 0; or after --ready_timeout, with exit code 1 and what the
    /// rest waits for.
    #[arg(long)]
    pub until_ready: bool,
    /// How long --until_ready waits until every machine is Ready, counted from the start of the fleet.
    #[arg(long, value_name = "SPAN", default_value = "15m")]
    pub ready_timeout: Span,
    /// Keep machines and database in DIR and go on with them next time. [default: new ones each time]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Begin with new machines, whatever --state_dir holds.
    #[arg(long)]
    pub fresh: bool,
    /// Program that puts shepherdctl beside this one. It is run when the fleet has started, and awaited before the
    /// commands of shepherdctl are printed.
    #[arg(long, value_name = "PROGRAM", hide = true)]
    pub build_shepherdctl: Option<PathBuf>,
}

/// Runs the demo until it is done, stopped or failed.
pub async fn run_demo(demo: DemoFlags) -> Result<(), ExitFailure> {
    logging::start_logging(flags::LogFormat::Text, "off", None);
    let (mut terminate, mut interrupt) = stop_signals()?;
    print_line(&format!(
        "{} simulated machines, a private PostgreSQL and the whole service:",
        demo.machines
    ))?;
    print_line("  starting the simulator and PostgreSQL …")?;
    let directory = FleetDirectory::open(&demo)?;
    let me = std::env::current_exe()
        .map_err(|error| ExitFailure::failed(format!("cannot find this program's own file: {error}")))?;
    let mut simulator = SimulatorProcess::start(&me, &demo, directory.path()).await?;
    let url = simulator.url().to_owned();
    let mut starting = std::pin::pin!(fleet_service::start_service(&me, &url, directory.persistent_path()));
    let mut stopped = false;
    let started = tokio::select! {
        started = &mut starting => started,
        died = simulator.wait_for_exit() => Err(died),
        () = wait_for_signal(&mut terminate, &mut interrupt) => {
            // The demo stops even if nobody reads this line.
            let _ = print_line("  stopping as soon as everything has started …");
            stopped = true;
            tokio::select! {
                started = &mut starting => started,
                () = wait_for_signal(&mut terminate, &mut interrupt) => Err(ExitFailure::failed("stopped in the middle of the start")),
            }
        }
    };
    let outcome = match started {
        Ok((database, running)) => {
            let printed = watch::DemoInstructions {
                program: &me,
                simulator: &url,
                database: &database.url,
                metrics: running.listeners().and_then(Listeners::metrics_address),
                directory: directory.persistent_path(),
            };
            let watched = tokio::select! {
                biased;
                () = std::future::ready(()), if stopped => interrupted_result(&demo),
                () = wait_for_signal(&mut terminate, &mut interrupt) => interrupted_result(&demo),
                died = simulator.wait_for_exit() => Err(died),
                watched = watch::watch_fleet(&demo, &printed, &database) => watched,
            };
            let ended = stop_service(database, running).await;
            watched.and(ended)
        }
        Err(failure) => Err(failure),
    };
    simulator.stop().await;
    outcome
}

async fn wait_for_signal(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// A person who only watches may stop at any time. A caller that waits for a result has none yet.
fn interrupted_result(demo: &DemoFlags) -> Result<(), ExitFailure> {
    if demo.until_ready {
        Err(ExitFailure::failed("stopped by a signal before every machine was Ready"))
    } else {
        Ok(())
    }
}

fn print_line(line: &str) -> Result<(), ExitFailure> {
    writeln!(std::io::stdout(), "{line}")
        .map_err(|error| ExitFailure::failed(format!("cannot write to standard output: {error}")))
}

/// Stops the service and reports that no work is left. Nothing here waits for a reader.
async fn stop_service(database: OpenDatabase, running: RunningService) -> Result<(), ExitFailure> {
    let result = print_line("\nstopping …");
    running.stop().await;
    let counts = database.bmdb.live_counts().await.map_err(database_failure);
    let closed = database.close().await;
    let counts = counts?;
    closed?;
    let result =
        result.and(print_line(&format!("live work: {}, open sessions: {}", counts.work, counts.sessions)));
    if counts.work != 0 || counts.sessions != 0 {
        return Err(ExitFailure::failed(format!(
            "{} work items and {} sessions were left behind; this is a defect of Shepherd",
            counts.work, counts.sessions
        )));
    }
    result
}
