//! A cluster that is restored from a snapshot, at the very address of its old member, and a node that kept running; and one
//! that is restored with an image of its etcd.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::curator_client::cluster_snapshot::{ClusterSnapshot, snapshot_digest};
use shepherd::etcd::client::{Client, EtcdError};
use shepherd::etcd::namespace::{KeySelector, Namespace};
use shepherd::model::ids::MachineId;
use shepherd::proto::agent::v1 as agent;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::snapshots_client::SnapshotsClient;
use shepherd::roleserver::cluster::control_plane::CURATOR_PORT;
use shepherd::roleserver::cluster::etcd_member::client_endpoint;
use shepherd::roleserver::cluster::node_order::{EtcdImage, OrderKind};
use shepherd::roleserver::cluster::order_inbox::OrderInbox;

use super::node::Node;
use super::owner::{Owner, patiently};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_program::etcdutl_program;
use crate::harness::etcd_servers::until;

pub(super) async fn snapshot(owner: &Owner) -> Result<Vec<u8>> {
    let mut snapshots = SnapshotsClient::new(owner.curators()?.channel());
    let mut pieces = patiently(async || snapshots.take(wire::TakeSnapshotRequest {}).await).await?;
    let mut encoded = Vec::new();
    while let Some(piece) = pieces.message().await? {
        encoded.extend(piece.chunk);
    }
    Ok(encoded)
}

