//! A cluster that lost its control plane for good is restored from its snapshot, and the old control plane stays out.
//!
//! As in `clusters.rs`, the machines are simulated and the nodes are not: real etcd, real curators, a real service.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::clusters::{Field, machines, settled, sleeping, wait_for};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::PATIENCE;

fn name(machine: &Value) -> Result<String> {
    Ok(machine["name"].as_str().context("a name")?.to_owned())
}

/// Declares a role that sleeps, assigns it to the worker, and returns the process that sleeps.
async fn serving(field: &Field, seconds: u32) -> Result<u32> {
    let file = field.fleet.directory().join("web.toml");
    let text = format!(
        "role = \"web\"\n[[service]]\nname = \"server\"\nprogram = \"/bin/sleep\"\nuser = \"root\"\n\
         arguments = [\"{seconds}\"]\nhealth = {{ exec = [\"/bin/true\"], interval = \"1s\" }}\n"
    );
    std::fs::write(&file, text)?;
    field.ctl(&["cluster", "declare", "ams", file.to_str().context("a path")?, "--reason", "the front"])?;
    field.ctl(&["cluster", "roles", "ams", "--add-role", "web", "--reason", "the front"])?;
    field.until("the service runs", "ams", |cluster| settled(cluster) && runs(cluster)).await?;
    let found = sleeping(seconds)?;
    ensure!(found.len() == 1, "{found:?}");
    Ok(found[0])
}

fn runs(cluster: &Value) -> bool {
    let workers = machines(cluster, "worker");
    !workers.is_empty() && workers.iter().all(|worker| worker["services"][0]["state"] == "healthy")
}

/// Orders the restoration until it is accepted. It is rejected while the control plane's last contact is less than a
/// minute ago.
async fn restore(field: &Field) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match field.ctl(&["cluster", "restore", "ams", "--yes", "--reason", "two of three burnt"]) {
            Ok(text) => {
                ensure!(text.starts_with("the cluster ams is restored from its snapshot of "), "{text}");
                return Ok(());
            }
            Err(refused) => ensure!(refused.to_string().contains("--bypass-quorum"), "{refused}"),
        }
        ensure!(Instant::now() < end, "it is refused for ever");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_comes_back_from_its_snapshot_and_its_old_members_stay_out() -> TestResult {
    let field = Field::start("cluster_restore", 7).await?;
    let cluster = field.make_ams(3, 1).await?;
    let reported = "SELECT count(*) = 1 FROM cluster WHERE etcd_bytes > 10000";
    assert!(field.fleet.holds(reported).await?, "its curators did not report the size of its etcd");
    let old: Vec<String> =
        machines(&cluster, "control-plane").into_iter().map(name).collect::<Result<_>>()?;
    let worker = name(machines(&cluster, "worker")[0])?;
    // A duration for which nothing else on this host sleeps.
    let seconds = 30_000_000 + std::process::id();
    let service = serving(&field, seconds).await?;
    let taken = "SELECT count(*) = 1 FROM cluster_snapshot WHERE why = 'ordered'";
    field.ctl(&["cluster", "snapshot", "ams", "--reason", "the front is declared"])?;
    field.fleet.until("a snapshot has all of it", taken).await?;

    // An order that was given by mistake changes nothing.
    let refused = field.ctl(&["cluster", "restore", "ams", "--reason", "a mistake"]);
    let refused = refused.err().context("a cluster was restored that is well")?.to_string();
    assert!(refused.contains("3 of the 3 members of its control plane answered"), "{refused}");

    // Two of three are gone for good: of one the disk as well. The third one has no quorum.
    for machine in &old[..2] {
        field.fleet.strike(machine, "power-fail").await?;
    }
    let disk = field.disk(&old[0]);
    wait_for("its programs have ended", || Ok(!field.runs_anything(&old[0]))).await?;
    std::fs::remove_dir_all(&disk)?;
    restore(&field).await?;
    let restoring = field.cluster("ams")?;
    assert_eq!(restoring["stage"], "restoring", "{restoring:#}");

    // Other machines are its control plane. The declarations, and the nodes that run them, are as in the snapshot.
    let back = |cluster: &Value| {
        let members = machines(cluster, "control-plane");
        settled(cluster)
            && runs(cluster)
            && cluster["votersReached"] == 3
            && members.iter().all(|member| old.iter().all(|old| member["name"] != **old))
    };
    let cluster = field.until("it is back", "ams", back).await?;
    assert_eq!((&cluster["epoch"], &cluster["voters"]), (&"1".into(), &3.into()), "{cluster:#}");
    assert_eq!(cluster["declarations"][0]["role"], "web", "{cluster:#}");
    let workers = machines(&cluster, "worker");
    assert_eq!((workers.len(), name(workers[0])?), (1, worker.clone()), "{cluster:#}");
    assert_eq!(workers[0]["roles"], Value::from(vec!["web"]), "{cluster:#}");
    assert_eq!(sleeping(seconds)?, [service], "the worker's service was restarted");
    let messages: Vec<String> = sqlx::query_scalar(
        "SELECT detail FROM history WHERE event IN ('ClusterRestored', 'ClusterFounded') ORDER BY at",
    )
    .fetch_all(&field.fleet.pool)
    .await?;
    assert_eq!(messages, ["it is the first node", "it is the first node of it"]);
    let received: i64 = sqlx::query_scalar(
        "SELECT epoch FROM machine_cluster_report JOIN machine_provided USING (machine_id) WHERE provider_id = $1",
    )
    .bind(&worker)
    .fetch_one(&field.fleet.pool)
    .await?;
    assert_eq!(received, 1, "the worker has not learned that its cluster was restored");
    let left = "SELECT count(*) = 0 FROM cluster WHERE restoring_since IS NOT NULL";
    assert!(field.fleet.holds(left).await?);
    for machine in cluster["machines"].as_array().context("machines")? {
        let kept = field.disk(&name(machine)?).join("cluster/snapshot");
        assert!(!kept.exists(), "the snapshot is still on a disk: {}", kept.display());
    }

    // One of the old members comes back with its disk and a role server that was part of the old control plane. It is
    // ordered to leave, and no caller follows it.
    let curators = cluster["curators"].clone();
    field.fleet.strike(&old[1], "heal").await?;
    // Needed only if the ladder has given the machine up already.
    let _ = field.ctl(&["retry", &old[1], "--reason", "it is back"]);
    let end = Instant::now() + PATIENCE;
    loop {
        let key: Option<Vec<u8>> = sqlx::query_scalar(
            "SELECT node_key FROM machine_cluster_report JOIN machine_provided USING (machine_id)
             WHERE provider_id = $1",
        )
        .bind(&old[1])
        .fetch_one(&field.fleet.pool)
        .await?;
        let cluster = field.cluster("ams")?;
        assert_eq!(cluster["curators"], curators, "an old member is a curator again: {cluster:#}");
        assert_eq!(sleeping(seconds)?, [service], "the worker's service was restarted");
        if key.is_none() && !field.disk(&old[1]).join("cluster/node_key.pk8").exists() {
            break;
        }
        assert!(Instant::now() < end, "it has not left: {}", field.fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let cluster = field.until("all is well", "ams", back).await?;
    assert_eq!(cluster["epoch"], "1");
    Ok(())
}
