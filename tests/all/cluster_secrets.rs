//! Kubernetes Secrets of a cluster with a real etcd and a real API server: neither a Secret nor its key is in etcd, in a
//! snapshot or in the database, the key is replaced, and both come back with a restored cluster.
//!
//! The machines are simulated. The controller manager and the scheduler are scripts that are healthy.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use shepherd::bmdb::cluster::sealed_snapshot::unseal_snapshot;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::reconciler::objects::api_client::{ApiServerConnection, ClientIdentity};
use shepherd::reconciler::objects::object_kind::ObjectKind;

use crate::cluster_images::{lose, open_newest_image, restorer, take_image};
use crate::clusters::{Field, machines, settled};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_program::etcdutl_program;
use crate::harness::fleet::PATIENCE;
use crate::harness::kubernetes::{ProgramSet, folder};
use crate::nodes::kubernetes::{File, STAND_IN, archive};
use crate::objects::kit::{Other, in_default, kind};

/// What nobody may find.
const PLANTED: &str = "correct-horse-battery-staple-7f3a9c";
/// The beginning of what an API server stores for a Secret that it has encrypted.
const ENCRYPTED: &str = "k8s:enc:secretbox:v1:";

fn secrets() -> ObjectKind {
    kind("", "Secret", "secrets", true)
}

/// Adds a bundle with this API server.
fn add_bundle(field: &Field, programs: &Path) -> Result<()> {
    let version = std::process::Command::new(programs.join("kube-apiserver")).arg("--version").output()?;
    let version = String::from_utf8(version.stdout)?;
    let version =
        version.trim().trim_start_matches("Kubernetes v").split(['-', '+']).next().unwrap_or_default();
    let file = |component: &'static str, content: Vec<u8>| File {
        component,
        path: format!("bin/{component}"),
        content,
    };
    let files = [
        file("kube-apiserver", std::fs::read(programs.join("kube-apiserver"))?),
        file("kube-controller-manager", STAND_IN.as_bytes().to_vec()),
        file("kube-scheduler", STAND_IN.as_bytes().to_vec()),
    ];
    let (_, archive) = archive(version, &files, &[])?;
    let path = field.fleet.directory().join("k");
    std::fs::write(&path, archive)?;
    field.ctl(&["artefacts", "add", path.to_str().context("a path")?, "--reason", "a bundle"])?;
    Ok(())
}

/// Whether the API server of the only member of the control plane that stays is healthy.
fn has_api_server(cluster: &Value) -> bool {
    let healthy = |machine: &&Value| {
        let components = machine["kubernetes"]["components"].as_array();
        components
            .into_iter()
            .flatten()
            .any(|one| one["name"] == "kube-apiserver" && one["state"] == "healthy")
    };
    machines(cluster, "control-plane").iter().any(healthy)
}

/// Whether every Secret is encrypted with the key of this number.
fn is_encrypted_with(cluster: &Value, number: u32) -> bool {
    let secrets = &cluster["secretsEncryption"];
    let key = secrets["key"].as_str().unwrap_or_default();
    secrets["stage"] == "settled" && key.starts_with(&format!("key{number}-"))
}

/// A client of the API server on this machine, as its reconciler.
fn client(field: &Field, cluster: &Value, machine: &str) -> Result<Other> {
    let server = cluster["kubernetes"]["apiServers"][0].as_str().context("an API server")?;
    let directory = field.disk(machine).join("cluster/kubernetes/controller");
    Other::new(&ApiServerConnection {
        url: format!("https://{server}"),
        identity: Some(ClientIdentity {
            authority: directory.join("servers.crt"),
            certificate: directory.join("reconciler.crt"),
            key: directory.join("reconciler.key"),
        }),
    })
}

