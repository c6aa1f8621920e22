//! Snapshots of this client, restored by etcd's own tool.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Result, ensure};
use shepherd_etcd::client::{EtcdError, Listing};
use shepherd_etcd::namespace::KeySelector;
use shepherd_etcd::snapshot_file::verify_snapshot;

use testkit::aloud::TestResult;
use testkit::etcd_program::etcdutl_program;
use testkit::etcd_servers::{Cluster, PATIENCE, peer_url};

use crate::value::{follow_listing, next, under, up_to};

/// By how much the restored etcd's revision exceeds that of the snapshot.
const BUMP: i64 = 1_000_000_000;
/// The member of a cluster with one.
const MEMBER: &str = "m0";

/// Restores a snapshot as the data of the only member, to be started by the test.
fn restore(etcdutl: &Path, etcd: &Cluster, snapshot: &Path) -> Result<Output> {
    let url = peer_url(MEMBER);
    let mut command = Command::new(etcdutl);
    command
        .args(["snapshot", "restore"])
        .arg(snapshot)
        .arg("--data-dir")
        .arg(etcd.path(MEMBER))
        .args(["--name", MEMBER, "--initial-cluster", &format!("{MEMBER}={url}")])
        .args(["--initial-advertise-peer-urls", &url])
        .args(["--bump-revision", &BUMP.to_string(), "--mark-compacted"]);
    Ok(command.output()?)
}

/// Ends the only member, and loses its data.
fn lose(etcd: &mut Cluster) -> Result<()> {
    etcd.kill(0)?;
    Ok(fs::remove_dir_all(etcd.path(MEMBER))?)
}

/// Starts the only member with the data of a snapshot.
async fn restart_from(etcdutl: &Path, etcd: &mut Cluster, snapshot: &Path) -> Result<()> {
    let output = restore(etcdutl, etcd, snapshot)?;
    ensure!(output.status.success(), "{output:?}");
    etcd.restart(0)?;
    etcd.wait_until_it_answers(0).await
}

#[tokio::test]
async fn snapshot_comes_back_with_all_keys_and_a_revision_that_nobody_has_seen() -> TestResult {
    let Some(etcdutl) = etcdutl_program()? else { return Ok(()) };
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    for number in 0..100 {
        client.put_unguarded(&format!("/registry/{number:03}"), &vec![number; 10_000]).await?;
    }
    client.delete_unguarded(&KeySelector::Prefix("/registry/09".to_owned())).await?;
    let all = KeySelector::Prefix("/".to_owned());
    let before = client.list(&all).await?;
    assert_eq!(before.records.len(), 90);
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("snapshot");
    let saved = client.save_snapshot(&path).await?;
    assert_eq!(saved.revision, before.revision);
    // A watch could continue after this write, which the snapshot lacks.
    let lost = client.put_unguarded("/registry/lost", b"later").await?;
    lose(&mut etcd)?;

    restart_from(&etcdutl, &mut etcd, &path).await?;
    let client = etcd.client();
    let after = client.list(&all).await?;
    let values = |listing: &Listing| -> Vec<(String, Vec<u8>)> {
        listing.records.iter().map(|record| (record.key.clone(), record.value.clone())).collect()
    };
    assert_eq!(values(&after), values(&before));
    assert!(after.revision >= saved.revision + BUMP, "{} after {}", after.revision, saved.revision);
    // Clients that hold a revision of before have to list again, also one that the snapshot never had.
    for revision in [saved.revision, lost, saved.revision + BUMP - 1] {
        let error = client.compact(revision).await.unwrap_err();
        assert!(matches!(error, EtcdError::Compacted { .. }), "{revision}: {error:?}");
    }
    client.put_unguarded("/registry/next", b"it can be written").await?;
    Ok(())
}

/// A watch that went on at its old revision would never hear that a key of after the snapshot is gone.
#[tokio::test]
async fn watch_of_before_lists_again_and_finds_what_was_lost() -> TestResult {
    let Some(etcdutl) = etcdutl_program()? else { return Ok(()) };
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/r/a", b"1").await?;
    let mut watcher = follow_listing(&client, under("/r/"), PATIENCE);
    assert_eq!(up_to(&mut watcher, "|").await?, ["/r/a=1", "|"]);
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("snapshot");
    client.save_snapshot(&path).await?;
    client.put_unguarded("/r/b", b"later").await?;
    assert_eq!(next(&mut watcher).await?, "/r/b=later");
    lose(&mut etcd)?;
    restart_from(&etcdutl, &mut etcd, &path).await?;
    assert_eq!(next(&mut watcher).await?, "-/r/b");
    client.put_unguarded("/r/c", b"2").await?;
    assert_eq!(next(&mut watcher).await?, "/r/c=2");
    Ok(())
}

/// The tool verifies the digest as [`verify_snapshot`] does: no snapshot passes one of them alone.
#[tokio::test]
async fn changed_snapshot_is_restored_by_nobody() -> TestResult {
    let Some(etcdutl) = etcdutl_program()? else { return Ok(()) };
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/a", &vec![7; 50_000]).await?;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("snapshot");
    client.save_snapshot(&path).await?;
    lose(&mut etcd)?;
    let whole = fs::read(&path)?;
    let mut changed = whole.clone();
    changed[9_000] ^= 1;
    for damaged in [&changed[..], &whole[..whole.len() - 512], &whole[..whole.len() - 32]] {
        fs::write(&path, damaged)?;
        assert!(verify_snapshot(&path).await.is_err());
        let output = restore(&etcdutl, &etcd, &path)?;
        assert!(!output.status.success(), "{output:?}");
        let _ = fs::remove_dir_all(etcd.path(MEMBER));
    }
    fs::write(&path, &whole)?;
    let output = restore(&etcdutl, &etcd, &path)?;
    assert!(output.status.success(), "{output:?}");
    Ok(())
}
