//! How the leader evaluates missing heartbeats.

use anyhow::{Context as _, Result};
use proto::curator::v1 as wire;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::node_health::Kind;
use proto::curator::v1::nodes_client::NodesClient;
use proto::curator::v1::registration_client::RegistrationClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ticket};
use testkit::etcd_servers::in_time;
use testkit::key_holder::Holder;

async fn health(owner: &Channel, node: &Holder) -> Result<Kind> {
    let listed = ManagementClient::new(owner.clone()).list_nodes(wire::ListNodesRequest::default()).await?;
    let id = node.id.to_string();
    let listed = listed.into_inner().nodes.into_iter();
    let mut its = listed.filter(|listed| listed.node.as_ref().is_some_and(|node| node.node_id == id));
    Ok(its.next().and_then(|listed| listed.health).context("it is not listed")?.kind())
}

/// Scenario C-10.
#[tokio::test]
async fn node_is_healthy_while_its_heartbeats_arrive_and_unknown_before_anybody_listened() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let (node, new) = (Holder::new()?, Holder::new()?);
    let certificate = cluster.take_in(&node).await?;
    let ticket = ticket(owner.clone(), None).await?;
    let mut registration = RegistrationClient::new(cluster.channel(0, Some(new.itself()?))?);
    registration.register(wire::RegisterRequest { ticket, ..Default::default() }).await?;

    assert_eq!(health(&owner, &node).await?, Kind::Unknown, "this leader has listened for a moment only");
    cluster.time.pass(11);
    assert_eq!(health(&owner, &node).await?, Kind::HeartbeatTimeout);
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    let (beat, beats) = mpsc::channel(1);
    let mut answers = nodes.heartbeat(ReceiverStream::new(beats)).await?.into_inner();
    for _ in 0..3 {
        beat.send(wire::HeartbeatRequest {}).await?;
        let answer = in_time("an answer", answers.message()).await??.context("it ended")?;
        assert_eq!(answer.interval_ms, 5000);
        assert_eq!(health(&owner, &node).await?, Kind::Healthy);
    }
    let healthy = wire::ListNodesRequest { health: vec![Kind::Healthy.into()], ..Default::default() };
    let mut management = ManagementClient::new(owner.clone());
    let listed = management.list_nodes(healthy).await?.into_inner().nodes;
    assert_eq!(listed.len(), 1);
    assert!(listed[0].health.context("no health")?.since_heartbeat_ms.is_some());

    cluster.time.pass(9);
    assert_eq!(health(&owner, &node).await?, Kind::Healthy, "one lost heartbeat is no evidence");
    cluster.time.pass(2);
    assert_eq!(health(&owner, &node).await?, Kind::HeartbeatTimeout);
    beat.send(wire::HeartbeatRequest {}).await?;
    in_time("an answer", answers.message()).await??.context("it ended")?;
    assert_eq!(health(&owner, &node).await?, Kind::Healthy);
    assert_eq!(health(&owner, &new).await?, Kind::Unknown, "one that is not up is never judged");
    Ok(())
}
