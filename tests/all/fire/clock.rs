//! One shepherd's wall clock is an hour off in either direction: nothing changes.
//!
//! The child really has that clock: `libfaketime` sits between it and the C library. It leaves the
//! monotonic and the boot-time clock alone, as a wrong battery clock does. These parts of a shepherd read the
//! wall clock:
//!
//! * certificates of the callback server (`crates/server/src/callback_ca.rs`): valid from a day before, so that
//!   agents, whose clocks are right here, believe one that was issued an hour in the future; replaced after
//!   half their life, whatever the clock says of the date;
//! * the check of the database's certificate on TLS connections (`rustls`): wrong by an hour at most at
//!   the ends of its life;
//! * the parameter against caches in a device list's URL (`device_list_source.rs` of the static
//!   provider), and the modification time of the role server's file, which is only compared for being the same;
//! * the times in the log, by which this test knows that the clock was off.
//!
//! Sessions and time limits count boot time. Every time that is stored or used in a decision is the
//! database's. The test checks this column by column.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use chrono::{DateTime, TimeDelta, Utc};
use sqlx::AssertSqlSafe;

use crate::checker::{Records, check};
use crate::fire::{BRAKES, Form, RECOVERED, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, Otherwise, endpoint};

/// How far any time in the database may be from its clock. The longest interval of the flags below and a slow run are
/// shorter than this, and the hour is longer.
const NEAR: &str = "40 minutes";

/// All machines are Ready, or one was suspected and waiting is useless.
const READY_OR_SUSPECTED: &str = "SELECT EXISTS (SELECT 1 FROM history WHERE process = 'Recovery')
        OR (count(*) > 0 AND count(*) = (SELECT machines FROM provider_state)
            AND NOT EXISTS (SELECT 1 FROM intent WHERE settled_at IS NULL))
     FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";

/// The library that gives a process another clock.
fn faketime() -> Result<PathBuf> {
    let places = std::fs::read_dir("/usr/lib")?.filter_map(Result::ok).map(|entry| entry.path());
    let library = Path::new("faketime/libfaketimeMT.so.1");
    let mut found = places.map(|place| place.join(library)).filter(|path| path.exists());
    found.next().context("libfaketime is not installed: run tools/need faketime")
}

/// A shepherd whose clock is off by this much.
fn off_by(offset: &str) -> Result<Otherwise> {
    let environment = vec![
        ("LD_PRELOAD", faketime()?.into_os_string()),
        ("FAKETIME", offset.into()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ("DONT_FAKE_MONOTONIC", "1".into()),
        // Otherwise times that are compared with a file's time would be off as well, which is not the subject here.
        ("NO_FAKE_STAT", "1".into()),
    ];
    Ok(Otherwise { environment, ..Otherwise::default() })
}

/// How far the times in a shepherd's log are from the database's.
async fn offset_in_the_log(fleet: &Fleet, name: &str) -> Result<TimeDelta> {
    let text = fleet.read_log(name)?;
    let last =
        text.lines().rev().find_map(|line| line.split_whitespace().next()?.parse::<DateTime<Utc>>().ok());
    let now: DateTime<Utc> = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&fleet.pool).await?;
    Ok(last.context("no line of the log begins with its time")? - now)
}

/// Columns with a time that is far from the database's clock, each with the number of rows.
async fn far_times(fleet: &Fleet) -> Result<Vec<String>> {
    let columns: Vec<(String, String)> = sqlx::query_as(
        "SELECT c.table_name::TEXT, c.column_name::TEXT
         FROM information_schema.columns c JOIN information_schema.tables t USING (table_schema, table_name)
         WHERE c.table_schema = 'public' AND t.table_type = 'BASE TABLE'
           AND c.data_type = 'timestamp with time zone'
         ORDER BY 1, 2",
    )
    .fetch_all(&fleet.pool)
    .await?;
    ensure!(columns.len() > 20, "only {} columns hold a time", columns.len());
    let mut far = Vec::new();
    for (table, column) in columns {
        let statement = format!(
            "SELECT count(*) FROM \"{table}\" WHERE \"{column}\" NOT BETWEEN
                 clock_timestamp() - INTERVAL '{NEAR}' AND clock_timestamp() + INTERVAL '{NEAR}'"
        );
        let found: i64 = sqlx::query_scalar(AssertSqlSafe(statement)).fetch_one(&fleet.pool).await?;
        if found > 0 {
            far.push(format!("{table}.{column}: {found}"));
        }
    }
    Ok(far)
}

