//! The snapshot of a cluster with Kubernetes gets an image of the whole etcd, although a shepherd dies in the middle. The
//! cluster is restored with it.
//!
//! As in `clusters.rs`, the machines are simulated and the nodes are not: real etcd and real curators. No component of
//! Kubernetes runs.

use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use shepherd::bmdb::cluster::sealed_image::{PartPlace, unseal_part};
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::etcd::client::{Client, EtcdError};
use shepherd::etcd::namespace::Namespace;
use shepherd::etcd::snapshot_file::verify_snapshot;
use shepherd::roleserver::cluster::etcd_member::client_endpoint;
use shepherd::roleserver::cluster::files::ClusterFiles;
use uuid::Uuid;

use crate::cluster_kubernetes::add_bundle;
use crate::clusters::{FLAGS, Field, machines, wait_for};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_program::etcdutl_program;
use crate::harness::fleet::PATIENCE;

/// Starts a shepherd that dies at this place, and waits until it has.
async fn let_die_at(field: &Field, place: &str) -> Result<()> {
    let point = format!("cluster.{place}");
    let mut dying = field.fleet.shepherd_dying_at(&point, place, slice::from_ref(&field.endpoint), &FLAGS)?;
    let end = Instant::now() + PATIENCE;
    while dying.ended()?.is_none() {
        ensure!(Instant::now() < end, "nobody passed {place}: {}", field.fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    expire_sessions(field).await
}

/// Ends the sessions of shepherds that are dead, which would expire in some seconds.
async fn expire_sessions(field: &Field) -> Result<()> {
    sqlx::query("UPDATE session SET deadline = clock_timestamp() WHERE closed_at IS NULL")
        .execute(&field.fleet.pool)
        .await?;
    Ok(())
}

/// The ids of an image, its snapshot and its cluster, the number of its parts, and its SHA-256.
type StoredImage = (Uuid, Uuid, Uuid, i64, Vec<u8>);

/// Opens the stored parts of an image, all in their places.
async fn open_image(field: &Field, (image, snapshot, cluster, parts, _): &StoredImage) -> Result<Vec<u8>> {
    let secrets = SecretsKey::open(&field.fleet.directory().join("secrets.key"))?;
    let sealed: Vec<Vec<u8>> =
        sqlx::query_scalar("SELECT sealed FROM cluster_image_part WHERE image_id = $1 ORDER BY number")
            .bind(image)
            .fetch_all(&field.fleet.pool)
            .await?;
    ensure!(i64::try_from(sealed.len())? == *parts, "{} of {parts} parts", sealed.len());
    let count = u64::try_from(*parts)?;
    let mut opened = Vec::new();
    for (number, sealed) in (0..).zip(&sealed) {
        ensure!(sealed.starts_with(b"age-encryption.org/v1"), "part {number} is not sealed");
        let last_of = Some(count).filter(|count| number + 1 == *count);
        let place = PartPlace { cluster: *cluster, snapshot: *snapshot, image: *image, number, last_of };
        opened.extend_from_slice(unseal_part(&secrets, &place, sealed)?.expose_secret());
    }
    Ok(opened)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_gets_one_whole_image_although_shepherds_die() -> TestResult {
    let mut field = Field::start("cluster_images", 1).await?;
    add_bundle(&field, "k-1.30", "1.30.1")?;
    field.shepherd = None;
    expire_sessions(&field).await?;
    let create = ["cluster", "create", "ams", "--control_plane", "1", "--workers", "0"];
    field.ctl(&[&create[..], &["--kubernetes_bundle", "k-1.30", "--reason", "a hall"]].concat())?;
    for place in ["image-begun", "image-part-stored"] {
        let_die_at(&field, place).await?;
        let counts = "SELECT count(*) = 0 FROM cluster_image WHERE completed_at IS NOT NULL";
        assert!(field.fleet.holds(counts).await?, "an image counts in the middle of which a shepherd died");
    }
    field.shepherd = Some(field.fleet.shepherd("survivor", slice::from_ref(&field.endpoint), &FLAGS)?);
    let complete = "SELECT count(*) > 0 FROM cluster_image WHERE completed_at IS NOT NULL";
    field.fleet.until("an image is complete", complete).await?;
    let stored: StoredImage = sqlx::query_as(
        "SELECT image_id, snapshot_id, cluster_id, parts, digest FROM cluster_image WHERE completed_at IS NOT NULL
         ORDER BY completed_at LIMIT 1",
    )
    .fetch_one(&field.fleet.pool)
    .await?;
    let abandoned = "SELECT count(*) = 0 FROM cluster_image WHERE completed_at IS NULL AND NOT abandoned
        AND begun_at < (SELECT min(completed_at) FROM cluster_image)";
    assert!(field.fleet.holds(abandoned).await?, "what the dead shepherds left is not abandoned");

    // It is what etcd sent, with its digest at the end.
    let opened = open_image(&field, &stored).await?;
    let file = field.fleet.directory().join("image");
    std::fs::write(&file, &opened)?;
    assert_eq!(verify_snapshot(&file).await?.sha256.as_slice(), stored.4);
    let output = field.ctl(&["cluster", "snapshots", "ams", "-o", "json"])?;
    let listed: Value = serde_json::from_str(&output)?;
    let listed = listed["snapshots"].as_array().context("a list")?;
    let of_it = listed.iter().find(|one| one["id"] == stored.1.to_string()).context("its snapshot")?;
    assert_eq!(of_it["image_bytes"], opened.len(), "{of_it:#}");
    Ok(())
}

/// Repeats an operation of etcd until it has an answer: a role server restarts its etcd whenever the settings change.
async fn until_answered<T>(mut operation: impl AsyncFnMut() -> Result<T, EtcdError>) -> Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        match operation().await {
            Err(EtcdError::Unavailable { .. } | EtcdError::Deadline { .. }) if Instant::now() < end => {}
            answer => return Ok(answer?),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A client of the etcd on a machine.
fn etcd(field: &Field, machine: &str) -> Result<Client> {
    let files = ClusterFiles::in_state_directory(&field.disk(machine));
    Ok(Client::new(vec![client_endpoint(&files)], Namespace::new("curator")?))
}

/// Orders the restoration until it is accepted, and returns the answer. It is rejected while the last contact of the control
/// plane is less than a minute ago.
async fn restore(field: &Field) -> Result<String> {
    let end = Instant::now() + PATIENCE;
    loop {
        match field.ctl(&["cluster", "restore", "ams", "--reason", "it burnt"]) {
            Ok(text) => return Ok(text),
            Err(refused) => ensure!(refused.to_string().contains("--bypass_quorum"), "{refused}"),
        }
        ensure!(Instant::now() < end, "it is refused for ever");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_objects_come_back_with_a_cluster_that_was_lost() -> TestResult {
    if etcdutl_program()?.is_none() {
        return Ok(());
    }
    let field = Field::start("cluster_image_restore", 3).await?;
    add_bundle(&field, "k-1.30", "1.30.1")?;
    let create = ["cluster", "create", "ams", "--control_plane", "1", "--workers", "0"];
    field.ctl(&[&create[..], &["--kubernetes_bundle", "k-1.30", "--reason", "a hall"]].concat())?;
    let cluster = field.until("it is founded", "ams", |cluster| cluster["voters_reached"] == 1).await?;
    let lost = machines(&cluster, "control-plane")[0]["name"].as_str().context("a name")?.to_owned();
    let client = etcd(&field, &lost)?;
    until_answered(async || client.put_unguarded("/registry/pods/a", b"a pod").await).await?;
    field.ctl(&["cluster", "snapshot", "ams", "--reason", "a pod runs"])?;
    let taken = "SELECT count(*) > 0 FROM cluster_snapshot s JOIN cluster_image i USING (snapshot_id)
         WHERE s.why = 'ordered' AND i.completed_at IS NOT NULL";
    field.fleet.until("the snapshot has an image", taken).await?;

    field.fleet.strike(&lost, "power-fail").await?;
    wait_for("its programs have ended", || Ok(!field.runs_anything(&lost))).await?;
    std::fs::remove_dir_all(field.disk(&lost))?;
    let output = restore(&field).await?;
    assert!(output.contains("its Kubernetes objects come back"), "{output}");
    let restored =
        "SELECT count(*) = 1 FROM cluster WHERE restored_at IS NOT NULL AND restoring_since IS NULL
         AND NOT restoring_with_image";
    field.fleet.until("it is restored", restored).await?;
    let back = |cluster: &Value| cluster["epoch"] == 1 && cluster["voters_reached"] == 1;
    let cluster = field.until("it is back", "ams", back).await?;
    let mut names =
        machines(&cluster, "control-plane").into_iter().filter_map(|machine| machine["name"].as_str());
    let restorer = names.rfind(|name| *name != lost).context("no machine restored it")?;
    let client = etcd(&field, restorer)?;
    let pod = until_answered(async || client.get("/registry/pods/a").await).await?;
    let pod = pod.context("the pod is lost")?;
    assert_eq!(pod.value, b"a pod");
    for file in ["cluster/image", "cluster/snapshot"] {
        assert!(!field.disk(restorer).join(file).exists(), "{file} is still on a disk");
    }
    Ok(())
}
