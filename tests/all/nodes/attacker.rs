//! An attacker with the key of a node: what each key of a cluster is worth at the listeners of the cluster.
//!
//! The attacker has copied the key and the certificates from the disk of a node. It makes every call of the table of
//! permissions, connects to the ports of etcd's members, and answers in the place of the true curator after that one is
//! off. What it answers as a leader would make another node run a service as root, and believe another epoch.
//!
//! Each attempt is counted under its name, and the counts are printed. An attempt counts only if it reached the other
//! end: calls go to a proved curator, a peer port must answer its own members at the same time, and a false curator must
//! be requested for its statement before its certificate is refused. The first test shows at its end that the same false
//! curator is believed with the key of a true one.
//!
//! Claims of the addresses of other nodes are tried in the tests of the curator: the nodes here are on addresses of the
//! loopback, where no connection proves an address.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prost::Message as _;
use rustls::sign::CertifiedKey;
use shepherd::curator_client::certificate::{Serial, Validity};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::node_id::{NodeId, PublicKey};
use shepherd::curator_client::pki::{Authority, TrustAnchor};
use shepherd::curator_client::statement::Statement;
use shepherd::curator_client::tls::certified_key;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::leader_client::LeaderClient;
use shepherd::roleserver::cluster::etcd_member::read_peer_certificate;
use shepherd::roleserver::cluster::files::ClusterFiles;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use shepherd::roleserver::cluster::peer_restart::StartRecord;
use tonic::transport::Channel;
use uuid::Uuid;

use self::attempts::{Attempt, Attempts};
use self::calls::{
    Target, answer_to_key, answer_to_node, answer_to_revoked, channel_to, orders, try_every_call,
    try_every_component,
};
use self::listeners::{FalseCurator, PeerAnswer, Requests, Script, peer_port, request_members};
use super::node::Node;
use super::owner::{Owner, patiently};
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

mod attempts;
mod calls;
mod disk;
mod joining;
mod kubernetes;
pub(super) mod listeners;
mod raft;
mod restart;
mod revocation_bound;
mod theft;

/// The only call that a node makes to a server with a certificate that it does not believe.
const OPEN_CALL: &str = "Leader/GetStatement";
/// An epoch that no cluster of these tests has.
const FALSE_EPOCH: u64 = 900;

/// What an attacker has from the disk of a node.
struct Loot {
    id: NodeId,
    anchor: TrustAnchor,
    key: Identity,
    certificate: Vec<u8>,
}

impl Loot {
    fn copy(node: &Node) -> Result<Self> {
        Self::read(&node.files())
    }

    /// The same from files that were copied before.
    fn read(files: &ClusterFiles) -> Result<Self> {
        let key = files.read_key()?.context("it has no key")?;
        let credentials = files.read_credentials()?.context("it has no certificate")?;
        let anchor = TrustAnchor::parse(&hex::decode(&credentials.ca_certificate)?)?;
        let id = NodeId::from_key(&PublicKey(key.public_key()));
        Ok(Self { id, anchor, key, certificate: hex::decode(&credentials.certificate)? })
    }

    /// The key with a certificate for it.
    fn with(&self, certificate: &[u8]) -> Result<Arc<CertifiedKey>> {
        Ok(certified_key(certificate, self.key.pkcs8())?)
    }

    /// The key with the certificate of the node.
    fn as_node(&self) -> Result<Arc<CertifiedKey>> {
        self.with(&self.certificate)
    }

    /// The key alone.
    fn as_key(&self) -> Result<Arc<CertifiedKey>> {
        self.with(self.key.certificate_der())
    }
}

/// The certificate that the curator on a node shows, from the disk of that node.
fn curator_certificate(node: &Node) -> Result<Vec<u8>> {
    node.files().read_curator_certificate().context("it has no certificate of a curator")
}

fn curator_of(node: &Node) -> SocketAddr {
    SocketAddr::new(node.address, CURATOR_PORT)
}

/// What a node has stored about its cluster, byte by byte, and the epoch that it follows.
#[derive(Debug, PartialEq, Eq)]
struct Beliefs {
    statement: Vec<u8>,
    stored_epoch: u64,
    followed_epoch: u64,
}

impl Beliefs {
    fn of(node: &Node, cluster: Uuid) -> Result<Self> {
        let connection = node.facts.connection.latest().context("it is no node")?;
        Ok(Self {
            statement: std::fs::read(node.disk().join("statement.json"))?,
            stored_epoch: node.files().epoch_of_cluster(cluster)?,
            followed_epoch: connection.curators.highest_epoch(),
        })
    }
}

