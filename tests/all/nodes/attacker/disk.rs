//! A removed consensus member that still has its whole disk, copied while it was a member, and connections from before.
//!
//! The key of the cluster's authority lies in the copied etcd, with those of the authorities of Kubernetes. With the first,
//! the attacker signs certificates and statements as it likes, so the end of the membership ends the certificates of the
//! member and nothing else. The test shows that. The same order has begun to replace the authority and then the keys of
//! Kubernetes, and the test shows that everything is refused after that. The end is the bound that the documentation
//! names. The attacker is idle meanwhile: one that speaks to etcd as a peer before that end reads the key of the new
//! authority, too, and only another replacement helps against it.
//!
//! Clients of etcd connect through a UNIX socket of its host, so there is no port for them to try. No API server runs
//! here: what the attacker shows is compared with what they trust, which the curators send to them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustls::sign::CertifiedKey;
use shepherd::curator::kubernetes::keys::KubernetesKeys;
use shepherd::curator_client::certificate::{IssuedCertificate, Serial, Validity};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::cluster::{authority_record_key, decode_authority};
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::node_id::PublicKey;
use shepherd::curator_client::pki::{Authority, PkiError, TrustAnchor};
use shepherd::curator_client::statement::Statement;
use shepherd::curator_client::succession::Succession;
use shepherd::curator_client::tls::certified_key;
use shepherd::etcd::client::Client;
use shepherd::etcd::namespace::Namespace;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::nodes_client::NodesClient;
use shepherd::roleserver::cluster::etcd_member::{client_endpoint, read_peer_certificate};
use shepherd::roleserver::cluster::files::ClusterFiles;
use shepherd::roleserver::cluster::peer_restart::StartRecord;
use shepherd::roleserver::cluster::stored_authorities::stored_authorities;
use tokio::io::AsyncReadExt as _;

use super::super::node::Node;
use super::super::owner::{Owner, patiently};
use super::super::services::{founded, joined};
use super::attempts::{Attempt, Attempts};
use super::calls::{
    Target, answer_to_deleted, answer_to_revoked, channel_to, orders, try_every_call,
    try_every_call_refused_as,
};
use super::kubernetes::try_kubernetes;
use super::listeners::{PeerAnswer, open_peer, peer_port, request_members, request_peer};
use super::raft::Impostor;
use super::{
    Beliefs, FALSE_EPOCH, Loot, curator_of, newest_statement, open_calls, script, try_peer_port,
    until_it_has_a_statement, until_refused,
};
use crate::harness::aloud::TestResult;
use crate::harness::child::{Program, guarded};
use crate::harness::etcd_program::etcd_program;
use crate::harness::etcd_servers::{in_time, until};
use crate::harness::forged_access::stored_keys;
use crate::harness::port::reserved;

/// Time in which a connection of before the removal ends: a minute for each of the two remaining members, as docs/security.md
/// promises. etcd itself ends an idle one only after five minutes.
const OPEN_CONNECTION_BOUND: Duration = Duration::from_mins(2);
/// A part of the sentence with which a certificate of the former authority is refused.
pub(super) const FORGED: &str = "which did not sign it";
/// How many statements the former authority claims to have signed, so that its next one is higher than each true one.
const FALSE_NUMBER: u64 = 1 << 40;

/// What members of etcd serve each other, on the releases that are supported.
const PEER_REQUESTS: [(&str, &str); 14] = [
    ("GET", "/version"),
    ("GET", "/members"),
    ("POST", "/members/promote/1"),
    ("POST", "/members/hashkv"),
    ("GET", "/raft/probing"),
    ("POST", "/raft"),
    ("GET", "/raft/stream/message/1"),
    ("GET", "/raft/stream/msgapp/1"),
    ("POST", "/raft/snapshot"),
    ("GET", "/leases"),
    ("POST", "/leases"),
    ("POST", "/leases/internal"),
    ("GET", "/downgrade/enabled"),
    ("GET", "/metrics"),
];

