//! A removed consensus member that still has its pair: it writes to etcd in the name of a living member, and reads what
//! is sent to that one. This is attack 01 of tests/security/README.md.
//!
//! etcd knows a member by its certificate alone, and believes the sender that a message names. So as long as the pair is
//! accepted, its membership makes no difference.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use prost::Message as _;
use rustls::sign::CertifiedKey;
use shepherd::curator::membership::peer_url;
use shepherd::curator_client::tls::certified_key;
use shepherd::etcd::client::Client;
use shepherd::etcd::namespace::Namespace;
use shepherd::roleserver::cluster::etcd_member::{client_endpoint, read_peer_certificate};

use super::super::node::Node;
use super::super::owner::Owner;
use super::super::services::{founded, joined};
use super::attempts::{Attempt, Attempts};
use super::listeners::{PeerAnswer, peer_port, request_members, request_peer};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// How often a removed member tries each request.
const TRIES: u32 = 5;

/// A message of Raft (`raft/raftpb/raft.proto`).
#[derive(Clone, PartialEq, prost::Message)]
struct RaftMessage {
    #[prost(int32, tag = "1")]
    kind: i32,
    #[prost(uint64, tag = "2")]
    to: u64,
    #[prost(uint64, tag = "3")]
    from: u64,
    #[prost(message, repeated, tag = "7")]
    entries: Vec<RaftEntry>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RaftEntry {
    #[prost(bytes = "vec", tag = "4")]
    data: Vec<u8>,
}

/// What an entry of etcd contains (`etcdserver/etcdserverpb/raft_internal.proto`).
#[derive(Clone, PartialEq, prost::Message)]
struct InternalRequest {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, optional, tag = "4")]
    put: Option<Put>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Put {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// A member that sends messages to `to` in the name of the living member `from`, with the pair of a third one.
pub(super) struct Impostor {
    pair: Arc<CertifiedKey>,
    at: SocketAddr,
    to: u64,
    from: u64,
    /// The head of each request, without its first line.
    head: String,
}

impl Impostor {
    /// The pair must be one that etcd accepts at this moment.
    pub(super) async fn new(owner: &Owner, pair: Arc<CertifiedKey>, to: &Node, from: &Node) -> Result<Self> {
        let members = owner.members().await?;
        let number = |node: &Node| {
            let id = node.id()?.to_string();
            let member = members.iter().find(|member| member.node_id == id);
            anyhow::Ok(member.with_context(|| format!("{id} is no member"))?.member_id)
        };
        let (at, number_to, number_from) = (peer_port(to)?, number(to)?, number(from)?);
        let version = serve(&pair, at, "GET /version HTTP/1.1\r\nHost: etcd\r\n\r\n").await?;
        let (_, version) = version.split_once("\"etcdserver\":\"").context("no version")?;
        let (version, _) = version.split_once('"').context("no version")?;
        let cluster = serve(&pair, at, "GET /members HTTP/1.1\r\nHost: etcd\r\n\r\n").await?;
        let name = "x-etcd-cluster-id: ";
        let line = cluster.lines().find(|line| line.to_lowercase().starts_with(name));
        let cluster = line.context("no id of the cluster")?.split_at(name.len()).1;
        let head = format!(
            "Host: etcd\r\nX-Etcd-Cluster-ID: {cluster}\r\nX-Raft-To: {number_to:x}\r\nX-Server-From: {number_from:x}\r\n\
             X-Server-Version: {version}\r\nX-Min-Cluster-Version: 3.0.0\r\nX-PeerURLs: {}\r\n",
            peer_url(from.address)
        );
        Ok(Self { pair, at, to: number_to, from: number_from, head })
    }

    /// The same messages with another pair.
    pub(super) fn with(&self, pair: Arc<CertifiedKey>) -> Self {
        Self { pair, at: self.at, to: self.to, from: self.from, head: self.head.clone() }
    }

    /// Proposes to write a key of the curators.
    pub(super) async fn propose(&self, key: &str) -> Result<PeerAnswer> {
        const PROPOSAL: i32 = 2;
        let put = Put { key: format!("namespaced:curator{key}").into_bytes(), value: b"stolen".to_vec() };
        let request = InternalRequest { id: rand::random(), put: Some(put) };
        let entries = vec![RaftEntry { data: request.encode_to_vec() }];
        let body = RaftMessage { kind: PROPOSAL, to: self.to, from: self.from, entries }.encode_to_vec();
        let head = format!(
            "POST /raft HTTP/1.1\r\n{}Content-Type: application/protobuf\r\nContent-Length: {}\r\n\r\n",
            self.head,
            body.len()
        );
        request_peer(self.at, self.pair.clone(), &[head.as_bytes(), body.as_slice()].concat()).await
    }

    /// Requests the entries that are meant for the living member.
    pub(super) async fn read_entries(&self) -> Result<PeerAnswer> {
        let request = format!("GET /raft/stream/msgapp/{:x} HTTP/1.1\r\n{}\r\n", self.from, self.head);
        request_peer(self.at, self.pair.clone(), request.as_bytes()).await
    }
}

/// The response to a request that must be served.
async fn serve(pair: &Arc<CertifiedKey>, at: SocketAddr, request: &str) -> Result<String> {
    match request_peer(at, pair.clone(), request.as_bytes()).await? {
        PeerAnswer::Served(answer) => Ok(answer),
        PeerAnswer::Refused => anyhow::bail!("the peer port {at} refuses a member"),
    }
}

/// Whether etcd accepted a request.
fn is_accepted(answer: &PeerAnswer) -> bool {
    matches!(answer, PeerAnswer::Served(text) if text.starts_with("HTTP/1.1 20"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_member_proposes_nothing_and_reads_no_entries() -> TestResult {
    let (owner, first) = founded().await?;
    let (second, third) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    for (node, count) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(count, 3).await?;
    }
    let client = Client::new(vec![client_endpoint(&first.files())], Namespace::new("curator")?);
    let certificate = read_peer_certificate(&third.files()).context("the third member has no pair")?;
    let key = third.files().read_key()?.context("the third member has no key")?;
    let pair = certified_key(&certificate, key.pkcs8())?;
    let impostors = [
        ("the first member", Impostor::new(&owner, pair.clone(), &first, &second).await?),
        ("the second member", Impostor::new(&owner, pair, &second, &first).await?),
    ];

    // While the membership lasts, the same requests succeed.
    for (to, impostor) in &impostors {
        let key = format!("/attacker/before/{:x}", impostor.to);
        let proposed = impostor.propose(&key).await?;
        assert!(is_accepted(&proposed), "a proposal to {to}: {proposed:?}");
        until("the proposal is written", async || Ok(client.get(&key).await?.is_some())).await?;
        let entries = impostor.read_entries().await?;
        assert!(is_accepted(&entries), "the entries at {to}: {entries:?}");
    }

    let remaining = [&first, &second];
    let former = remaining.map(|node| node.etcd().map(|etcd| etcd.instance));
    owner.roles(&third, &[], &["consensus-member"]).await?;
    third.until_control_plane(false).await?;
    // The remaining members restart in turn, which ends the connections of before.
    for (node, former) in remaining.into_iter().zip(former) {
        node.until_etcd_is_another(&former.context("no etcd")?).await?;
    }
    for node in remaining {
        node.until_no_restart_is_due().await?;
    }
    owner.until_well(2, 3).await?;
    for (to, impostor) in &impostors {
        until("the pair of the removed member is refused", async || {
            Ok(impostor.read_entries().await? == PeerAnswer::Refused)
        })
        .await
        .with_context(|| format!("at {to}\n{}\n{}", first.report(), second.report()))?;
    }
    // An etcd that restarts closes connections, too. So none of both may, and each serves a living member.
    let serving = remaining.map(|node| node.etcd().map(|etcd| etcd.instance));
    let mut attempts = Attempts::default();
    for (to, impostor) in &impostors {
        let key = format!("/attacker/after/{:x}", impostor.to);
        for _ in 0..TRIES {
            for (what, answer) in [
                ("a proposal to", impostor.propose(&key).await?),
                ("the entries at", impostor.read_entries().await?),
            ] {
                let refused = answer == PeerAnswer::Refused;
                attempts.record(
                    format!("{what} {to}"),
                    if refused { Attempt::Refused } else { Attempt::Answered },
                );
            }
        }
        assert_eq!(client.get(&key).await?.map(|record| record.value), None, "it was written");
    }
    attempts.print("the pair of a removed member");
    assert_eq!((attempts.count(Attempt::Answered), attempts.count(Attempt::Refused)), (0, 4 * TRIES));
    let certificate = read_peer_certificate(&second.files()).context("the second member has no pair")?;
    let key = second.files().read_key()?.context("the second member has no key")?;
    let living = certified_key(&certificate, key.pkcs8())?;
    for node in remaining {
        let answer = request_members(peer_port(node)?, living.clone()).await?;
        assert!(is_accepted(&answer), "the pair of a member: {answer:?}");
    }
    assert_eq!(
        remaining.map(|node| node.etcd().map(|etcd| etcd.instance)),
        serving,
        "it restarted meanwhile"
    );
    owner.until_well(2, 3).await?;
    Ok(())
}
