//! Pairs of etcd's members: what a copy of one is worth after its membership, and that each is recorded.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore};
use shepherd::curator_client::certificate::Serial;
use shepherd::curator_client::pki_revocation_list::{PeerRevocations, parse_peer_revocation_list};
use shepherd::curator_client::tls::certified_key;
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::CERTIFICATES;
use shepherd::etcd::namespace::{KeySelector, Namespace};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::roleserver::cluster::etcd_member;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::attacker::listeners::{PeerAnswer, peer_port, request_members};
use super::node::Node;
use super::owner::{Owner, patiently};
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::{in_time, until};

/// TCP port on which members of etcd reach each other.
const PEER_PORT: u16 = 7834;
/// Time in which a connection that was open before a removal ends: a minute for the one remaining member, as
/// docs/security.md promises. etcd itself ends an idle one only after five minutes.
const OPEN_CONNECTION_BOUND: Duration = Duration::from_mins(1);

/// The pair of a member, copied from its disk.
struct PeerPair {
    serial: Serial,
    own: Arc<CertifiedKey>,
    config: Arc<ClientConfig>,
}

impl PeerPair {
    fn copy(node: &Node) -> Result<Self> {
        Self::read(&node.disk().join("etcd"))
    }

    fn read(directory: &Path) -> Result<Self> {
        let certificate = CertificateDer::from_pem_file(directory.join("peer.crt"))?;
        let key = PrivateKeyDer::from_pem_file(directory.join("peer.key"))?;
        let serial = Serial::from_der(&certificate).context("no certificate of a member")?;
        let own = certified_key(&certificate, key.secret_der())?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(directory.join("ca.crt"))?)?;
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)?;
        Ok(Self { serial, own, config: Arc::new(config) })
    }

    /// Whether etcd on this node answers a request of a peer with this pair: for the list of members, which needs no
    /// other proof. An error if it does not answer and does not refuse the certificate.
    async fn opens(&self, node: &Node) -> Result<bool> {
        match request_members(peer_port(node)?, self.own.clone()).await? {
            PeerAnswer::Served(answer) => {
                ensure!(answer.starts_with("HTTP/1.1 200"), "etcd answers {answer}");
                Ok(true)
            }
            PeerAnswer::Refused => Ok(false),
        }
    }

    /// Whether etcd on this node refuses this pair, and the same process serves that of a member. An etcd that ends closes
    /// connections, too, and an error says that.
    async fn is_refused(&self, node: &Node, member: &Self) -> Result<bool> {
        let serving = node.etcd().context("no etcd")?.instance;
        let is_refused = !self.opens(node).await?;
        ensure!(member.opens(node).await?, "etcd refuses a member");
        let present = node.etcd().context("no etcd")?.instance;
        ensure!(present == serving && present.is_alive(), "etcd has restarted meanwhile");
        Ok(is_refused)
    }

    /// A connection to the etcd of this node, as a peer, on which it has answered a request.
    async fn connect(&self, node: &Node) -> Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(SocketAddr::new(node.address, PEER_PORT)).await?;
        let connector = TlsConnector::from(self.config.clone());
        let mut stream = connector.connect(ServerName::from(node.address), stream).await?;
        stream.write_all(b"GET /members HTTP/1.1\r\nHost: etcd\r\n\r\n").await?;
        let mut answer = [0; 12];
        in_time("an answer of etcd", stream.read_exact(&mut answer)).await??;
        ensure!(answer == *b"HTTP/1.1 200", "etcd answers {:?}", String::from_utf8_lossy(&answer));
        Ok(stream)
    }
}

/// The number of the membership that the cluster has recorded with this certificate of a member; `None` if it has no
/// such record.
pub(super) async fn recorded_member(owner: &Owner, serial: Serial) -> Result<Option<u64>> {
    let mut credentials = CredentialsClient::new(owner.curators()?.channel());
    let listed = patiently(async || credentials.list(wire::ListCredentialsRequest {}).await).await?;
    let recorded = listed.credentials.into_iter().find(|credential| credential.serial == serial.to_string());
    let peer = recorded.filter(|recorded| recorded.kind() == wire::CertificateKind::EtcdPeer);
    Ok(peer.map(|recorded| recorded.member_id))
}

pub(super) fn member_of(node: &Node) -> Result<u64> {
    let membership = node.files().read_membership()?;
    membership.and_then(|membership| membership.member).context("it is no member")
}

/// Makes it a voting member of a cluster of two.
async fn become_member(owner: &Owner, node: &Node) -> Result<PeerPair> {
    owner.roles(node, &["consensus-member"], &[]).await?;
    node.until_control_plane(true).await?;
    owner.until_well(2, 2).await?;
    PeerPair::copy(node)
}

