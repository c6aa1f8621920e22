//! An fsync of the role server that takes 20 s, on a node with a real etcd, a service, and the curator that leads the
//! cluster.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use shepherd::curator::service::curator_server::LEADER_TTL;
use shepherd::model::ids::MachineId;
use shepherd::roleserver::cluster::order_inbox::OrderInbox;
use shepherd::roleserver::disk::fault::block_syncs;
use uuid::Uuid;

use super::node::election_keys;
use super::services::{declare, founded, instance, script, until_well};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// How long the fsync takes at least. A lease that is not renewed meanwhile has ended.
const FSYNC: Duration = Duration::from_secs(20);
const _: () = assert!(FSYNC.as_secs() > LEADER_TTL.as_secs(), "a lost lease would not be noticed");

/// One thread runs the node, as in the role server.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_fsync_of_twenty_seconds_costs_no_lease_and_touches_no_workload() -> TestResult {
    let (owner, mut node) = founded().await?;
    node.until_control_plane(true).await?;
    owner.until_well(1, 1).await.with_context(|| node.report())?;
    let steady = script("steady", "exec sleep 1000000", &[]);
    let first = declare(&owner, "web", std::slice::from_ref(&steady)).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "steady", first).await?;
    let service = instance(&node, "web_steady")?;
    let client = node.etcd_client()?;
    let (leader, etcd) = (election_keys(&client).await?, node.etcd().context("no etcd")?);
    assert_eq!(leader.len(), 1);

    let disk = block_syncs(&node.places().directory);
    // The role server starts another service, and waits until the record of it is durable.
    let later = script("later", "exec sleep 1000000", &[]);
    let second = declare(&owner, "web", &[steady, later]).await?;
    until("the role server waits for its disk", async || Ok(disk.waiting() > 0))
        .await
        .with_context(|| node.report())?;
    let began = Instant::now();
    while began.elapsed() < FSYNC {
        owner.members().await.with_context(|| node.report())?;
        assert_eq!(
            election_keys(&client).await?,
            leader,
            "the lease of the leader was lost\n{}",
            node.report()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(disk.waiting() > 0, "nothing waits for the disk any more");
    let inbox = OrderInbox::new(MachineId(Uuid::new_v4()), node.files(), node.facts.clone());
    let error = inbox.report().error;
    assert!(error.contains("has taken longer than 5 s: the disk is slow or failing"), "{error}");

    drop(disk);
    until_well(&owner, &node, "later", second).await?;
    assert_eq!(election_keys(&client).await?, leader, "the lease of the leader was lost");
    assert_eq!(node.etcd().context("no etcd")?.instance, etcd.instance, "etcd was started again");
    assert_eq!(instance(&node, "web_steady")?, service, "the service was started again");
    owner.until_well(1, 1).await.with_context(|| node.report())?;
    node.stop().await?;
    Ok(())
}
