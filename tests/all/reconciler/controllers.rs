//! Controller releases: what the watch on them reports after each change.

use anyhow::Context as _;
use shepherd::reconciler::controller_releases::ControllerReleases;
use shepherd::reconciler::service::watch_releases;
use tokio::sync::watch;

use super::kit::{delete_node, program, put_node, release};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::{Cluster, until};

/// Waits for the releases as of this revision.
async fn at(
    receiver: &watch::Receiver<Option<ControllerReleases>>,
    revision: i64,
) -> anyhow::Result<(String, String)> {
    let seen = || receiver.borrow().clone().filter(|seen| seen.revision >= revision);
    until("the change is reported", async || Ok(seen().is_some())).await?;
    let seen = seen().context("it was there")?;
    assert_eq!(seen.revision, revision, "the report is for another revision");
    assert_eq!(seen.unknown, Vec::<String>::new());
    Ok((seen.lowest.to_string(), seen.highest.to_string()))
}

#[tokio::test]
async fn releases_are_reported_with_the_revision_that_they_hold_for() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("1.0.0", "0.1.0", "0.1.0")?;
    for (id, version) in [("a1", "0.0.2"), ("a2", "0.0.2"), ("a3", "0.0.2"), ("b", "0.0.3")] {
        put_node(&client, id, true, Some(version)).await?;
    }
    let last = put_node(&client, "c", true, Some("10000.0.0")).await?;
    let (tell, receiver) = watch::channel(None);
    let watching = tokio::spawn({
        let (client, own) = (client.clone(), own.clone());
        async move { watch_releases(&client, &own, &tell).await }
    });
    let both = |lowest: &str, highest: &str| (lowest.to_owned(), highest.to_owned());
    assert_eq!(at(&receiver, last).await?, both("0.0.2", "10000.0.0"));
    let taken = put_node(&client, "a1", false, Some("0.0.2")).await?;
    assert_eq!(at(&receiver, taken).await?, both("0.0.2", "10000.0.0"));
    let deleted = delete_node(&client, "a2").await?;
    assert_eq!(at(&receiver, deleted).await?, both("0.0.2", "10000.0.0"));
    let updated = put_node(&client, "a3", true, Some("0.0.4")).await?;
    assert_eq!(at(&receiver, updated).await?, both("0.0.3", "10000.0.0"));
    let alone = delete_node(&client, "c").await?;
    assert_eq!(at(&receiver, alone).await?, both("0.0.3", "1.0.0"), "the own release always counts");
    let silent = put_node(&client, "d", true, None).await?;
    until("a node without a release is reported", async || {
        Ok(receiver.borrow().as_ref().is_some_and(|seen| seen.revision >= silent && seen.unknown.len() == 1))
    })
    .await?;
    assert_eq!(receiver.borrow().as_ref().unwrap().highest, release("1.0.0")?);
    watching.abort();
    Ok(())
}
