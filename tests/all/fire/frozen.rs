//! A shepherd that is frozen for longer than its sessions last, in the middle of a call, and resumes when others have
//! taken over its machines: nothing that it does from then on takes effect.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use chrono::{DateTime, Utc};
use rustix::process::Signal;
use serde_json::Value;
use uuid::Uuid;

use crate::checker::{Records, TOUCHES, check};
use crate::fire::{Form, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, Program, endpoint};

/// A call that the simulator was processing when its caller froze.
#[derive(Debug)]
pub(super) struct Caught {
    pub(super) call: u64,
    what: String,
    machine: String,
    pub(super) intent: String,
}

/// The SSH key by which the journal identifies the caller of an SSH call.
fn key_of(line: &Value) -> Option<&str> {
    line["arguments"]["key"].as_str()
}

/// Calls of the journal that have begun and not ended.
pub(super) fn open_calls(journal: &[Value], wanted: &[&str]) -> Vec<Caught> {
    let ended = |number: u64| journal.iter().any(|line| line["phase"] == "end" && line["call"] == number);
    journal
        .iter()
        .filter(|line| line["phase"] == "start" && wanted.iter().any(|what| line["what"] == *what))
        .filter_map(|line| {
            let number = line["call"].as_u64()?;
            if ended(number) {
                return None;
            }
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            Some(Caught {
                call: number,
                what: text(&line["what"]),
                machine: text(&line["machine"]),
                intent: text(&line["intent"]),
            })
        })
        .collect()
}

