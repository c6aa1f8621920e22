//! Restarts by an operator: one shepherd after the other, and an older release beside a newer one.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::checker::{Records, check};
use crate::fire::{BRAKES, DISTURBED, Form, RECOVERED, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, endpoint};

/// Heartbeats of each agent: answered, and failed.
async fn heartbeats(fleet: &Fleet) -> Result<Vec<(u64, u64)>> {
    let number = |value: &Value| value.as_u64().context("a number of heartbeats");
    fleet
        .truth()
        .await?
        .iter()
        .map(|machine| {
            let heartbeats = &machine["heartbeats"];
            Ok((number(&heartbeats["delivered"])?, number(&heartbeats["failed"])?))
        })
        .collect()
}

/// Waits until every agent had `more` further heartbeats answered.
async fn everybody_reported(fleet: &Fleet, more: u64) -> Result<()> {
    let before = heartbeats(fleet).await?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = heartbeats(fleet).await?;
        if before.iter().zip(&now).all(|(before, now)| now.0 >= before.0 + more) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not everybody reports\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until a shepherd listens there: an agent that the other shepherd refers to it must be able to connect.
async fn until_it_listens(endpoint: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while tokio::net::TcpStream::connect(endpoint).await.is_err() {
        ensure!(Instant::now() < deadline, "nobody listens at {endpoint}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarting_two_shepherds_in_turn_costs_no_agent_more_than_one_heartbeat_each() -> TestResult {
    let form = Form::of_this_run();
    let (machines, rounds) = form.pick((30, 1), (200, 4));
    let flags = [
        "--machine_count",
        &machines.to_string(),
        "--boot_seconds",
        "0.5",
        "--persistent_agent_percent",
        "100",
    ];
    let fleet = Fleet::start("fire_rolling", &flags).await?;
    let (first, second) = (endpoint()?, endpoint()?);
    let flags = ["--session_interval=15s", "--heartbeat_interval=1s", "--recovery_silence_timeout=20s"];
    let start = |name: &str, here: &String, there: &String| {
        fleet.shepherd(name, &[here.clone(), there.clone()], &flags)
    };
    let mut one = start("one", &first, &second)?;
    let mut two = start("two", &second, &first)?;
    until_it_listens(&first).await?;
    until_it_listens(&second).await?;
    fleet.until("all are Ready", ALL_READY).await?;
    everybody_reported(&fleet, 3).await?;

    let mut worst = 0;
    for _ in 0..rounds {
        for turn in [0, 1] {
            let before = heartbeats(&fleet).await?;
            if turn == 0 {
                end(&fleet, one).await?;
                one = start("one", &first, &second)?;
                until_it_listens(&first).await?;
            } else {
                end(&fleet, two).await?;
                two = start("two", &second, &first)?;
                until_it_listens(&second).await?;
            }
            everybody_reported(&fleet, 3).await?;
            let after = heartbeats(&fleet).await?;
            let failed = before.iter().zip(&after).map(|(before, after)| after.1 - before.1);
            worst = worst.max(failed.max().unwrap_or(0));
            assert!(worst <= 1, "one agent had {worst} heartbeats refused\n{}", fleet.explain().await?);
        }
    }
    assert_eq!(count(&fleet, RECOVERED).await?, 0);
    assert_eq!(count(&fleet, DISTURBED).await? + count(&fleet, BRAKES).await?, 0);
    end(&fleet, one).await?;
    end(&fleet, two).await?;
    let records = Records::read(&fleet.pool, &fleet.journal()?).await?;
    assert_eq!(check(&records), []);
    counted(
        "rolling restart",
        format!("{machines} agents, {} restarts, at most {worst} heartbeat refused to one agent", 2 * rounds),
    )?;
    Ok(())
}

/// An older release must not claim, rewrite or sweep rows that a newer release wrote.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_shepherd_keeps_its_hands_off_what_newer_rules_decided() -> TestResult {
    let flags = ["--machine_count", "12", "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("fire_rules", &flags).await?;
    let flags = ["--heartbeat_interval=1s", "--recovery_silence_timeout=8s", "--recovery_brake_fraction=0.9"];
    let (first, second) = (endpoint()?, endpoint()?);
    let shepherd = fleet.shepherd("older", &[first.clone(), second.clone()], &flags)?;
    fleet.until("all are Ready", ALL_READY).await?;
    // As a newer release would have left them: half are its own, and some of its work is due at once.
    sqlx::query(
        "UPDATE machine_due SET rules_version = rules_version + 1, process = 'AgentStart', timer = false,
                ready_at = clock_timestamp(), reason = 'decided by newer rules', priority = 0
         WHERE lane = 'access' AND machine_id IN (SELECT machine_id FROM machine ORDER BY machine_id LIMIT 6)",
    )
    .execute(&fleet.pool)
    .await?;
    // The others are as an even older release left them. A starting shepherd sweeps at once, in the order of the ids:
    // when it has rewritten the last of these rows, it has passed all rows of the newer release.
    sqlx::query(
        "UPDATE machine_due SET rules_version = rules_version - 1, reason = 'decided by older rules'
         WHERE machine_id NOT IN (SELECT machine_id FROM machine ORDER BY machine_id LIMIT 6)",
    )
    .execute(&fleet.pool)
    .await?;
    let sweeping = fleet.shepherd("sweeping", &[second, first], &flags)?;
    fleet
        .until("it has swept", "SELECT count(*) = 0 FROM machine_due WHERE reason = 'decided by older rules'")
        .await?;
    let claims = "SELECT count(*) FROM history h JOIN machine_due d USING (machine_id, lane)
         WHERE h.event = 'Started' AND d.reason = 'decided by newer rules' AND h.fence > 1";
    let theirs =
        "SELECT count(*) FROM machine_due WHERE reason = 'decided by newer rules' AND lease_session IS NULL";
    assert_eq!(count(&fleet, theirs).await?, 6, "an older shepherd rewrote a newer one's rows");
    // It is not idle meanwhile: it works on its own rows.
    for machine in 1..=12 {
        fleet.strike(&format!("sim-{machine:04}"), "kill").await?;
    }
    fleet
        .until(
            "it works on what is its own",
            "SELECT count(DISTINCT machine_id) >= 1 FROM history WHERE process = 'Recovery' AND event = 'Started'",
        )
        .await?;
    assert_eq!(count(&fleet, theirs).await?, 6, "an older shepherd rewrote a newer one's rows");
    assert_eq!(count(&fleet, claims).await?, 0, "an older shepherd claimed a newer one's rows");
    end(&fleet, shepherd).await?;
    end(&fleet, sweeping).await?;
    counted("newer rules", "6 of 12 rows of a newer release were neither claimed nor rewritten")?;
    Ok(())
}
