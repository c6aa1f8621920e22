//! A cluster's records in a fresh etcd, from a snapshot of another one that is gone.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use curator_client::certificate::{Serial, Validity};
use curator_client::cluster::{Cluster, cluster_record_key};
use curator_client::cluster_snapshot::ClusterSnapshot;
use curator_client::node::{ConsensusMember, Node, NodeState};
use curator_client::pki::Authority;
use etcd::client::Client;
use etcd::key_space::{CERTIFICATES, NODES, REVOKED_NODES, ROOT};
use etcd::namespace::KeySelector;
use etcd::record::FORMAT;
use model::cluster::kubernetes::KeyPurpose;
use prost::Message as _;
use proto::curator::v1 as wire;
use shepherd_curator::bootstrap::{BootstrapRequest, bootstrap_cluster};
use shepherd_curator::kubernetes::keys::{KubernetesKeys, keys_record_key};
use shepherd_curator::kubernetes::node_allocation::{AssignedGeneration, NodeAllocation};
use shepherd_curator::kubernetes::settings::{KubernetesSettings, settings_record_key};
use shepherd_curator::kubernetes::signer::{Signer, generate_key};
use shepherd_curator::restore::RestoreSource;
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::curators::{founding, kubernetes_settings};
use testkit::etcd_servers;
use testkit::key_holder::Holder;

async fn all(client: &Client) -> Result<BTreeMap<String, Vec<u8>>> {
    let listing = client.list(&KeySelector::Prefix(ROOT.to_owned())).await?;
    Ok(listing.records.into_iter().map(|record| (record.key, record.value)).collect())
}

fn nodes(records: &BTreeMap<String, Vec<u8>>) -> Result<Vec<Node>> {
    let nodes = records.iter().filter(|(key, _)| NODES.range().contains(key));
    Ok(nodes.map(|(key, value)| Node::decode(key, value)).collect::<Result<_, _>>()?)
}

/// A cluster of two consensus members and a node, and what is needed to restore it on another node.
async fn take_snapshot(
    owner: &Holder,
    restorer: &Holder,
    also: &[(String, Vec<u8>)],
) -> Result<(ClusterSnapshot, BootstrapRequest)> {
    let (first, second, worker) = (Holder::new()?, Holder::new()?, Holder::new()?);
    let now = model::time::Timestamp::from(std::time::SystemTime::now());
    let etcd = etcd_servers::Cluster::start_named(vec![first.id.to_string()]).await?;
    let client = etcd.client();
    let before = founding(Uuid::new_v4(), &first, owner, now)?;
    bootstrap_cluster(&client, &before, now).await?;
    let mut member = Node::new(second.key, NodeState::Up, now);
    member.roles.consensus_member = Some(ConsensusMember { member_id: 7, peers: BTreeMap::new() });
    for node in [member, Node::new(worker.key, NodeState::Up, now)] {
        client.put_unguarded(&Node::etcd_key(&node.id)?, &node.encode()?).await?;
    }
    for (key, value) in also {
        client.put_unguarded(key, value).await?;
    }
    // More than one transaction.
    for number in 0..250 {
        client.put_unguarded(&format!("{ROOT}later/{number}"), &vec![7; 3_000]).await?;
    }
    let listing = client.list(&KeySelector::Prefix(ROOT.to_owned())).await?;
    let snapshot = ClusterSnapshot::from_listing(listing, now)?;
    let (_, authority) = snapshot.cluster_and_authority()?;
    let restoring = RestoreSource {
        snapshot: Arc::new(snapshot.clone()),
        epoch: 3,
        over_image: false,
        revocations: BTreeMap::new(),
    };
    let again = BootstrapRequest {
        authority: Arc::new(Authority::load(&authority.anchor().certificate, authority.pkcs8())?),
        restore: Some(restoring),
        ..founding(snapshot.cluster, restorer, owner, now)?
    };
    Ok((snapshot, again))
}

