//! Outages of our own: no machine is suspected because it could not reach us.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shepherd::bmdb::connection::private_postgres::PrivatePostgres;
use shepherd::bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use uuid::Uuid;

use crate::checker::{Records, check};
use crate::fire::{BRAKES, DISTURBED, Form, RECOVERED, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, endpoint};

/// Machines with agents that reported since the database's clock showed `since`, each with the time of its first report.
async fn first_returns(
    fleet: &Fleet,
    since: chrono::DateTime<chrono::Utc>,
    machines: usize,
) -> Result<BTreeMap<Uuid, chrono::DateTime<chrono::Utc>>> {
    let mut first = BTreeMap::new();
    let deadline = Instant::now() + PATIENCE;
    while first.len() < machines {
        let seen: Vec<(Uuid, chrono::DateTime<chrono::Utc>)> =
            sqlx::query_as("SELECT machine_id, at FROM machine_agent_heartbeat WHERE at > $1")
                .bind(since)
                .fetch_all(&fleet.pool)
                .await?;
        for (machine, at) in seen {
            first.entry(machine).or_insert(at);
        }
        ensure!(Instant::now() < deadline, "{} agents are back\n{}", first.len(), fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(first)
}

/// How many of the returns fall into the fullest tenth of the whole duration.
fn fullest_tenth(first: &BTreeMap<Uuid, chrono::DateTime<chrono::Utc>>) -> (usize, chrono::TimeDelta) {
    let (Some(begin), Some(end)) = (first.values().min(), first.values().max()) else {
        return (0, chrono::TimeDelta::zero());
    };
    let span = (*end - *begin).num_milliseconds().max(1);
    let mut tenths = [0_usize; 10];
    for at in first.values() {
        let place = (*at - *begin).num_milliseconds() * 10 / (span + 1);
        tenths[usize::try_from(place).unwrap_or(0).min(9)] += 1;
    }
    (tenths.into_iter().max().unwrap_or(0), *end - *begin)
}

/// The largest number within one second, wherever that second begins.
fn fullest_second(milliseconds: &[u64]) -> usize {
    let within = |begin: &u64| milliseconds.iter().filter(|ms| (*begin..*begin + 1000).contains(ms)).count();
    milliseconds.iter().map(within).max().unwrap_or(0)
}

/// The pauses that agents chose after their last failure. The test uses them instead of arrivals, because a host that
/// stalls for a second turns any arrivals into one wave.
async fn pauses(fleet: &Fleet) -> Result<Vec<u64>> {
    let machines = fleet.truth().await?;
    let pause = |machine: &serde_json::Value| machine["heartbeats"]["pause_ms"].as_u64();
    machines.iter().map(|machine| pause(machine).context("an agent reached somebody all the time")).collect()
}

/// Shorter than the longest gap that counts as listening.
const STEP: Duration = Duration::from_secs(25);

async fn now(fleet: &Fleet) -> Result<chrono::DateTime<chrono::Utc>> {
    Ok(sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&fleet.pool).await?)
}

/// Machines for which a recovery was claimed before this time of the database's clock. That clock continues while a
/// busy host runs nothing.
async fn recovered_before(fleet: &Fleet, moment: chrono::DateTime<chrono::Utc>) -> Result<i64> {
    Ok(sqlx::query_scalar(
        "SELECT count(DISTINCT machine_id) FROM history WHERE process = 'Recovery' AND at < $1",
    )
    .bind(moment)
    .fetch_one(&fleet.pool)
    .await?)
}

/// An outage of an hour of the test clock, with a limit of three minutes. The machines with agents that died meanwhile are
/// suspected one full limit after we listened again, and no others ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_hour_away_starts_no_ladder_before_agents_had_one_full_limit() -> TestResult {
    let machines = Form::of_this_run().pick(24, 200);
    let flags = [
        "--machine_count",
        &machines.to_string(),
        "--boot_seconds",
        "0.5",
        "--persistent_agent_percent",
        "100",
    ];
    let fleet = Fleet::start("fire_away", &flags).await?;
    let limit = chrono::TimeDelta::minutes(3);
    let flags = ["--heartbeat_interval=1s", "--recovery_silence_timeout=3m"];
    let endpoints = [endpoint()?];
    let shepherd = fleet.shepherd("before", &endpoints, &flags)?;
    fleet.until("all are Ready", ALL_READY).await?;
    end(&fleet, shepherd).await?;

    let dead = ["sim-0001", "sim-0002", "sim-0003"];
    for machine in dead {
        fleet.strike(machine, "kill").await?;
    }
    fleet.database.advance(Duration::from_hours(1)).await?;
    let back_at = now(&fleet).await?;
    let shepherd = fleet.shepherd("after", &endpoints, &flags)?;
    let alive = machines - dead.len();
    let back = first_returns(&fleet, back_at, alive).await?;
    // Nearly none of that hour has passed for the agents, so the times of their returns prove little. The test in real
    // time checks them.
    let (fullest, took) = fullest_tenth(&back);

    // In steps shorter than the longest gap in listening. Otherwise the pause would be ours again.
    let mut listened = Duration::ZERO;
    while listened + Duration::from_secs(30) < limit.to_std()? {
        let early = recovered_before(&fleet, back_at + limit).await?;
        assert!(early == 0, "{early} suspected after {listened:?} of listening");
        assert!(count(&fleet, BRAKES).await? == 0, "a brake is on although only we were away");
        listen_on(&fleet, alive).await?;
        listened += STEP;
    }
    for _ in 0..3 {
        listen_on(&fleet, alive).await?;
    }
    fleet
        .until(
            "those whose agents died are helped",
            "SELECT count(DISTINCT machine_id) = 3 FROM intent WHERE kind = 'restart-agent'",
        )
        .await?;
    fleet.until("all are Ready", ALL_READY).await?;
    let early = recovered_before(&fleet, back_at + limit).await?;
    assert!(early == 0, "{early} suspected before the limit");
    let recovered = count(&fleet, RECOVERED).await?;
    assert_eq!(recovered, 3, "only those whose agents died are helped\n{}", fleet.explain().await?);
    end(&fleet, shepherd).await?;
    counted(
        "away for an hour",
        format!(
            "{machines} machines, 0 suspected within the limit, 3 of 3 dead agents helped after it; {} agents \
             came back within {} ms, {fullest} of them in the fullest tenth",
            back.len(),
            took.num_milliseconds()
        ),
    )?;
    Ok(())
}

