//! What a person is told while a demo runs.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use crate::bmdb::error::BmdbError;
use crate::model::phase::Phase;
use crate::model::shell_words::word;
use crate::service::demo::healing::Healing;
use crate::service::demo::progress::Progress;
use crate::service::demo::shepherdctl::Building;
use crate::service::demo::{DemoFlags, rest, say};
use crate::service::failure::Failure;
use crate::service::run::{OpenDatabase, database_failure};
use crate::simulator::faults::Profile;

/// How often the fleet is looked at.
const LOOK: Duration = Duration::from_millis(250);
/// For how long looks may come to nothing.
const BLIND: Duration = Duration::from_mins(1);

/// What the commands are made of that a person can paste.
pub(super) struct Printed<'a> {
    /// This program's own file.
    pub(super) program: &'a Path,
    /// The simulator's provider API.
    pub(super) simulator: &'a str,
    /// The private database.
    pub(super) database: &'a str,
    /// Where metrics are shown.
    pub(super) metrics: Option<SocketAddr>,
    /// Where the fleet stays, if it does.
    pub(super) kept: Option<&'a Path>,
}

/// Shows a fleet becoming Ready; then ends, or says what to try and watches it heal.
pub(super) async fn watch(
    demo: &DemoFlags,
    printed: &Printed<'_>,
    database: &OpenDatabase,
) -> Result<(), Failure> {
    let began = Instant::now();
    let mut building = Building::start(demo.build_shepherdctl.as_deref().filter(|_| !demo.until_ready));
    let mut fleet = i64::from(demo.machines);
    let mut progress = Progress::new();
    loop {
        let phases = seen(async || database.bmdb.indexed_phases().await).await?;
        let ready = phases.get(Phase::Ready.as_str()).copied().unwrap_or(0);
        // A kept fleet may be larger than what was asked for this time.
        let left = phases.get(Phase::Retired.as_str()).copied().unwrap_or(0);
        fleet = fleet.max(phases.values().sum::<i64>() - left);
        progress.show(&phases, fleet)?;
        if ready >= enough(demo, fleet) {
            progress.finish();
            let ready = if ready >= fleet { format!("all {fleet}") } else { format!("{ready} of {fleet}") };
            say(&format!("{ready} machines are Ready after {:.1} s", began.elapsed().as_secs_f64()))?;
            break;
        }
        if demo.until_ready && began.elapsed() > demo.deadline.0 {
            progress.finish();
            return Err(rest::why(&database.bmdb, demo.deadline, fleet, ready).await);
        }
        tokio::time::sleep(LOOK).await;
    }
    if demo.until_ready {
        return Ok(());
    }
    if building.is_under_way() {
        say("\nshepherdctl, which you can try next, is still being built …")?;
    }
    if let Some(failure) = building.failure().await {
        say(&format!("shepherdctl could not be built, so that its commands below do not work: {failure}"))?;
    }
    say(&printed.commands(demo.machines))?;
    let mut summary = Summary(Healing::default());
    loop {
        let machines = seen(async || database.bmdb.machine_phases().await).await?;
        for line in summary.0.observe(machines, std::time::Instant::now()) {
            say(&line)?;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// What a look at the fleet shows. On a host with much else to do one may come to nothing; the demo ends only
/// when nothing is seen for long.
async fn seen<T>(look: impl AsyncFn() -> Result<T, BmdbError>) -> Result<T, Failure> {
    let began = Instant::now();
    loop {
        match look().await {
            Ok(seen) => return Ok(seen),
            Err(error) if began.elapsed() > BLIND => return Err(database_failure(error)),
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    }
}

/// How many machines must be Ready before a person is told what to try. Of a large fleet with faults
/// hardly ever all are at one moment.
fn enough(demo: &DemoFlags, fleet: i64) -> i64 {
    if demo.until_ready || demo.faults == Profile::None { fleet } else { fleet - fleet / 20 }
}

/// Says in the end what was seen, however the watching ends.
struct Summary(Healing);

impl Drop for Summary {
    fn drop(&mut self) {
        if let Some(line) = self.0.summary() {
            // Nobody to tell is no failure here.
            let _ = say(&format!("\n{line}"));
        }
    }
}

impl Printed<'_> {
    /// What to try, as it can be pasted: a checkout may be anywhere.
    fn commands(&self, machines: u32) -> String {
        let (one, other) = (format!("sim-{:04}", machines.min(7)), format!("sim-{:04}", machines.min(11)));
        let shepherd = word(&self.program.to_string_lossy());
        let ctl = word(&self.program.with_file_name("shepherdctl").to_string_lossy());
        let (simulator, database) = (self.simulator, word(self.database));
        let metrics = self.metrics.map_or_else(String::new, |address| {
            format!("\nRead what it counts:\n\n  curl --silent http://{address}/metrics\n")
        });
        // A fleet of one has no other.
        let hang = if other == one {
            String::new()
        } else {
            format!("\n  {shepherd} simulator fault {other} hang --url {simulator}")
        };
        let end = self.kept.map_or_else(
            || "removes everything it made".to_owned(),
            |kept| format!("leaves the fleet in {} for the next time", kept.display()),
        );
        format!(
            "
Break a machine, in another terminal, and watch it come back here:

  {shepherd} simulator fault {one} kill --url {simulator}{hang}

Ask what Shepherd knows and does about it:

  {ctl} --bmdb_url {database} get machines
  {ctl} --bmdb_url {database} why {one}
  {ctl} --bmdb_url {database} timeline {one}

Make a cluster of some of them, where etcd is installed:

  {ctl} --bmdb_url {database} cluster create demo --reason 'to see it'
  {ctl} --bmdb_url {database} cluster describe demo

See all of it on one page; q leaves that:

  {ctl} --bmdb_url {database} top

Give a machine back, and watch it leave:

  {ctl} --bmdb_url {database} retire {one} --reason 'trying it'
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
    fn faults_do_not_keep_a_person_waiting_for_a_moment_without_any() {
        for (flags, fleet, expected) in [
            (&["demo"][..], 200, 200),
            (&["demo", "--faults", "mild"], 200, 190),
            (&["demo", "--faults", "harsh"], 8, 8),
            (&["demo", "--faults", "mild", "--until_ready"], 200, 200),
        ] {
            let line = Line::try_parse_from(flags).unwrap();
            assert_eq!(enough(&line.demo, fleet), expected, "{flags:?}");
        }
    }
}
