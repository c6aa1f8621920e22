//! Addresses of nodes: what a connection proves, and what a node gets that claims another one.
//!
//! The curators have the rule of the programs, but for loopback addresses, at which the clients of these tests are.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use curator_client::curator_channel::open_channel_from;
use curator_client::node::Node;
use curator_client::tls::client_config;
use proto::curator::v1 as wire;
use proto::curator::v1::kubernetes_client::KubernetesClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use rcgen::{KeyPair, PublicKeyData as _};
use shepherd_curator::node_address::{AddressRule, AddressSource};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, put_kubernetes, refusal, status};
use testkit::etcd_servers::in_time;
use testkit::key_holder::Holder;

const WORKER: &str = "kubernetes-worker";

async fn cluster() -> Result<Cluster> {
    let address_rule = AddressRule { source: AddressSource::Connection, allow_loopback: true };
    let cluster = Cluster::start_with(ClusterOptions { address_rule, ..ClusterOptions::default() }).await?;
    cluster.until_one_leads(None).await?;
    Ok(cluster)
}

/// A node, which calls from an address of its own.
struct Machine {
    holder: Holder,
    certificate: Vec<u8>,
    channel: Channel,
}

impl Machine {
    async fn come(cluster: &Cluster, source: &str) -> Result<Self> {
        let holder = Holder::new()?;
        let certificate = cluster.take_in(&holder).await?;
        let channel = channel_from(cluster, &holder, &certificate, source)?;
        Ok(Self { holder, certificate, channel })
    }

    /// Has another address from now on.
    fn move_to(&mut self, cluster: &Cluster, source: &str) -> Result<()> {
        self.channel = channel_from(cluster, &self.holder, &self.certificate, source)?;
        Ok(())
    }

    async fn report(&self, address: &str) -> Result<Response<wire::UpdateStatusResponse>, Status> {
        let status =
            wire::NodeStatus { external_address: address.to_owned(), ..status(([127, 0, 0, 1], 0).into()) };
        let request = wire::UpdateStatusRequest { node_id: self.holder.id.to_string(), status: Some(status) };
        NodesClient::new(self.channel.clone()).update_status(request).await
    }

    async fn certificate(
        &self,
        component: wire::KubernetesComponent,
    ) -> Result<Response<wire::IssueKubernetesCertificateResponse>, Status> {
        let public_key = KeyPair::generate().map(|key| key.subject_public_key_info()).unwrap_or_default();
        let request = wire::IssueKubernetesCertificateRequest { component: component.into(), public_key };
        KubernetesClient::new(self.channel.clone()).issue_certificate(request).await
    }

    /// Sends a heartbeat, and returns once the leader has received it.
    async fn beat(&self) -> Result<()> {
        let (beat, beats) = mpsc::channel(1);
        let mut calling = NodesClient::new(self.channel.clone());
        let mut answers = calling.heartbeat(ReceiverStream::new(beats)).await?.into_inner();
        beat.send(wire::HeartbeatRequest {}).await?;
        in_time("an answer", answers.message()).await??.context("it ended")?;
        Ok(())
    }

    /// The address in its record.
    async fn recorded(&self, cluster: &Cluster) -> Result<Option<String>> {
        let key = Node::etcd_key(&self.holder.id)?;
        let record = cluster.client_of(0).get(&key).await?.context("no record")?;
        Ok(Node::decode(&key, &record.value)?.status.map(|status| status.address.to_string()))
    }

    /// Records an address as a release did that believed each report.
    async fn record(&self, cluster: &Cluster, address: &str) -> Result<()> {
        let key = Node::etcd_key(&self.holder.id)?;
        let client = cluster.client_of(0);
        let record = client.get(&key).await?.context("no record")?;
        let mut node = Node::decode(&key, &record.value)?;
        node.status.as_mut().context("no status")?.address = address.parse()?;
        client.put_unguarded(&key, &node.encode()?).await?;
        Ok(())
    }
}

fn channel_from(cluster: &Cluster, holder: &Holder, certificate: &[u8], source: &str) -> Result<Channel> {
    let own = Some(holder.with(certificate)?);
    let config = client_config(cluster.anchor.clone(), None, own, cluster.time.clock())?;
    Ok(open_channel_from(source.parse()?, &cluster.address(0)?, config))
}