/// Moves the clock by less than the longest gap in listening, and waits for a heartbeat of every living machine.
async fn listen_on(fleet: &Fleet, alive: usize) -> Result<()> {
    fleet.database.advance(STEP).await?;
    first_returns(fleet, now(fleet).await?, alive).await?;
    Ok(())
}

/// The same in real time, with lower limits by policy, while every agent retries at a closed port.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn away_for_longer_than_the_silence_limit_in_real_time_disturbs_nobody() -> TestResult {
    // Enough machines that chance alone does not put three quarters of them into one second.
    let machines = Form::of_this_run().pick(60, 200);
    let flags = [
        "--machine_count",
        &machines.to_string(),
        "--boot_seconds",
        "0.5",
        "--persistent_agent_percent",
        "100",
    ];
    let fleet = Fleet::start("fire_away_really", &flags).await?;
    let flags = ["--heartbeat_interval=1s", "--recovery_silence_timeout=30s"];
    let endpoints = [endpoint()?];
    let shepherd = fleet.shepherd("before", &endpoints, &flags)?;
    fleet.until("all are Ready", ALL_READY).await?;
    end(&fleet, shepherd).await?;
    // The subject of this test is that time passes: longer than the limit, for every agent.
    fleet
        .until(
            "everybody has been silent for longer than the limit",
            "SELECT max(at) < clock_timestamp() - INTERVAL '32 s' FROM machine_agent_heartbeat",
        )
        .await?;
    // They lost the connection at the same time, and their pauses differ only by their random part: two seconds by now.
    // Without it they would all come back within the second over which heartbeats are spread.
    let fullest = fullest_second(&pauses(&fleet).await?);
    assert!(
        fullest * 4 <= machines * 3,
        "{fullest} of {machines} agents wait equally long, within one second"
    );
    let back_at = now(&fleet).await?;
    let shepherd = fleet.shepherd("after", &endpoints, &flags)?;
    let back = first_returns(&fleet, back_at, machines).await?;
    let (_, took) = fullest_tenth(&back);
    fleet.until("all are Ready", ALL_READY).await?;
    assert_eq!(count(&fleet, RECOVERED).await?, 0, "{}", fleet.explain().await?);
    assert_eq!(count(&fleet, DISTURBED).await?, 0);
    end(&fleet, shepherd).await?;
    counted(
        "away in real time",
        format!(
            "{machines} machines, none suspected; back within {} ms, {fullest} of them with pauses within one second",
            took.num_milliseconds()
        ),
    )?;
    Ok(())
}