/// A client of a curator for what it serves to everybody.
fn open_calls(loot: &Loot, curator: &Node) -> Result<LeaderClient<Channel>> {
    Ok(LeaderClient::new(channel_to(loot, curator, loot.as_key()?)?))
}

/// The newest statement of the cluster.
async fn newest_statement(leader: &LeaderClient<Channel>) -> Result<wire::SignedStatement> {
    let mut leader = leader.clone();
    let statement = async || {
        let response = leader.get_statement(wire::GetStatementRequest {}).await;
        // Until the first one is made.
        response.map_err(|status| tonic::Status::unavailable(status.message()))
    };
    patiently(statement).await?.statement.context("an empty response")
}

/// Waits until a node follows no curator without a statement any more.
async fn until_it_has_a_statement(node: &Node) -> Result<()> {
    let path = node.disk().join("statement.json");
    until("the node has a statement", async || Ok(path.exists())).await.with_context(|| node.report())
}

/// Waits until the etcd of a member was started with this certificate on its list of revoked peers, and with two
/// authorities, so that it restarts for nothing else.
async fn until_etcd_rejects(member: &Node, pair: &[u8]) -> Result<()> {
    let serial = Serial::from_der(pair).context("no serial number")?.to_string();
    until("etcd rejects the pair of the revoked node", async || {
        let Some(started) = member.files().read_etcd_file("started.json")? else { return Ok(false) };
        let started: StartRecord = serde_json::from_slice(&started)?;
        let is_present = started.revoked.contains(&serial) && started.authorities.len() == 2;
        Ok(is_present && member.etcd().is_some_and(|etcd| etcd.instance.is_alive()))
    })
    .await
    .with_context(|| member.report())
}

/// Statements that an attacker can send: the newest one, the same with another byte, and one that the attacker signed as
/// an authority of the same name.
fn replayed_and_forged(
    loot: &Loot,
    newest: &wire::SignedStatement,
) -> Result<Vec<(&'static str, wire::SignedStatement)>> {
    let mut changed = newest.clone();
    *changed.statement.last_mut().context("an empty statement")? ^= 1;
    let now = Clock::system().now();
    let validity = Validity::starting(now, Duration::from_hours(24));
    let authority =
        Authority::create(loot.anchor.cluster, loot.key.pkcs8(), Serial::new(rand::random()), validity)?;
    let forged = Statement {
        cluster: loot.anchor.cluster,
        epoch: FALSE_EPOCH,
        number: FALSE_EPOCH,
        issued_at: now,
        authorities: vec![authority.anchor().clone()],
        revoked: BTreeMap::new(),
    };
    Ok(vec![
        ("the newest statement", newest.clone()),
        ("a statement with another byte", changed),
        ("a statement of the attacker's own authority", forged.sign(&authority)?.to_wire()),
    ])
}

