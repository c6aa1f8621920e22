//! A cluster's records in a fresh etcd, from a snapshot of another one that is gone.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use shepherd::curator::bootstrap::{Founding, bootstrap};
use shepherd::curator::cluster::{Cluster, cluster_key};
use shepherd::curator::kubernetes::allotment::{Allotment, Told};
use shepherd::curator::kubernetes::authority::{Signer, new_key};
use shepherd::curator::kubernetes::keys::{Keys as KubernetesKeys, Which, keys_key};
use shepherd::curator::kubernetes::settings::{Settings, settings_key};
use shepherd::curator::node::{ConsensusMember, Node, State};
use shepherd::curator::pki::{Authority, Serial, Validity};
use shepherd::curator::restore::Restoring;
use shepherd::curator::snapshot::Snapshot;
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::{CERTIFICATES, NODES, ROOT};
use shepherd::etcd::namespace::Keys;
use uuid::Uuid;

use super::cluster::{Holder, founding, kubernetes_settings};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers;

async fn all(client: &Client) -> Result<BTreeMap<String, Vec<u8>>> {
    let listing = client.list(&Keys::Under(ROOT.to_owned())).await?;
    Ok(listing.records.into_iter().map(|record| (record.key, record.value)).collect())
}

fn nodes(records: &BTreeMap<String, Vec<u8>>) -> Result<Vec<Node>> {
    let nodes = records.iter().filter(|(key, _)| NODES.range().contains(key));
    Ok(nodes.map(|(key, value)| Node::decode(key, value)).collect::<Result<_, _>>()?)
}

/// A cluster of two consensus members and a node, and what is needed to restore it on another node.
async fn taken(
    owner: &Holder,
    restorer: &Holder,
    also: &[(String, Vec<u8>)],
) -> Result<(Snapshot, Founding)> {
    let (first, second, worker) = (Holder::new()?, Holder::new()?, Holder::new()?);
    let now = shepherd::model::time::Timestamp::from(std::time::SystemTime::now());
    let etcd = etcd_servers::Cluster::start_named(vec![first.id.to_string()]).await?;
    let client = etcd.client();
    let before = founding(Uuid::new_v4(), &first, owner, now)?;
    bootstrap(&client, &before, now).await?;
    let mut member = Node::new(second.key, State::Up, now);
    member.roles.consensus_member = Some(ConsensusMember { member: 7, peers: BTreeMap::new() });
    for node in [member, Node::new(worker.key, State::Up, now)] {
        client.put_unguarded(&Node::etcd_key(&node.id)?, &node.encode()?).await?;
    }
    for (key, value) in also {
        client.put_unguarded(key, value).await?;
    }
    // More than one transaction.
    for number in 0..250 {
        client.put_unguarded(&format!("{ROOT}later/{number}"), &vec![7; 3_000]).await?;
    }
    let listing = client.list(&Keys::Under(ROOT.to_owned())).await?;
    let snapshot = Snapshot::of(listing, now)?;
    let (_, authority) = snapshot.what_there_is_one_of()?;
    let restoring = Restoring { snapshot: Arc::new(snapshot.clone()), epoch: 3 };
    let again = Founding {
        authority: Arc::new(Authority::load(&authority.anchor().certificate, authority.pkcs8())?),
        restoring: Some(restoring),
        ..founding(snapshot.cluster, restorer, owner, now)?
    };
    Ok((snapshot, again))
}

#[tokio::test]
async fn restored_cluster_has_all_records_and_no_member_of_before_however_often_it_is_begun() -> TestResult {
    let (owner, restorer) = (Holder::new()?, Holder::new()?);
    let (snapshot, founding) = taken(&owner, &restorer, &[]).await?;
    let etcd = etcd_servers::Cluster::start_named(vec![restorer.id.to_string()]).await?;
    let (client, now) = (etcd.client(), snapshot.taken_at);
    // What an attempt that was cut off had written: some of it, and nothing of that counts.
    for number in 0..3 {
        client.put_unguarded(&format!("{ROOT}later/{number}"), b"of before").await?;
    }
    client.put_unguarded(&format!("{ROOT}nodes/none"), b"of before").await?;

    let restored = bootstrap(&client, &founding, now).await?;
    let there = all(&client).await?;
    let cluster = Cluster::decode(&cluster_key()?, &there[&cluster_key()?])?;
    assert_eq!((cluster.id, cluster.epoch), (snapshot.cluster, 3));
    for (key, value) in &snapshot.records {
        if !NODES.range().contains(key) && *key != cluster_key()? {
            assert_eq!(there.get(key), Some(value), "{key}");
        }
    }
    let members: Vec<Node> =
        nodes(&there)?.into_iter().filter(|node| node.roles.consensus_member.is_some()).collect();
    let member = client.status().await?.member;
    assert_eq!(members.len(), 1, "members of before are members still: {members:?}");
    assert_eq!(members[0].id, restorer.id);
    assert_eq!(members[0].roles.consensus_member.as_ref().map(|role| role.member), Some(member));
    assert_eq!(nodes(&there)?.len(), snapshot.nodes()?.len() + 1);
    assert!(Validity::read(&restored.certificate).is_some(), "it has a certificate");

    // Once it is done it is done: what was written since stays.
    client.put_unguarded(&format!("{ROOT}later/0"), b"since").await?;
    bootstrap(&client, &founding, now).await?;
    let mut again = all(&client).await?;
    assert_eq!(again.remove(&format!("{ROOT}later/0")), Some(b"since".to_vec()));
    again.retain(|key, _| !CERTIFICATES.range().contains(key));
    assert!(again.iter().all(|(key, value)| there.get(key) == Some(value)), "it was written again");

    // What was restored before is not taken for what was ordered since.
    let restoring = founding.restoring.clone().map(|restoring| Restoring { epoch: 4, ..restoring });
    let error = bootstrap(&client, &Founding { restoring, ..founding }, now).await;
    let error = error.map_err(|error| error.to_string());
    let said = "holds it of epoch 3, and epoch 4 was ordered";
    assert!(error.as_ref().is_err_and(|error| error.contains(said)), "{error:?}");
    Ok(())
}

