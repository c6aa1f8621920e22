//! The snapshot of a cluster with Kubernetes gets an image of the whole etcd, although a shepherd dies in the middle. The
//! cluster is restored with it, once, although shepherds die in the middle of that, too.
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
use crate::harness::fleet::{PATIENCE, Program};
use crate::harness::memory::{process_memory, reset_process_peak};

/// Size of an image that is fetched while a shepherd is killed: some seconds for a program that is not optimized.
const IMAGE_MEBIBYTES: u64 = 32;
/// Size of an image that does not fit into the memory that it may take.
const LARGE_MEBIBYTES: u64 = 128;
/// Most that a process may take for an image, in MiB. `make bench ARGS='--part images'` measures this with a GiB.
const MEMORY_LIMIT: u64 = 64;

/// Starts a shepherd that dies at this place.
fn start_dying_at(field: &Field, place: &str) -> Result<Program> {
    let point = format!("cluster.{place}");
    field.fleet.shepherd_dying_at(&point, place, slice::from_ref(&field.endpoint), &FLAGS)
}

/// Starts a shepherd that dies at this place, and waits until it has.
async fn let_die_at(field: &Field, place: &str) -> Result<()> {
    until_dead(field, start_dying_at(field, place)?, place).await
}

/// Waits until a shepherd has died at this place.
async fn until_dead(field: &Field, mut dying: Program, place: &str) -> Result<()> {
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

/// Opens the newest complete image.
pub(crate) async fn open_newest_image(field: &Field) -> Result<Vec<u8>> {
    let stored: StoredImage = sqlx::query_as(
        "SELECT image_id, snapshot_id, cluster_id, parts, digest FROM cluster_image WHERE completed_at IS NOT NULL
         ORDER BY completed_at DESC LIMIT 1",
    )
    .fetch_one(&field.fleet.pool)
    .await?;
    open_image(field, &stored).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_gets_one_whole_image_although_shepherds_die() -> TestResult {
    let mut field = Field::start("cluster_images", 1).await?;
    add_bundle(&field, "k-1.30", "1.30.1")?;
    field.shepherd = None;
    expire_sessions(&field).await?;
    let create = ["cluster", "create", "ams", "--control-plane", "1", "--workers", "0"];
    field.ctl(&[&create[..], &["--kubernetes-bundle", "k-1.30", "--reason", "a hall"]].concat())?;
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
    assert_eq!(of_it["imageBytes"], opened.len().to_string(), "{of_it:#}");
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
        match field.ctl(&["cluster", "restore", "ams", "--yes", "--reason", "it burnt"]) {
            Ok(text) => return Ok(text),
            Err(refused) => ensure!(refused.to_string().contains("--bypass-quorum"), "{refused}"),
        }
        ensure!(Instant::now() < end, "it is refused for ever");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Founds the cluster `ams` of one member, with these objects in its etcd. Returns the name of the member.
async fn found_cluster(field: &Field, objects: &[(&str, &[u8])]) -> Result<String> {
    add_bundle(field, "k-1.30", "1.30.1")?;
    let create = ["cluster", "create", "ams", "--control-plane", "1", "--workers", "0"];
    field.ctl(&[&create[..], &["--kubernetes-bundle", "k-1.30", "--reason", "a hall"]].concat())?;
    let cluster = field.until("it is founded", "ams", |cluster| cluster["votersReached"] == 1).await?;
    let member = machines(&cluster, "control-plane")[0]["name"].as_str().context("a name")?.to_owned();
    let client = etcd(field, &member)?;
    for (key, value) in objects {
        until_answered(async || client.put_unguarded(key, value).await).await?;
    }
    Ok(member)
}

/// Takes a snapshot with an image.
pub(crate) async fn take_image(field: &Field) -> Result<()> {
    field.ctl(&["cluster", "snapshot", "ams", "--reason", "a pod runs"])?;
    let taken = "SELECT count(*) > 0 FROM cluster_snapshot s JOIN cluster_image i USING (snapshot_id)
         WHERE s.why = 'ordered' AND i.completed_at IS NOT NULL";
    field.fleet.until("the snapshot has an image", taken).await
}

/// A MiB that nothing makes smaller.
fn noise() -> Vec<u8> {
    let mut noise = vec![0; 1 << 20];
    rand::fill(noise.as_mut_slice());
    noise
}

/// Keys for this many objects.
fn keys(count: u64) -> Vec<String> {
    (0..count).map(|number| format!("/registry/secrets/{number}")).collect()
}

/// What a shepherd and the role servers of all machines, the curator among them, have in memory before some work, in KiB.
struct Resident {
    shepherd: (u32, u64),
    machines: (u32, u64),
}

impl Resident {
    fn before(field: &Field) -> Result<Self> {
        let shepherd = field.shepherd.as_ref().context("no shepherd")?.pid();
        let machines = field.fleet.simulator_pid();
        Ok(Self {
            shepherd: (shepherd, reset_process_peak(shepherd)?),
            machines: (machines, reset_process_peak(machines)?),
        })
    }

    /// Checks that the work has taken little memory.
    fn check(&self, work: &str) -> Result<()> {
        for (name, (pid, before)) in [("the shepherd", self.shepherd), ("the role servers", self.machines)] {
            let grown = process_memory(pid, "VmHWM:")?.saturating_sub(before) >> 10;
            ensure!(grown <= MEMORY_LIMIT, "{name} took {grown} MiB while an image was {work}");
        }
        Ok(())
    }
}

/// Cuts the power of a machine, and removes its disk.
pub(crate) async fn lose(field: &Field, machine: &str) -> Result<()> {
    field.fleet.strike(machine, "power-fail").await?;
    wait_for("its programs have ended", || Ok(!field.runs_anything(machine))).await?;
    Ok(std::fs::remove_dir_all(field.disk(machine))?)
}

/// The machine of the present control plane that is not this one.
pub(crate) fn restorer<'c>(cluster: &'c Value, lost: &str) -> Result<&'c str> {
    let mut names =
        machines(cluster, "control-plane").into_iter().filter_map(|machine| machine["name"].as_str());
    names.rfind(|name| *name != lost).context("no machine restores it")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_objects_come_back_with_a_cluster_that_was_lost() -> TestResult {
    if etcdutl_program()?.is_none() {
        return Ok(());
    }
    let field = Field::start("cluster_image_restore", 3).await?;
    let (noise, keys) = (noise(), keys(LARGE_MEBIBYTES));
    let mut objects: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), noise.as_slice())).collect();
    objects.push(("/registry/pods/a", b"a pod"));
    let lost = found_cluster(&field, &objects).await?;
    let before = Resident::before(&field)?;
    take_image(&field).await?;
    before.check("taken")?;
    lose(&field, &lost).await?;
    let before = Resident::before(&field)?;
    let output = restore(&field).await?;
    assert!(output.contains("its Kubernetes objects come back"), "{output}");
    let restored =
        "SELECT count(*) = 1 FROM cluster WHERE restored_at IS NOT NULL AND restoring_since IS NULL
         AND NOT restoring_with_image";
    field.fleet.until("it is restored", restored).await?;
    before.check("restored")?;
    let back = |cluster: &Value| cluster["epoch"] == "1" && cluster["votersReached"] == 1;
    let cluster = field.until("it is back", "ams", back).await?;
    let restorer = restorer(&cluster, &lost)?;
    let client = etcd(&field, restorer)?;
    let pod = until_answered(async || client.get("/registry/pods/a").await).await?;
    let pod = pod.context("the pod is lost")?;
    assert_eq!(pod.value, b"a pod");
    for file in ["cluster/image", "cluster/snapshot"] {
        assert!(!field.disk(restorer).join(file).exists(), "{file} is still on a disk");
    }
    Ok(())
}

