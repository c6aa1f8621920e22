//! Watches a demo's fleet become Ready, then prints instructions.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use crate::bmdb::connection::error::BmdbError;
use crate::model::phase::Phase;
use crate::model::shell_words::quote_if_needed;
use crate::service::database::OpenDatabase;
use crate::service::demo::flags::DemoFlags;
use crate::service::demo::not_ready::not_ready_failure;
use crate::service::demo::phase_changes::PhaseChanges;
use crate::service::demo::progress::{Progress, print_line};
use crate::service::demo::shepherdctl_build::ShepherdctlBuild;
use crate::service::failure::{ExitFailure, database_failure};
use crate::simulator::faults::FaultProfile;

/// Time between two polls of the fleet.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How long polls may fail before the demo fails.
const MAX_UNREACHABLE: Duration = Duration::from_mins(1);

/// What the printed commands contain.
pub(super) struct DemoInstructions<'a> {
    /// The path of this program's file.
    pub(super) program: &'a Path,
    /// The URL of the simulator's provider API.
    pub(super) simulator: &'a str,
    /// The path of the contexts file, by which `shepherdctl` reaches the fleet.
    pub(super) contexts: &'a Path,
    /// The address of the metrics, if they are served.
    pub(super) metrics: Option<SocketAddr>,
    /// The persistent directory of the fleet, if it has one.
    pub(super) directory: Option<&'a Path>,
}

/// Shows a fleet becoming Ready. Then returns, or prints what to try and watches the fleet heal.
pub(super) async fn watch_fleet(
    demo: &DemoFlags,
    printed: &DemoInstructions<'_>,
    database: &OpenDatabase,
) -> Result<(), ExitFailure> {
    let began = Instant::now();
    let mut build = ShepherdctlBuild::start(demo.build_shepherdctl.as_deref().filter(|_| !demo.until_ready));
    let mut fleet = i64::from(demo.machines);
    let mut progress = Progress::new();
    loop {
        let phases = retry_query(async || database.bmdb.indexed_phases().await).await?;
        let ready = phases.get(Phase::Ready.as_str()).copied().unwrap_or(0);
        // A persistent fleet may be larger than the number of machines given this time.
        let left = phases.get(Phase::Retired.as_str()).copied().unwrap_or(0);
        fleet = fleet.max(phases.values().sum::<i64>() - left);
        progress.show(&phases, fleet)?;
        if ready >= required_ready(demo, fleet) {
            progress.finish();
            let ready = if ready >= fleet { format!("all {fleet}") } else { format!("{ready} of {fleet}") };
            print_line(&format!("{ready} machines are Ready after {:.1} s", began.elapsed().as_secs_f64()))?;
            break;
        }
        if demo.until_ready && began.elapsed() > demo.ready_timeout.0 {
            progress.finish();
            return Err(not_ready_failure(&database.bmdb, demo.ready_timeout, fleet, ready).await);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    if demo.until_ready {
        return Ok(());
    }
    if build.is_under_way() {
        print_line("\nshepherdctl, which you can try next, is still being built …")?;
    }
    if let Some(failure) = build.failure().await {
        print_line(&format!(
            "shepherdctl could not be built, so that its commands below do not work: {failure}"
        ))?;
    }
    print_line(&printed.commands(demo.machines))?;
    let mut summary = SummaryOnDrop(PhaseChanges::default());
    loop {
        let machines = retry_query(async || database.bmdb.machine_phases().await).await?;
        for line in summary.0.observe(machines, std::time::Instant::now()) {
            print_line(&line)?;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Polls the fleet. On a busy host a query may fail, so the demo ends only if none succeeds for `MAX_UNREACHABLE`.
async fn retry_query<T>(look: impl AsyncFn() -> Result<T, BmdbError>) -> Result<T, ExitFailure> {
    let began = Instant::now();
    loop {
        match look().await {
            Ok(seen) => return Ok(seen),
            Err(error) if began.elapsed() > MAX_UNREACHABLE => return Err(database_failure(error)),
            Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

/// How many machines must be Ready before the instructions are printed. In a large fleet with faults, hardly ever are
/// all machines Ready at the same moment.
fn required_ready(demo: &DemoFlags, fleet: i64) -> i64 {
    if demo.until_ready || demo.faults == FaultProfile::None { fleet } else { fleet - fleet / 20 }
}

/// Prints a summary at the end, however the watching ends.
struct SummaryOnDrop(PhaseChanges);

impl Drop for SummaryOnDrop {
    fn drop(&mut self) {
        if let Some(line) = self.0.summary() {
            // A reader that is gone is no failure here.
            let _ = print_line(&format!("\n{line}"));
        }
    }
}

impl DemoInstructions<'_> {
    /// Commands to try, which can be pasted: with full paths, as a checkout may be anywhere.
    fn commands(&self, machines: u32) -> String {
        let (one, other) = (format!("sim-{:04}", machines.min(7)), format!("sim-{:04}", machines.min(11)));
        let shepherd = quote_if_needed(&self.program.to_string_lossy());
        let ctl = quote_if_needed(&self.program.with_file_name("shepherdctl").to_string_lossy());
        let simulator = self.simulator;
        let contexts = quote_if_needed(&self.contexts.to_string_lossy());
        let metrics = self.metrics.map_or_else(String::new, |address| {
            format!("\nRead what it counts:\n\n  curl --silent http://{address}/metrics\n")
        });
        // A fleet of one machine has no second machine.
        let hang = if other == one {
            String::new()
        } else {
            format!("\n  {shepherd} simulator fault {other} hang --url {simulator}")
        };
        let end = self.directory.map_or_else(
            || "removes everything it made".to_owned(),
            |kept| format!("leaves the fleet in {} for the next time", kept.display()),
        );
        format!(
            "
Break a machine, in another terminal, and watch it come back here:

  {shepherd} simulator fault {one} kill --url {simulator}{hang}

Let shepherdctl reach this fleet, once in that terminal:

  export SHEPHERD_CONTEXTS={contexts}

Ask what Shepherd knows and does about it:

  {ctl} get machines
  {ctl} why {one}
  {ctl} timeline {one}

Make a cluster of some of them, where etcd is installed:

  {ctl} cluster create demo --reason 'to see it'
  {ctl} cluster describe demo

See all of it on one page; q leaves that:

  {ctl} top

Give a machine back, and watch it leave:

  {ctl} retire {one} --yes --reason 'trying it'
{metrics}
Ctrl-C ends the demo and {end}.
"
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        demo: DemoFlags,
    }

    #[test]
    fn faults_do_not_delay_the_instructions() {
        for (flags, fleet, expected) in [
            (&["demo"][..], 200, 200),
            (&["demo", "--faults", "mild"], 200, 190),
            (&["demo", "--faults", "harsh"], 8, 8),
            (&["demo", "--faults", "mild", "--until_ready"], 200, 200),
        ] {
            let line = Line::try_parse_from(flags).unwrap();
            assert_eq!(required_ready(&line.demo, fleet), expected, "{flags:?}");
        }
    }
}
