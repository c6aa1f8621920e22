//! Snapshots that an owner takes: complete, and of one revision.

use anyhow::Result;
use curator_client::cluster::authority_record_key;
use curator_client::cluster_snapshot::{ClusterSnapshot, snapshot_digest};
use curator_client::node::NodeState;
use etcd::key_space::{LEADER, ROOT};
use etcd::namespace::KeySelector;
use proto::curator::v1 as wire;
use proto::curator::v1::snapshots_client::SnapshotsClient;
use tonic::Code;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, refusal};
use testkit::etcd_servers::in_time;
use testkit::key_holder::Holder;

use crate::statements::until_first_statement;

async fn take(channel: Channel) -> Result<Vec<wire::TakeSnapshotResponse>> {
    let taking = async {
        let mut answers =
            SnapshotsClient::new(channel).take(wire::TakeSnapshotRequest {}).await?.into_inner();
        let mut pieces = Vec::new();
        while let Some(piece) = answers.message().await? {
            pieces.push(piece);
        }
        Ok::<_, anyhow::Error>(pieces)
    };
    in_time("a snapshot", taking).await?
}

#[tokio::test]
async fn snapshot_has_every_record_as_it_was_at_one_moment_in_pieces_for_an_owner() -> TestResult {
    let cluster = Cluster::start().await?;
    // The leader writes it by itself. It is in the snapshot, too.
    until_first_statement(&cluster, 0).await?;
    let owner = cluster.as_owner().await?;
    let client = cluster.etcd.client();
    // More than one message, and more than one page of etcd's.
    for number in 0..300 {
        client.put_unguarded(&format!("{ROOT}later/{number}"), &vec![7; 2_000]).await?;
    }
    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;
    let before = client.list(&KeySelector::Prefix(ROOT.to_owned())).await?;
    let pieces = take(owner.clone()).await?;
    assert!(pieces.len() > 1, "one piece");
    let encoded: Vec<u8> = pieces.iter().flat_map(|piece| piece.chunk.clone()).collect();
    assert_eq!(pieces.last().map(|piece| piece.sha256.clone()), Some(snapshot_digest(&encoded).to_vec()));
    let taken = ClusterSnapshot::decode(&encoded)?;
    assert_eq!((taken.cluster, taken.epoch), (cluster.id, 0));
    assert!(taken.revision >= before.revision, "{} {}", taken.revision, before.revision);
    let kept = before.records.iter().filter(|record| !LEADER.range().contains(&record.key));
    for record in kept.clone() {
        assert_eq!(taken.records.get(&record.key), Some(&record.value), "{}", record.key);
    }
    assert_eq!(taken.records.len(), kept.count());
    assert!(taken.records.contains_key(&authority_record_key()?));
    let nodes = taken.nodes()?;
    assert!(nodes.iter().any(|known| known.id == node.id && known.state == NodeState::Up), "{nodes:?}");
    assert_eq!(taken.consensus_members()?, [cluster.nodes[0].id]);

    // It has the key of the authority, so no node may read it.
    let as_node = cluster.channel(0, Some(node.with(&certificate)?))?;
    let asking = SnapshotsClient::new(as_node).take(wire::TakeSnapshotRequest {}).await;
    let (code, text) = refusal(asking)?;
    assert_eq!(code, Code::PermissionDenied, "{text}");
    Ok(())
}