/// A key with a certificate, and a name for it.
type NamedKey = (&'static str, Arc<CertifiedKey>);

/// What the attacker has from the disk of a consensus member.
pub(super) struct StolenDisk {
    /// Key and certificate of the node.
    pub(super) loot: Loot,
    /// The certificate of its curator.
    pub(super) curator: Vec<u8>,
    /// The certificate of its member of etcd, for the key of the node.
    pub(super) peer: Vec<u8>,
    /// The authority of the cluster, with its key.
    pub(super) authority: Authority,
    /// The keys of Kubernetes, if the cluster has any.
    pub(super) kubernetes: Option<KubernetesKeys>,
    /// A key that the attacker generated.
    own: Identity,
}

impl StolenDisk {
    /// Copies the disk of a member that is off.
    pub(super) async fn copy(node: &Node) -> Result<Self> {
        let place = tempfile::tempdir()?;
        copy_directory(&node.disk(), &place.path().join("cluster"))?;
        let files = ClusterFiles::in_state_directory(place.path());
        let (authority, kubernetes) = read_keys(&files).await?;
        Ok(Self {
            loot: Loot::read(&files)?,
            curator: files.read_curator_certificate().context("no certificate of a curator")?,
            peer: read_peer_certificate(&files).context("no pair of a member")?,
            authority,
            kubernetes,
            own: Identity::generate()?,
        })
    }

    /// A certificate of the copied authority, for the key of the attacker.
    pub(super) fn certify(
        &self,
        issue: impl FnOnce(&Authority, &PublicKey, Serial, Validity) -> Result<IssuedCertificate, PkiError>,
    ) -> Result<Arc<CertifiedKey>> {
        let (key, serial) = (PublicKey(self.own.public_key()), Serial::new(rand::random()));
        let validity = Validity::starting(Clock::system().now(), Duration::from_hours(24));
        let issued = issue(&self.authority, &key, serial, validity)?;
        Ok(certified_key(&issued.certificate, self.own.pkcs8())?)
    }

    pub(super) fn certify_peer(&self, address: IpAddr) -> Result<Arc<CertifiedKey>> {
        self.certify(|authority, key, serial, validity| {
            authority.issue_etcd_peer_certificate(key, address, serial, validity)
        })
    }

    pub(super) fn certify_owner(&self) -> Result<Arc<CertifiedKey>> {
        self.certify(|authority, key, serial, validity| {
            authority.issue_owner_certificate("kim", key, serial, validity)
        })
    }

    /// The certificates for calls, those of the disk and those of the copied authority.
    fn callers(&self) -> Result<Vec<NamedKey>> {
        Ok(vec![
            ("a call by the node of the disk", self.loot.as_node()?),
            ("a call by the curator of the disk", self.loot.with(&self.curator)?),
            ("a call by the member of etcd of the disk", self.loot.with(&self.peer)?),
            ("a call by a false node", self.certify(Authority::issue_node_certificate)?),
            ("a call by a false curator", self.certify(Authority::issue_curator_certificate)?),
            ("a call by a false owner", self.certify_owner()?),
        ])
    }

    /// The certificates for the peer port of a member, which `address` is claimed for.
    fn peers(&self, address: IpAddr) -> Result<Vec<NamedKey>> {
        Ok(vec![
            ("the pair of the disk", self.loot.with(&self.peer)?),
            ("the node of the disk", self.loot.as_node()?),
            ("the key of the disk alone", self.loot.as_key()?),
            ("a false pair", self.certify_peer(address)?),
            ("a false node", self.certify(Authority::issue_node_certificate)?),
        ])
    }

    /// Statements of the copied authority. `newest` is the true one, and `former` the last one before the replacement.
    pub(super) fn statements(
        &self,
        newest: wire::SignedStatement,
        former: wire::SignedStatement,
    ) -> Result<Vec<(&'static str, wire::SignedStatement)>> {
        let anchor = self.authority.anchor().clone();
        let now = Clock::system().now();
        let forged = Statement {
            cluster: anchor.cluster,
            epoch: 0,
            number: FALSE_NUMBER,
            issued_at: now,
            authorities: vec![anchor.clone()],
            revoked: BTreeMap::new(),
        };
        let validity = Validity::starting(now, Duration::from_hours(24));
        let heir =
            Authority::create(anchor.cluster, self.own.pkcs8(), Serial::new(rand::random()), validity)?;
        let inherited = Statement { authorities: vec![heir.anchor().clone()], ..forged.clone() };
        let succession = Succession::sign(&self.authority, heir.anchor())?;
        let inherited = inherited.sign(&heir)?.with_successors(vec![succession]);
        Ok(vec![
            ("a statement of the copied authority", forged.sign(&self.authority)?.to_wire()),
            ("a statement of an authority that it named", inherited.to_wire()),
            ("the statement before the replacement", former),
            ("the newest statement", newest),
        ])
    }
}

/// Copies the files of a directory. Sockets are left out.
fn copy_directory(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    std::fs::set_permissions(to, std::fs::metadata(from)?.permissions())?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (kind, copy) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_dir() {
            copy_directory(&entry.path(), &copy)?;
        } else if kind.is_file() {
            std::fs::copy(entry.path(), &copy)?;
        }
    }
    Ok(())
}