/// What the planted Secret has.
async fn read_planted(field: &Field, machine: &str) -> Result<String> {
    let end = Instant::now() + PATIENCE;
    loop {
        let cluster = field.cluster("ams")?;
        // An API server that restarts does not answer.
        if let Ok(client) = client(field, &cluster, machine)
            && let Ok(Ok(secret)) = client.get(&secrets(), &in_default("planted")).await
        {
            let value = STANDARD.decode(secret["data"]["password"].as_str().context("a password")?)?;
            return Ok(String::from_utf8(value)?);
        }
        ensure!(Instant::now() < end, "the Secret cannot be read: {}", field.fleet.explain().await?);
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

/// All bytes of the files below this directory, without the zeros at the end of each: etcd allocates files before it writes.
fn read_all(directory: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let (kind, path) = (entry.file_type()?, entry.path());
        if kind.is_dir() {
            bytes.extend(read_all(&path)?);
        } else if kind.is_file() {
            let content = std::fs::read(&path)?;
            let end = content.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            bytes.extend_from_slice(&content[..end]);
        }
    }
    Ok(bytes)
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// The keys of Secrets in the database, opened.
async fn open_keys(field: &Field) -> Result<Vec<Vec<u8>>> {
    let opener = SecretsKey::open(&field.fleet.directory().join("secrets.key"))?;
    let sealed: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT sealed FROM sealed_secret WHERE name LIKE '%/secret-keys/%' ORDER BY name",
    )
    .fetch_all(&field.fleet.pool)
    .await?;
    let mut keys = Vec::new();
    for sealed in sealed {
        // Its cluster comes first.
        keys.push(opener.unseal("a key", &sealed)?.expose_secret()[16..].to_vec());
    }
    Ok(keys)
}

/// Checks that none of the keys is in these bytes, in any form in which one is stored somewhere.
fn check_without_keys(what: &str, bytes: &[u8], keys: &[Vec<u8>]) -> Result<()> {
    for key in keys {
        for form in [key.clone(), STANDARD.encode(key).into_bytes(), hex::encode(key).into_bytes()] {
            ensure!(!contains(bytes, &form), "a key of Secrets is in {what}");
        }
    }
    Ok(())
}

/// Checks that no row of the database has a key that is not sealed.
async fn check_database(field: &Field, keys: &[Vec<u8>]) -> Result<()> {
    let rows: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT sealed FROM sealed_secret UNION ALL SELECT sealed FROM cluster_order WHERE sealed IS NOT NULL
         UNION ALL SELECT convert_to(secret_keys::TEXT, 'UTF8') FROM cluster
         UNION ALL SELECT convert_to(secrets::TEXT, 'UTF8') FROM machine_cluster_report WHERE secrets IS NOT NULL",
    )
    .fetch_all(&field.fleet.pool)
    .await?;
    rows.iter().try_for_each(|row| check_without_keys("a row of the database", row, keys))
}

