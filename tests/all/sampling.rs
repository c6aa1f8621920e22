//! Counting the fleet: once a minute, correctly, by one of any number of shepherds, and by none that has lost the
//! lease.

use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::bmdb::connection::error::BmdbError;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::fleet::sample::LEASE;
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::process_resources::{ProcessShortages, ProcessSignals};
use shepherd::manager::sampler;
use shepherd::model::backoff::BackoffFact;
use shepherd::model::fleet_sample::FleetSample;
use shepherd::model::process::Process;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::{Kit, LONG, Shepherd, ended, hold, until};
use crate::harness::aloud::TestResult;

const HELD_LEASES: &str = "SELECT count(*) FROM named_lease WHERE lease_session IS NOT NULL";
const OPEN_SESSIONS: &str = "SELECT count(*) FROM session WHERE closed_at IS NULL";
const SAMPLES: &str = "SELECT count(*) FROM fleet_sample";

/// The counts of a sample that is taken now.
async fn counted(kit: &Kit) -> Result<FleetSample> {
    sampler::count_fleet(&kit.bmdb, &CancellationToken::new()).await?.context("it was stopped")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_is_counted_by_its_facts() -> TestResult {
    let kit = Kit::new("sampling_counts").await?;
    let machines = kit.provided(1_050, "rack").await?;
    kit.provided(3, "elsewhere").await?;
    let now = kit.bmdb.read_machine_snapshot(machines[0]).await?.now;
    let backoff = BackoffFact {
        failures: 2,
        last_interval: Duration::from_mins(5),
        until: now + Duration::from_mins(5),
        cause: "no route".to_owned(),
    };
    let old = BackoffFact { until: now - Duration::from_mins(5), ..backoff.clone() };
    kit.change(machines[0], vec![FactChange::Backoff(Process::AgentStart, backoff)]).await?;
    kit.change(machines[1], vec![FactChange::Backoff(Process::AgentStart, old)]).await?;
    kit.change(machines[2], vec![hold("new disks")]).await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::Update).await?;
    sqlx::query("INSERT INTO brake VALUES ('recovery', '*', 'many', now(), now())")
        .execute(&kit.pool)
        .await?;

    let sample = counted(&kit).await?;
    assert_eq!(sample.phases["Provided"].machines, 1_053);
    assert_eq!(sample.facts["provided"], 1_053);
    assert_eq!((sample.facts["held"], sample.facts["agent-started"]), (1, 0));
    assert_eq!(sample.backoffs["AgentStart"], 1, "one that is over counts");
    assert_eq!(sample.work["Update"], 1);
    let places: Vec<(&str, u64)> =
        sample.places.iter().map(|place| (place.provider.as_str(), place.machines)).collect();
    assert_eq!(places, [("elsewhere", 3), ("rack", 1_050)]);
    let brakes: Vec<(&str, &str)> =
        sample.brakes.iter().map(|brake| (brake.kind.as_str(), brake.scope.as_str())).collect();
    assert_eq!(brakes, [("recovery", "*")]);
    // All machines except the waiting one and the held one; and all except the one that is worked on.
    assert_eq!((sample.due["AgentStart"].machines, sample.due["Update"].machines), (1_051, 1_052));
    work.cancel("counted").await?;
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_shepherds_one_counts_each_minute_and_both_show_it() -> TestResult {
    let kit = Kit::new("sampling_two").await?;
    kit.provided(5, "rack").await?;
    let stop = CancellationToken::new();
    let mut running = Vec::new();
    for name in ["one", "other"] {
        // Longer than all the minutes by which the database's clock is moved.
        let shepherd = Shepherd::start(&kit, name, Duration::from_hours(1)).await?;
        let book = Metrics::new();
        let metrics = ManagerMetrics::register(&book);
        let task = tokio::spawn(sampler::run_sampler(
            shepherd.sessions.clone(),
            metrics,
            ProcessSignals {
                shortages: watch::channel(ProcessShortages::default()).1,
                metrics_turned_away: watch::channel(None).1,
                file_refusals: Vec::new(),
            },
            stop.clone(),
        ));
        running.push((shepherd, book, task));
    }
    for minutes in 1..=3 {
        until("the minute is counted", async || Ok(kit.count(SAMPLES).await? >= minutes)).await?;
        kit.database.advance(Duration::from_mins(1)).await?;
    }
    until("the last one is", async || Ok(kit.count(SAMPLES).await? >= 4)).await?;
    let of_fleet = |book: &Metrics| -> Result<Vec<String>> {
        let text = book.encode()?;
        // A histogram grows with each sample that a shepherd has read, and not every shepherd reads each.
        let lines =
            text.lines().filter(|line| line.starts_with("shepherd_fleet_") && !line.contains("_age_"));
        Ok(lines.map(str::to_owned).collect())
    };
    let five = "shepherd_fleet_machines{phase=\"Provided\"} 5.0";
    until("both show the same", async || {
        let (first, second) = (of_fleet(&running[0].1)?, of_fleet(&running[1].1)?);
        Ok(first == second && first.iter().any(|line| line == five))
    })
    .await?;
    let minutes = "SELECT count(DISTINCT date_trunc('minute', minute)) FROM fleet_sample";
    assert_eq!(kit.count(minutes).await?, kit.count(SAMPLES).await?);
    assert_eq!(
        kit.count("SELECT count(*) FROM fleet_sample WHERE extract(second FROM minute) <> 0").await?,
        0
    );
    stop.cancel();
    for (shepherd, _, task) in running {
        ended("a sampler", task).await?;
        shepherd.stop().await?;
    }
    assert_eq!((kit.count(HELD_LEASES).await?, kit.count(OPEN_SESSIONS).await?), (0, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_lost_the_lease_writes_no_count_down_and_a_minute_has_one() -> TestResult {
    let kit = Kit::new("sampling_lost").await?;
    let shepherd = Shepherd::start(&kit, "frozen", LONG).await?;
    let (kind, name) = LEASE;
    let session = shepherd.session().await?;
    let lease = shepherd.bmdb.acquire_named_lease(&session, kind, name).await?.context("it is free")?;
    let now = kit.bmdb.read_latest_sample(None).await?.now;
    let sample = counted(&kit).await?;
    assert!(shepherd.bmdb.store_sample(&lease, now, &sample).await?);
    assert!(!shepherd.bmdb.store_sample(&lease, now, &sample).await?, "a minute has two");
    let latest = kit.bmdb.read_latest_sample(None).await?;
    assert_eq!(latest.sample.as_ref(), Some(&sample));
    let (minute, _) = latest.minute_and_taken_at.context("there is one")?;
    assert_eq!(kit.bmdb.read_latest_sample(Some(minute)).await?.sample, None, "it is no news");

    kit.database.advance(Duration::from_mins(1)).await?;
    let later = kit.bmdb.read_latest_sample(None).await?.now;
    shepherd.bmdb.release_named_lease(&lease).await?;
    let again = shepherd.bmdb.acquire_named_lease(&session, kind, name).await?.context("it is free again")?;
    let late = shepherd.bmdb.store_sample(&lease, later, &sample).await;
    assert!(matches!(late, Err(BmdbError::LeaseLost)), "{late:?}");
    assert!(shepherd.bmdb.store_sample(&again, later, &sample).await?);
    assert_eq!(kit.count(SAMPLES).await?, 2);
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn clusters_are_counted_as_they_are_shown_and_those_that_nobody_hears() -> TestResult {
    let kit = Kit::new("sampling_clusters").await?;
    for (name, founded, deleting, settled, seen) in [
        ("ams", true, false, true, Some(5)),
        ("fra", true, false, true, Some(90)),
        ("lhr", false, false, false, None),
        ("cdg", true, true, false, Some(90)),
    ] {
        sqlx::query(
            "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
                 created_by, wait_reasons, settled, founded_at, ca_certificate, curators, deleting_at, deleting_by, observed_at)
             VALUES (gen_random_uuid(), $1, 3, 1, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', $2,
                 CASE WHEN $3 THEN clock_timestamp() END,
                 CASE WHEN $3 THEN 'ca'::BYTEA END, CASE WHEN $3 THEN '[]'::JSONB END,
                 CASE WHEN $4 THEN clock_timestamp() END,
                 CASE WHEN $4 THEN 'kim' END, clock_timestamp() - make_interval(secs => $5))",
        )
        .bind(name)
        .bind(settled)
        .bind(founded)
        .bind(deleting)
        .bind(seen.map(f64::from))
        .execute(&kit.pool)
        .await?;
    }
    for (name, hours) in [("ams", 1), ("ams", 30), ("fra", 5), ("cdg", 99)] {
        sqlx::query(
            "INSERT INTO cluster_snapshot
             SELECT gen_random_uuid(), cluster_id, clock_timestamp() - make_interval(hours => $2), 'first', 7, 0, 10, 5, 3,
                 '[]', decode(repeat('cd', 32), 'hex') FROM cluster WHERE name = $1",
        )
        .bind(name)
        .bind(hours)
        .execute(&kit.pool)
        .await?;
    }
    // Kubernetes of two live clusters, one of them without any report, and of a cluster that is being deleted.
    sqlx::raw_sql(
        r#"INSERT INTO cluster_kubernetes (cluster_id, bundle, version, service_range, pod_range, node_prefix, domain, add_ons,
                                           requested_at, requested_by, rotate, observed)
           SELECT cluster_id, decode(repeat('ab', 32), 'hex'), '1.31.0', '10.96.0.0/16', '10.128.0.0/12', 24, 'cluster.local',
                  '{}', now(), 'kim', '[]',
                  CASE WHEN name <> 'fra' THEN '{"rotations": [{"waits_for": ["a"]}, {"waits_for": ["a", "b"]}]}'::JSONB END
           FROM cluster WHERE name IN ('ams', 'fra', 'cdg');
           INSERT INTO machine SELECT gen_random_uuid(), now() FROM generate_series(1, 3);
           INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at, leaving, kubernetes)
           SELECT m.machine_id, c.cluster_id, 'worker', now(), CASE WHEN m.n = 3 THEN 'it goes' END,
                  CASE WHEN m.n > 1 THEN '{"components": [{"state": "healthy"}, {"state": "starting"}, {"state": "down"}]}'::JSONB END
           FROM (SELECT machine_id, row_number() OVER () AS n FROM machine WHERE machine_id NOT IN
                     (SELECT machine_id FROM machine_provided) LIMIT 3) m,
                (SELECT cluster_id FROM cluster WHERE name = 'ams') c;
           INSERT INTO cluster_upgrade (upgrade_id, cluster_id, released, back, parallelism, deadline_seconds, created_at,
                                        created_by, reason, paused, ended_at, ended, requested_nodes)
           SELECT name || s.n, cluster_id, TRUE, FALSE, 1, 900, now(), 'kim', 'r', CASE WHEN name = 'ams' THEN 'why' END,
                  CASE WHEN s.n = 2 THEN now() END, CASE WHEN s.n = 2 THEN 'done' END, '{}'
           FROM cluster, generate_series(1, 2) s (n) WHERE name IN ('ams', 'fra', 'cdg')"#,
    )
    .execute(&kit.pool)
    .await?;
    let clusters = counted(&kit).await?.clusters;
    assert_eq!((clusters.kubernetes, clusters.components_unwell, clusters.nodes_behind), (2, 2, 2));
    assert_eq!((clusters.upgrades_going, clusters.upgrades_paused), (1, 1));
    let some: Vec<(&str, u64)> = clusters
        .stages
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(stage, count)| (stage.as_str(), *count))
        .collect();
    assert_eq!(some, [("converged", 2), ("deleting", 1), ("waiting-for-machines", 1)]);
    assert_eq!(clusters.unheard, 1);
    let hours = clusters.oldest_snapshot_seconds / 3600.0;
    assert!((5.0..6.0).contains(&hours), "{hours}");
    Ok(())
}
