//! A database file that reaches its quota: what etcd reports and refuses, and what makes it accept writes again.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use shepherd_etcd::client::{Client, EtcdError};
use shepherd_etcd::maintenance::{Alarm, AlarmKind};
use shepherd_etcd::members::MemberId;

use testkit::aloud::TestResult;
use testkit::etcd_servers::{Cluster, until};

const QUOTA: u64 = 16 << 20;

/// Writes one key until etcd refuses. Returns the refusal.
async fn fill(client: &Client) -> Result<EtcdError> {
    // Random bytes are not needed: etcd compresses nothing.
    let value = vec![b'v'; 1 << 20];
    for _ in 0..100 {
        if let Err(error) = client.put_unguarded("/filler", &value).await {
            return Ok(error);
        }
    }
    bail!("etcd accepted 100 MiB");
}

#[tokio::test]
async fn full_member_accepts_writes_again_once_it_is_compacted_defragmented_and_disarmed() -> TestResult {
    let etcd = Cluster::start_with_quota(1, QUOTA).await?;
    let client = etcd.client();
    assert_eq!(client.database_quota().await?, Some(QUOTA));
    assert_eq!(client.list_alarms().await?, BTreeSet::new());
    let before = client.database_status().await?;
    assert!(!before.has_alarm && before.file_bytes < QUOTA / 2, "{before:?}");
    assert!(before.bytes_in_use > 0 && before.bytes_in_use <= before.file_bytes, "{before:?}");

    let refusal = fill(&client).await?.to_string();
    assert!(refusal.contains("database space exceeded"), "{refusal}");
    let own = MemberId(client.status().await?.member_id);
    until("the alarm is raised", async || Ok(client.database_status().await?.has_alarm)).await?;
    assert_eq!(client.list_alarms().await?, [Alarm { member: own, kind: AlarmKind::NoSpace }].into());
    let full = client.database_status().await?;
    assert_eq!(full.member, own);
    assert!(full.file_bytes > QUOTA * 9 / 10, "{full:?}");
    assert!(full.has_space_alarm && !full.is_learner, "{full:?}");
    until("everything is applied", async || {
        let status = client.database_status().await?;
        Ok(status.committed_index > 0 && !status.is_behind())
    })
    .await?;

    // The room is free inside the file, which stays as large as it is.
    client.compact_physically(full.revision).await?;
    client.compact_physically(full.revision).await?;
    assert!(client.database_status().await?.file_bytes > QUOTA * 9 / 10);
    client.defragment().await?;
    let small = client.database_status().await?;
    assert!(small.file_bytes < QUOTA / 2 && small.has_alarm, "{small:?}");
    let error = client.put_unguarded("/a", b"one").await.unwrap_err().to_string();
    assert!(error.contains("database space exceeded"), "the alarm stays: {error}");

    client.end_space_alarm(MemberId(31)).await?;
    assert!(client.database_status().await?.has_alarm, "another member has none");
    client.end_space_alarm(own).await?;
    assert_eq!(client.list_alarms().await?, BTreeSet::new());
    client.put_unguarded("/a", b"one").await?;
    assert!(!client.database_status().await?.has_alarm);
    Ok(())
}
