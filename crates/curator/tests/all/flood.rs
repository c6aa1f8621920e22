//! A flood of connections without a certificate: the leader keeps its lease and serves its cluster.

use std::time::Duration;

use anyhow::{Context as _, Result};
use proto::curator::v1 as wire;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use testkit::aloud::TestResult;
use testkit::curators::{Cluster, Holder};
use testkit::etcd_servers::in_time;
use testkit::flood::{Flood, FloodPlan, HALF_A_RECORD};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// The key of the election's winner, which another leadership would not have.
async fn lock(cluster: &Cluster) -> Result<Vec<(String, i64)>> {
    let selector = etcd::namespace::KeySelector::Prefix(etcd::key_space::LEADER.range().start);
    let listed = cluster.client_of(0).list(&selector).await?;
    Ok(listed.records.into_iter().map(|record| (record.key, record.create_revision)).collect())
}

/// Comes again until it is served: while it has not shown its certificate, a connection from the address of a flood can
/// give way to others. Operators' programs and nodes come again too.
async fn list_over_new_connection(cluster: &Cluster) {
    loop {
        let listed = async {
            let owner = cluster.as_owner().await?;
            ManagementClient::new(owner).list_nodes(wire::ListNodesRequest::default()).await?;
            anyhow::Ok(())
        };
        match listed.await {
            Ok(()) => return,
            Err(error) => tracing::info!(%error, "a new connection was not served"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_keeps_its_lease_and_serves_its_cluster_beside_a_flood() -> TestResult {
    let cluster = Cluster::start().await?;
    let (node, owner) = (Holder::new()?, cluster.as_owner().await?);
    let certificate = cluster.take_in(&node).await?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    let (beat, beats) = mpsc::channel(1);
    let mut answers = nodes.heartbeat(ReceiverStream::new(beats)).await?.into_inner();
    // Channels connect when they are first used. This one must be a connection of before the flood.
    ManagementClient::new(owner.clone()).list_nodes(wire::ListNodesRequest::default()).await?;
    let before = lock(&cluster).await?;
    for sources in [1, 200] {
        let target = cluster.address(0)?.parse()?;
        let plan = FloodPlan { target, sources, silent: 1300, half_spoken: 1000, half: HALF_A_RECORD };
        let flood = Flood::start(&[plan]).await?;
        beat.send(wire::HeartbeatRequest {}).await?;
        in_time("an answer to a heartbeat", answers.message()).await??.context("the heartbeats ended")?;
        // An owner over a connection of before, and over a new one.
        ManagementClient::new(owner.clone()).list_nodes(wire::ListNodesRequest::default()).await?;
        in_time("a new connection of an owner", list_over_new_connection(&cluster)).await?;
        drop(flood);
    }
    assert_eq!(lock(&cluster).await?, before, "the leadership changed");
    Ok(())
}
