//! Locks: one holder at a time, and the end of a lock after its holder has ended.

use std::time::Duration;

use anyhow::{Result, bail};
use shepherd_etcd::client::Client;
use shepherd_etcd::lock::{Lock, LockAttempt};
use testkit::aloud::TestResult;
use testkit::etcd_servers::{Cluster, until};

const KEY: &str = "/work/of-one";

async fn take(client: &Client, holder: &str, ttl: Duration) -> Result<Lock> {
    match client.try_lock(KEY, holder, ttl).await? {
        LockAttempt::Acquired(lock) => Ok(lock),
        LockAttempt::Busy { holder } => bail!("{holder} holds it"),
    }
}

#[tokio::test]
async fn lock_has_one_holder_until_it_is_released() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let lock = take(&client, "one", Duration::from_mins(1)).await?;
    for _ in 0..2 {
        let error = take(&client, "two", Duration::from_mins(1)).await.unwrap_err();
        assert_eq!(error.to_string(), "one holds it");
    }
    lock.release(&client).await;
    let lock = take(&client, "two", Duration::from_mins(1)).await?;
    assert_eq!(client.get(KEY).await?.map(|record| record.value), Some(b"two".to_vec()));
    lock.release(&client).await;
    assert_eq!(client.get(KEY).await?, None);
    Ok(())
}

#[tokio::test]
async fn lock_of_a_holder_that_has_ended_ends_with_its_lease() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let _ = take(&client, "one", Duration::from_secs(2)).await?;
    until("the lock is free again", async || {
        let attempt = client.try_lock(KEY, "two", Duration::from_mins(1)).await?;
        Ok(matches!(attempt, LockAttempt::Acquired(_)))
    })
    .await?;
    Ok(())
}
