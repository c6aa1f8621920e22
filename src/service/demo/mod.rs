//! `shepherd demo`: a fleet in a box, to see the main job done.
//!
//! The real service on a real PostgreSQL, against simulated machines that are a
//! process of their own behind real protocols. Nothing in the service knows
//! that it is a demo; only the limits are short, so that a person can watch.
//!
//! * `directory`: where the fleet is kept, and whether it stays.
//! * `machines`: the simulator, our child.
//! * `fleet_service`: the service, with the flags that a demo gives it.
//! * `watch`: what is said meanwhile; `progress`, `healing` and `rest` are its parts.
//!
//! Whoever watches may go away (`| head`): what was begun is stopped in order
//! all the same, and that nobody listened is the failure that is returned.

use std::io::Write as _;
use std::path::PathBuf;

use clap::Args;
use tokio::signal::unix::Signal;

use crate::model::time::Span;
use crate::service::callback::Callback;
use crate::service::demo::directory::FleetDirectory;
use crate::service::demo::machines::Simulator;
use crate::service::failure::Failure;
use crate::service::flags;
use crate::service::logging;
use crate::service::run::{OpenDatabase, Running, database_failure, signals};
use crate::simulator::faults::Profile;

mod directory;
mod fleet_service;
mod healing;
mod machines;
mod progress;
mod rest;
mod shepherdctl;
mod watch;

/// How the demo is run.
#[expect(clippy::doc_markdown, reason = "the documentation of each is its help text, which shows no marks")]
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DemoFlags {
    /// How many machines there are, 1 to 2000.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=2000))]
    pub machines: u32,
    /// What goes wrong unasked.
    #[arg(long, value_enum, value_name = "PROFILE", default_value = "none")]
    pub faults: Profile,
    /// Where all chance of the simulated machines comes from: the same number, the same fleet.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Stop when every machine is Ready, with exit code 0; or at the deadline, with exit code 1 and
    /// what the rest waits for.
    #[arg(long)]
    pub until_ready: bool,
    /// When every machine must be Ready, with --until_ready. It counts from when the fleet has started.
    #[arg(long, value_name = "SPAN", default_value = "15m")]
    pub deadline: Span,
    /// Keep machines and database in DIR and go on with them next time. [default: new ones each time]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Begin with new machines, whatever --dir holds.
    #[arg(long)]
    pub fresh: bool,
    /// Program that puts shepherdctl beside this one. It is run when the fleet has started, and awaited before the
    /// commands of shepherdctl are printed.
    #[arg(long, value_name = "PROGRAM", hide = true)]
    pub build_shepherdctl: Option<PathBuf>,
}

/// Runs the demo.
pub async fn run(demo: DemoFlags) -> Result<(), Failure> {
    logging::start(flags::LogFormat::Text, "off", None);
    let (mut terminate, mut interrupt) = signals()?;
    say(&format!("{} simulated machines, a private PostgreSQL and the whole service:", demo.machines))?;
    say("  starting the simulator and PostgreSQL …")?;
    let directory = FleetDirectory::open(&demo)?;
    let me = std::env::current_exe()
        .map_err(|error| Failure::failed(format!("cannot find this program's own file: {error}")))?;
    let mut simulator = Simulator::start(&me, &demo, directory.path()).await?;
    let url = simulator.url().to_owned();
    let mut starting = std::pin::pin!(fleet_service::start(&me, &url, directory.kept()));
    let mut stopped = false;
    let started = tokio::select! {
        started = &mut starting => started,
        died = simulator.died() => Err(died),
        () = asked_to_stop(&mut terminate, &mut interrupt) => {
            // Told to nobody is stopped all the same.
            let _ = say("  stopping as soon as everything has started …");
            stopped = true;
            tokio::select! {
                started = &mut starting => started,
                () = asked_to_stop(&mut terminate, &mut interrupt) => Err(Failure::failed("stopped in the middle of the start")),
            }
        }
    };
    let outcome = match started {
        Ok((database, running)) => {
            let printed = watch::Printed {
                program: &me,
                simulator: &url,
                database: &database.url,
                metrics: running.callback().and_then(Callback::metrics_address),
                kept: directory.kept(),
            };
            let watched = tokio::select! {
                biased;
                () = std::future::ready(()), if stopped => interrupted(&demo),
                () = asked_to_stop(&mut terminate, &mut interrupt) => interrupted(&demo),
                died = simulator.died() => Err(died),
                watched = watch::watch(&demo, &printed, &database) => watched,
            };
            let ended = stop(database, running).await;
            watched.and(ended)
        }
        Err(failure) => Err(failure),
    };
    simulator.end().await;
    outcome
}

async fn asked_to_stop(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Somebody who only watches stops when they like; somebody who waits for a result has none.
fn interrupted(demo: &DemoFlags) -> Result<(), Failure> {
    if demo.until_ready {
        Err(Failure::failed("stopped by a signal before every machine was Ready"))
    } else {
        Ok(())
    }
}

fn say(line: &str) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}")
        .map_err(|error| Failure::failed(format!("cannot write to standard output: {error}")))
}

/// Stops the service and says what is left, which is nothing. Nothing here waits for a listener.
async fn stop(database: OpenDatabase, running: Running) -> Result<(), Failure> {
    let told = say("\nstopping …");
    running.stop().await;
    let counts = database.bmdb.live_counts().await.map_err(database_failure);
    let closed = database.close().await;
    let counts = counts?;
    closed?;
    let told = told.and(say(&format!("live work: {}, open sessions: {}", counts.work, counts.sessions)));
    if counts.work != 0 || counts.sessions != 0 {
        return Err(Failure::failed(format!(
            "{} work items and {} sessions were left behind; this is a defect of Shepherd",
            counts.work, counts.sessions
        )));
    }
    told
}