#[tokio::test]
async fn restored_cluster_has_all_records_and_no_member_of_before_however_often_it_is_begun() -> TestResult {
    let (owner, restorer) = (Holder::new()?, Holder::new()?);
    let (snapshot, founding) = take_snapshot(&owner, &restorer, &[]).await?;
    let etcd = etcd_servers::Cluster::start_named(vec![restorer.id.to_string()]).await?;
    let (client, now) = (etcd.client(), snapshot.taken_at);
    // The records of an interrupted attempt: some of them, and none of them counts.
    for number in 0..3 {
        client.put_unguarded(&format!("{ROOT}later/{number}"), b"of before").await?;
    }
    client.put_unguarded(&format!("{ROOT}nodes/none"), b"of before").await?;

    let restored = bootstrap_cluster(&client, &founding, now).await?;
    let there = all(&client).await?;
    let cluster = Cluster::decode(&cluster_record_key()?, &there[&cluster_record_key()?])?;
    assert_eq!((cluster.id, cluster.epoch), (snapshot.cluster, 3));
    for (key, value) in &snapshot.records {
        if !NODES.range().contains(key) && *key != cluster_record_key()? {
            assert_eq!(there.get(key), Some(value), "{key}");
        }
    }
    let members: Vec<Node> =
        nodes(&there)?.into_iter().filter(|node| node.roles.consensus_member.is_some()).collect();
    let member = client.status().await?.member_id;
    assert_eq!(members.len(), 1, "members of before are members still: {members:?}");
    assert_eq!(members[0].id, restorer.id);
    assert_eq!(members[0].roles.consensus_member.as_ref().map(|role| role.member_id), Some(member));
    assert_eq!(nodes(&there)?.len(), snapshot.nodes()?.len() + 1);
    assert!(Validity::from_der(&restored.certificate).is_some(), "it has a certificate");

    // A restore that was completed is not repeated: what was written since stays.
    client.put_unguarded(&format!("{ROOT}later/0"), b"since").await?;
    bootstrap_cluster(&client, &founding, now).await?;
    let mut again = all(&client).await?;
    assert_eq!(again.remove(&format!("{ROOT}later/0")), Some(b"since".to_vec()));
    again.retain(|key, _| !CERTIFICATES.range().contains(key));
    assert!(again.iter().all(|(key, value)| there.get(key) == Some(value)), "it was written again");

    // A cluster that was restored before is distinguished from one that is ordered now.
    let restoring = founding.restore.clone().map(|restoring| RestoreSource { epoch: 4, ..restoring });
    let error = bootstrap_cluster(&client, &BootstrapRequest { restore: restoring, ..founding }, now).await;
    let error = error.map_err(|error| error.to_string());
    let text = "holds it of epoch 3, and epoch 4 was ordered";
    assert!(error.as_ref().is_err_and(|error| error.contains(text)), "{error:?}");
    Ok(())
}

/// An etcd that was restored from an image has the records of before. They are written again, and nothing else is.
#[tokio::test]
async fn records_of_before_in_an_image_are_replaced_and_other_keys_stay() -> TestResult {
    let (owner, restorer) = (Holder::new()?, Holder::new()?);
    let (snapshot, founding) = take_snapshot(&owner, &restorer, &[]).await?;
    let etcd = etcd_servers::Cluster::start_named(vec![restorer.id.to_string()]).await?;
    let (client, now) = (etcd.client(), snapshot.taken_at);
    for (key, value) in &snapshot.records {
        client.put_unguarded(key, value).await?;
    }
    client.put_unguarded(&format!("{ROOT}later/of-the-image"), b"of before").await?;
    client.put_unguarded("/registry/pods/a", b"a pod").await?;
    let over_image = |over_image| BootstrapRequest {
        restore: founding.restore.clone().map(|restoring| RestoreSource { over_image, ..restoring }),
        ..founding.clone()
    };
    let refused =
        bootstrap_cluster(&client, &over_image(false), now).await.map_err(|error| error.to_string());
    assert!(
        refused.as_ref().is_err_and(|error| error.contains("epoch 0, and epoch 3 was ordered")),
        "{refused:?}"
    );
    bootstrap_cluster(&client, &over_image(true), now).await?;
    let there = all(&client).await?;
    let members = nodes(&there)?;
    let members: Vec<&Node> = members.iter().filter(|node| node.roles.consensus_member.is_some()).collect();
    assert_eq!(members.len(), 1, "members of before are members still: {members:?}");
    assert_eq!(members[0].id, restorer.id);
    assert_eq!(there.get(&format!("{ROOT}later/of-the-image")), None, "a record of the image is left");
    let pod = client.get("/registry/pods/a").await?.context("a pod is lost")?;
    assert_eq!(pod.value, b"a pod");
    // What was written since stays when the role server starts again.
    client.put_unguarded(&format!("{ROOT}later/0"), b"since").await?;
    bootstrap_cluster(&client, &over_image(true), now).await?;
    assert_eq!(all(&client).await?.get(&format!("{ROOT}later/0")), Some(&b"since".to_vec()));
    Ok(())
}

/// The order to restore an older snapshot carries what was revoked since.
#[tokio::test]
async fn what_was_revoked_after_the_snapshot_stays_revoked() -> TestResult {
    let (owner, restorer, thief) = (Holder::new()?, Holder::new()?, Holder::new()?);
    let (snapshot, founding) = take_snapshot(&owner, &restorer, &[]).await?;
    let etcd = etcd_servers::Cluster::start_named(vec![restorer.id.to_string()]).await?;
    let (client, now) = (etcd.client(), snapshot.taken_at);
    let key = REVOKED_NODES.key(thief.id)?;
    let record = wire::RevokedNodeRecord { format: FORMAT, ..wire::RevokedNodeRecord::default() };
    let with = |key: &str| BootstrapRequest {
        restore: founding.restore.clone().map(|restoring| RestoreSource {
            revocations: BTreeMap::from([(key.to_owned(), record.encode_to_vec())]),
            ..restoring
        }),
        ..founding.clone()
    };
    let refused = bootstrap_cluster(&client, &with(&format!("{ROOT}later/0")), now).await;
    assert!(refused.is_err(), "an order carries a record that is no revocation");
    bootstrap_cluster(&client, &with(&key), now).await?;
    let there = all(&client).await?;
    assert_eq!(there.get(&key), Some(&record.encode_to_vec()), "the key of a thief is good again");
    Ok(())
}

