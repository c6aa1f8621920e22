//! The stolen key of a cluster's authority: what it is worth before the shepherd has replaced the authority by orders,
//! and after the last of them.
//!
//! The test gives the orders as a shepherd does, in its steps. The attacker has the whole disk of a consensus member.
//! Before the first step, the etcd of each member serves a pair that the stolen authority signs. From the third step on
//! none does, and only then the new key gets into etcd. After the last step, no curator, no node and no member of etcd
//! believes anything that the stolen authority signs, such as certificates, statements and a successor that it
//! names.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shepherd::curator_client::authority_ring::AuthorityRing;
use shepherd::curator_client::certificate::{Serial, Validity};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::cluster::authority_record_key;
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::pki::{Authority, TrustAnchor};
use shepherd::etcd::client::Client;
use shepherd::etcd::namespace::Namespace;
use shepherd::model::cluster::authority_theft::AuthorityStep;
use shepherd::model::ids::MachineId;
use shepherd::proto::agent::v1 as agent;
use shepherd::roleserver::cluster::etcd_member::client_endpoint;
use shepherd::roleserver::cluster::order_inbox::OrderInbox;
use shepherd::roleserver::commands::follow_authority::follow_authority;
use tokio::net::TcpStream;

use super::super::node::Node;
use super::super::owner::Owner;
use super::super::services::{founded, joined};
use super::attempts::{Attempt, Attempts};
use super::calls::{Target, answer_to_revoked, channel_to, try_every_call_refused_as};
use super::disk::{FORGED, StolenDisk};
use super::listeners::{PeerAnswer, peer_port, request_members};
use super::{
    Beliefs, FALSE_EPOCH, curator_of, newest_statement, open_calls, script, try_peer_port,
    until_it_has_a_statement, until_refused,
};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// The authority that replaces the stolen one.
fn make_authority(owner: &Owner) -> Result<Authority> {
    let validity = Validity::starting(Clock::system().now(), Duration::from_hours(24));
    let key = Identity::generate()?;
    Ok(Authority::create(owner.cluster, key.pkcs8(), Serial::new(rand::random()), validity)?)
}

/// The order of a shepherd to take this step.
fn order(
    node: &Node,
    owner: &Owner,
    next: &Authority,
    step: AuthorityStep,
) -> Result<agent::ReplaceAuthority> {
    let mut order = agent::ReplaceAuthority {
        step: step.to_wire().into(),
        ca_certificate: next.anchor().certificate.clone(),
        ..Default::default()
    };
    if !matches!(step, AuthorityStep::Accept | AuthorityStep::Follow) {
        let validity = Validity::starting(Clock::system().now(), Duration::from_hours(24));
        let serial = Serial::new(rand::random());
        let issued = next.issue_etcd_peer_certificate(&node.key()?, node.address, serial, validity)?;
        order.peer_certificate = issued.certificate;
    }
    if step == AuthorityStep::Install {
        order.private_key = next.pkcs8().to_vec();
        order.owner_keys = vec![owner.public_key()];
    }
    Ok(order)
}

fn inbox(node: &Node) -> OrderInbox {
    OrderInbox::new(MachineId::generate(), node.files(), node.facts.clone())
}

/// Gives its machine an order with a higher number than the last one.
fn send(node: &Node, order: agent::ReplaceAuthority) -> Result<()> {
    let generation = node.files().read_order()?.context("it has no order")?.generation + 1;
    let operation = Some(agent::cluster_order::Operation::ReplaceAuthority(order));
    inbox(node).accept(&agent::ClusterOrder { generation, operation, ..Default::default() });
    let report = inbox(node).report();
    ensure!(report.generation == generation, "the order is not accepted: {}", report.error);
    Ok(())
}