/// PostgreSQL itself stops while machines are taken over, stays unavailable, and starts again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_stopped_in_the_middle_crashes_nothing_and_repeats_nothing() -> TestResult {
    let form = Form::of_this_run();
    let (machines, away) = form.pick((40, Duration::from_secs(8)), (200, Duration::from_secs(30)));
    let directory = tempfile::Builder::new().prefix("fire-").tempdir()?;
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let options = PrivatePostgresOptions {
        storage: ServerStorage::Persistent(directory.path().join("postgres")),
        max_connections: 100,
    };
    let server = PrivatePostgres::start(options.clone()).await?;
    server.create_database("bmdb").await?;
    let url = server.url("bmdb");
    let flags = ["--machine_count", &machines.to_string(), "--boot_seconds", "0.5"];
    let fleet = Fleet::start_at("fire_postgres", &flags, |_| Ok(url.clone())).await?;
    let mut shepherd = fleet.shepherd("shepherd", &[endpoint()?], &["--session_interval=6s"])?;
    let pid = shepherd.pid();

    let deadline = Instant::now() + PATIENCE;
    loop {
        // The tables do not exist before the shepherd has created the schema.
        let known: i64 = count(&fleet, "SELECT count(*) FROM pg_tables WHERE tablename = 'work'").await?;
        if known > 0 && count(&fleet, "SELECT count(*) FROM work WHERE process = 'AgentStart'").await? > 2 {
            break;
        }
        assert!(Instant::now() < deadline, "never in the middle");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.stop().await?;
    let stopped = Instant::now();
    while stopped.elapsed() < away {
        assert!(shepherd.ended()?.is_none(), "the shepherd ended because its database was away");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let server = PrivatePostgres::start(options).await?;
    assert!(server.url("bmdb") == url, "the same server at the same place");

    fleet.until("all are Ready", ALL_READY).await?;
    assert!(shepherd.ended()?.is_none() && shepherd.pid() == pid, "the shepherd lived on");
    let lost = count(
        &fleet,
        "SELECT count(*) FROM session WHERE closed_at IS NOT NULL AND component = 'initializer'",
    )
    .await?;
    assert!(lost > 0, "no session was lost: that was no outage");
    end(&fleet, shepherd).await?;
    let records = Records::read(&fleet.pool, &fleet.journal()?).await?;
    assert_eq!(check(&records), []);
    let enrolled = records.calls.iter().filter(|call| call.what == "enroll" && call.outcome == "ok").count();
    let brakes = count(&fleet, BRAKES).await?;
    assert_eq!(brakes, 0, "a brake stayed on");
    assert_eq!(count(&fleet, DISTURBED).await?, 0, "nobody is disturbed because of us");
    counted(
        "PostgreSQL stopped",
        format!(
            "away for {} s, {machines} machines made and Ready, {enrolled} enrolments, {lost} sessions replaced",
            away.as_secs()
        ),
    )?;
    fleet.pool.close().await;
    drop(fleet);
    server.stop().await.context("stopping the test's own server")?;
    Ok(())
}
