//! Certificates of etcd's members: renewed while etcd runs, and after all of them have ended by one order.
//!
//! etcd compares certificates with the clock of the host. So the certificates are issued as ones that have ended, and no
//! clock is moved.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use shepherd::curator_client::certificate::{CLOCK_SKEW, Serial, Validity};
use shepherd::curator_client::cluster::{authority_record_key, decode_authority};
use shepherd::curator_client::cluster_snapshot::ClusterSnapshot;
use shepherd::curator_client::peer_renewal::renew_peer;
use shepherd::curator_client::pki::{Authority, PEER_LIFETIME};
use shepherd::etcd::client::Client;
use shepherd::etcd::namespace::Namespace;
use shepherd::model::ids::MachineId;
use shepherd::model::time::{Timestamp, after, before, between};
use shepherd::proto::agent::v1 as agent;
use shepherd::roleserver::cluster::etcd_member;
use shepherd::roleserver::cluster::order_inbox::OrderInbox;

use super::node::Node;
use super::peer_revocation::{member_of, recorded_member};
use super::restoring::snapshot;
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

const DAY: Duration = Duration::from_hours(24);

fn now() -> Timestamp {
    SystemTime::now().into()
}

/// A certificate that was issued so many days ago and ended an hour ago.
pub(super) fn ended() -> Validity {
    Validity { not_before: before(now(), DAY * 31), not_after: before(now(), Duration::from_hours(1)) }
}

pub(super) async fn authority_of(node: &Node) -> Result<Authority> {
    let client = Client::new(vec![etcd_member::client_endpoint(&node.files())], Namespace::new("curator")?);
    let key = authority_record_key()?;
    let record = client.get(&key).await?.context("no authority")?;
    Ok(decode_authority(&key, &record.value)?)
}

/// Gives its member a certificate with this validity. Nothing records it.
pub(super) fn replace_certificate(node: &Node, authority: &Authority, validity: Validity) -> Result<Serial> {
    let serial = Serial::new(rand::random());
    let issued = authority.issue_etcd_peer_certificate(&node.key()?, node.address, serial, validity)?;
    etcd_member::replace_peer_certificate(&node.files(), &issued.certificate)?;
    Ok(serial)
}

pub(super) fn certificate(node: &Node) -> Result<(Serial, Validity)> {
    let present = etcd_member::read_peer_certificate(&node.files()).context("no certificate")?;
    let parsed = Serial::from_der(&present).zip(Validity::from_der(&present));
    parsed.context("a damaged certificate")
}

/// Waits until its member has another certificate than this one, and returns that one.
async fn until_another(node: &Node, former: Serial) -> Result<(Serial, Validity)> {
    until("its member has another certificate", async || Ok(certificate(node)?.0 != former))
        .await
        .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))?;
    certificate(node)
}

/// Waits until it reports that its member's certificate has ended. It has no quorum then.
pub(super) async fn until_certificate_ended(node: &Node) -> Result<()> {
    until("it reports that its certificate has ended", async || {
        let problem = node.facts.problems.describe();
        Ok(problem.is_some_and(|text| text.contains("has ended") && text.contains("renew-peers")))
    })
    .await
    .with_context(|| node.report())?;
    ensure!(node.facts.control_plane.latest().flatten().is_none(), "it has a quorum");
    Ok(())
}

/// Gives its machine the order with a certificate that the shepherd signs with the authority in this snapshot.
pub(super) fn order_certificate(
    node: &Node,
    taken: &ClusterSnapshot,
    authority: &Authority,
) -> Result<Serial> {
    let (serial, ca) = (Serial::new(rand::random()), &authority.anchor().certificate);
    let certificate = renew_peer(taken, ca, &node.key()?, serial, now())?.certificate;
    let operation = agent::cluster_order::Operation::RenewPeer(agent::RenewPeer { certificate });
    let inbox = OrderInbox::new(MachineId::generate(), node.files(), node.facts.clone());
    inbox.accept(&agent::ClusterOrder { generation: 1, operation: Some(operation), ..Default::default() });
    let report = inbox.report();
    ensure!(report.generation == 1, "the order is not accepted: {}", report.error);
    Ok(serial)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_members_whose_certificates_have_ended_come_back_by_one_order() -> TestResult {
    let (owner, mut first) = founded().await?;
    let (mut second, mut third) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    for (node, voters) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, 3).await?;
    }
    owner.learn(&[&first, &second, &third])?;
    let authority = authority_of(&first).await?;
    let taken = ClusterSnapshot::decode(&snapshot(&owner).await?)?;

    for node in [&mut first, &mut second, &mut third] {
        node.cut_power().await?;
    }
    for node in [&mut first, &mut second, &mut third] {
        replace_certificate(node, &authority, ended())?;
        node.start()?;
    }
    for node in [&first, &second, &third] {
        until_certificate_ended(node).await?;
    }

    let nodes = [&first, &second, &third];
    let mut serials = Vec::new();
    for node in nodes {
        let running = node.etcd().context("no etcd")?.instance;
        serials.push((order_certificate(node, &taken, &authority)?, running));
        assert_eq!(
            certificate(node)?.0,
            serials[serials.len() - 1].0,
            "the ordered certificate is in its file"
        );
    }
    for (node, (serial, running)) in nodes.into_iter().zip(serials) {
        node.until_control_plane(true).await?;
        let etcd = node.etcd().context("no etcd")?;
        assert_eq!(etcd.instance, running, "etcd has restarted");
        let member = Some(member_of(node)?);
        until("the ordered certificate is recorded", async || {
            Ok(recorded_member(&owner, serial).await? == member)
        })
        .await
        .with_context(|| node.report())?;
    }
    owner.until_well(3, 3).await?;

    // One that was off for longer than its certificate needs no order: the others have a quorum.
    third.cut_power().await?;
    let former = replace_certificate(&third, &authority, ended())?;
    third.start()?;
    until_another(&third, former).await?;
    third.until_control_plane(true).await?;
    owner.until_well(3, 3).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_is_renewed_while_etcd_runs() -> TestResult {
    let (owner, first) = founded().await?;
    first.until_control_plane(true).await?;
    let authority = authority_of(&first).await?;
    let running = first.etcd().context("no etcd")?.instance;
    let key = || -> Result<Vec<u8>> { Ok(std::fs::read(first.disk().join("etcd/peer.key"))?) };
    let (former_key, member) = (key()?, member_of(&first)?);
    assert!(
        between(now(), certificate(&first)?.1.not_after) <= PEER_LIFETIME,
        "that of a founder lasts a month"
    );
    for (what, validity) in [
        (
            "less than a third is left",
            Validity { not_before: before(now(), DAY * 25), not_after: after(now(), DAY * 5) },
        ),
        ("a release before issued it", Validity::starting(now(), DAY * 36_000)),
        ("it has ended", ended()),
    ] {
        let former = replace_certificate(&first, &authority, validity)?;
        let (serial, renewed) = until_another(&first, former).await.context(what)?;
        let lifetime = between(renewed.not_before, renewed.not_after);
        assert!(renewed.contains(now()) && lifetime <= PEER_LIFETIME + CLOCK_SKEW, "{what}: {lifetime:?}");
        assert_eq!(recorded_member(&owner, serial).await?, Some(member), "{what}");
        assert_eq!(key()?, former_key, "{what}: the key stays");
        assert_eq!(first.etcd().context("no etcd")?.instance, running, "{what}: etcd has restarted");
    }
    owner.until_well(1, 1).await?;
    Ok(())
}
