//! `shepherd demo`: a simulated fleet, a private database and the real service.
//!
//! The real service runs on a real PostgreSQL, against simulated machines in a process of their own behind real
//! protocols. Nothing in the service knows that it is a demo. Only the limits are short, so that a person can watch.
//!
//! * [`flags`]: the flags of the demo.
//! * `directory`: where the fleet is stored, and whether it is persistent.
//! * `simulator_process`: the simulator, a child process.
//! * `reserved_port`: the port of each listener, which stays the same in a persistent demo.
//! * `fleet_service`: the service, with the flags of a demo.
//! * `saved_context`: the context by which `shepherdctl` calls the API of the demo.
//! * `watch`: the output meanwhile; `progress`, `phase_changes` and `not_ready` are its parts.
//! * `shepherdctl_build`: builds `shepherdctl` if the demo is run from source.
//!
//! The reader of the output may go away (`| head`). Everything that was started is stopped in order all the same, and
//! the failed write is the failure that is returned.

use crate::service::database::OpenDatabase;
use crate::service::demo::directory::FleetDirectory;
use crate::service::demo::flags::DemoFlags;
use crate::service::demo::progress::print_line;
use crate::service::demo::reserved_port::{DemoListener, ReservedPort};
use crate::service::demo::saved_context::save_context;
use crate::service::demo::simulator_process::SimulatorProcess;
use crate::service::failure::{ExitFailure, database_failure};
use crate::service::flags::LogFormat;
use crate::service::listeners::Listeners;
use crate::service::logging;
use crate::service::os_process::StopSignals;
use crate::service::running_service::RunningService;

mod directory;
pub mod flags;
mod fleet_service;
mod not_ready;
mod phase_changes;
mod progress;
mod reserved_port;
mod saved_context;
mod shepherdctl_build;
mod simulator_process;
mod watch;

/// Runs the demo until it is done, stopped or failed.
pub async fn run_demo(demo: DemoFlags) -> Result<(), ExitFailure> {
    logging::start_logging(LogFormat::Text, "off", None);
    let mut signals = StopSignals::listen()?;
    print_line(&format!(
        "{} simulated machines, a private PostgreSQL and the whole service:",
        demo.machines
    ))?;
    print_line("  starting the simulator and PostgreSQL …")?;
    let directory = FleetDirectory::open(&demo)?;
    let me = std::env::current_exe()
        .map_err(|error| ExitFailure::failed(format!("cannot find this program's own file: {error}")))?;
    // Reserved until the simulator listens there.
    let provider = ReservedPort::reserve(DemoListener::Provider, directory.persistent_path())?;
    let mut simulator = SimulatorProcess::start(&me, &demo, directory.path(), provider.address).await?;
    drop(provider);
    let url = simulator.url().to_owned();
    let mut starting = std::pin::pin!(fleet_service::start_service(&me, &url, directory.persistent_path()));
    let mut stopped = false;
    let started = tokio::select! {
        started = &mut starting => started,
        died = simulator.wait_for_exit() => Err(died),
        () = signals.recv() => {
            // The demo stops even if nobody reads this line.
            let _ = print_line("  stopping as soon as everything has started …");
            stopped = true;
            tokio::select! {
                started = &mut starting => started,
                () = signals.recv() => Err(ExitFailure::failed("stopped in the middle of the start")),
            }
        }
    };
    let outcome = match started {
        Ok((database, running)) => {
            let watching = async {
                let api = running.listeners().and_then(Listeners::api);
                let api = api.ok_or_else(|| ExitFailure::failed("the service of the demo has no API"))?;
                let contexts = save_context(directory.path(), &database.bmdb, api).await?;
                let printed = watch::DemoInstructions {
                    program: &me,
                    simulator: &url,
                    contexts: &contexts,
                    metrics: running.listeners().and_then(Listeners::metrics_address),
                    directory: directory.persistent_path(),
                };
                watch::watch_fleet(&demo, &printed, &database).await
            };
            let watched = tokio::select! {
                biased;
                () = std::future::ready(()), if stopped => interrupted_result(&demo),
                () = signals.recv() => interrupted_result(&demo),
                died = simulator.wait_for_exit() => Err(died),
                watched = watching => watched,
            };
            let ended = stop_service(database, running).await;
            watched.and(ended)
        }
        Err(failure) => Err(failure),
    };
    simulator.stop().await;
    outcome
}

/// A person who only watches may stop at any time. A caller that waits for a result has none yet.
fn interrupted_result(demo: &DemoFlags) -> Result<(), ExitFailure> {
    if demo.until_ready {
        Err(ExitFailure::failed("stopped by a signal before every machine was Ready"))
    } else {
        Ok(())
    }
}

/// Stops the service and reports that no work is left. Nothing here waits for a reader.
async fn stop_service(database: OpenDatabase, running: RunningService) -> Result<(), ExitFailure> {
    let result = print_line("\nstopping …");
    let deadline = running.stop().await;
    let counts = database.bmdb.live_counts().await.map_err(database_failure);
    let closed = database.close(deadline).await;
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