/// The authority and the keys of Kubernetes in the copied data of etcd, which is started as the only member of a cluster of
/// its own.
async fn read_keys(files: &ClusterFiles) -> Result<(Authority, Option<KubernetesKeys>)> {
    let membership = files.read_membership()?.context("it was no member")?;
    let (directory, peers) = (files.etcd_directory(), format!("http://{}", reserved()?));
    let mut command = guarded(etcd_program()?);
    command.current_dir(&directory).args(["--name", "copy", "--data-dir", &membership.data]);
    command.args(["--listen-client-urls", "unix://client:1", "--advertise-client-urls", "unix://client:1"]);
    command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
    command.arg("--force-new-cluster");
    let _etcd = Program::spawn_logged(&mut command, &directory.join("copy.log"))?;
    let client = Client::new(vec![client_endpoint(files)], Namespace::new("curator")?);
    let (key, mut record) = (authority_record_key()?, None);
    until("the copied etcd answers", async || {
        record = client.get(&key).await.ok().flatten();
        Ok(record.is_some())
    })
    .await
    .with_context(|| std::fs::read_to_string(directory.join("copy.log")).unwrap_or_default())?;
    let authority = decode_authority(&key, &record.context("no authority")?.value)?;
    Ok((authority, stored_keys(&client).await.ok()))
}

/// Waits until this is true of the authorities that each of these nodes trusts.
async fn until_trusted(
    nodes: &[&Node],
    what: &str,
    is_trusted: impl Fn(&[TrustAnchor]) -> bool,
) -> Result<()> {
    until(what, async || {
        for node in nodes {
            if !is_trusted(&stored_authorities(&node.files())?.unwrap_or_default()) {
                return Ok(false);
            }
        }
        Ok(true)
    })
    .await
    .with_context(|| nodes.iter().map(|node| node.report()).collect::<Vec<_>>().join("\n"))
}

/// Waits until the etcd of a member was started with this authority and no other.
async fn until_etcd_trusts(node: &Node, authority: &TrustAnchor) -> Result<()> {
    let (files, expected) = (node.files(), BTreeSet::from([hex::encode(authority.fingerprint())]));
    until("etcd was started with the new authority alone", async || {
        let Some(started) = files.read_etcd_file("started.json")? else { return Ok(false) };
        let started: StartRecord = serde_json::from_slice(&started)?;
        Ok(started.authorities == expected && node.etcd().is_some_and(|etcd| etcd.instance.is_alive()))
    })
    .await
    .with_context(|| node.report())
}

/// Waits until the authority of the cluster has been replaced, and returns the new one, which alone is trusted.
async fn follow_replacement(
    owner: &mut Owner,
    old: &TrustAnchor,
    members: [&Node; 2],
    worker: &Node,
) -> Result<TrustAnchor> {
    let nodes = [members[0], members[1], worker];
    let is_new = |listed: &[TrustAnchor]| listed.first().is_some_and(|first| first != old);
    until_trusted(&nodes, "all trust two authorities", |listed| listed.len() == 2 || is_new(listed)).await?;
    until_trusted(&nodes, "the new authority signs", is_new).await?;
    until_trusted(&nodes, "the old one is dropped", |listed| listed.len() == 1 && is_new(listed)).await?;
    let new = stored_authorities(&worker.files())?.unwrap_or_default();
    let new = new.into_iter().next().context("no authority")?;
    for member in members {
        until_etcd_trusts(member, &new).await?;
    }
    // The owner trusted the old one, and has a certificate of it.
    owner.claim_by(members, new.clone()).await?;
    until("the replacement has ended", async || Ok(owner.authority_rotation().await?.is_none())).await?;
    owner.until_well(2, 3).await?;
    Ok(new)
}