/// The addresses that a certificate names.
fn addresses(certificate: &[u8]) -> Result<Vec<IpAddr>> {
    let (_, certificate) = X509Certificate::from_der(certificate)?;
    let names = certificate.subject_alternative_name()?.context("no names")?;
    let addresses = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::IPAddress(bytes) => <[u8; 4]>::try_from(*bytes).ok().map(IpAddr::from),
        _ => None,
    });
    Ok(addresses.collect())
}

#[tokio::test]
async fn reported_address_counts_for_nothing() -> TestResult {
    let cluster = cluster().await?;
    let mut node = Machine::come(&cluster, "127.0.0.2").await?;
    for claim in ["127.0.0.3", "10.0.0.7", "2001:db8::7"] {
        let (code, text) = refusal(node.report(claim).await)?;
        assert_eq!(code, Code::FailedPrecondition, "{text}");
        let expected = format!(
            "{} reports the address {claim}, and 127.0.0.2 is proved for it: let it connect to the curators from \
             {claim}, or give its order the address 127.0.0.2",
            node.holder.id
        );
        assert_eq!(text, expected);
    }
    assert_eq!(node.recorded(&cluster).await?, None, "nothing of a refused report is stored");
    node.report("127.0.0.2").await?;
    assert_eq!(node.recorded(&cluster).await?.as_deref(), Some("127.0.0.2"));
    assert_eq!(refusal(node.report("127.0.0.3").await)?.0, Code::FailedPrecondition);
    assert_eq!(node.recorded(&cluster).await?.as_deref(), Some("127.0.0.2"));

    // The address of the curator's own machine is no exception for others.
    let curator = cluster.address(0)?;
    let (curator, _) = curator.rsplit_once(':').context("no port")?;
    assert_eq!(refusal(node.report(curator).await)?.0, Code::FailedPrecondition);

    // A machine that has another address now, such as after a new lease of DHCP, is followed.
    node.move_to(&cluster, "127.0.0.4")?;
    node.report("127.0.0.4").await?;
    assert_eq!(node.recorded(&cluster).await?.as_deref(), Some("127.0.0.4"));
    Ok(())
}

#[tokio::test]
async fn worker_gets_no_certificate_for_another_address() -> TestResult {
    use wire::KubernetesComponent as Component;
    const API_SERVER: &str = "127.0.0.9";
    let cluster = cluster().await?;
    let owner = cluster.as_owner().await?;
    put_kubernetes(owner.clone()).await?;
    let worker = Machine::come(&cluster, "127.0.0.2").await?;
    let roles = wire::UpdateRolesRequest {
        node_id: worker.holder.id.to_string(),
        add_roles: vec![WORKER.to_owned()],
        ..Default::default()
    };
    ManagementClient::new(owner).update_roles(roles).await?;
    worker.report("127.0.0.2").await?;
    let issued = worker.certificate(Component::KubeletServer).await?.into_inner();
    assert_eq!(addresses(&issued.certificate)?, ["127.0.0.2".parse::<IpAddr>()?]);

    assert_eq!(refusal(worker.report(API_SERVER).await)?.0, Code::FailedPrecondition);
    let issued = worker.certificate(Component::KubeletServer).await?.into_inner();
    assert_eq!(addresses(&issued.certificate)?, ["127.0.0.2".parse::<IpAddr>()?]);

    // It had the address before the cluster was updated to this rule.
    worker.record(&cluster, API_SERVER).await?;
    worker.report(API_SERVER).await?;
    let (code, text) = refusal(worker.certificate(Component::KubeletServer).await)?;
    assert_eq!(code, Code::FailedPrecondition, "{text}");
    assert!(text.contains("reports the address 127.0.0.9, and 127.0.0.2 is proved for it"), "{text}");
    // A client's certificate names no address.
    let issued = worker.certificate(Component::Kubelet).await?.into_inner();
    let (_, kubelet) = X509Certificate::from_der(&issued.certificate)?;
    assert!(kubelet.subject_alternative_name()?.is_none());
    // It needs nobody's help to have its own address again.
    worker.report("127.0.0.2").await?;
    let issued = worker.certificate(Component::KubeletServer).await?.into_inner();
    assert_eq!(addresses(&issued.certificate)?, ["127.0.0.2".parse::<IpAddr>()?]);
    Ok(())
}

