//! A cluster that is restored from a snapshot, at the very address of its old member, and a node that kept running; and one
//! that is restored with an image of its etcd.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::curator_client::cluster_snapshot::{ClusterSnapshot, snapshot_digest};
use shepherd::etcd::client::{Client, EtcdError};
use shepherd::etcd::namespace::{KeySelector, Namespace};
use shepherd::model::ids::MachineId;
use shepherd::proto::agent::v1 as agent;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::snapshots_client::SnapshotsClient;
use shepherd::roleserver::cluster::etcd_member::client_endpoint;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
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
pub(super) async fn image(owner: &Owner) -> Result<(Vec<u8>, String)> {
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

/// Gives a machine a snapshot with an image, and the order to restore the cluster with both.
pub(super) fn order_restore(
    owner: &Owner,
    node: &Node,
    taken: &[u8],
    (image, etcd_version): &(Vec<u8>, String),
) -> Result<()> {
    let OrderKind::Found { cluster, name, owner_keys, .. } = owner.founding_order() else {
        anyhow::bail!("the order does not found a cluster")
    };
    node.files().read_or_create_key()?;
    std::fs::write(node.files().snapshot_path(), taken)?;
    std::fs::write(node.files().image_path(), image)?;
    let sha256 = hex::encode(snapshot_digest(image));
    node.ask(OrderKind::Found {
        cluster,
        name,
        owner_keys,
        snapshot: Some(hex::encode(snapshot_digest(taken))),
        image: Some(EtcdImage { sha256, etcd_version: etcd_version.clone() }),
        revocations: BTreeMap::new(),
        epoch: 1,
    })
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
    let (taken, image) = (snapshot(&owner).await?, image(&owner).await?);
    // A client has seen this object, and nobody will see it again.
    let written = client.put_unguarded("/registry/pods/later", b"of after the image").await?;
    let before = owner.members().await?[0].member_id;
    first.cut_power().await?;

    let mut second = Node::at(first.address)?;
    order_restore(&owner, &second, &taken, &image)?;
    // Interrupted anywhere, it restores the whole image or continues with it.
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

/// Writes a program that prints one line.
fn write_program(directory: &Path, name: &str, line: &str) -> Result<()> {
    let program = directory.join(name);
    std::fs::write(&program, format!("#!/bin/sh\necho '{line}'\n"))?;
    Ok(std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?)
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
    etcd(&first)?.put_unguarded("/registry/pods/a", b"a pod").await?;
    let (taken, image) = (snapshot(&owner).await?, image(&owner).await?);
    first.cut_power().await?;
    let mut second = Node::at(first.address)?;
    let (own, place) = (second.etcd_program.clone(), tempfile::tempdir()?);
    let programs = ["another-tool", "etcd-3.4"].map(|name| place.path().join(name));
    for directory in &programs {
        std::fs::create_dir_all(directory)?;
    }
    // The etcd that the image is of with a tool of another minor version, and etcd 3.4, which has none.
    symlink(&own, programs[0].join("etcd"))?;
    write_program(&programs[0], "etcdutl", "etcdutl version: 3.99.0")?;
    write_program(&programs[1], "etcd", "etcd Version: 3.4.30")?;
    write_program(&programs[1], "etcdutl", "etcdutl version: 3.5.21")?;
    let later = (image.0.clone(), "3.99.0".to_owned());
    for (what, image, etcd, expected) in [
        ("a later etcd", &later, own.clone(), "install etcd and etcdutl 3.99"),
        ("another tool", &image, programs[0].join("etcd"), "and etcdutl 3.99.0: install etcdutl 3."),
        (
            "etcd 3.4",
            &image,
            programs[1].join("etcd"),
            "has etcd 3.4.30, for which no etcdutl restores an image",
        ),
    ] {
        order_restore(&owner, &second, &taken, image)?;
        second.etcd_program = etcd;
        second.start()?;
        let reported = || second.facts.problems.describe().unwrap_or_default();
        until("it reports why it restores nothing", async || Ok(reported().contains(expected)))
            .await
            .with_context(|| format!("{what}: {}", reported()))?;
        let text = reported();
        assert!(text.contains("the cluster is not restored") && !text.contains('\n'), "{what}: {text}");
        let left = std::fs::read_dir(second.files().etcd_directory()).into_iter().flatten().flatten();
        let left: Vec<String> = left.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        let begun = |name: &String| name == "founding" || name.starts_with("restoring-");
        assert!(!left.iter().any(begun), "{what}: it has begun: {left:?}");
        second.cut_power().await?;
    }

    // With the right programs, the same order is carried out.
    order_restore(&owner, &second, &taken, &image)?;
    second.etcd_program = own;
    second.start()?;
    second.until_control_plane(true).await?;
    assert!(etcd(&second)?.get("/registry/pods/a").await?.is_some(), "the objects are lost");
    Ok(())
}
