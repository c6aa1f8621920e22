//! Snapshots that an owner takes: complete, and of one revision. Images of the whole etcd.

use anyhow::{Context as _, Result};
use curator_client::cluster::authority_record_key;
use curator_client::cluster_snapshot::{ClusterSnapshot, snapshot_digest};
use curator_client::node::NodeState;
use etcd::key_space::{LEADER, ROOT};
use etcd::namespace::KeySelector;
use etcd::snapshot_file::verify_snapshot;
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

async fn take_image(channel: Channel) -> Result<Vec<wire::TakeImageResponse>> {
    let taking = async {
        let request = wire::TakeImageRequest {};
        let mut answers = SnapshotsClient::new(channel).take_image(request).await?.into_inner();
        let mut messages = Vec::new();
        while let Some(message) = answers.message().await? {
            messages.push(message);
        }
        Ok::<_, anyhow::Error>(messages)
    };
    in_time("an image", taking).await?
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

#[tokio::test]
async fn image_has_the_whole_etcd_in_chunks_for_an_owner_alone() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let client = cluster.etcd.client();
    // Objects of Kubernetes are not below the root of the curator's records. These are many chunks.
    for number in 0..20 {
        client.put_unguarded(&format!("/registry/secrets/{number}"), &vec![number; 50_000]).await?;
    }
    let revision = client.put_unguarded("/registry/secrets/last", b"a planted Secret").await?;
    let messages = take_image(owner.clone()).await?;
    let (last, chunks) = messages.split_last().context("it sent nothing")?;
    assert!(chunks.len() > 1, "one chunk");
    assert!(chunks.iter().all(|message| message.sha256.is_empty()), "only the last message ends the image");
    let image: Vec<u8> = chunks.iter().flat_map(|message| message.chunk.clone()).collect();
    assert_eq!(last.sha256, snapshot_digest(&image));
    assert_eq!((last.bytes, last.chunk.len()), (u64::try_from(image.len())?, 0));
    assert!(last.revision >= revision, "{} {revision}", last.revision);
    assert_eq!(last.etcd_version, client.status().await?.version);
    let has_secret = |bytes: &[u8]| bytes.windows(16).any(|words| words == b"a planted Secret");
    assert!(has_secret(&image), "it is not all there");
    let records: Vec<u8> = take(owner).await?.into_iter().flat_map(|piece| piece.chunk).collect();
    assert!(!has_secret(&records), "a snapshot has objects of Kubernetes, and the documents deny that");
    // It ends with etcd's own digest, as etcdutl requires.
    let path = cluster.etcd.path("image");
    std::fs::write(&path, &image)?;
    assert_eq!(verify_snapshot(&path).await?.bytes, last.bytes);

    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;
    let as_node = cluster.channel(0, Some(node.with(&certificate)?))?;
    let asking = SnapshotsClient::new(as_node).take_image(wire::TakeImageRequest {}).await;
    let (code, text) = refusal(asking)?;
    assert_eq!(code, Code::PermissionDenied, "{text}");
    Ok(())
}