/// The answers of a false leader: the node gets a role with a service that writes a file.
async fn script(
    owner: &Owner,
    victim: &Node,
    leader: NodeId,
    epoch: u64,
    statements: Vec<(&'static str, wire::SignedStatement)>,
    file: &Path,
) -> Result<Script> {
    let id = victim.id()?.to_string();
    let nodes = owner.nodes().await?.into_iter().filter_map(|listed| listed.node);
    let mut record = nodes.into_iter().find(|node| node.node_id == id).context("no record")?;
    record.roles.get_or_insert_default().declared_roles.push("web".to_owned());
    let source = Some(wire::program::Source::Path("/bin/sh".to_owned()));
    let text = format!("id >{}; while :; do sleep 0.1; done", file.display());
    let service = wire::Service {
        name: "server".to_owned(),
        run: Some(wire::service::Run::Program(wire::Program { source, url: String::new() })),
        arguments: vec!["-c".to_owned(), text],
        environment: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        user: "root".to_owned(),
        ..Default::default()
    };
    Ok(Script { leader, epoch, statements, record, service })
}

/// Lets a false curator answer until a node has refused its certificate for `reason`, more than once, after each
/// statement was sent. The node must have requested nothing but statements.
async fn until_refused(
    attempts: &mut Attempts,
    what: &str,
    at: SocketAddr,
    shown: Arc<CertifiedKey>,
    script: &Script,
    victim: (&Node, &str),
) -> Result<()> {
    let (victim, reason) = victim;
    let false_curator = FalseCurator::start(at, shown, script.clone()).await?;
    let connection = victim.facts.connection.latest().context("it is no node")?;
    let refusal = || connection.curators.refusal().borrow().clone().unwrap_or_default();
    let mut is_named = false;
    let waited = until("the certificate of the false curator is refused", async || {
        is_named |= refusal().contains(reason);
        let requests = false_curator.requests();
        ensure!(requests.calls.keys().all(|call| call == OPEN_CALL), "it was believed: {requests:?}");
        let is_sent = |name: &str| requests.statements.get(name).is_some_and(|count| *count > 0);
        let all_are_sent = script.statements.iter().all(|(name, _)| is_sent(name));
        Ok(is_named && all_are_sent && requests.refused_handshakes > 1)
    })
    .await;
    let requests = false_curator.requests();
    waited.with_context(|| format!("{requests:?}\n{}\n{}", refusal(), victim.report()))?;
    record_requests(attempts, what, &requests);
    ensure!(connection.curators.leader().is_none(), "{what}: it follows {:?}", connection.curators.leader());
    Ok(())
}

/// Counts what a false curator was requested for.
fn record_requests(attempts: &mut Attempts, what: &str, requests: &Requests) {
    attempts.record_many(format!("{what}: its certificate"), Attempt::Refused, requests.refused_handshakes);
    for (name, count) in &requests.statements {
        // None of them replaces the stored one, which the tests compare.
        attempts.record_many(format!("{what}: {name}"), Attempt::Refused, *count);
    }
    for (call, count) in requests.calls.iter().filter(|(call, _)| *call != OPEN_CALL) {
        attempts.record_many(format!("{what}: {call}"), Attempt::Believed, *count);
    }
}

/// Connects to the peer port of a member with each of these certificates, and then with the member's own pair, which must
/// be served.
async fn try_peer_port(
    attempts: &mut Attempts,
    member: &Node,
    shown: &[(&str, Arc<CertifiedKey>)],
) -> Result<()> {
    let at = peer_port(member)?;
    for (name, own) in shown {
        let answer = request_members(at, own.clone()).await?;
        ensure!(answer == PeerAnswer::Refused, "the peer port of etcd answered to {name}: {answer:?}");
        attempts.record(format!("the peer port of etcd, by {name}"), Attempt::Refused);
    }
    let pair = read_peer_certificate(&member.files()).context("the member has no pair")?;
    let key = member.files().read_key()?.context("the member has no key")?;
    let answer = request_members(at, certified_key(&pair, key.pkcs8())?).await?;
    ensure!(matches!(answer, PeerAnswer::Served(_)), "the port refuses its own member: nothing was tried");
    Ok(())
}

/// Makes all calls with the key of a node that is no consensus member, about itself and about the others.
async fn try_calls_of_a_node(
    attempts: &mut Attempts,
    loot: &Loot,
    curator: &Node,
    (own, is_worker): (&Node, bool),
    others: &[&Node],
) -> Result<()> {
    let channel = channel_to(loot, curator, loot.as_node()?)?;
    let what = "a call about itself";
    try_every_call(attempts, what, &channel, &Target::new(own)?, |row| answer_to_node(row, true, is_worker))
        .await?;
    for other in others {
        let (what, target) = ("a call about another node", Target::new(other)?);
        try_every_call(attempts, what, &channel, &target, |row| answer_to_node(row, false, is_worker))
            .await?;
    }
    let (what, channel) = ("a call by the key alone", channel_to(loot, curator, loot.as_key()?)?);
    try_every_call(attempts, what, &channel, &Target::new(own)?, |row| answer_to_key(row, false)).await
}

/// Tries everything that the key of a node can try while the true curator answers: all calls, all certificates of
/// Kubernetes, of which `allowed` are issued, and the peer port of etcd. No order of an owner changes.
async fn try_as_node(
    attempts: &mut Attempts,
    (owner, curator): (&Owner, &Node),
    loot: &Loot,
    own: (&Node, bool),
    others: &[&Node],
    allowed: &[wire::KubernetesComponent],
) -> Result<()> {
    let before = orders(owner).await?;
    try_calls_of_a_node(attempts, loot, curator, own, others).await?;
    let channel = channel_to(loot, curator, loot.as_node()?)?;
    try_every_component(attempts, &channel, allowed).await?;
    assert_eq!(orders(owner).await?, before, "an order of an owner has changed");
    let shown = [("the certificate of the node", loot.as_node()?), ("the key alone", loot.as_key()?)];
    try_peer_port(attempts, curator, &shown).await
}

/// The attacks 15 and 15b of tests/security/README.md.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_of_a_node_without_roles_leads_nobody() -> TestResult {
    let mut attempts = Attempts::default();
    let (owner, mut first) = founded().await?;
    let worker = joined(&owner, &first).await?;
    let mut bare = joined(&owner, &first).await?;
    owner.put_kubernetes().await?;
    until_it_has_a_statement(&worker).await?;
    let loot = Loot::copy(&bare)?;
    bare.stop().await?;

    let others = [&first, &worker];
    try_as_node(&mut attempts, (&owner, &first), &loot, (&bare, false), &others, &[]).await?;

    // The true curator is off, and the attacker answers in its place.
    let place = tempfile::tempdir()?;
    let file = place.path().join("run-by-the-false-leader");
    let newest = newest_statement(&open_calls(&loot, &first)?).await?;
    let statements = replayed_and_forged(&loot, &newest)?;
    let false_script = script(&owner, &worker, loot.id, FALSE_EPOCH, statements, &file).await?;
    let newest = vec![("the newest statement", newest)];
    let true_script = script(&owner, &worker, first.id()?, 0, newest, &file).await?;
    let (cluster, before) = (owner.cluster, Beliefs::of(&worker, owner.cluster)?);
    drop(owner);
    first.cut_power().await?;
    let (at, reason) = (curator_of(&first), "which has no curator's certificate");
    let what = "a false leader";
    until_refused(&mut attempts, what, at, loot.as_node()?, &false_script, (&worker, reason)).await?;
    assert_eq!(Beliefs::of(&worker, cluster)?, before);
    assert!(!file.exists(), "the worker runs what a false leader declared");
    attempts.print("the key of a node without roles");
    assert_eq!(attempts.count(Attempt::Believed), 0);

    // The same answers, with the key and the certificate of a true curator: that is what a consensus member is worth.
    let genuine = Loot::copy(&first)?;
    let shown = genuine.with(&curator_certificate(&first)?)?;
    let curator = FalseCurator::start(at, shown, true_script).await?;
    until("the worker runs what a curator declared", async || Ok(file.exists()))
        .await
        .with_context(|| format!("{:?}\n{}", curator.requests(), worker.report()))?;
    let mut control = Attempts::default();
    record_requests(&mut control, "a true curator's key", &curator.requests());
    control.print("the key of a consensus member");
    assert!(control.count(Attempt::Believed) > 2, "{control:?}");
    assert_eq!(Beliefs::of(&worker, cluster)?, before);
    Ok(())
}

