//! A flood of connections without a certificate: the leader keeps its lease and serves its cluster, and connections with
//! a certificate stay.

use std::time::Duration;

use anyhow::{Context as _, Result};
use proto::curator::v1 as wire;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, certificate, refusal};
use testkit::etcd_servers::{in_time, until};
use testkit::flood::{Flood, FloodPlan, HALF_A_RECORD};
use testkit::key_holder::Holder;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::statements::until_first_statement;

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

/// Floods from this many addresses, one after the other. The first address is not that of everyone else if a class of
/// connections has fewer places than one address of a flood opens connections.
async fn leader_serves_beside_floods(files: u64, sources: &[usize], first_source: usize) -> Result<()> {
    let cluster = Cluster::start_with(ClusterOptions { files, ..ClusterOptions::default() }).await?;
    cluster.until_one_leads(None).await?;
    let (node, owner) = (Holder::new()?, cluster.as_owner().await?);
    let certificate = cluster.take_in(&node).await?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    let (beat, beats) = mpsc::channel(1);
    let mut answers = nodes.heartbeat(ReceiverStream::new(beats)).await?.into_inner();
    // Channels connect when they are first used. This one must be a connection of before the flood.
    ManagementClient::new(owner.clone()).list_nodes(wire::ListNodesRequest::default()).await?;
    let before = lock(&cluster).await?;
    for &sources in sources {
        let target = cluster.address(0)?.parse()?;
        let half = HALF_A_RECORD;
        let plan = FloodPlan { target, sources, first_source, silent: 1300, half_spoken: 1000, half };
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_keeps_its_lease_and_serves_its_cluster_beside_a_flood() -> TestResult {
    Ok(leader_serves_beside_floods(1 << 20, &[1, 200], 0).await?)
}

/// Then a class has 96 places, and an address 48 of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_that_may_open_1024_files_serves_its_cluster_beside_a_flood() -> TestResult {
    Ok(leader_serves_beside_floods(1024, &[1, 80], 1).await?)
}

/// A follower serves nothing but the way to the leader, and every node watches that for as long as it runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_of_nodes_at_a_follower_never_give_way_and_one_too_many_is_refused_in_words() -> TestResult {
    // Sixty places for connections with a certificate, and eight for those of one address that count as strangers'.
    let wanted = ClusterOptions { size: 3, files: 256, ..ClusterOptions::default() };
    let cluster = Cluster::start_with(wanted).await?;
    let leader = cluster.until_one_leads(None).await?;
    let follower = (leader + 1) % 3;
    // Until there is a statement, the leader dials every curator. Each watch gets a message when there is one.
    until_first_statement(&cluster, follower).await?;
    let node = &cluster.nodes[leader];
    let own = node.with(&certificate(&cluster.authority, node, cluster.time.now())?)?;
    let client = || anyhow::Ok(LeaderClient::new(cluster.channel(follower, Some(own.clone()))?));
    let watch = async || {
        let mut leader = client()?;
        let mut answers = leader.watch(wire::WatchLeaderRequest {}).await?.into_inner();
        answers.message().await?.context("the watch ended")?;
        anyhow::Ok((leader, answers))
    };
    let mut first = None;
    until("a follower knows the leader", async || {
        first = watch().await.ok();
        Ok(first.is_some())
    })
    .await?;
    until("the connections before that have ended", async || {
        let numbers = cluster.gate(follower)?;
        Ok(numbers.proven + numbers.unproven == 1)
    })
    .await?;
    let mut watches: Vec<_> = first.into_iter().collect();
    while watches.len() < 60 {
        watches.push(watch().await.context("a watch gave way, or a newcomer did")?);
    }
    let numbers = cluster.gate(follower)?;
    assert_eq!((numbers.proven, numbers.turned_away_at), (60, None), "a watch gave way: {numbers:?}");

    let (code, text) = refusal(client()?.watch(wire::WatchLeaderRequest {}).await)?;
    assert_eq!((code, text.starts_with("all places of this listener")), (Code::Unavailable, true), "{text}");
    until("it is counted", async || Ok(cluster.gate(follower)?.closed.get("full") == Some(&1))).await?;

    let target = cluster.address(follower)?.parse()?;
    let half = HALF_A_RECORD;
    let plan = FloodPlan { target, sources: 100, first_source: 0, silent: 200, half_spoken: 200, half };
    let flood = Flood::start(&[plan]).await?;
    assert_eq!(cluster.gate(follower)?.proven, 60);
    drop(flood);
    for (_, watch) in &mut watches {
        let ended = tokio::time::timeout(Duration::ZERO, watch.message()).await;
        assert!(ended.is_err(), "a watch ended: {ended:?}");
    }
    Ok(())
}
