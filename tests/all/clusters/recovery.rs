//! Recovery of the machines of a cluster: it disturbs a member only when the cluster can spare it.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;

use super::{FLAGS, Field, UNDISTURBED, machines, settled};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, endpoint};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_asks_the_cluster_before_it_disturbs_a_member() -> TestResult {
    let field = Field::start("clusters_recovery", 3).await?;
    field.ctl(&["cluster", "create", "ams", "--reason", "the new hall"])?;
    field.until("it is settled", "ams", settled).await?;

    // The shepherd receives no heartbeats of the agent; the curator receives those of the node.
    field.fleet.strike("sim-0002", "agent-hang").await?;
    let end = Instant::now() + PATIENCE;
    loop {
        let text = field.why("sim-0002")?;
        if text.contains("unreachable by us, healthy to its curator (cluster ams)") {
            break;
        }
        assert!(
            field.fleet.holds(UNDISTURBED).await?,
            "a member was disturbed although its curator gets its heartbeats: {text}"
        );
        assert!(Instant::now() < end, "why does not say it: {text}\n{}", field.fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(
        field.fleet.holds(UNDISTURBED).await?,
        "a member was disturbed although its curator gets its heartbeats"
    );
    let cluster = field.cluster("ams")?;
    assert_eq!(
        (&cluster["stage"], &cluster["votersReached"]),
        (&"converged".into(), &3.into()),
        "{cluster:#}"
    );
    field.fleet.strike("sim-0002", "heal").await?;
    field.fleet.until("it is back in contact", ALL_READY).await?;

    // The machine is dead, and its node with it. The others are most of the members, so the machine may be recovered.
    field.fleet.strike("sim-0003", "dead").await?;
    let helped = "SELECT count(*) >= 1 FROM intent WHERE kind = 'power-cycle'";
    field.fleet.until("its power was cycled", helped).await?;
    field.fleet.until("it is back", ALL_READY).await?;
    let cluster = field.until("all of it is well", "ams", settled).await?;
    assert_eq!((&cluster["voters"], &cluster["votersReached"]), (&3.into(), &3.into()), "{cluster:#}");
    let members: i64 =
        sqlx::query_scalar("SELECT count(*) FROM machine_cluster").fetch_one(&field.fleet.pool).await?;
    assert_eq!(members, 3, "nobody was replaced");
    Ok(())
}

/// The shepherd receives no heartbeats of a rack, and the curators of its cluster receive those of every node: no
/// machine is disrupted and none is replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rack_that_only_we_do_not_hear_is_left_alone() -> TestResult {
    let field = Field::start("clusters_rack", 6).await?;
    let cluster = field.make_ams(3, 3).await?;
    let location = |machine: &Value| machine["location"].as_str().unwrap_or_default().to_owned();
    let everybody = cluster["machines"].as_array().context("machines")?;
    // The racks differ in how many members of the control plane they have. The one with most of them is the worst case.
    let rack = machines(&cluster, "control-plane")
        .into_iter()
        .map(location)
        .max_by_key(|rack| {
            machines(&cluster, "control-plane").iter().filter(|m| location(m) == *rack).count()
        })
        .context("a rack")?;
    let cut_off: Vec<String> = everybody
        .iter()
        .filter(|machine| location(machine) == rack)
        .filter_map(|machine| machine["name"].as_str().map(ToOwned::to_owned))
        .collect();
    assert!((2..everybody.len()).contains(&cut_off.len()), "{cluster:#}");
    for machine in &cut_off {
        field.fleet.strike(machine, "agent-hang").await?;
    }
    let end = Instant::now() + PATIENCE;
    for machine in &cut_off {
        loop {
            let text = field.why(machine)?;
            assert!(
                field.fleet.holds(UNDISTURBED).await?,
                "a machine was disturbed although its curator gets its heartbeats: {text}"
            );
            if text.contains("unreachable by us, healthy to its curator (cluster ams)") {
                break;
            }
            assert!(Instant::now() < end, "why does not say it: {text}\n{}", field.fleet.explain().await?);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    let plan = field.ctl(&["plan", "--horizon", "10m"])?;
    for machine in &cut_off {
        let put_off = |line: &str| {
            line.contains(machine.as_str()) && line.contains("unreachable by us, healthy to its curator")
        };
        assert!(plan.lines().any(put_off), "{machine} is not put off:\n{plan}");
    }
    let lost = "SELECT count(*) = 0 FROM machine_cluster JOIN machine_provided USING (machine_id)
        JOIN machine_due USING (machine_id) WHERE lane = 'access' AND phase_index NOT IN ('Ready', 'Silent')";
    assert!(
        field.fleet.holds(lost).await?,
        "a machine was taken for lost although its curator gets its heartbeats"
    );
    for machine in &cut_off {
        field.fleet.strike(machine, "heal").await?;
    }
    field.fleet.until("they are back in contact", ALL_READY).await?;
    let after = field.until("it is settled", "ams", settled).await?;
    let names = |cluster: &Value| -> Vec<String> {
        let all = cluster["machines"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut names: Vec<String> = all.iter().map(|machine| machine["name"].to_string()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&after), names(&cluster), "somebody was replaced");
    assert!(
        field.fleet.holds(UNDISTURBED).await?,
        "a machine was disturbed although its curator was in contact with it all the time"
    );
    Ok(())
}

/// Three machines of one cluster fall silent in a fleet of a hundred, and their curators do not receive heartbeats of
/// them either: the ladder recovers one after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_silent_members_one_at_a_time_is_helped() -> TestResult {
    let simulator = ["--machine_count", "100", "--boot_seconds", "0.3", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("clusters_silent", &simulator).await?;
    // No loop reconciles the cluster: this test itself writes what its curators would report.
    let parts = "--components=provisioner,initializer,recoverer,updater,callback";
    let flags =
        [&FLAGS[1..3], &[parts, "--heartbeat_interval=2s", "--recovery_ladder=reboot:20s:2"]].concat();
    let _shepherd = fleet.shepherd("shepherd", &[endpoint()?], &flags)?;
    fleet.until("all are known", "SELECT count(*) = 100 FROM machine").await?;
    fleet.until("all are Ready", ALL_READY).await?;
    let silent = ["sim-0010", "sim-0050", "sim-0100"];
    for statement in [
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, founded_at, ca_certificate, curators, observed_at, wait_reasons, settled, voters, voters_reached)
         VALUES (gen_random_uuid(), 'ams', 3, 3, '', '[]', 'automatic', 1, clock_timestamp(), 'a test',
             clock_timestamp(), 'ca', '[]', clock_timestamp() + INTERVAL '1 day', '[]', FALSE, 3, 3)",
        "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at, node_id, node_state, health, voter)
         SELECT machine_id, cluster_id, 'worker', clock_timestamp(), provider_id, 'up', 'silent', FALSE
         FROM machine_provided, cluster WHERE provider_id IN ('sim-0010', 'sim-0050', 'sim-0100')",
    ] {
        sqlx::query(statement).execute(&fleet.pool).await?;
    }
    for machine in silent {
        fleet.strike(machine, "hang").await?;
    }
    let at_once = "SELECT count(*) <= 1 FROM machine_recovery WHERE acted_at IS NOT NULL";
    let helped = "SELECT count(DISTINCT machine_id) = 3 FROM intent WHERE kind = 'reboot'";
    let end = Instant::now() + PATIENCE;
    while !(fleet.holds(helped).await? && fleet.holds(ALL_READY).await?) {
        assert!(fleet.holds(at_once).await?, "two machines of a cluster are disturbed at once");
        assert!(Instant::now() < end, "not all were helped: {}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Polling may miss an overlap, the records do not: between the first and the last step of one machine there is no
    // step of another.
    let overlaps: i64 = sqlx::query_scalar(
        "WITH helped AS (
             SELECT i.machine_id, min(i.begun_at) AS first, max(i.begun_at) AS last FROM intent i
             JOIN machine_cluster USING (machine_id) GROUP BY i.machine_id)
         SELECT count(*) FROM helped a JOIN helped b ON a.machine_id < b.machine_id
         WHERE a.first <= b.last AND b.first <= a.last",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert_eq!(overlaps, 0, "the ladders of two machines of a cluster overlap");
    Ok(())
}