/// Whether every thread of a process is stopped.
pub(crate) fn is_stopped(pid: u32) -> Result<bool> {
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended meanwhile was not stopped.
        let Ok(stat) = std::fs::read_to_string(task?.path().join("stat")) else { return Ok(false) };
        // The name before it may contain anything, including a parenthesis.
        let (_, after_name) = stat.rsplit_once(") ").context("a thread without its state")?;
        if !after_name.starts_with('T') {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Freezes `shepherd`, the only one of its fleet, while one of these calls is open.
pub(super) async fn freeze(fleet: &Fleet, shepherd: &Program, wanted: &[&str]) -> Result<Vec<Caught>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        shepherd.signal(Signal::STOP)?;
        while !is_stopped(shepherd.pid())? {
            tokio::task::yield_now().await;
        }
        // A call that was still open when its caller had stopped.
        let caught = open_calls(&fleet.journal()?, wanted);
        if !caught.is_empty() {
            return Ok(caught);
        }
        shepherd.signal(Signal::CONT)?;
        ensure!(Instant::now() < deadline, "never in the middle of {wanted:?}\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(7)).await;
    }
}

/// Whether every session of this process has ended in the database.
pub(super) async fn all_over(fleet: &Fleet, pid: u32, what: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let open: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM session WHERE runtime_info->>'pid' = $1 AND closed_at IS NULL",
        )
        .bind(pid.to_string())
        .fetch_one(&fleet.pool)
        .await?;
        if open == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{what}: {open} sessions stay open");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Ends a shepherd that was frozen, and then the one that has taken over its work.
pub(super) async fn end_both(fleet: &Fleet, victim: Program, survivor: Program) -> Result<()> {
    let frozen = victim.pid();
    end(fleet, victim).await?;
    // A session that it lost right before, as on a busy host, is left to the reaper. That is the survivor's.
    all_over(fleet, frozen, "ended").await?;
    end(fleet, survivor).await
}

/// Provider's id of a machine, process that held it, from when, until when.
type Lease = (String, i64, DateTime<Utc>, Option<DateTime<Utc>>);

/// Calls after line `since` that touch a machine and began while no process held a lease on it, or, for SSH calls by
/// `key`, while the process `pid` did not.
async fn without_a_lease(fleet: &Fleet, key: &str, pid: u32, since: u64) -> Result<Vec<String>> {
    // Read before the leases, so that a call in it had its lease by then.
    let journal = fleet.journal()?;
    let leases: Vec<Lease> = sqlx::query_as(
        "SELECT p.provider_id, (s.runtime_info->>'pid')::INT8, b.at, e.at
         FROM history b
         JOIN session s USING (session_id)
         JOIN machine_provided p USING (machine_id)
         LEFT JOIN history e ON e.machine_id = b.machine_id AND e.lane = b.lane AND e.fence = b.fence AND e.edge = 'end'
         WHERE b.edge = 'start' AND b.lane = 'access'",
    )
    .fetch_all(&fleet.pool)
    .await?;
    let mut found = Vec::new();
    for line in journal {
        let touches = line["phase"] == "start" && TOUCHES.iter().any(|what| line["what"] == *what);
        if !touches || line["call"].as_u64().unwrap_or(0) <= since {
            continue;
        }
        let by_it = key_of(&line) == Some(key);
        let at: DateTime<Utc> = line["at"].as_str().context("a line without its time")?.parse()?;
        let covered = leases.iter().any(|(machine, holder, from, until)| {
            line["machine"] == *machine
                && (!by_it || *holder == i64::from(pid))
                && *from <= at
                && until.is_none_or(|until| at <= until)
        });
        if !covered {
            found
                .push(format!("{} of {} at {at}, by the frozen one: {by_it}", line["what"], line["machine"]));
        }
    }
    Ok(found)
}

/// Freezes one of two shepherds in the middle of `wanted`, lets the other take over, and resumes it.
async fn frozen_in_the_middle_of(
    test_name: &str,
    machines: usize,
    wanted: &[&str],
    strike: Option<(&str, &[&str])>,
) -> Result<()> {
    let flags = [
        "--machine_count",
        &machines.to_string(),
        "--boot_seconds",
        "0.5",
        "--persistent_agent_percent",
        "100",
    ];
    let fleet = Fleet::start(test_name, &flags).await?;
    let (first, second) = (endpoint()?, endpoint()?);
    let flags = [
        "--session_interval=3s",
        "--outward_call_timeout=8s",
        "--heartbeat_interval=1s",
        "--recovery_silence_timeout=6s",
        "--recovery_brake_fraction=0.9",
        "--recovery_brake_window=20s",
        "--recovery_ladder=restart-agent:5s:1,reboot:10s:1,power-cycle:10s:2",
    ];
    let victim = fleet.shepherd("victim", &[first.clone(), second.clone()], &flags)?;
    if let Some((provider, faults)) = strike {
        fleet.until("all are Ready", ALL_READY).await?;
        fleet.strike("provider", provider).await?;
        for (number, fault) in faults.iter().enumerate() {
            fleet.strike(&format!("sim-{:04}", number + 1), fault).await?;
        }
    }
    let caught = freeze(&fleet, &victim, wanted).await?;
    let journal = fleet.journal()?;
    let key = journal.iter().find_map(key_of).context("it has logged in somewhere")?.to_owned();
    let mut cut_off: Vec<u64> = open_calls(&journal, &TOUCHES).iter().map(|call| call.call).collect();
    // Started only now, so that the caught call is the victim's. It loses no session, however busy the host is.
    let unhurried = [&flags[..], &["--session_interval=30s"]].concat();
    let survivor = fleet.shepherd("survivor", &[second, first], &unhurried)?;
    let frozen = victim.pid();
    all_over(&fleet, frozen, "frozen").await?;
    fleet.strike("provider", "heal").await?;
    let caught_one = caught.first().context("something was caught")?;
    taken_over(&fleet, &caught_one.machine, frozen).await?;
    let journal = fleet.journal()?;
    let woken_after = journal.len() as u64;
    // A request that it had sent before it froze may have arrived after that.
    cut_off.extend(
        journal
            .iter()
            .filter(|line| key_of(line) == Some(key.as_str()))
            .filter_map(|line| line["call"].as_u64())
            .filter(|call| caught.iter().all(|caught| *call > caught.call)),
    );
    victim.signal(Signal::CONT)?;

    works_again(&fleet, frozen, async || {
        let uncovered = without_a_lease(&fleet, &key, frozen, woken_after).await?;
        ensure!(uncovered.is_empty(), "touched after it woke, without a lease: {uncovered:#?}");
        Ok(())
    })
    .await?;
    fleet.until("all are Ready", ALL_READY).await?;
    end_both(&fleet, victim, survivor).await?;

    let mut records = Records::read(&fleet.pool, &fleet.journal()?).await?;
    // A call stays open on the machine for as long as its caller is frozen. Its effect came before.
    for call in records.calls.iter_mut().filter(|call| cut_off.contains(&call.start)) {
        call.end = call.start;
    }
    assert_eq!(check(&records), []);
    let uncovered = without_a_lease(&fleet, &key, frozen, woken_after).await?;
    assert_eq!(uncovered, Vec::<String>::new(), "touched after it woke, without a lease");
    let expired: Vec<Uuid> =
        records.edges.iter().filter(|edge| edge.event == "Expired").map(|edge| edge.machine_id).collect();
    ensure!(!expired.is_empty(), "nothing was lost: that was no freeze");
    counted(
        "frozen",
        format!(
            "in the middle of {} {}; {} leases lost, none of {} calls after it woke was without a lease",
            caught.len(),
            caught_one.what,
            expired.len(),
            fleet.journal()?.len() as u64 - woken_after
        ),
    )?;
    Ok(())
}

/// Waits until a process that was frozen has new sessions, and checks meanwhile what it does.
pub(super) async fn works_again(
    fleet: &Fleet,
    pid: u32,
    mut look: impl AsyncFnMut() -> Result<()>,
) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let sessions: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM session
             WHERE runtime_info->>'pid' = $1 AND closed_at IS NULL AND component = 'initializer'",
        )
        .bind(pid.to_string())
        .fetch_one(&fleet.pool)
        .await?;
        look().await?;
        if sessions > 0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it does not come back\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until another process than `pid` has begun to work on a machine that the frozen one held.
async fn taken_over(fleet: &Fleet, machine: &str, pid: u32) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let taken: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM history h JOIN session s USING (session_id) JOIN machine_provided p USING (machine_id)
             WHERE p.provider_id = $1 AND h.edge = 'end' AND h.event <> 'Expired' AND s.runtime_info->>'pid' <> $2)",
        )
        .bind(machine)
        .bind(pid.to_string())
        .fetch_one(&fleet.pool)
        .await?;
        if taken {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "nobody takes {machine} over\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_in_the_middle_of_ssh() -> TestResult {
    let machines = Form::of_this_run().pick(30, 120);
    Ok(frozen_in_the_middle_of("fire_frozen_ssh", machines, &["upload", "enroll-command"], None).await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_in_the_middle_of_a_power_call() -> TestResult {
    // An API that takes five seconds for every call: long enough to freeze its caller meanwhile.
    let strike = ("api-slow", ["dead", "dead"].as_slice());
    Ok(frozen_in_the_middle_of("fire_frozen_power", 6, &["power"], Some(strike)).await?)
}
