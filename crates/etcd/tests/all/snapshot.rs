//! A snapshot of everything in etcd.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use shepherd_etcd::snapshot_file::{SnapshotFileError, SnapshotFlaw, verify_snapshot};

use testkit::aloud::TestResult;
use testkit::etcd_servers::Cluster;
use testkit::memory::peak_of;

#[tokio::test]
async fn snapshot_is_whole_ours_alone_and_of_the_revision_it_says() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    // More than one chunk of what etcd sends (32 KiB).
    for number in 0..20 {
        client.put_unguarded(&format!("/{number}"), &vec![number; 100_000]).await?;
    }
    let revision = client.put_unguarded("/last", b"the last words").await?;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("snapshot");
    // A file that a crash left, which others could read.
    fs::write(directory.path().join("snapshot.partial"), b"old")?;
    let saved = client.save_snapshot(&path).await?;
    assert_eq!(saved.revision, revision);
    assert_eq!(saved.snapshot.bytes, fs::metadata(&path)?.len());
    assert_eq!(fs::metadata(&path)?.permissions().mode() & 0o777, 0o600);
    assert!(saved.snapshot.bytes > 2_000_000, "{saved:?}");
    assert_eq!(verify_snapshot(&path).await?, saved.snapshot);
    let output = Command::new("sha256sum").arg(&path).output()?;
    assert!(String::from_utf8(output.stdout)?.starts_with(&hex::encode(saved.snapshot.sha256)));
    let bytes = fs::read(&path)?;
    assert!(bytes.windows(14).any(|words| words == b"the last words"), "it is not all there");

    client.put_unguarded("/more", b"more").await?;
    let again = client.save_snapshot(&path).await?;
    assert!(again.revision > saved.revision && again.snapshot.sha256 != saved.snapshot.sha256);
    let left: Vec<_> =
        fs::read_dir(directory.path())?.map(|entry| entry.map(|entry| entry.file_name())).collect();
    assert_eq!(left.len(), 1, "{left:?}");

    let mut changed = bytes.clone();
    changed[70_000] ^= 1;
    fs::write(&path, &changed)?;
    let error = verify_snapshot(&path).await.unwrap_err();
    assert!(matches!(error, SnapshotFileError::Corrupt { flaw: SnapshotFlaw::Digest, .. }), "{error:?}");
    fs::write(&path, &bytes[..bytes.len() - 1])?;
    let error = verify_snapshot(&path).await.unwrap_err();
    assert!(matches!(error, SnapshotFileError::Corrupt { flaw: SnapshotFlaw::Size(_), .. }), "{error:?}");
    assert!(error.to_string().ends_with("take another"), "{error}");
    Ok(())
}

#[tokio::test]
async fn snapshot_that_fails_leaves_the_one_before_and_nothing_else() -> TestResult {
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("snapshot");
    let saved = client.save_snapshot(&path).await?;
    etcd.kill(0)?;
    let error = client.save_snapshot(&path).await.unwrap_err();
    assert!(matches!(error, SnapshotFileError::Etcd(_)), "{error:?}");
    assert_eq!(verify_snapshot(&path).await?, saved.snapshot);
    assert_eq!(fs::read_dir(directory.path())?.count(), 1);

    etcd.restart(0)?;
    etcd.wait_until_it_answers(0).await?;
    let nowhere = directory.path().join("nowhere/snapshot");
    let error = client.save_snapshot(&nowhere).await.unwrap_err();
    assert!(error.to_string().starts_with("creating "), "{error}");
    let error = verify_snapshot(&nowhere).await.unwrap_err();
    assert!(error.to_string().starts_with("reading "), "{error}");
    Ok(())
}

/// So a program can forward an etcd of gigabytes. The runtime and the test share one thread, and its memory is counted. HTTP/2
/// lets etcd send 2 MiB ahead of the reader.
#[test]
fn stream_takes_little_memory_for_a_large_snapshot() -> TestResult {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let etcd = runtime.block_on(async {
        let etcd = Cluster::start(1).await?;
        let client = etcd.client();
        for number in 0..40 {
            client.put_unguarded(&format!("/{number}"), &vec![number; 1_000_000]).await?;
        }
        Ok::<_, anyhow::Error>(etcd)
    })?;
    let receive = async {
        let mut stream = etcd.client().open_snapshot().await?;
        while stream.next_chunk().await?.is_some() {}
        Ok::<_, anyhow::Error>(stream.finish()?)
    };
    let (received, peak) = peak_of(|| runtime.block_on(receive));
    let bytes = received?.bytes;
    assert!(bytes > 40_000_000 && peak < 8 << 20, "{peak} bytes of memory for a snapshot of {bytes}");
    Ok(())
}