/// The leader, as a node knows it.
fn leader(node: &Node) -> Option<String> {
    let connection = node.facts.connection.latest()?;
    Some(connection.curators.leader()?.node.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_that_lived_on_follows_the_restored_cluster_and_never_again_the_old_one() -> TestResult {
    let mut owner = Owner::new()?;
    let mut first = Node::new()?;
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_control_plane(true).await?;
    owner.claim(&first).await?;
    let mut worker = Node::new()?;
    worker.start()?;
    worker.ask(owner.join(&first).await?)?;
    owner.approve(&worker).await?;
    worker.until_it_is_one().await?;
    owner.wait_for_node_status(&worker).await?;
    owner.until_well(1, 2).await?;
    let before = owner.members().await?[0].member_id;
    let taken = snapshot(&owner).await?;
    let (id, authority) =
        (ClusterSnapshot::decode(&taken)?.cluster, worker.files().read_credentials()?.context("one")?);

    // Its only member is gone. Another machine has its address, and restores the cluster.
    first.cut_power().await?;
    let mut second = Node::at(first.address)?;
    let OrderKind::Found { cluster, name, owner_keys, .. } = owner.founding_order() else {
        panic!("the order does not found a cluster")
    };
    second.files().read_or_create_key()?;
    std::fs::write(second.files().snapshot_path(), &taken)?;
    second.ask(OrderKind::Found {
        cluster,
        name,
        owner_keys,
        snapshot: Some(hex::encode(snapshot_digest(&taken))),
        image: None,
        revocations: BTreeMap::new(),
        epoch: 1,
    })?;
    second.start()?;
    second.until_control_plane(true).await?;
    second.until_it_is_one().await?;
    assert_eq!(cluster, id);
    assert!(!second.files().snapshot_path().exists(), "the snapshot is still on its disk");
    assert_eq!(second.files().epoch_of_cluster(id)?, 1);
    let mut owner = owner.again();
    owner.claim(&second).await?;
    let members = owner.members().await?;
    assert_eq!(members.len(), 1);
    assert_ne!(members[0].member_id, before, "a member of before could take itself for this one");

    // The node that kept running receives the order, and continues as the same node.
    let inbox = OrderInbox::new(MachineId::generate(), worker.files(), worker.facts.clone());
    let curator = std::net::SocketAddr::new(second.address, CURATOR_PORT).to_string();
    let join = agent::JoinCluster {
        ticket: vec![7; 32],
        ca_certificate: hex::decode(&authority.ca_certificate)?,
        curators: vec![curator],
        epoch: 1,
        ..Default::default()
    };
    inbox.accept(&agent::ClusterOrder {
        generation: 1,
        operation: Some(agent::cluster_order::Operation::Join(join)),
        ..Default::default()
    });
    assert_eq!((inbox.report().epoch, inbox.report().error.as_str()), (1, ""));
    let restored = second.id()?.to_string();
    until("it follows the restored cluster", async || Ok(leader(&worker).as_ref() == Some(&restored)))
        .await?;
    until("its curator hears it", async || {
        let id = worker.id()?.to_string();
        let nodes = owner.nodes().await?;
        Ok(nodes.iter().any(|listed| {
            listed.node.as_ref().is_some_and(|node| node.node_id == id)
                && listed.health.is_some_and(|health| health.kind() == wire::node_health::Kind::Healthy)
        }))
    })
    .await?;

    let anchor = worker.facts.connection.latest().context("no connection")?.anchor;
    until("it stored the statement of the restored cluster", async || {
        let stored = worker.files().read_statement(&anchor)?;
        Ok(stored.is_some_and(|stored| stored.statement.epoch == 1))
    })
    .await?;

    // The old member comes back, where the new one was, and leads all that it knows of: no node follows it.
    second.cut_power().await?;
    first.start()?;
    first.until_control_plane(true).await?;
    let mut of_before = owner.again();
    of_before.claim(&first).await?;
    of_before.members().await?;
    let old = first.id()?.to_string();
    for _ in 0..50 {
        assert_ne!(leader(&worker).as_ref(), Some(&old), "it follows the cluster of before");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    first.cut_power().await?;
    second.start()?;
    until("it follows the restored cluster", async || Ok(leader(&worker).as_ref() == Some(&restored)))
        .await?;
    Ok(())
}

/// An image of the whole etcd, and the version of the etcd.
async fn image(owner: &Owner) -> Result<(Vec<u8>, String)> {
    let mut snapshots = SnapshotsClient::new(owner.curators()?.channel());
    let mut messages = patiently(async || snapshots.take_image(wire::TakeImageRequest {}).await).await?;
    let mut image = Vec::new();
    loop {
        let message = messages.message().await?.context("the image was cut off")?;
        if !message.sha256.is_empty() {
            return Ok((image, message.etcd_version));
        }
        image.extend(message.chunk);
    }
}

/// All objects of Kubernetes, by their keys.
async fn list_objects(client: &Client) -> Result<BTreeMap<String, Vec<u8>>> {
    let listing = client.list(&KeySelector::Prefix("/registry/".to_owned())).await?;
    Ok(listing.records.into_iter().map(|record| (record.key, record.value)).collect())
}

/// A client of the etcd of a node.
fn etcd(node: &Node) -> Result<Client> {
    Ok(Client::new(vec![client_endpoint(&node.files())], Namespace::new("curator")?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_objects_come_back_with_the_image_of_etcd() -> TestResult {
    if etcdutl_program()?.is_none() {
        return Ok(());
    }
    let mut owner = Owner::new()?;
    let mut first = Node::new()?;
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_control_plane(true).await?;
    owner.claim(&first).await?;
    let client = etcd(&first)?;
    for number in 0..1_000 {
        client
            .put_unguarded(&format!("/registry/pods/{number:04}"), format!("pod {number}").as_bytes())
            .await?;
    }
    let objects = list_objects(&client).await?;
    assert_eq!(objects.len(), 1_000);
    let (taken, (image, etcd_version)) = (snapshot(&owner).await?, image(&owner).await?);
    // A client has seen this object, and nobody will see it again.
    let written = client.put_unguarded("/registry/pods/later", b"of after the image").await?;
    let before = owner.members().await?[0].member_id;
    first.cut_power().await?;

    let mut second = Node::at(first.address)?;
    let OrderKind::Found { cluster, name, owner_keys, .. } = owner.founding_order() else {
        panic!("the order does not found a cluster")
    };
    second.files().read_or_create_key()?;
    std::fs::write(second.files().snapshot_path(), &taken)?;
    std::fs::write(second.files().image_path(), &image)?;
    second.ask(OrderKind::Found {
        cluster,
        name,
        owner_keys,
        snapshot: Some(hex::encode(snapshot_digest(&taken))),
        image: Some(EtcdImage { sha256: hex::encode(snapshot_digest(&image)), etcd_version }),
        revocations: BTreeMap::new(),
        epoch: 1,
    })?;
    // Interrupted anywhere, it restores the whole image or goes on with it.
    for milliseconds in [20, 80, 200, 500] {
        second.start()?;
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        second.cut_power().await?;
    }
    second.start()?;
    second.until_control_plane(true).await?;
    second.until_it_is_one().await?;
    assert!(!second.files().image_path().exists(), "the image is still on its disk");
    let client = etcd(&second)?;
    assert!(list_objects(&client).await? == objects, "the objects are not those of the image");
    let now = client.put_unguarded("/registry/pods/b", b"another").await?;
    assert!(now > written + 900_000_000, "a client of before could continue: {written}, {now}");
    let compacted = client.compact(written).await.err();
    assert!(
        matches!(compacted, Some(EtcdError::Compacted { .. })),
        "a watch of before could continue at its revision: {compacted:?}"
    );
    let mut owner = owner.again();
    owner.claim(&second).await?;
    let members = owner.members().await?;
    assert_eq!(members.len(), 1, "the members of before came back with the image");
    assert_ne!(members[0].member_id, before);

    // It starts again with what was written since.
    second.cut_power().await?;
    second.start()?;
    second.until_control_plane(true).await?;
    assert!(etcd(&second)?.get("/registry/pods/b").await?.is_some(), "the image was restored again");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_is_not_restored_by_another_version_of_the_tool() -> TestResult {
    if etcdutl_program()?.is_none() {
        return Ok(());
    }
    let mut owner = Owner::new()?;
    let mut first = Node::new()?;
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_control_plane(true).await?;
    owner.claim(&first).await?;
    let (taken, (image, _)) = (snapshot(&owner).await?, image(&owner).await?);
    first.cut_power().await?;
    let mut second = Node::at(first.address)?;
    let OrderKind::Found { cluster, name, owner_keys, .. } = owner.founding_order() else {
        panic!("the order does not found a cluster")
    };
    second.files().read_or_create_key()?;
    std::fs::write(second.files().snapshot_path(), &taken)?;
    std::fs::write(second.files().image_path(), &image)?;
    let sha256 = hex::encode(snapshot_digest(&image));
    second.ask(OrderKind::Found {
        cluster,
        name,
        owner_keys,
        snapshot: Some(hex::encode(snapshot_digest(&taken))),
        image: Some(EtcdImage { sha256, etcd_version: "3.99.0".to_owned() }),
        revocations: BTreeMap::new(),
        epoch: 1,
    })?;
    second.start()?;
    let reported = || second.facts.problems.describe().unwrap_or_default();
    until("it reports why it restores nothing", async || Ok(reported().contains("etcd 3.99.0"))).await?;
    assert!(reported().contains("install etcd and etcdutl 3.99"), "{}", reported());
    assert!(!second.files().etcd_directory().join("founding").exists(), "it has begun");
    Ok(())
}