/// Checks that neither the Secret nor a key is in etcd's files, in an opened snapshot, or in its image.
async fn check_copies(field: &Field, machine: &str, keys: &[Vec<u8>]) -> Result<()> {
    let etcd = read_all(&field.disk(machine).join("cluster/etcd"))?;
    ensure!(contains(&etcd, ENCRYPTED.as_bytes()), "no encrypted Secret is in etcd's files");
    let (snapshot, sha256): (uuid::Uuid, Vec<u8>) = sqlx::query_as(
        "SELECT snapshot_id, digest FROM cluster_snapshot WHERE why = 'ordered' ORDER BY taken_at DESC LIMIT 1",
    )
    .fetch_one(&field.fleet.pool)
    .await?;
    let chunks: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT sealed FROM cluster_snapshot_chunk WHERE snapshot_id = $1 ORDER BY number",
    )
    .bind(snapshot)
    .fetch_all(&field.fleet.pool)
    .await?;
    let opener = SecretsKey::open(&field.fleet.directory().join("secrets.key"))?;
    let snapshot = unseal_snapshot(&opener, &chunks.concat(), &sha256)?.expose_secret().to_vec();
    let image = open_newest_image(field).await?;
    ensure!(contains(&image, ENCRYPTED.as_bytes()), "no encrypted Secret is in the image of etcd");
    for (what, bytes) in
        [("etcd's files", etcd), ("an opened snapshot", snapshot), ("an opened image of etcd", image)]
    {
        ensure!(!contains(&bytes, PLANTED.as_bytes()), "the planted Secret is in {what}");
        let encoded = STANDARD.encode(PLANTED);
        ensure!(!contains(&bytes, encoded.as_bytes()), "the planted Secret is in {what}");
        check_without_keys(what, &bytes, keys)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planted_secret_and_its_keys_are_in_no_etcd_and_no_snapshot_and_come_back_with_both() -> TestResult {
    if etcdutl_program()?.is_none() {
        return Ok(());
    }
    let Some(programs) = folder(ProgramSet::ApiServer)? else { return Ok(()) };
    let field = Field::start("cluster_secrets", 2).await?;
    add_bundle(&field, &programs)?;
    let create = ["cluster", "create", "ams", "--control-plane", "1", "--workers", "0"];
    field.ctl(&[&create[..], &["--kubernetes-bundle", "k", "--reason", "a hall"]].concat())?;
    let ready = |cluster: &Value| has_api_server(cluster) && is_encrypted_with(cluster, 1);
    let cluster = field.until("Secrets are encrypted", "ams", ready).await?;
    let member = machines(&cluster, "control-plane")[0]["name"].as_str().context("a name")?.to_owned();
    let config = field.disk(&member).join("cluster/kubernetes/controller/secrets-encryption.json");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&config)?.permissions());
    assert_eq!(mode & 0o777, 0o600);

    let secret = json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"password": PLANTED},
        "metadata": {"name": "planted", "namespace": "default"}});
    client(&field, &cluster, &member)?.create(&secrets(), &secret).await??;
    assert_eq!(read_planted(&field, &member).await?, PLANTED);
    let first = open_keys(&field).await?;
    assert_eq!(first.len(), 1);
    let etcd = read_all(&field.disk(&member).join("cluster/etcd"))?;
    assert!(!contains(&etcd, PLANTED.as_bytes()), "the planted Secret is in etcd's files");
    take_image(&field).await?;
    // Not the first one: the cluster got that before the Secret was planted.
    let snapshot: uuid::Uuid = sqlx::query_scalar(
        "SELECT snapshot_id FROM cluster_snapshot JOIN cluster_image USING (snapshot_id)
         WHERE why = 'ordered' AND completed_at IS NOT NULL ORDER BY taken_at DESC LIMIT 1",
    )
    .fetch_one(&field.fleet.pool)
    .await?;
    check_copies(&field, &member, &first).await?;
    check_database(&field, &first).await?;

    // Another key: it writes every Secret again, and the former one stays sealed for that snapshot.
    let rotate = ["cluster", "rotate-secrets-key", "ams", "--reason", "a disk left"];
    assert!(field.ctl(&rotate)?.contains("replaces the key of its Kubernetes Secrets"));
    assert!(field.ctl(&rotate)?.contains("already replaces the key"), "it is ordered twice");
    // The former key is dropped on the controller, too.
    let rotated =
        |cluster: &Value| has_api_server(cluster) && is_encrypted_with(cluster, 2) && settled(cluster);
    field.until("another key is in use", "ams", rotated).await?;
    assert_eq!(read_planted(&field, &member).await?, PLANTED);
    let keys = open_keys(&field).await?;
    assert!(keys.len() == 2 && keys.contains(&first[0]), "a snapshot needs the former key");
    let etcd = read_all(&field.disk(&member).join("cluster/etcd"))?;
    assert!(contains(&etcd, format!("{ENCRYPTED}key2-").as_bytes()), "no Secret was written again");
    assert!(!contains(&etcd, PLANTED.as_bytes()), "the planted Secret is in etcd's files");
    check_without_keys("etcd's files", &etcd, &keys)?;
    check_database(&field, &keys).await?;
    let config_now = std::fs::read_to_string(&config)?;
    assert!(!config_now.contains(&STANDARD.encode(&first[0])), "the controller still has the former key");

    // The snapshot of before the rotation is restored, with the Secret and the key that it needs.
    lose(&field, &member).await?;
    let snapshot = snapshot.to_string();
    let restore = ["cluster", "restore", "ams", "--yes", "--snapshot", &snapshot, "--reason", "it burnt"];
    let end = Instant::now() + PATIENCE;
    while let Err(refused) = field.ctl(&restore) {
        assert!(refused.to_string().contains("--bypass-quorum") && Instant::now() < end, "{refused}");
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    }
    let back = |cluster: &Value| cluster["epoch"] == "1" && rotated(cluster);
    let cluster = field.until("it is back", "ams", back).await?;
    let restorer = restorer(&cluster, &member)?.to_owned();
    assert_eq!(read_planted(&field, &restorer).await?, PLANTED, "its key did not come back");
    Ok(())
}
