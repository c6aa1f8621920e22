//! Nodes that come back with another address, and are followed.
//!
//! The curators have the rule of the programs, but for loopback addresses: what a node reports counts for nothing. Every
//! connection comes from 127.0.0.1 here, so no node has an address that its connection proves, either. Each has the one
//! that the client of the shepherd assigns to it, from the list of a provider, and that the order of its machine names. A
//! host never loses an address of the loopback interface. What a host does that lost its address is decided by the tables
//! of `node_address` and `member_address`.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use rcgen::{KeyPair, PublicKeyData as _};
use shepherd::curator::membership::peer_url;
use shepherd::curator::node_address::{AddressRule, AddressSource};
use shepherd::manager::cluster::curators::{CuratorCallError, CuratorClient};
use shepherd::model::cluster::node_address::{AssignedAddress, NodeAddresses};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::kubernetes_client::KubernetesClient;
use shepherd::roleserver::cluster::etcd_member::read_peer_certificate;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use tokio::net::TcpStream;
use tonic::Code;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::node::Node;
use super::owner::{Owner, is_transient, patiently};
use super::peer_revocation::member_of;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

const API_SERVER_PORT: u16 = 6443;
/// The rule of the programs, with loopback addresses.
const RULE: AddressRule = AddressRule { source: AddressSource::Connection, allow_loopback: true };

/// A cluster of one node, and a client of the shepherd.
async fn founded() -> Result<(Owner, CuratorClient, Node)> {
    let (mut owner, mut node) = (Owner::new()?, Node::new()?);
    node.address_rule = RULE;
    node.ask(owner.founding_order())?;
    node.start()?;
    node.until_it_is_one().await?;
    owner.claim(&node).await?;
    let shepherd = owner.shepherd_client(&node).await?;
    assign(&shepherd, &node).await?;
    Ok((owner, shepherd, node))
}

/// Another node in the cluster of `first`, without roles.
async fn joined(owner: &Owner, shepherd: &CuratorClient, first: &Node) -> Result<Node> {
    let mut node = Node::new()?;
    node.address_rule = RULE;
    node.ask(owner.join(first).await?)?;
    node.start()?;
    assign(shepherd, &node).await?;
    node.until_it_is_one().await?;
    owner.wait_for_node_status(&node).await?;
    Ok(node)
}

/// Approves a node with its address in the provider's list, as soon as it has registered. Another call assigns another
/// address.
async fn assign(shepherd: &CuratorClient, node: &Node) -> Result<()> {
    until("it is approved with its address", async || {
        let Ok(key) = node.key() else { return Ok(false) };
        match shepherd.approve_node(key.0, Some(node.address)).await {
            Ok(()) => Ok(true),
            Err(error) if is_transient(&error) => Ok(false),
            // It has not registered yet.
            Err(CuratorCallError::Rejected { status, .. }) if status.code() == Code::NotFound => Ok(false),
            Err(error) => Err(error.into()),
        }
    })
    .await
    .with_context(|| node.report())
}

/// The addresses of a node, as the shepherd has them from its curators.
async fn observed(shepherd: &CuratorClient, node: &Node) -> Result<NodeAddresses> {
    let (key, mut addresses) = (node.key()?.0, None);
    until("the curators list the node", async || {
        match shepherd.observe_cluster(false, false).await {
            Ok((seen, _)) => addresses = Some(seen.node_by_key(&key).context("no such node")?.addresses),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(addresses.is_some())
    })
    .await?;
    addresses.context("no addresses")
}

/// Waits until the curators have refused the report of a node that has another address than the assigned one.
async fn until_refused(shepherd: &CuratorClient, node: &Node, former: IpAddr) -> Result<()> {
    let expected = format!("reports the address {}, and was assigned {former}", node.address);
    until("its report is refused", async || {
        Ok(node.facts.problems.describe().is_some_and(|problem| problem.contains(&expected)))
    })
    .await
    .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))?;
    let addresses = NodeAddresses { recorded: Some(former), assigned: AssignedAddress::Address(former) };
    assert_eq!(observed(shepherd, node).await?, addresses, "what a node reports counts for nothing");
    Ok(())
}

/// The addresses that a certificate names.
pub(super) fn addresses(certificate: &[u8]) -> Result<Vec<IpAddr>> {
    let (_, certificate) = X509Certificate::from_der(certificate)?;
    let names = certificate.subject_alternative_name()?.context("no names")?;
    let addresses = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::IPAddress(bytes) => <[u8; 4]>::try_from(*bytes).ok().map(IpAddr::from),
        _ => None,
    });
    Ok(addresses.collect())
}

fn curator_of(node: &Node) -> String {
    SocketAddr::new(node.address, CURATOR_PORT).to_string()
}

/// Waits until the record of a node has its present address.
async fn until_recorded(owner: &Owner, node: &Node) -> Result<()> {
    let (id, address) = (node.id()?.to_string(), node.address.to_string());
    until("the record of the node has its address", async || {
        let mut nodes = owner.nodes().await?.into_iter().filter_map(|listed| listed.node);
        let status = nodes.find(|node| node.node_id == id).and_then(|node| node.status);
        Ok(status.is_some_and(|status| status.external_address == address))
    })
    .await
    .with_context(|| node.report())
}

