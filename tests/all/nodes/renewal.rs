//! Expired certificates.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use shepherd::curator_client::certificate::{Serial, Validity};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::curator_channel::open_channel;
use shepherd::curator_client::peer_identity::Revocations;
use shepherd::curator_client::pki::NODE_LIFETIME;
use shepherd::curator_client::tls::{CuratorCheck, CuratorCheckProvider, curator_client_config};
use shepherd::model::time::{Timestamp, after};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::leader_client::LeaderClient;
use shepherd::proto::curator::v1::revoke_credentials_request::Target;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;

use super::node::Node;
use super::owner::{Owner, patiently};
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// Waits until a client that demands a curator accepts that of this node, although these certificates are revoked.
async fn until_curator_is_accepted(node: &Node, clock: &Clock, revoked: &[Serial]) -> Result<()> {
    let anchor = node.facts.connection.latest().context("no connection")?.anchor;
    let serials: BTreeMap<_, _> =
        revoked.iter().map(|serial| (*serial, after(clock.now(), NODE_LIFETIME))).collect();
    let revocations = Arc::new(Revocations { serials, ..Default::default() });
    let anchors = vec![anchor.clone()];
    let demand: CuratorCheckProvider = Arc::new(move || {
        Ok(CuratorCheck::Curator { anchors: anchors.clone(), revocations: revocations.clone() })
    });
    let config = curator_client_config(anchor, demand, Some(node.id()?), None, clock.clone())?;
    let address = SocketAddr::new(node.address, CURATOR_PORT).to_string();
    let mut client = LeaderClient::new(open_channel(&address, config));
    let answered = until("its curator is one to a client that demands a curator", async || {
        Ok(client.get_ca_certificate(wire::GetCaCertificateRequest {}).await.is_ok())
    });
    answered.await.with_context(|| node.report())
}

/// A month after which no certificate is valid: the etcd member issues itself and its curator other certificates, and
/// the other node gets one for its key alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_were_off_for_longer_than_their_certificates_come_back() -> TestResult {
    let days = Arc::new(AtomicU32::new(0));
    let clock = {
        let (days, host) = (days.clone(), Clock::system());
        let now = move || {
            let passed = Duration::from_hours(24) * days.load(Ordering::SeqCst);
            after(Timestamp::from(SystemTime::now()), passed)
        };
        Clock::new(now, move || host.monotonic())
    };
    let mut owner = Owner::new()?;
    let (mut first, mut node) = (Node::new()?, Node::new()?);
    (first.clock, node.clock) = (clock.clone(), clock.clone());
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_it_is_one().await?;
    owner.claim(&first).await?;
    node.ask(owner.join(&first).await?)?;
    node.start()?;
    owner.approve(&node).await?;
    node.until_it_is_one().await?;
    owner.wait_for_node_status(&node).await?;

    node.stop().await?;
    first.stop().await?;
    days.store(u32::try_from(NODE_LIFETIME.as_secs() / 86_400)? + 1, Ordering::SeqCst);
    node.start()?;
    first.start()?;
    for node in [&first, &node] {
        let connection = node.facts.connection.clone();
        let good = until("it has a certificate that is good now", async || {
            let shown = connection.latest().map(|connection| connection.certificate.current());
            let validity = shown.and_then(|shown| Validity::from_der(shown.cert.first()?));
            Ok(validity.is_some_and(|validity| validity.contains(clock.now())))
        });
        good.await.with_context(|| node.report())?;
        let kept = node.files().read_credentials()?.context("no certificate")?.certificate;
        let kept = Validity::from_der(&hex::decode(kept)?).context("no certificate")?;
        assert!(kept.contains(clock.now()), "and keeps it");
    }
    // The curator shows a certificate of its own, which is good now.
    let stored = first.files().read_curator_certificate().context("no certificate of a curator")?;
    let stored = Validity::from_der(&stored).context("no certificate")?;
    assert!(stored.contains(clock.now()), "{stored:?}");
    until_curator_is_accepted(&first, &clock, &[]).await?;
    // With the new certificate, the control plane accepts it as the same node.
    node.until_control_plane(false).await?;
    Ok(())
}

/// The certificate of a curator is revoked by its serial number, and its node is trusted: the curator shows another one
/// long before the next check.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_certificate_of_a_curator_is_replaced() -> TestResult {
    let (mut owner, mut node) = (Owner::new()?, Node::new()?);
    node.ask(owner.founding_order())?;
    node.start()?;
    node.until_it_is_one().await?;
    owner.claim(&node).await?;
    let former = node.files().read_curator_certificate().context("no certificate of a curator")?;
    let serial = Serial::from_der(&former).context("no serial number")?;
    until_curator_is_accepted(&node, &node.clock, &[]).await?;
    let mut credentials = CredentialsClient::new(owner.curators()?.channel());
    let revoke = wire::RevokeCredentialsRequest { target: Some(Target::Serial(serial.to_string())) };
    patiently(async || credentials.revoke(revoke.clone()).await).await?;
    until_curator_is_accepted(&node, &node.clock, &[serial]).await?;
    Ok(())
}

/// A revoked node gets no certificate for its curator. It stays a member of etcd until the others are a quorum without it,
/// and its etcd continues meanwhile, because they have none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_of_a_revoked_member_continues_without_a_curator() -> TestResult {
    let (owner, first) = founded().await?;
    let (mut second, mut third) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    for (node, voters) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, 3).await?;
    }
    third.cut_power().await?;
    let mut credentials = CredentialsClient::new(owner.curators()?.channel());
    let target = Some(Target::NodeId(second.id()?.to_string()));
    let revoke = wire::RevokeCredentialsRequest { target };
    patiently(async || credentials.revoke(revoke.clone()).await).await?;

    // A day later, the role server is updated.
    second.stop().await?;
    second.files().remove_curator_certificate()?;
    let etcd = second.etcd().context("it has no etcd")?.instance;
    second.start()?;
    let problems = second.facts.problems.clone();
    until("it reports that it is revoked", async || {
        Ok(problems.describe().is_some_and(|problem| problem.contains("are revoked")))
    })
    .await
    .with_context(|| second.report())?;
    for _ in 0..50 {
        let present = second.etcd().map(|record| record.instance);
        assert_eq!(present.as_ref(), Some(&etcd), "its etcd was stopped\n{}", second.report());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(owner.members().await?.len(), 3, "the cluster has no quorum without it");
    third.start()?;
    until("its membership ends", async || Ok(owner.members().await?.len() == 2))
        .await
        .with_context(|| third.report())?;
    Ok(())
}
