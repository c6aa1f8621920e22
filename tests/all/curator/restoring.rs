//! A cluster's records in a fresh etcd, from a snapshot of another one that is gone.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use shepherd::curator::bootstrap::{Founding, bootstrap};
use shepherd::curator::cluster::{Cluster, cluster_key};
use shepherd::curator::node::{ConsensusMember, Node, State};
use shepherd::curator::pki::{Authority, Validity};
use shepherd::curator::restore::Restoring;
use shepherd::curator::snapshot::Snapshot;
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::{CERTIFICATES, NODES, ROOT};
use shepherd::etcd::namespace::Keys;
use uuid::Uuid;

use super::cluster::{Holder, founding};
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
async fn taken(owner: &Holder, restorer: &Holder) -> Result<(Snapshot, Founding)> {
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
    let (snapshot, founding) = taken(&owner, &restorer).await?;
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