/// Makes all calls to this curator, once it leads.
async fn try_curator(
    attempts: &mut Attempts,
    stolen: &StolenDisk,
    curator: &Node,
    target: &Target,
) -> Result<()> {
    for (what, shown) in stolen.callers()? {
        let channel = channel_to(&stolen.loot, curator, shown)?;
        try_every_call_refused_as(attempts, what, &channel, target, FORGED, answer_to_revoked)
            .await
            .with_context(|| curator.report())?;
    }
    let authority = certified_key(&stolen.authority.anchor().certificate, stolen.authority.pkcs8())?;
    for (what, shown) in [
        ("a call by the key of the disk alone", stolen.loot.as_key()?),
        ("a call by the copied authority itself", authority),
    ] {
        let channel = channel_to(&stolen.loot, curator, shown)?;
        try_every_call(attempts, what, &channel, target, answer_to_deleted).await?;
    }
    Ok(())
}

/// Makes each request of a member of etcd to the peer port of this one.
async fn try_peer_paths(attempts: &mut Attempts, stolen: &StolenDisk, member: &Node) -> Result<()> {
    let at = peer_port(member)?;
    for (who, shown) in stolen.peers(member.address)? {
        for (method, path) in PEER_REQUESTS {
            let request = format!("{method} {path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: 0\r\n\r\n");
            let answer = request_peer(at, shown.clone(), request.as_bytes()).await?;
            ensure!(answer == PeerAnswer::Refused, "{method} {path} by {who}: {answer:?}");
            attempts.record(format!("the peer port of etcd, by {who}: {method} {path}"), Attempt::Refused);
        }
    }
    // Its own pair is served there.
    try_peer_port(attempts, member, &[]).await
}

/// Sends messages of Raft in the name of a living member.
async fn try_raft(
    attempts: &mut Attempts,
    stolen: &StolenDisk,
    impostor: &Impostor,
    member: &Node,
    key: &str,
) -> Result<()> {
    for (who, shown) in stolen.peers(member.address)? {
        let impostor = impostor.with(shown);
        for (what, answer) in
            [("a proposal", impostor.propose(key).await?), ("the entries", impostor.read_entries().await?)]
        {
            ensure!(answer == PeerAnswer::Refused, "{what} by {who}: {answer:?}");
            attempts.record(format!("raft, by {who}: {what}"), Attempt::Refused);
        }
    }
    let client = Client::new(vec![client_endpoint(&member.files())], Namespace::new("curator")?);
    ensure!(client.get(key).await?.is_none(), "it was written");
    Ok(())
}

