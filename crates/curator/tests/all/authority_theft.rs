//! The authority of a cluster after a theft of its key, as an owner, a node and the thief see it.

use std::collections::BTreeMap;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::authority_ring::{AuthorityRing, ReplacementStep};
use curator_client::certificate::{Serial, Validity};
use curator_client::cluster::authority_record_key;
use curator_client::known_epoch::KnownEpoch;
use curator_client::leader_channel::LeaderTracker;
use curator_client::pki::Authority;
use curator_client::statement::{SignedStatement, Statement};
use curator_client::succession::Succession;
use etcd::key_space::TICKETS;
use etcd::namespace::KeySelector;
use proto::curator::v1 as wire;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use shepherd_curator::authority_installation::install_authority;
use shepherd_curator::bootstrap::create_authority;
use tonic::Code;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, certificate, refusal, ticket};
use testkit::etcd_servers::until;
use testkit::key_holder::Holder;

use crate::statements::trust_of;

/// A channel by an owner's certificate that this authority signs.
fn as_owner(cluster: &Cluster, authority: &Authority, key: &Holder) -> Result<Channel> {
    let validity = Validity::starting(cluster.time.now(), Duration::from_hours(1));
    let serial = Serial::new(rand::random());
    let issued = authority.issue_owner_certificate("kim", &key.key, serial, validity)?;
    cluster.channel(0, Some(key.with(&issued.certificate)?))
}

async fn served_statement(cluster: &Cluster) -> Result<wire::SignedStatement> {
    let mut leader = LeaderClient::new(cluster.channel(0, None)?);
    let response = leader.get_statement(wire::GetStatementRequest {}).await?.into_inner();
    response.statement.context("no statement")
}

/// Installs this authority, and leaves the owner its key.
async fn install(cluster: &Cluster, next: &Authority) -> Result<(u64, wire::SignedStatement)> {
    let (client, now) = (cluster.client_of(0), cluster.time.now());
    Ok(install_authority(&client, next, &[cluster.owner.key], now).await?)
}

#[tokio::test]
async fn stolen_authority_opens_nothing_once_another_one_is_installed() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let thief = Holder::new()?;
    let owner = cluster.as_owner().await?;
    ticket(owner.clone(), None).await?;
    let mut open = ManagementClient::new(as_owner(&cluster, &cluster.authority, &thief)?);
    open.list_nodes(wire::ListNodesRequest::default()).await?;

    // The curators stop for it, which ends the connections that were open before.
    cluster.stop(0).await?;
    let next = create_authority(cluster.id, cluster.time.now())?;
    let (epoch, first) = install(&cluster, &next).await?;
    // Another member has the same order.
    let (same, again) = install(&cluster, &next).await?;
    assert!(same == epoch && SignedStatement::verify(&again, slice::from_ref(next.anchor())).is_ok());
    let trust = trust_of(&cluster);
    cluster.anchor = next.anchor().clone();
    cluster.run(0).await?;
    let (founder, old) = (&cluster.nodes[0], &cluster.authority);
    until("a statement of the new authority is served", async || {
        // A curator that does not lead yet ends connections.
        let served = served_statement(&cluster).await;
        Ok(served.is_ok_and(|one| SignedStatement::verify(&one, slice::from_ref(next.anchor())).is_ok()))
    })
    .await?;

    assert!(open.list_nodes(wire::ListNodesRequest::default()).await.is_err(), "its connection is open");
    let mut stolen = ManagementClient::new(as_owner(&cluster, old, &thief)?);
    let (code, text) = refusal(stolen.list_nodes(wire::ListNodesRequest::default()).await)?;
    assert_eq!(code, Code::Unauthenticated, "{text}");
    let by_old = certificate(old, founder, cluster.time.now())?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(founder.with(&by_old)?))?);
    let (code, text) = refusal(nodes.renew_certificate(wire::RenewCertificateRequest {}).await)?;
    assert_eq!(code, Code::Unauthenticated, "{text}");
    let by_new = certificate(&next, founder, cluster.time.now())?;
    let mut renewed = NodesClient::new(cluster.channel(0, Some(founder.with(&by_new)?))?);
    renewed.renew_certificate(wire::RenewCertificateRequest {}).await?;
    let mut management = ManagementClient::new(as_owner(&cluster, &next, &cluster.owner)?);
    management.list_nodes(wire::ListNodesRequest::default()).await?;
    let tickets = cluster.client_of(0).list(&KeySelector::Prefix(TICKETS.to_string())).await?;
    assert!(tickets.records.is_empty(), "the thief may have made some");

    // A node that follows by an order believes nothing of the thief, however high its numbers are.
    let known = KnownEpoch::default();
    let tracker =
        LeaderTracker::with_statements(trust.clone(), Arc::new(|| None), known, Arc::new(|_| Ok(())));
    let forged = |number, authority: &Authority| {
        let authorities = vec![authority.anchor().clone()];
        let now = cluster.time.now();
        let revoked = BTreeMap::new();
        Statement { cluster: cluster.id, epoch: 700, number, issued_at: now, authorities, revoked }
            .sign(authority)
    };
    assert!(trust.offer(&forged(1 << 40, old)?.to_wire(), 0).await?, "it trusts the stolen one until then");
    let verified = SignedStatement::verify(&first, slice::from_ref(next.anchor()))?;
    tracker.adopt_authority(next.anchor().clone(), Some(verified), epoch);
    let heir = create_authority(cluster.id, cluster.time.now())?;
    let named = Succession::sign(old, heir.anchor())?;
    for (what, sent) in [
        ("the thief states", forged(1 << 41, old)?),
        ("its heir states", forged(1 << 42, &heir)?.with_successors(vec![named])),
    ] {
        assert!(trust.offer(&sent.to_wire(), 0).await.is_err(), "after the theft, {what} and is believed");
    }
    assert_eq!((trust.authorities(), tracker.highest_epoch()), (vec![next.anchor().clone()], epoch));
    Ok(())
}

#[tokio::test]
async fn late_order_brings_no_former_authority_back() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let (client, key) = (cluster.client_of(0), authority_record_key()?);
    let next = create_authority(cluster.id, cluster.time.now())?;
    install(&cluster, &next).await?;
    // A planned replacement since then.
    cluster.stop(0).await?;
    let record = client.get(&key).await?.context("no record")?;
    let successor = create_authority(cluster.id, cluster.time.now())?;
    let anchor = successor.anchor().clone();
    let mut ring = AuthorityRing::decode(&key, &record.value)?;
    ring = ring.begin(successor, cluster.time.now())?.context("one is under way")?;
    for step in [ReplacementStep::Sign, ReplacementStep::Drop, ReplacementStep::End] {
        ring = ring.apply_step(step, cluster.time.now()).context("it ends another stage")?;
    }
    client.put_unguarded(&key, &ring.encode()).await?;
    // A member that was off has the order until now.
    install(&cluster, &next).await?;
    let record = client.get(&key).await?.context("no record")?;
    let signer = AuthorityRing::decode(&key, &record.value)?.signer.anchor().clone();
    assert!(signer == anchor, "an authority that was replaced since signs again");
    Ok(())
}