/// Claims of other addresses with this key, as in attack 09, are tried in `curator/addresses`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_key_is_worth_its_own_node() -> TestResult {
    use wire::KubernetesComponent::{Kubelet, KubeletServer, Proxy};
    let mut attempts = Attempts::default();
    let (owner, mut first) = founded().await?;
    let mut worker = joined(&owner, &first).await?;
    let bare = joined(&owner, &first).await?;
    owner.put_kubernetes().await?;
    owner.roles(&worker, &["kubernetes-worker"], &[]).await?;
    until_it_has_a_statement(&bare).await?;
    let loot = Loot::copy(&worker)?;
    worker.stop().await?;

    let (others, allowed) = ([&first, &bare], [Kubelet, KubeletServer, Proxy]);
    try_as_node(&mut attempts, (&owner, &first), &loot, (&worker, true), &others, &allowed).await?;

    let place = tempfile::tempdir()?;
    let file = place.path().join("run-by-the-false-leader");
    let newest = newest_statement(&open_calls(&loot, &first)?).await?;
    let statements = replayed_and_forged(&loot, &newest)?;
    let script = script(&owner, &bare, loot.id, FALSE_EPOCH, statements, &file).await?;
    let (cluster, before) = (owner.cluster, Beliefs::of(&bare, owner.cluster)?);
    drop(owner);
    first.cut_power().await?;
    let (at, reason) = (curator_of(&first), "which has no curator's certificate");
    let what = "a false leader";
    until_refused(&mut attempts, what, at, loot.as_node()?, &script, (&bare, reason)).await?;
    assert_eq!(Beliefs::of(&bare, cluster)?, before);
    assert!(!file.exists(), "a node runs what a false leader declared");
    attempts.print("the key of a worker");
    assert_eq!(attempts.count(Attempt::Believed), 0);
    Ok(())
}