#[tokio::test]
async fn two_nodes_that_claim_one_address_get_one_sentence() -> TestResult {
    let cluster = cluster().await?;
    let first = Machine::come(&cluster, "127.0.0.2").await?;
    // Behind the same gateway: its address is the source of both.
    let second = Machine::come(&cluster, "127.0.0.2").await?;
    first.report("127.0.0.2").await?;
    first.beat().await?;

    let (code, text) = refusal(second.report("127.0.0.2").await)?;
    assert_eq!(code, Code::FailedPrecondition, "{text}");
    let expected = format!(
        "the address of {} would be 127.0.0.2, which {} has: give one of the two another address, or delete the one \
         that is gone",
        second.holder.id, first.holder.id
    );
    assert_eq!(text, expected);
    assert_eq!(second.recorded(&cluster).await?, None, "nothing of a refused report is stored");
    first.report("127.0.0.2").await?;

    // A node that is gone blocks nobody: its machine may have been installed again.
    cluster.time.pass(11);
    second.report("127.0.0.2").await?;
    assert_eq!(second.recorded(&cluster).await?.as_deref(), Some("127.0.0.2"));
    Ok(())
}

/// A node has the address of another one in its record, because it reported that to a release that believed it. It sends
/// heartbeats, and the other one gets its certificates nevertheless.
#[tokio::test]
async fn address_that_was_never_proved_gives_way_to_one_that_is() -> TestResult {
    use wire::KubernetesComponent as Component;
    const VICTIM: &str = "127.0.0.9";
    let cluster = cluster().await?;
    let owner = cluster.as_owner().await?;
    put_kubernetes(owner.clone()).await?;
    let squatter = Machine::come(&cluster, "127.0.0.2").await?;
    let victim = Machine::come(&cluster, VICTIM).await?;
    let mut management = ManagementClient::new(owner);
    for node in [&squatter, &victim] {
        let roles = wire::UpdateRolesRequest {
            node_id: node.holder.id.to_string(),
            add_roles: vec![WORKER.to_owned()],
            ..Default::default()
        };
        management.update_roles(roles).await?;
    }
    victim.report(VICTIM).await?;
    squatter.report("127.0.0.2").await?;
    squatter.record(&cluster, VICTIM).await?;
    squatter.report(VICTIM).await?;

    // Its heartbeats show where it is.
    squatter.beat().await?;
    let issued = victim.certificate(Component::KubeletServer).await?.into_inner();
    assert_eq!(addresses(&issued.certificate)?, [VICTIM.parse::<IpAddr>()?]);
    assert_eq!(refusal(squatter.certificate(Component::KubeletServer).await)?.0, Code::FailedPrecondition);

    // A node that comes to the address gets it, too, and keeps it once its own heartbeats prove it.
    victim.report(VICTIM).await?;
    victim.beat().await?;
    let third = Machine::come(&cluster, VICTIM).await?;
    let (code, text) = refusal(third.report(VICTIM).await)?;
    assert_eq!(code, Code::FailedPrecondition, "{text}");
    assert!(text.contains(&format!("{VICTIM}, which {} has", victim.holder.id)), "{text}");
    Ok(())
}

/// A new leader has received no heartbeat yet. Until it could have, a node behind the same gateway gets no address of
/// another one.
#[tokio::test]
async fn change_of_the_leader_frees_no_address() -> TestResult {
    let mut cluster = cluster().await?;
    let first = Machine::come(&cluster, "127.0.0.2").await?;
    let mut second = Machine::come(&cluster, "127.0.0.2").await?;
    first.report("127.0.0.2").await?;
    cluster.stop(0).await?;
    cluster.run(0).await?;
    cluster.until_one_leads(None).await?;
    second.move_to(&cluster, "127.0.0.2")?;
    let (code, text) = refusal(second.report("127.0.0.2").await)?;
    assert_eq!(
        (code, text.contains(&first.holder.id.to_string())),
        (Code::FailedPrecondition, true),
        "{text}"
    );
    assert_eq!(second.recorded(&cluster).await?, None, "nothing of a refused report is stored");
    cluster.time.pass(11);
    second.report("127.0.0.2").await?;
    Ok(())
}