/// Gives all members the order for this step, and waits until all have taken it. No two of them are down at once.
async fn take_step(members: &[&Node], owner: &Owner, next: &Authority, step: AuthorityStep) -> Result<()> {
    for member in members {
        send(member, order(member, owner, next, step)?)?;
    }
    let mut most = 0;
    let taken = until("all members have taken the step", async || {
        let is_down = |node: &&&Node| !node.etcd().is_some_and(|etcd| etcd.instance.is_alive());
        most = most.max(members.iter().filter(is_down).count());
        Ok(members.iter().all(|node| {
            let report = inbox(node).report();
            AuthorityStep::from_wire(report.next_authority_step).is_some_and(|taken| taken >= step)
        }))
    })
    .await;
    taken.with_context(|| format!("{step}: {}", describe(members)))?;
    ensure!(most <= 1, "{step}: {most} of the members were down at once");
    Ok(())
}

fn describe(nodes: &[&Node]) -> String {
    let lines = nodes.iter().map(|node| format!("{:?}\n{}", node.facts.problems.describe(), node.report()));
    lines.collect::<Vec<_>>().join("\n")
}

/// Waits until each of these nodes trusts this authority, in its files and in its connection.
async fn until_followed(nodes: &[&Node], anchor: &TrustAnchor) -> Result<()> {
    let has_followed = |node: &&Node| {
        let stored = node.files().read_credentials().ok().flatten();
        let connection = node.facts.connection.latest();
        stored.is_some_and(|stored| stored.ca_certificate == hex::encode(&anchor.certificate))
            && connection.is_some_and(|connection| connection.authority() == *anchor)
            && node.files().read_next_authority().is_ok_and(|next| next.is_none())
    };
    until("they trust the new authority", async || Ok(nodes.iter().all(has_followed)))
        .await
        .with_context(|| describe(nodes))
}

/// The authority in the etcd of this member.
async fn installed(member: &Node) -> Result<TrustAnchor> {
    let client = Client::new(vec![client_endpoint(&member.files())], Namespace::new("curator")?);
    let key = authority_record_key()?;
    let record = client.get(&key).await?.context("no record")?;
    Ok(AuthorityRing::decode(&key, &record.value)?.signer.anchor().clone())
}

/// What the false pair of the attacker gets from the peer port of each member.
async fn try_false_pair(stolen: &StolenDisk, members: &[&Node], is_served: bool) -> Result<()> {
    for member in members {
        let answer = request_members(peer_port(member)?, stolen.certify_peer(member.address)?).await?;
        ensure!((answer != PeerAnswer::Refused) == is_served, "a false pair is served: {answer:?}");
    }
    Ok(())
}