/// What Kubernetes is to be, its authorities and the keys of its service accounts are those of the snapshot, so that whoever
/// runs by them goes on. But all of it is told anew, in a generation that no node can have spoken of: what one said or was
/// told before the loss is of something else.
#[tokio::test]
async fn restored_cluster_has_its_kubernetes_in_a_generation_of_its_own() -> TestResult {
    let (owner, restorer, worker, gone) = (Holder::new()?, Holder::new()?, Holder::new()?, Holder::new()?);
    let now = shepherd::model::time::Timestamp::from(std::time::SystemTime::now());
    let signer = |which: Which| {
        let key = new_key()?;
        if !which.is_authority() {
            return Ok(Signer::bare(&key)?);
        }
        let validity = Validity::starting(now, std::time::Duration::from_hours(24));
        let serial = Serial::new(rand::random());
        anyhow::Ok(Signer::authority(which.as_str(), Uuid::from_u128(7), &key, serial, validity)?)
    };
    let signers = Which::ALL.into_iter().map(|which| Ok((which, signer(which)?)));
    let first = KubernetesKeys::first(None, signers.collect::<Result<_>>()?);
    let under_way = first.begin(Which::ServiceAccounts, signer(Which::ServiceAccounts)?, now)?;
    let under_way = under_way.context("it is under way")?;
    let told = Some(Told { generation: first.generation, at: now });
    let allotment = |part: &str| anyhow::Ok(Allotment { part: Some(part.parse()?), told, bundle: None });
    let (its, of_gone) = (allotment("10.128.0.0/24")?, allotment("10.128.1.0/24")?);
    let record = Node::new(worker.key, State::Up, now);
    let settings = Settings::new(kubernetes_settings())?.replacing(None, None)?.context("it is new")?;
    let (snapshot, founding) = taken(
        &owner,
        &restorer,
        &[
            (Node::etcd_key(&worker.id)?, record.encode()?),
            (settings_key()?, settings.encode()),
            (keys_key()?, under_way.encode()),
            (Allotment::etcd_key(&worker.id)?, its.encode()),
            (Allotment::etcd_key(&gone.id)?, of_gone.encode()),
        ],
    )
    .await?;
    let etcd = etcd_servers::Cluster::start_named(vec![restorer.id.to_string()]).await?;
    bootstrap(&etcd.client(), &founding, snapshot.taken_at).await?;
    let there = all(&etcd.client()).await?;
    assert_eq!(Cluster::decode(&cluster_key()?, &there[&cluster_key()?])?.epoch, 3);
    assert_eq!(there.get(&settings_key()?), Some(&settings.encode()));
    let keys = KubernetesKeys::decode(&keys_key()?, &there[&keys_key()?])?;
    for which in Which::ALL {
        let (before, now) = (under_way.ring(which)?, keys.ring(which)?);
        assert_eq!(now.signs, before.signs, "{which}: what signs is another one");
        let trusted = |ring: &shepherd::curator::kubernetes::keys::Ring| {
            ring.replacement.as_ref().map(|replacement| (replacement.trusted.clone(), replacement.stage))
        };
        assert_eq!(trusted(now), trusted(before), "{which}: what is trusted beside it is another one");
    }
    assert_eq!(keys.service_account_keys().len(), 2, "tokens of both are believed still");
    // Whatever was made of it after the snapshot, in the cluster that is lost.
    assert!(keys.generation > under_way.generation + 1000 && keys.former.is_empty());
    let replacement = keys.ring(Which::ServiceAccounts)?.replacement.clone().context("it goes on")?;
    assert_eq!((replacement.generation, replacement.settled_at), (keys.generation, None));
    let key = Allotment::etcd_key(&worker.id)?;
    let kept = Allotment::decode(&key, &there[&key])?;
    assert_eq!(kept, Allotment { told: None, ..its }, "its part, and nothing that it was told");
    assert!(!there.contains_key(&Allotment::etcd_key(&gone.id)?), "a part of a node that nobody knows");
    Ok(())
}