/// What the removal alone ends: the pair of the disk. A pair that the copied authority signs is served.
async fn try_before_the_replacement(stolen: &StolenDisk, members: [&Node; 2]) -> Result<()> {
    let mut attempts = Attempts::default();
    for member in members {
        let at = peer_port(member)?;
        for (who, shown, is_served) in [
            ("the pair of the disk", stolen.loot.with(&stolen.peer)?, false),
            ("a false pair", stolen.certify_peer(member.address)?, true),
        ] {
            let mut outcome = Attempt::Answered;
            // The member has the list of revoked peers a few seconds after the removal.
            until("the peer port serves what the old authority signs, and no revoked pair", async || {
                // Nobody serves the port while etcd restarts for the replacement.
                let Ok(answer) = request_members(at, shown.clone()).await else { return Ok(false) };
                outcome = if answer == PeerAnswer::Refused { Attempt::Refused } else { Attempt::Answered };
                Ok((outcome == Attempt::Answered) == is_served)
            })
            .await
            .with_context(|| format!("{who}: {outcome:?}"))?;
            attempts.record(format!("the peer port of etcd, by {who}"), outcome);
        }
    }
    attempts.print("the disk of a removed member, before the authority is replaced");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_of_a_removed_member_is_worth_nothing_once_the_authority_is_replaced() -> TestResult {
    let (mut owner, mut first) = founded().await?;
    let (mut second, mut third) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    let worker = joined(&owner, &first).await?;
    owner.put_kubernetes().await?;
    for (node, voters) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, 4).await?;
    }
    owner.learn(&[&first, &second])?;
    until_it_has_a_statement(&worker).await?;
    third.cut_power().await?;
    let mut stolen = StolenDisk::copy(&third).await?;
    third.start()?;
    third.until_control_plane(true).await?;
    owner.until_well(3, 4).await?;

    // Everything that it can open is open before it is removed.
    let pair = stolen.loot.with(&stolen.peer)?;
    let members = [("the first member", &first), ("the second member", &second)];
    let mut open = Vec::new();
    for (name, member) in members {
        open.push((name, open_peer(peer_port(member)?, pair.clone()).await?));
    }
    let mut nodes = NodesClient::new(channel_to(&stolen.loot, &first, stolen.loot.as_node()?)?);
    let mut watched = patiently(async || nodes.watch_all(wire::WatchAllRequest {}).await).await?;
    in_time("the nodes", watched.message()).await??.context("the stream ended")?;
    let impostors = [
        Impostor::new(&owner, pair.clone(), &first, &second).await?,
        Impostor::new(&owner, pair, &second, &first).await?,
    ];

    let mut attempts = Attempts::default();
    let former = members.map(|(_, node)| node.etcd().map(|etcd| etcd.instance));
    let statement = newest_statement(&open_calls(&stolen.loot, &first)?).await?;
    owner.remove_member(&third).await?;
    third.until_control_plane(false).await?;
    // The bound counts from here for all of them, also while other attempts are made.
    let open = open.into_iter().map(|(name, mut stream)| {
        let mut rest = Vec::new();
        let end = async move {
            tokio::time::timeout(OPEN_CONNECTION_BOUND, stream.read_to_end(&mut rest)).await.is_ok()
        };
        (name, tokio::spawn(end))
    });
    let open: Vec<_> = open.collect();
    third.cut_power().await?;
    // Every etcd trusts the old authority until it has restarted twice.
    try_before_the_replacement(&stolen, [&first, &second]).await?;
    owner.delete(&third).await?;
    for (name, ended) in open {
        assert!(ended.await?, "the connection to {name} is still open\n{}", first.report());
        attempts.record(format!("a connection of before: {name}"), Attempt::Refused);
    }
    in_time("the end of the stream", async { while let Ok(Some(_)) = watched.message().await {} }).await?;
    attempts.record("a connection of before: the nodes at the curator", Attempt::Refused);
    for ((_, node), former) in members.into_iter().zip(former) {
        node.until_etcd_is_another(&former.context("no etcd")?).await?;
    }

    let old = stolen.authority.anchor().clone();
    let new = follow_replacement(&mut owner, &old, [&first, &second], &worker).await?;
    try_kubernetes(&mut attempts, &stolen, &first).await?;
    // The attacker trusts the new authority, so that it reaches the true curators.
    stolen.loot.anchor = new;

    let before = orders(&owner).await?;
    let target = Target::new(&worker)?;
    // Each curator leads while the other one is off.
    first.stop().await?;
    try_curator(&mut attempts, &stolen, &second, &target).await?;
    first.start()?;
    first.until_control_plane(true).await?;
    second.stop().await?;
    try_curator(&mut attempts, &stolen, &first, &target).await?;
    second.start()?;
    second.until_control_plane(true).await?;
    owner.until_well(2, 3).await?;
    assert_eq!(orders(&owner).await?, before, "an order of an owner has changed");
    for (number, (member, impostor)) in [&first, &second].into_iter().zip(&impostors).enumerate() {
        try_peer_paths(&mut attempts, &stolen, member).await?;
        let key = format!("/attacker/of-a-disk/{number}");
        try_raft(&mut attempts, &stolen, impostor, member, &key).await?;
    }

    // The true curators are off, and the attacker answers in their place.
    let place = tempfile::tempdir()?;
    let file = place.path().join("run-by-the-false-leader");
    let newest = newest_statement(&open_calls(&stolen.loot, &first)?).await?;
    let statements = stolen.statements(newest, statement)?;
    let script = script(&owner, &worker, stolen.loot.id, FALSE_EPOCH, statements, &file).await?;
    let (cluster, before) = (owner.cluster, Beliefs::of(&worker, owner.cluster)?);
    drop(owner);
    second.cut_power().await?;
    first.cut_power().await?;
    for (what, shown) in [
        ("the curator of the disk", stolen.loot.with(&stolen.curator)?),
        ("a false curator", stolen.certify(Authority::issue_curator_certificate)?),
    ] {
        let at = curator_of(&first);
        until_refused(&mut attempts, what, at, shown, &script, (&worker, FORGED)).await?;
        assert_eq!(Beliefs::of(&worker, cluster)?, before, "{what}");
        assert!(!file.exists(), "the worker runs what {what} declared");
    }
    attempts.print("the disk of a removed member");
    assert_eq!(attempts.count(Attempt::Believed), 0);
    // A curator answers anybody who leads, and serves the statement to them.
    let open_to_anybody = 3 * 8 * 2;
    assert_eq!(attempts.count(Attempt::Answered), open_to_anybody);
    Ok(())
}