/// Ends its membership, and waits until the remaining member rejects its pair and has restarted, which ends connections of
/// before.
async fn end_membership(owner: &Owner, node: &Node, pair: &PeerPair, first: &Node) -> Result<()> {
    let former = first.etcd().context("no etcd")?.instance;
    owner.roles(node, &[], &["consensus-member"]).await?;
    node.until_control_plane(false).await?;
    first.until_etcd_is_another(&former).await?;
    let own = PeerPair::copy(first)?;
    // While it restarts, nothing listens there.
    until("the remaining member rejects the pair and accepts its own", async || {
        Ok(pair.is_refused(first, &own).await.unwrap_or(false))
    })
    .await
    .with_context(|| first.report())?;
    first.until_no_restart_is_due().await?;
    owner.until_well(1, 2).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_member_opens_no_peer_port() -> TestResult {
    let (owner, first) = founded().await?;
    let node = joined(&owner, &first).await?;
    let pair = become_member(&owner, &node).await?;
    assert!(pair.opens(&first).await?, "a member opens it");

    end_membership(&owner, &node, &pair, &first).await?;
    let own = PeerPair::copy(&first)?;
    let serving = first.etcd().map(|etcd| etcd.instance);
    let mut accepted = 0;
    for _ in 0..20 {
        accepted += u32::from(pair.opens(&first).await?);
    }
    assert_eq!(accepted, 0, "requests of 20 with the pair of a removed member were accepted");
    assert!(pair.is_refused(&first, &own).await?, "a member still opens it");
    assert_eq!(first.etcd().map(|etcd| etcd.instance), serving, "it refused nothing while it restarted");
    let etcd = node.disk().join("etcd");
    until("its disk has no pair any more", async || {
        Ok(!etcd.join("peer.crt").exists() && !etcd.join("peer.key").exists())
    })
    .await?;
    owner.until_well(1, 2).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_that_was_open_before_a_removal_ends() -> TestResult {
    let (owner, first) = founded().await?;
    let node = joined(&owner, &first).await?;
    let pair = become_member(&owner, &node).await?;
    let mut open = pair.connect(&first).await?;
    let former = first.etcd().context("no etcd")?.instance;

    owner.roles(&node, &[], &["consensus-member"]).await?;
    // Its membership has ended then, and the bound begins.
    node.until_control_plane(false).await?;
    let mut rest = Vec::new();
    // A connection that is cut off has ended, too.
    let ended = tokio::time::timeout(OPEN_CONNECTION_BOUND, open.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "the connection of the removed member is still open\n{}", first.report());
    first.until_etcd_is_another(&former).await?;
    let own = PeerPair::copy(&first)?;
    until("etcd listens again, and rejects the pair", async || {
        Ok(pair.is_refused(&first, &own).await.unwrap_or(false))
    })
    .await?;
    owner.until_well(1, 2).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_comes_back_has_another_serial() -> TestResult {
    let (owner, first) = founded().await?;
    let node = joined(&owner, &first).await?;
    let former = become_member(&owner, &node).await?;
    let former_member = member_of(&node)?;
    end_membership(&owner, &node, &former, &first).await?;

    let present = become_member(&owner, &node).await?;
    assert_ne!(present.serial, former.serial);
    assert_eq!(recorded_member(&owner, former.serial).await?, Some(former_member));
    assert_eq!(recorded_member(&owner, present.serial).await?, Some(member_of(&node)?));
    for (where_to, member) in [("the other member", &first), ("its own etcd", &node)] {
        member.until_no_restart_is_due().await?;
        let refused = former.is_refused(member, &present).await;
        assert!(refused.context(where_to)?, "the pair of its former membership opens {where_to}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn founders_serial_is_recorded() -> TestResult {
    let (owner, mut first) = founded().await?;
    let (serial, member) = (PeerPair::copy(&first)?.serial, member_of(&first)?);
    assert_eq!(recorded_member(&owner, serial).await?, Some(member));

    // A release before this one recorded nothing. The founder does, with its next start.
    let endpoint = etcd_member::client_endpoint(&first.files());
    let client = Client::new(vec![endpoint], Namespace::new("curator")?);
    client.delete_unguarded(&KeySelector::One(CERTIFICATES.key(serial)?)).await?;
    assert_eq!(recorded_member(&owner, serial).await?, None);
    first.stop().await?;
    first.start()?;
    first.until_control_plane(true).await?;
    assert_eq!(recorded_member(&owner, serial).await?, Some(member));
    Ok(())
}

/// etcd is started with the list if there is one. There is one at its first start already, when nobody is removed yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_is_there_before_the_first_start_of_etcd() -> TestResult {
    let (owner, first) = founded().await?;
    let node = joined(&owner, &first).await?;
    become_member(&owner, &node).await?;
    for member in [&first, &node] {
        assert!(reads_list(member)?, "it was started without the list");
        let list = std::fs::read(member.disk().join("etcd/peer.crl"))?;
        let listed = parse_peer_revocation_list(&list).context("it is damaged")?;
        assert!(listed.is_empty(), "{listed:?}");
    }
    Ok(())
}

/// Whether etcd of this node was started with this argument.
fn has_argument(node: &Node, wanted: &str) -> Result<bool> {
    let pid = node.etcd().context("no etcd")?.instance.pid;
    let command_line = std::fs::read(format!("/proc/{pid}/cmdline"))?;
    let mut arguments = command_line.split(|byte| *byte == 0);
    Ok(arguments.any(|argument| argument == wanted.as_bytes()))
}

/// Whether etcd of this node was started with the list.
fn reads_list(node: &Node) -> Result<bool> {
    has_argument(node, "--peer-crl-file")
}

/// Whether the list of this node is one that etcd can read.
fn has_whole_list(node: &Node) -> bool {
    let list = std::fs::read(node.disk().join("etcd/peer.crl"));
    list.is_ok_and(|list| parse_peer_revocation_list(&list).is_some())
}

fn damage_list(node: &Node) -> Result<()> {
    Ok(std::fs::write(node.disk().join("etcd/peer.crl"), b"torn")?)
}

/// A running etcd rejects every peer while its list is damaged, and one that starts would not read it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_list_is_reported_and_replaced() -> TestResult {
    let (owner, mut first) = founded().await?;
    let mut node = joined(&owner, &first).await?;
    become_member(&owner, &node).await?;
    until_list_is_recorded(&node).await?;
    damage_list(&node)?;
    until("the list is whole again", async || Ok(has_whole_list(&node))).await?;

    // No leader and no quorum: the node is needed for both.
    node.cut_power().await?;
    first.cut_power().await?;
    damage_list(&node)?;
    node.start()?;
    let problems = node.facts.problems.clone();
    until("the damaged list is reported", async || {
        Ok(problems.describe().is_some_and(|problem| problem.contains("peer.crl is damaged")))
    })
    .await
    .with_context(|| node.report())?;
    first.start()?;
    node.until_control_plane(true).await?;
    until("the list is whole again", async || Ok(has_whole_list(&node))).await?;
    owner.until_well(2, 2).await?;
    Ok(())
}

/// Waits until the node has the list that is recorded in etcd, and its copy.
async fn until_list_is_recorded(node: &Node) -> Result<()> {
    let endpoint = etcd_member::client_endpoint(&node.files());
    let client = Client::new(vec![endpoint], Namespace::new("curator")?);
    until("the node has the recorded list", async || {
        let Ok(Some(record)) = client.get(&PeerRevocations::etcd_key()?).await else { return Ok(false) };
        let recorded = PeerRevocations::decode(&record.key, &record.value)?.list;
        let read = |name| std::fs::read(node.disk().join("etcd").join(name)).ok();
        Ok(["peer.crl", "peer.crl.copy"].into_iter().all(|name| read(name).as_ref() == Some(&recorded)))
    })
    .await
}

/// Starts a member without any other one, and with these files of its list lost. Returns whether its etcd was started with
/// the list, once it is started and a problem with this text is reported.
async fn start_alone_without(node: &mut Node, lost: &[&str], problem: &str) -> Result<bool> {
    for name in lost {
        std::fs::remove_file(node.disk().join("etcd").join(name))?;
    }
    node.start()?;
    let problems = node.facts.problems.clone();
    until("the lost list is reported", async || {
        let reported = problems.describe().is_some_and(|described| described.contains(problem));
        let is_alive = node.etcd().is_some_and(|etcd| etcd.instance.is_alive());
        // The process is a launcher at first.
        Ok(reported && is_alive && has_argument(node, "--data-dir").unwrap_or(false))
    })
    .await
    .with_context(|| format!("{:?}\n{}", problems.describe(), node.report()))?;
    reads_list(node)
}

/// A member with a pair and without a list has lost the list: no leader can be called, so its etcd starts with the copy. It
/// starts without a list only if that is lost, too, because the other members may need it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_list_is_reported_and_its_copy_is_used() -> TestResult {
    let (owner, mut first) = founded().await?;
    let mut node = joined(&owner, &first).await?;
    become_member(&owner, &node).await?;
    until_list_is_recorded(&node).await?;
    for (lost, problem, starts_with_it) in [
        (&["peer.crl"][..], "its copy is used", true),
        (&["peer.crl", "peer.crl.copy"][..], "a removed member may connect to this one", false),
    ] {
        node.cut_power().await?;
        first.cut_power().await?;
        let is_read = start_alone_without(&mut node, lost, problem).await?;
        assert_eq!(is_read, starts_with_it, "{lost:?} is lost");
        first.start()?;
        node.until_control_plane(true).await?;
        until_list_is_recorded(&node).await?;
        let problems = node.facts.problems.clone();
        until("nothing is reported any more", async || {
            Ok(problems.describe().is_none_or(|described| !described.contains("list of revoked peers")))
        })
        .await?;
        owner.until_well(2, 2).await?;
    }
    Ok(())
}