/// Checks that no machine but the lost one runs anything or has data of an etcd, and that the cluster is being restored.
fn check_nothing_serves(field: &Field, lost: &str, when: &str) -> Result<()> {
    let cluster = field.cluster("ams")?;
    ensure!(cluster["stage"] == "restoring", "{when}: {cluster:#}");
    for machine in cluster["machines"].as_array().context("machines")? {
        let name = machine["name"].as_str().context("a name")?;
        let data = field.disk(name).join("cluster/etcd/founding");
        ensure!(name == lost || !data.exists(), "{when}: {name} has data of an etcd");
        ensure!(name == lost || !field.runs_anything(name), "{when}: {name} runs something");
    }
    Ok(())
}

/// Waits until a machine has a part of the image, and returns its length.
async fn until_part_is_fetched(field: &Field, lost: &str) -> Result<u64> {
    let end = Instant::now() + PATIENCE;
    loop {
        let cluster = field.cluster("ams")?;
        if let Ok(name) = restorer(&cluster, lost) {
            let image = field.disk(name).join("cluster/image");
            while Instant::now() < end {
                match std::fs::metadata(&image) {
                    Ok(file) if file.len() > 0 => return Ok(file.len()),
                    _ => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        }
        ensure!(Instant::now() < end, "nothing is fetched: {}", field.fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_is_restored_once_although_shepherds_die_and_nothing_serves_before() -> TestResult {
    if etcdutl_program()?.is_none() {
        return Ok(());
    }
    let mut field = Field::start("cluster_image_deaths", 3).await?;
    let (noise, keys) = (noise(), keys(IMAGE_MEBIBYTES));
    let objects: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), noise.as_slice())).collect();
    let lost = found_cluster(&field, &objects).await?;
    take_image(&field).await?;
    lose(&field, &lost).await?;

    // One dies when it has an epoch for the order, and one when it has given the order.
    field.shepherd = None;
    expire_sessions(&field).await?;
    let dying = start_dying_at(&field, "epoch-allocated")?;
    restore(&field).await?;
    until_dead(&field, dying, "epoch-allocated").await?;
    check_nothing_serves(&field, &lost, "an epoch is allocated")?;
    let_die_at(&field, "founding-ordered").await?;
    check_nothing_serves(&field, &lost, "a machine has the order")?;
    // One is killed while it sends the image.
    let mut sending = field.fleet.shepherd("sending", slice::from_ref(&field.endpoint), &FLAGS)?;
    let fetched = until_part_is_fetched(&field, &lost).await?;
    sending.kill()?;
    expire_sessions(&field).await?;
    assert!(fetched < IMAGE_MEBIBYTES << 20, "all {fetched} bytes of the image were fetched at once");
    // The machine repeats its request, and nobody answers.
    tokio::time::sleep(Duration::from_secs(3)).await;
    check_nothing_serves(&field, &lost, "a part of the image is fetched")?;
    // And one when it has recorded that the cluster is restored.
    let_die_at(&field, "restore-recorded").await?;

    field.shepherd = Some(field.fleet.shepherd("survivor", slice::from_ref(&field.endpoint), &FLAGS)?);
    let back = |cluster: &Value| cluster["votersReached"] == 1 && cluster["stage"] != "restoring";
    let cluster = field.until("it is back", "ams", back).await?;
    assert_eq!(cluster["epoch"], "2", "the order of the first shepherd was never given: {cluster:#}");
    let client = etcd(&field, restorer(&cluster, &lost)?)?;
    for key in &keys {
        let object = until_answered(async || client.get(key).await).await?;
        assert!(object.is_some_and(|object| object.value == noise), "{key} is lost");
    }
    let once = "SELECT count(*) = 1 FROM history WHERE event = 'ClusterRestored'";
    assert!(field.fleet.holds(once).await?, "it was restored more than once");
    Ok(())
}