/// Waits until a node knows the curator at this address, and none at the former one.
async fn until_in_directory(node: &Node, present: &str, former: &str) -> Result<()> {
    until("the directory of curators has the present address alone", async || {
        let connection = node.facts.connection.latest().context("it is no node")?;
        let directory = connection.curators.directory();
        Ok(directory.contains(present) && !directory.contains(former))
    })
    .await
    .with_context(|| node.report())
}

/// Waits until a node of Kubernetes connects to the API server at this address, and to no other.
async fn until_endpoint(node: &Node, address: IpAddr) -> Result<()> {
    let (setup, expected) = (node.facts.setup.clone(), SocketAddr::new(address, API_SERVER_PORT).to_string());
    until("the node has the endpoint of the API server", async || {
        let setup = setup.latest().flatten();
        Ok(setup.is_some_and(|setup| setup.api_servers() == std::slice::from_ref(&expected)))
    })
    .await
    .with_context(|| node.report())
}

/// Gets the certificate that a kubelet serves with, as the node does.
async fn kubelet_certificate(node: &Node) -> Result<Vec<u8>> {
    let connection = node.facts.connection.latest().context("it is no node")?;
    let request = wire::IssueKubernetesCertificateRequest {
        component: wire::KubernetesComponent::KubeletServer.into(),
        public_key: KeyPair::generate()?.subject_public_key_info(),
    };
    let mut kubernetes = KubernetesClient::new(connection.curators.channel());
    Ok(patiently(async || kubernetes.issue_certificate(request.clone()).await).await?.certificate)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_that_comes_back_with_another_address_is_followed() -> TestResult {
    let (owner, shepherd, first) = founded().await?;
    let mut worker = joined(&owner, &shepherd, &first).await?;
    let former = worker.address;
    owner.put_kubernetes().await?;
    owner.roles(&worker, &["kubernetes-worker"], &[]).await?;
    until_recorded(&owner, &worker).await?;
    assert_eq!(addresses(&kubelet_certificate(&worker).await?)?, [worker.address]);

    worker.cut_power().await?;
    worker.move_elsewhere()?;
    worker.start()?;
    worker.until_it_is_one().await?;
    until_refused(&shepherd, &worker, former).await?;
    assert_eq!(addresses(&kubelet_certificate(&worker).await?)?, [former]);

    assign(&shepherd, &worker).await?;
    until_recorded(&owner, &worker).await?;
    assert_eq!(addresses(&kubelet_certificate(&worker).await?)?, [worker.address]);
    owner.until_well(1, 2).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_comes_back_with_another_address_is_followed() -> TestResult {
    let (owner, shepherd, mut first) = founded().await?;
    let second = joined(&owner, &shepherd, &first).await?;
    let mut third = joined(&owner, &shepherd, &first).await?;
    let worker = joined(&owner, &shepherd, &first).await?;
    for (node, voters) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, 4).await?;
    }
    owner.put_kubernetes().await?;
    owner.roles(&third, &["kubernetes-controller"], &[]).await?;
    owner.roles(&worker, &["kubernetes-worker"], &[]).await?;
    until_endpoint(&worker, third.address).await?;
    let (number, former, id) = (member_of(&third)?, third.address, third.id()?.to_string());
    until("the worker knows the third curator", async || {
        let connection = worker.facts.connection.latest().context("it is no node")?;
        Ok(connection.curators.directory().contains(&curator_of(&third)))
    })
    .await?;
    let before = curator_of(&third);

    // An order that names another address changes nothing while etcd runs, also for a role server that starts beside it.
    third.stop().await?;
    third.move_elsewhere()?;
    third.start()?;
    third.until_control_plane(true).await?;
    assert_ne!(third.address, former);
    assert_eq!(third.facts.address.latest(), Some(former));
    assert!(TcpStream::connect(&before).await.is_ok(), "its curator is where it was");
    third.cut_power().await?;
    third.start()?;
    third.until_control_plane(true).await?;
    assert_eq!(member_of(&third)?, number, "it is the same member");
    until_refused(&shepherd, &third, former).await?;
    for node in [&first, &second] {
        let connection = node.facts.connection.latest().context("it is no node")?;
        assert!(!connection.curators.directory().contains(&curator_of(&third)), "nobody proved its address");
    }

    assign(&shepherd, &third).await?;
    until_recorded(&owner, &third).await?;
    let url = peer_url(third.address);
    until("the member is listed at its address", async || {
        let members = owner.members().await?;
        Ok(members.iter().any(|member| {
            (member.member_id, &member.node_id, member.peer_urls.as_slice())
                == (number, &id, std::slice::from_ref(&url))
        }))
    })
    .await
    .with_context(|| third.report())?;
    until("the certificate of the member names its address", async || {
        let certificate = read_peer_certificate(&third.files()).context("it has none")?;
        Ok(addresses(&certificate)? == [third.address])
    })
    .await
    .with_context(|| third.report())?;
    owner.until_well(3, 4).await?;
    // Its curator is there, and the other nodes know that. So is its API server, for them.
    let _connection = TcpStream::connect(curator_of(&third)).await?;
    for node in [&first, &second, &worker] {
        until_in_directory(node, &curator_of(&third), &before).await?;
    }
    until_endpoint(&worker, third.address).await?;

    // A member without any connection of before connects to it, too: the etcd of the first one starts again.
    first.cut_power().await?;
    first.start()?;
    first.until_control_plane(true).await?;
    owner.learn(&[&first, &second, &third])?;
    owner.until_well(3, 4).await?;
    Ok(())
}