/// The desired state of Kubernetes, its authorities and the keys of its service accounts are those of the snapshot, so
/// that a node that runs with them continues. But everything is sent again, in a generation that no node can have
/// reported: what a node reported or received before the loss belongs to another generation.
#[tokio::test]
async fn restored_cluster_has_its_kubernetes_in_a_generation_of_its_own() -> TestResult {
    let (owner, restorer, worker, gone) = (Holder::new()?, Holder::new()?, Holder::new()?, Holder::new()?);
    let now = model::time::Timestamp::from(std::time::SystemTime::now());
    let signer = |which: KeyPurpose| {
        let key = generate_key()?;
        if !which.is_authority() {
            return Ok(Signer::without_certificate(&key)?);
        }
        let validity = Validity::starting(now, std::time::Duration::from_hours(24));
        let serial = Serial::new(rand::random());
        anyhow::Ok(Signer::new_authority(which.as_str(), Uuid::from_u128(7), &key, serial, validity)?)
    };
    let signers = KeyPurpose::ALL.into_iter().map(|which| Ok((which, signer(which)?)));
    let first = KubernetesKeys::initial(None, signers.collect::<Result<_>>()?);
    let under_way =
        first.begin_rotation(KeyPurpose::ServiceAccounts, signer(KeyPurpose::ServiceAccounts)?, now)?;
    let under_way = under_way.context("it is under way")?;
    let generation = Some(AssignedGeneration { generation: first.generation, assigned_at: now });
    let allocation = |part: &str| {
        anyhow::Ok(NodeAllocation { pod_range: Some(part.parse()?), assigned: generation, bundle: None })
    };
    let (its, of_gone) = (allocation("10.128.0.0/24")?, allocation("10.128.1.0/24")?);
    let record = Node::new(worker.key, NodeState::Up, now);
    let settings = KubernetesSettings::new(kubernetes_settings())?
        .into_next_revision(None, None)?
        .context("it is new")?;
    let (snapshot, founding) = take_snapshot(
        &owner,
        &restorer,
        &[
            (Node::etcd_key(&worker.id)?, record.encode()?),
            (settings_record_key()?, settings.encode()),
            (keys_record_key()?, under_way.encode()),
            (NodeAllocation::etcd_key(&worker.id)?, its.encode()),
            (NodeAllocation::etcd_key(&gone.id)?, of_gone.encode()),
        ],
    )
    .await?;
    let etcd = etcd_servers::Cluster::start_named(vec![restorer.id.to_string()]).await?;
    bootstrap_cluster(&etcd.client(), &founding, snapshot.taken_at).await?;
    let there = all(&etcd.client()).await?;
    assert_eq!(Cluster::decode(&cluster_record_key()?, &there[&cluster_record_key()?])?.epoch, 3);
    assert_eq!(there.get(&settings_record_key()?), Some(&settings.encode()));
    let keys = KubernetesKeys::decode(&keys_record_key()?, &there[&keys_record_key()?])?;
    for which in KeyPurpose::ALL {
        let (before, now) = (under_way.key_ring(which)?, keys.key_ring(which)?);
        assert_eq!(now.signer, before.signer, "{which}: what signs is another one");
        let trusted = |ring: &shepherd_curator::kubernetes::keys::KeyRing| {
            ring.replacement.as_ref().map(|replacement| (replacement.trusted.clone(), replacement.stage))
        };
        assert_eq!(trusted(now), trusted(before), "{which}: what is trusted beside it is another one");
    }
    assert_eq!(keys.service_account_keys().len(), 2, "tokens of both are believed still");
    // The generation is higher than any that the lost cluster may have reached after the snapshot.
    assert!(keys.generation > under_way.generation + 1000 && keys.former.is_empty());
    let replacement =
        keys.key_ring(KeyPurpose::ServiceAccounts)?.replacement.clone().context("it goes on")?;
    assert_eq!((replacement.generation, replacement.settled_at), (keys.generation, None));
    let key = NodeAllocation::etcd_key(&worker.id)?;
    let kept = NodeAllocation::decode(&key, &there[&key])?;
    assert_eq!(kept, NodeAllocation { assigned: None, ..its }, "it keeps its pod range alone");
    assert!(!there.contains_key(&NodeAllocation::etcd_key(&gone.id)?), "a part of a node that nobody knows");
    Ok(())
}