/// Who takes over the address of a machine that is off does not get it as a node.
#[tokio::test]
async fn assigned_address_is_kept_for_its_node() -> TestResult {
    let cluster = cluster().await?;
    let first = Machine::come(&cluster, "127.0.0.2").await?;
    let mut second = Machine::come(&cluster, "127.0.0.3").await?;
    let mut owner = ManagementClient::new(cluster.as_owner().await?);
    let assign = |node: &Machine, address: &str| wire::ApproveRequest {
        public_key: node.holder.key.0.to_vec(),
        address: address.to_owned(),
    };
    owner.approve(assign(&first, "127.0.0.2")).await?;
    first.report("127.0.0.2").await?;
    second.report("127.0.0.3").await?;
    // No heartbeat of the first one arrives for longer than the leader waits for one.
    cluster.time.pass(11);
    second.move_to(&cluster, "127.0.0.2")?;
    let (code, text) = refusal(second.report("127.0.0.2").await)?;
    assert_eq!(code, Code::FailedPrecondition, "{text}");
    assert!(text.contains(&format!("127.0.0.2, which {} has", first.holder.id)), "{text}");
    assert_eq!(second.recorded(&cluster).await?.as_deref(), Some("127.0.0.3"));

    // An owner may give it to another node, as after a change in a provider's list.
    owner.approve(assign(&first, "127.0.0.3")).await?;
    owner.approve(assign(&second, "127.0.0.2")).await?;
    second.report("127.0.0.2").await?;
    assert_eq!(second.recorded(&cluster).await?.as_deref(), Some("127.0.0.2"));

    let listed = owner.list_nodes(wire::ListNodesRequest::default()).await?.into_inner().nodes;
    let assigned = |node: &Machine| {
        let id = node.holder.id.to_string();
        let mut found =
            listed.iter().filter(|listed| listed.node.as_ref().is_some_and(|node| node.node_id == id));
        found.next().and_then(|listed| listed.assigned_address.clone())
    };
    assert_eq!(
        (assigned(&first), assigned(&second)),
        (Some("127.0.0.3".to_owned()), Some("127.0.0.2".to_owned()))
    );
    let others = listed.iter().filter(|listed| listed.assigned_address.as_deref() == Some(""));
    assert_eq!(others.count(), listed.len() - 2, "nothing is assigned to a node that no owner named");
    Ok(())
}

#[tokio::test]
async fn node_has_the_address_that_an_owner_assigned() -> TestResult {
    let cluster = cluster().await?;
    let node = Machine::come(&cluster, "127.0.0.2").await?;
    node.report("127.0.0.2").await?;
    let mut owner = ManagementClient::new(cluster.as_owner().await?);
    let assign = |address: &str| wire::ApproveRequest {
        public_key: node.holder.key.0.to_vec(),
        address: address.to_owned(),
    };
    for (wrong, expected) in [
        ("node-7", "the address \"node-7\" is not an IP address"),
        ("0.0.0.0", "0.0.0.0 cannot be the address of a node: other machines do not reach a node there"),
    ] {
        let (code, text) = refusal(owner.approve(assign(wrong)).await)?;
        assert_eq!((code, text.as_str()), (Code::InvalidArgument, expected));
    }
    // It connects from another one, as a machine with two addresses may.
    owner.approve(assign("127.0.0.5")).await?;
    node.report("127.0.0.5").await?;
    assert_eq!(node.recorded(&cluster).await?.as_deref(), Some("127.0.0.5"));
    // An approval without an address takes nothing away.
    owner.approve(assign("")).await?;
    let (code, text) = refusal(node.report("127.0.0.2").await)?;
    assert_eq!(code, Code::FailedPrecondition, "{text}");
    assert!(text.contains("reports the address 127.0.0.2, and was assigned 127.0.0.5"), "{text}");
    assert_eq!(node.recorded(&cluster).await?.as_deref(), Some("127.0.0.5"));

    owner.approve(assign("127.0.0.2")).await?;
    node.report("127.0.0.2").await?;
    assert_eq!(node.recorded(&cluster).await?.as_deref(), Some("127.0.0.2"));
    Ok(())
}