async fn an_hour_off(test_name: &str, offset: &str, expected: TimeDelta) -> Result<()> {
    let machines = Form::of_this_run().pick(16, 100);
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
    // Longer than a busy host stops, and short compared with an hour.
    let flags = [
        "--session_interval=30s",
        "--heartbeat_interval=1s",
        "--recovery_silence_timeout=30s",
        "--recovery_brake_fraction=0.9",
        "--recovery_ladder=restart-agent:30s:3",
        "--update_interval_stable=1m",
    ];
    // Alone at first: it creates the authority, creates every machine, enrols it and receives its heartbeats.
    let odd = fleet.shepherd_otherwise(off_by(offset)?, "odd", &[first.clone(), second.clone()], &flags)?;
    fleet.until("all are Ready, or one is suspected", READY_OR_SUSPECTED).await?;
    assert_eq!(
        count(&fleet, RECOVERED).await?,
        0,
        "suspected by a clock of our own\n{}",
        fleet.explain().await?
    );
    let off = offset_in_the_log(&fleet, "odd").await?;
    ensure!(
        (off - expected).abs() < TimeDelta::minutes(10),
        "its clock is off by {off}, which is not {offset}"
    );

    // Then beside one whose clock is right, with agents that die.
    let straight = fleet.shepherd("straight", &[second, first], &flags)?;
    for machine in ["sim-0001", "sim-0002", "sim-0003"] {
        fleet.strike(machine, "kill").await?;
    }
    fleet
        .until(
            "those whose agents died are helped",
            "SELECT count(DISTINCT machine_id) = 3 FROM intent
             WHERE kind = 'restart-agent' AND settled_at IS NOT NULL",
        )
        .await?;
    fleet.until("all are Ready", ALL_READY).await?;
    assert_eq!(count(&fleet, RECOVERED).await?, 3, "somebody else was suspected\n{}", fleet.explain().await?);
    assert_eq!(count(&fleet, BRAKES).await?, 0, "{}", fleet.explain().await?);
    // The database decides how long a machine must be silent before it is suspected.
    let early =
        "SELECT count(*) FROM intent i JOIN history h ON h.machine_id = i.machine_id AND h.event = 'Ready'
         WHERE i.kind = 'restart-agent' AND i.begun_at > h.at AND i.begun_at < h.at + INTERVAL '28 s'";
    assert_eq!(count(&fleet, early).await?, 0, "a machine was suspected before its limit");
    let lost = count(&fleet, "SELECT count(*) FROM history WHERE event = 'Expired'").await?;
    assert_eq!(lost, 0, "a session was lost");
    assert_eq!(far_times(&fleet).await?, Vec::<String>::new(), "a time of its clock was written down");
    end(&fleet, odd).await?;
    end(&fleet, straight).await?;
    assert_eq!(check(&Records::read(&fleet.pool, &fleet.journal()?).await?), []);
    counted(
        "clock off",
        format!(
            "by {} min: {machines} machines Ready, 3 of 3 dead agents helped and nobody else, 0 sessions lost",
            off.num_minutes()
        ),
    )?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_an_hour_fast_makes_no_difference() -> TestResult {
    Ok(an_hour_off("fire_clock_fast", "+1h", TimeDelta::hours(1)).await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_an_hour_slow_makes_no_difference() -> TestResult {
    Ok(an_hour_off("fire_clock_slow", "-1h", TimeDelta::hours(-1)).await?)
}
