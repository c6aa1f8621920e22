//! Interrupted shutdowns: a shepherd receives a signal to stop, and is killed during the grace period of its running
//! work, is hurried by a second signal, or dies between two steps of stopping. Its successor leaves nothing doubled and
//! nothing orphaned, and every machine Ready once.
//!
//! One fleet serves all ways, as in `crash.rs`: each shepherd may create three machines more than the one before, and
//! is stopped while it works on two of them. Their SSH commands answer two seconds late, so that work lasts longer than
//! a signal takes.
//!
//! A command that a shepherd has begun on a machine continues there for these two seconds after the shepherd has ended,
//! and cannot be cancelled; the fence exists for that case. So a call counts until its caller's end, and no longer. A
//! call that the machine begins only after that, because the caller died in these two seconds, does not count.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::checker::Records;
use crate::fire::crash::{BRIEF, death, judge_records, ready_exactly_once};
use crate::fire::{ALL_KNOWN_READY, Form, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{Fleet, PATIENCE, Program, endpoint};

/// A session that expires on a busy host leaves its work to the reaper while its last command continues at the machine
/// for two seconds and the next shepherd starts. No shepherd died there, and this test does not examine that case.
const UNHURRIED: &str = "--session_interval=15s";

/// How a shutdown is interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Killed while it waits for its running work.
    Killed,
    /// A second signal; then it may run to its end.
    Hurried,
    /// One signal, and dies at this failpoint.
    DeadAt(&'static str),
    /// Two signals, and dies at this failpoint.
    HurriedDeadAt(&'static str),
}

const WAYS: [Way; 6] = [
    Way::Killed,
    Way::DeadAt("shutdown.draining"),
    Way::Hurried,
    Way::HurriedDeadAt("initializer.cancelled"),
    Way::HurriedDeadAt("shutdown.idle"),
    Way::HurriedDeadAt("shutdown.drained"),
];

impl Way {
    fn place(self) -> Option<&'static str> {
        match self {
            Self::Killed | Self::Hurried => None,
            Self::DeadAt(place) | Self::HurriedDeadAt(place) => Some(place),
        }
    }

    /// Whether it dies with unfinished work, or certainly without any.
    fn leaves_work(self) -> Option<bool> {
        match self {
            Self::Killed | Self::DeadAt(_) => Some(true),
            Self::Hurried | Self::HurriedDeadAt("shutdown.idle" | "shutdown.drained") => Some(false),
            Self::HurriedDeadAt(_) => None,
        }
    }
}

/// Machines that a process has worked on for at least this many milliseconds, by the BMDB.
async fn works_on(fleet: &Fleet, pid: u32, milliseconds: i64) -> Result<i64> {
    Ok(sqlx::query_scalar(
        "SELECT count(*) FROM work w JOIN session s USING (session_id)
         WHERE w.process = 'AgentStart' AND s.runtime_info->>'pid' = $1
           AND w.started_at <= clock_timestamp() - $2 * INTERVAL '1 ms'",
    )
    .bind(pid.to_string())
    .bind(milliseconds)
    .fetch_one(&fleet.pool)
    .await?)
}

/// Sends the signal to stop, and waits until the log shows that the shepherd stops.
async fn tell_to_stop(fleet: &Fleet, name: &str, shepherd: &Program) -> Result<()> {
    shepherd.signal(Signal::TERM)?;
    let deadline = Instant::now() + PATIENCE;
    while !fleet.read_log(name)?.contains("a second signal stops at once") {
        ensure!(Instant::now() < deadline, "it does not say that it stops\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Waits until the database has completed the statements of a shepherd that is gone: an end of work with a commit on
/// its way still takes effect.
async fn unheard(fleet: &Fleet) -> Result<()> {
    let gone = "SELECT count(*) = 0 FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'shepherd'";
    fleet.until("the dead shepherd's connections are closed", gone).await
}

/// Stops a shepherd in this way. Returns the number of machines with work that it left unfinished.
async fn stopped(fleet: &Fleet, name: &str, way: Way, mut shepherd: Program) -> Result<i64> {
    let pid = shepherd.pid();
    let deadline = Instant::now() + PATIENCE;
    // A machine that is still booting refuses connections at once; one that is up takes many seconds.
    while works_on(fleet, pid, 1000).await? < 2 {
        ensure!(Instant::now() < deadline, "{way:?}: it never works on two\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    match way {
        Way::Killed => {
            tell_to_stop(fleet, name, &shepherd).await?;
            shepherd.kill()?;
        }
        Way::Hurried => {
            tell_to_stop(fleet, name, &shepherd).await?;
            end(fleet, shepherd).await?;
        }
        Way::DeadAt(place) => {
            shepherd.signal(Signal::TERM)?;
            death(fleet, &mut shepherd, place).await?;
        }
        Way::HurriedDeadAt(place) => {
            tell_to_stop(fleet, name, &shepherd).await?;
            shepherd.signal(Signal::TERM)?;
            death(fleet, &mut shepherd, place).await?;
        }
    }
    unheard(fleet).await?;
    let left = works_on(fleet, pid, 0).await?;
    match way.leaves_work() {
        Some(true) => ensure!(left > 0, "{way:?}: nothing was under way any more"),
        Some(false) => ensure!(left == 0, "{way:?}: {left} work items were left to the reaper"),
        None => {}
    }
    if way == Way::Hurried {
        let open: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM session WHERE closed_at IS NULL AND runtime_info->>'pid' = $1",
        )
        .bind(pid.to_string())
        .fetch_one(&fleet.pool)
        .await?;
        ensure!(open == 0, "{open} sessions of a shepherd that came to its end are open");
    }
    Ok(left)
}

/// The SSH key by which the journal knows who made a call.
fn key_of(arguments: &Value) -> Option<&str> {
    arguments["key"].as_str()
}

/// The length of the journal when the shepherd of each SSH key was gone.
#[derive(Debug, Default)]
struct ShepherdExits(HashMap<String, u64>);

impl ShepherdExits {
    /// Records that the shepherd of this name is gone.
    fn note(&mut self, fleet: &Fleet, name: &str) -> Result<()> {
        self.0.insert(fleet.ssh_key(name)?, fleet.journal()?.len() as u64);
        Ok(())
    }

    /// Ends each call at the end of its caller, and leaves out calls that a slow machine began only after that.
    fn end_calls(&self, records: &mut Records) {
        records.calls.retain_mut(|call| {
            let gone = key_of(&call.arguments).and_then(|key| self.0.get(key)).copied().unwrap_or(u64::MAX);
            call.end = call.end.min(gone);
            call.start <= gone
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shepherd_that_dies_while_it_stops_leaves_each_machine_to_be_ready_once() -> TestResult {
    let rounds = Form::of_this_run().pick(1, 3);
    let ways = WAYS.repeat(rounds);
    let machines = 3 * ways.len();
    let flags = [
        "--machine_count",
        &machines.to_string(),
        "--boot_seconds",
        "0.1",
        "--persistent_agent_percent",
        "100",
    ];
    let fleet = Fleet::start("fire_shutdown", &flags).await?;
    for number in 1..=machines {
        fleet.strike(&format!("sim-{number:04}"), "slow").await?;
    }
    let endpoints = [endpoint()?];
    let (mut left, mut gone) = (0, ShepherdExits::default());
    for (number, way) in ways.iter().copied().enumerate() {
        let name = format!("shepherd-{number}");
        let most = format!("--provisioner_max_machines={}", 3 * (number + 1));
        let flags = [&BRIEF[..], &[UNHURRIED, &most]].concat();
        let shepherd = match way.place() {
            Some(place) => fleet.shepherd_dying_at(place, &name, &endpoints, &flags)?,
            None => fleet.shepherd(&name, &endpoints, &flags)?,
        };
        left += stopped(&fleet, &name, way, shepherd).await?;
        gone.note(&fleet, &name)?;
    }
    for number in 1..=machines {
        fleet.strike(&format!("sim-{number:04}"), "heal").await?;
    }
    let shepherd = fleet.shepherd("last", &endpoints, &[&BRIEF[..], &[UNHURRIED]].concat())?;
    let all = "SELECT count(*) = (SELECT machines FROM provider_state) FROM machine";
    fleet.until("there are as many machines as there can be", all).await?;
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    let alone = "SELECT count(DISTINCT runtime_info->>'pid') = 1 FROM session WHERE closed_at IS NULL";
    fleet.until("every session of the dead is over", alone).await?;
    end(&fleet, shepherd).await?;
    let mut records = Records::read(&fleet.pool, &fleet.journal()?).await?;
    gone.end_calls(&mut records);
    judge_records(&fleet, &records).await?;
    ready_exactly_once(&fleet).await?;
    let expired = count(&fleet, "SELECT count(*) FROM history WHERE event = 'Expired'").await?;
    let cancelled = count(&fleet, "SELECT count(*) FROM history WHERE event = 'Cancelled'").await?;
    assert!(expired >= left, "{left} work items were left behind, and {expired} recorded as lost");
    assert!(cancelled > 0, "nothing was ever cancelled in order");
    counted(
        "in the middle of stopping",
        format!(
            "{} stops cut short, {machines} machines each Ready once; {left} work items lost and {cancelled} cancelled",
            ways.len()
        ),
    )?;
    Ok(())
}