/// The key of the node that is worth most: a consensus member with a curator's certificate that is still valid. This is attack
/// 15c of tests/security/README.md.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoked_key_opens_and_leads_nothing() -> TestResult {
    let mut attempts = Attempts::default();
    let (owner, mut first) = founded().await?;
    let worker = joined(&owner, &first).await?;
    let mut second = joined(&owner, &first).await?;
    owner.put_kubernetes().await?;
    owner.roles(&second, &["consensus-member"], &[]).await?;
    second.until_control_plane(true).await?;
    owner.until_well(2, 3).await?;
    until_it_has_a_statement(&worker).await?;
    let loot = Loot::copy(&second)?;
    let curators = curator_certificate(&second)?;
    let pair = read_peer_certificate(&second.files()).context("the member has no pair")?;
    let leader = open_calls(&loot, &first)?;
    let former = newest_statement(&leader).await?;

    let mut credentials = CredentialsClient::new(owner.curators()?.channel());
    let target = Some(wire::revoke_credentials_request::Target::NodeId(loot.id.to_string()));
    let request = wire::RevokeCredentialsRequest { target };
    patiently(async || credentials.revoke(request.clone()).await).await?;
    let mut newest = former.clone();
    // The end of the membership begins a replacement of the authority, which waits for the revoked node.
    until("the worker has a statement that lists the revoked curator and two authorities", async || {
        // While etcd restarts, no curator answers.
        let Ok(served) = newest_statement(&leader).await else { return Ok(false) };
        newest = served;
        let statement = wire::Statement::decode(newest.statement.as_slice())?;
        let is_last = !statement.revoked.is_empty() && statement.authorities.len() == 2;
        let stored = std::fs::read_to_string(worker.disk().join("statement.json"))?;
        Ok(is_last && stored.contains(&hex::encode(&newest.statement)))
    })
    .await
    .with_context(|| worker.report())?;
    until_etcd_rejects(&first, &pair).await?;
    owner.until_well(1, 2).await?;

    let before = orders(&owner).await?;
    let own = Target::new(&second)?;
    for (what, shown) in [
        ("a call by the revoked certificate", loot.as_node()?),
        ("a call by the revoked curator's certificate", loot.with(&curators)?),
    ] {
        let channel = channel_to(&loot, &first, shown)?;
        try_every_call(&mut attempts, what, &channel, &own, answer_to_revoked).await?;
    }
    let (what, channel) = ("a call by the revoked key alone", channel_to(&loot, &first, loot.as_key()?)?);
    try_every_call(&mut attempts, what, &channel, &own, |row| answer_to_key(row, true)).await?;
    assert_eq!(orders(&owner).await?, before, "an order of an owner has changed");
    let shown = [
        ("the certificate of the node", loot.as_node()?),
        ("the curator's certificate", loot.with(&curators)?),
        ("the key alone", loot.as_key()?),
        ("the pair of its membership", loot.with(&pair)?),
    ];
    try_peer_port(&mut attempts, &first, &shown).await?;
    let members = owner.members().await?;
    assert!(members.len() == 1, "the revoked node is a member of etcd: {members:?}");

    // With the former statement, in which the curator is not revoked.
    let place = tempfile::tempdir()?;
    let file = place.path().join("run-by-the-false-leader");
    let mut statements = replayed_and_forged(&loot, &newest)?;
    statements.push(("the statement before the revocation", former));
    let script = script(&owner, &worker, loot.id, FALSE_EPOCH, statements, &file).await?;
    let (cluster, before) = (owner.cluster, Beliefs::of(&worker, owner.cluster)?);
    drop(owner);
    second.cut_power().await?;
    first.cut_power().await?;
    let at = curator_of(&first);
    for (what, shown, reason) in [
        ("a revoked curator", loot.with(&curators)?, "its credentials are revoked"),
        ("a revoked node", loot.as_node()?, "which has no curator's certificate"),
    ] {
        until_refused(&mut attempts, what, at, shown, &script, (&worker, reason)).await?;
        assert_eq!(Beliefs::of(&worker, cluster)?, before);
        assert!(!file.exists(), "the worker runs what a revoked leader declared");
    }
    attempts.print("a revoked key");
    assert_eq!(attempts.count(Attempt::Believed), 0);
    Ok(())
}