/// The member that leads.
fn leader<'n>(owner: &Owner, members: &[&'n Node]) -> Result<&'n Node> {
    let leader = owner.curators()?.leader().context("nobody leads")?;
    let found = members.iter().find(|node| node.id().is_ok_and(|id| id == leader.node));
    found.copied().context("a stranger leads")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stolen_authority_is_worth_nothing_once_orders_have_replaced_it() -> TestResult {
    let (mut owner, mut first) = founded().await?;
    let (mut second, mut third) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    let (worker, mut absent) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    for (node, voters) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, 5).await?;
    }
    owner.learn(&[&first, &second, &third])?;
    until_it_has_a_statement(&worker).await?;
    third.cut_power().await?;
    let mut stolen = StolenDisk::copy(&third).await?;
    third.start()?;
    third.until_control_plane(true).await?;
    owner.until_well(3, 5).await?;
    try_false_pair(&stolen, &[&first, &second, &third], true).await?;
    let former = newest_statement(&open_calls(&stolen.loot, &first)?).await?;
    absent.cut_power().await?;

    let next = make_authority(&owner)?;
    take_step(&[&first, &second, &third], &owner, &next, AuthorityStep::Accept).await?;
    // A role server that is interrupted continues from its files.
    second.stop().await?;
    second.start()?;
    second.until_control_plane(true).await?;
    take_step(&[&first, &second, &third], &owner, &next, AuthorityStep::Show).await?;
    owner.until_well(3, 4).await?;
    take_step(&[&first, &second, &third], &owner, &next, AuthorityStep::Reject).await?;
    owner.until_well(3, 4).await?;
    let members = [&first, &second, &third];
    try_false_pair(&stolen, &members, false).await?;
    take_step(&members, &owner, &next, AuthorityStep::Close).await?;
    for member in members {
        assert!(TcpStream::connect(curator_of(member)).await.is_err(), "its curator serves the thief");
    }
    assert_ne!(installed(&first).await?, *next.anchor(), "the thief could read the new key");

    let running: Vec<_> = members.iter().map(|node| node.etcd().map(|etcd| etcd.instance)).collect();
    for member in members {
        send(member, order(member, &owner, &next, AuthorityStep::Install)?)?;
    }
    until_followed(&members, next.anchor()).await?;
    for member in members {
        assert_eq!(installed(member).await?, *next.anchor());
        // Once more: it changes nothing.
        send(member, order(member, &owner, &next, AuthorityStep::Install)?)?;
        assert_eq!(member.files().read_next_authority()?, None);
    }
    send(&worker, order(&worker, &owner, &next, AuthorityStep::Follow)?)?;
    until_followed(&[&worker], next.anchor()).await?;
    owner.claim_by(members, next.anchor().clone()).await?;
    owner.until_well(3, 4).await?;
    let after: Vec<_> = members.iter().map(|node| node.etcd().map(|etcd| etcd.instance)).collect();
    assert_eq!(after, running, "etcd has restarted more than twice");
    // The node that was off trusts the stolen one until a person moves it.
    absent.start()?;
    let state = absent.disk();
    let state: &Path = state.parent().context("no state directory")?;
    follow_authority(state, &hex::encode(&next.anchor().certificate), &[]).map_err(anyhow::Error::msg)?;
    until_followed(&[&absent], next.anchor()).await?;
    owner.until_well(3, 5).await?;

    // The attacker trusts the new authority, so that it reaches the true curators.
    stolen.loot.anchor = next.anchor().clone();
    let mut attempts = Attempts::default();
    let (leading, target) = (leader(&owner, &members)?, Target::new(&worker)?);
    for (what, shown) in [
        ("a call by a false node", stolen.certify(Authority::issue_node_certificate)?),
        ("a call by a false curator", stolen.certify(Authority::issue_curator_certificate)?),
        ("a call by a false owner", stolen.certify_owner()?),
    ] {
        let channel = channel_to(&stolen.loot, leading, shown)?;
        try_every_call_refused_as(&mut attempts, what, &channel, &target, FORGED, answer_to_revoked)
            .await
            .with_context(|| leading.report())?;
    }
    for member in members {
        let pairs = [
            ("the pair of the disk", stolen.loot.with(&stolen.peer)?),
            ("a false pair", stolen.certify_peer(member.address)?),
        ];
        try_peer_port(&mut attempts, member, &pairs).await?;
    }

    // The true curators are off, and the attacker answers in their place.
    let place = tempfile::tempdir()?;
    let file = place.path().join("run-by-the-false-leader");
    let newest = newest_statement(&open_calls(&stolen.loot, &first)?).await?;
    let statements = stolen.statements(newest, former)?;
    let script = script(&owner, &worker, stolen.loot.id, FALSE_EPOCH, statements, &file).await?;
    let (cluster, before) = (owner.cluster, Beliefs::of(&worker, owner.cluster)?);
    drop(owner);
    let at = curator_of(&first);
    for node in [&mut first, &mut second, &mut third] {
        node.cut_power().await?;
    }
    for (what, shown) in [
        ("the curator of the disk", stolen.loot.with(&stolen.curator)?),
        ("a false curator", stolen.certify(Authority::issue_curator_certificate)?),
    ] {
        until_refused(&mut attempts, what, at, shown, &script, (&worker, FORGED)).await?;
        assert_eq!(Beliefs::of(&worker, cluster)?, before, "{what}");
        assert!(!file.exists(), "the worker runs what {what} declared");
    }
    attempts.print("the stolen key of the authority, after orders have replaced it");
    assert_eq!(attempts.count(Attempt::Believed), 0);
    Ok(())
}
