//! The list of revoked peers of etcd: what the leader writes, and what a member gets with its certificate.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use curator_client::certificate::{Serial, Validity};
use curator_client::pki::PEER_LIFETIME;
use curator_client::pki_revocation_list::{PeerRevocations, parse_peer_revocation_list};
use model::time::between;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use shepherd_curator::bootstrap::{issue_peer_from_local_etcd, register_peer_certificate};
use shepherd_curator::statement_record::statement_record_key;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, status};
use testkit::etcd_servers::until;
use testkit::key_holder::Holder;

/// The serial numbers on the list in etcd; `None` before there is one.
async fn listed(cluster: &Cluster) -> Result<Option<BTreeSet<Serial>>> {
    let key = PeerRevocations::etcd_key()?;
    let record = cluster.client_of(0).get(&key).await?;
    let decoded = record.map(|record| PeerRevocations::decode(&key, &record.value)).transpose()?;
    Ok(decoded.map(|revocations| revocations.serials))
}

async fn until_listed(cluster: &Cluster, serials: &[Serial]) -> Result<()> {
    let expected: BTreeSet<Serial> = serials.iter().copied().collect();
    until(
        "the list has these serial numbers",
        async || Ok(listed(cluster).await?.as_ref() == Some(&expected)),
    )
    .await
    .with_context(|| format!("{expected:?}"))
}

fn roles(node: &Holder, add: &[&str], remove: &[&str]) -> wire::UpdateRolesRequest {
    wire::UpdateRolesRequest {
        node_id: node.id.to_string(),
        add_roles: add.iter().map(|&name| name.to_owned()).collect(),
        remove_roles: remove.iter().map(|&name| name.to_owned()).collect(),
        ..Default::default()
    }
}

/// Requests a certificate for etcd. Returns its serial number, and the list that comes with it.
async fn issue(nodes: &mut NodesClient<Channel>) -> Result<(Serial, BTreeSet<Serial>)> {
    let issued = nodes.issue_peer_certificate(wire::IssuePeerCertificateRequest {}).await?.into_inner();
    let serial = Serial::from_der(&issued.certificate).context("no serial number")?;
    let list = parse_peer_revocation_list(&issued.revocation_list).context("no list that etcd reads")?;
    Ok((serial, list))
}

/// Kind and number of a membership in the record of a certificate.
async fn recorded(owner: &Channel, serial: Serial) -> Result<Option<(wire::CertificateKind, u64)>> {
    let mut credentials = CredentialsClient::new(owner.clone());
    let listed = credentials.list(wire::ListCredentialsRequest {}).await?.into_inner().credentials;
    let record = listed.into_iter().find(|credential| credential.serial == serial.to_string());
    Ok(record.map(|record| (record.kind(), record.member_id)))
}

#[tokio::test]
async fn certificate_of_an_ended_membership_gets_on_the_list_and_stays_there() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut management = ManagementClient::new(owner.clone());
    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    let status = Some(status(([127, 77, 0, 1], 0).into()));
    nodes.update_status(wire::UpdateStatusRequest { node_id: node.id.to_string(), status }).await?;
    until_listed(&cluster, &[]).await.context("there is a list before there is anything on it")?;

    let mut ended: Vec<Serial> = Vec::new();
    for _ in 0..2 {
        let given = management.update_roles(roles(&node, &["consensus-member"], &[])).await?.into_inner();
        let role = given.node.and_then(|node| node.roles?.consensus_member).context("no member")?;
        let (serial, list) = issue(&mut nodes).await?;
        assert!(!ended.contains(&serial), "a serial number is used once");
        assert_eq!(list, ended.iter().copied().collect::<BTreeSet<_>>(), "a member gets the list as it is");
        let kind = wire::CertificateKind::EtcdPeer;
        assert_eq!(recorded(&owner, serial).await?, Some((kind, role.member_id)));
        let present = listed(&cluster).await?.context("no list")?;
        assert!(!present.contains(&serial), "it is that of a member");

        management.update_roles(roles(&node, &[], &["consensus-member"])).await?;
        ended.push(serial);
        until_listed(&cluster, &ended).await?;
    }
    Ok(())
}

#[tokio::test]
async fn member_without_a_leader_gets_a_recorded_certificate_from_its_own_etcd() -> TestResult {
    let cluster = Cluster::start().await?;
    let (owner, client, founder) = (cluster.as_owner().await?, cluster.client_of(0), &cluster.nodes[0]);
    let (address, now) = ("127.77.0.1".parse()?, cluster.time.now());
    let issued = issue_peer_from_local_etcd(&client, founder.key, address, now).await?;
    let serial = Serial::from_der(&issued).context("no serial number")?;
    let member = client.status().await?.member_id;
    let expected = (wire::CertificateKind::EtcdPeer, member);
    assert_eq!(recorded(&owner, serial).await?, Some(expected), "it is recorded before it is used");
    let stated = client.get(&statement_record_key()?).await?.is_some();
    let validity = Validity::from_der(&issued).context("no validity")?;
    let lifetime = between(now, validity.not_after);
    assert!(stated && lifetime <= PEER_LIFETIME, "{lifetime:?}");

    // One that may not be a member gets none.
    let node = Holder::new()?;
    cluster.take_in(&node).await?;
    let refused = issue_peer_from_local_etcd(&client, node.key, address, now).await;
    let error = refused.map(drop).unwrap_err().to_string();
    assert!(error.contains("is no consensus member"), "{error}");
    Ok(())
}

#[tokio::test]
async fn member_records_the_certificate_that_it_runs_with() -> TestResult {
    let cluster = Cluster::start().await?;
    let (owner, client, founder) = (cluster.as_owner().await?, cluster.client_of(0), &cluster.nodes[0]);
    let (serial, address) = (Serial::new(rand::random()), "127.77.0.1".parse()?);
    let validity = Validity::starting(cluster.time.now(), PEER_LIFETIME);
    let issued = cluster.authority.issue_etcd_peer_certificate(&founder.key, address, serial, validity)?;
    assert_eq!(recorded(&owner, serial).await?, None, "nothing records what a founder signs for itself");
    // With the number of another membership, as a record of a release before has none; then with its own, twice.
    let member = client.status().await?.member_id;
    for number in [7, member, member] {
        register_peer_certificate(&client, founder.key, &issued.certificate, number).await?;
        let expected = (wire::CertificateKind::EtcdPeer, number);
        assert_eq!(recorded(&owner, serial).await?, Some(expected));
    }
    let error = register_peer_certificate(&client, founder.key, b"none", member).await;
    let error = error.map_err(|error| error.to_string()).err().context("it was recorded")?;
    assert!(error.contains("was not recorded") && error.contains("peer.crt"), "{error}");
    until_listed(&cluster, &[]).await?;
    Ok(())
}
