//! The owner of a cluster of a test, who may give orders in it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::leader_channel::LeaderTracker;
use shepherd::curator_client::pki::TrustAnchor;
use shepherd::curator_client::statement_trust::StatementTrust;
use shepherd::curator_client::tls::{certified_key, client_config};
use shepherd::manager::cluster::curators::{CuratorCallError, CuratorClient};
use shepherd::model::cluster::owner_key::OwnerKeySlot;
use shepherd::model::cluster::state::ClusterIdentity;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::kubernetes_client::KubernetesClient;
use shepherd::proto::curator::v1::management_client::ManagementClient;
use shepherd::proto::curator::v1::tickets_client::TicketsClient;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use shepherd::roleserver::cluster::node_order::OrderKind;
use tokio::task::JoinSet;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::harness::etcd_servers::{PATIENCE, until};
use crate::nodes::node::Node;

/// An owner of a cluster, who may give orders in it.
pub(crate) struct Owner {
    key: Arc<Identity>,
    pub(crate) cluster: Uuid,
    curators: Option<(LeaderTracker, JoinSet<()>, TrustAnchor)>,
}

impl Owner {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { key: Arc::new(Identity::generate()?), cluster: Uuid::new_v4(), curators: None })
    }

    /// The same owner, without a claimed certificate.
    pub(crate) fn again(&self) -> Self {
        Self { key: self.key.clone(), cluster: self.cluster, curators: None }
    }

    /// The public half of its key.
    pub(crate) fn public_key(&self) -> Vec<u8> {
        self.key.public_key().to_vec()
    }

    /// The order that the first node gets.
    pub(crate) fn founding_order(&self) -> OrderKind {
        OrderKind::Found {
            cluster: self.cluster,
            name: "of a test".to_owned(),
            owner_keys: vec![hex::encode(self.key.public_key())],
            snapshot: None,
            image: None,
            revocations: BTreeMap::new(),
            epoch: 0,
        }
    }

    /// Claims a certificate from the cluster of this node, and follows its leader from then on.
    pub(crate) async fn claim(&mut self, node: &Node) -> Result<()> {
        let connection = node.facts.connection.latest().context("it is no node")?;
        self.claim_by([node], connection.anchor.clone()).await
    }

    /// The same from the leader among these nodes. `anchor` is the authority of the cluster, which may have replaced an
    /// earlier one.
    pub(crate) async fn claim_by<const N: usize>(
        &mut self,
        nodes: [&Node; N],
        anchor: TrustAnchor,
    ) -> Result<()> {
        let clock = nodes.first().context("no node")?.clock.clone();
        let addresses = nodes.map(|node| std::net::SocketAddr::new(node.address, CURATOR_PORT).to_string());
        let own = certified_key(self.key.certificate_der(), self.key.pkcs8())?;
        let (claiming, following) = way(&anchor, own, addresses.clone(), &clock);
        let mut credentials = CredentialsClient::new(claiming.channel());
        let claimed = patiently(async || {
            credentials.claim_owner(wire::ClaimOwnerRequest { lifetime_ms: 3_600_000 }).await
        })
        .await?;
        drop(following);
        let own = certified_key(&claimed.certificate, self.key.pkcs8())?;
        let (curators, following) = way(&anchor, own, addresses, &clock);
        self.curators = Some((curators, following, anchor));
        Ok(())
    }

    /// Adds the addresses of these nodes' curators.
    pub(crate) fn learn(&self, nodes: &[&Node]) -> Result<()> {
        let (curators, ..) = self.curators.as_ref().context("it owns nothing")?;
        let at = |node: &&Node| std::net::SocketAddr::new(node.address, CURATOR_PORT).to_string();
        curators.set_directory(nodes.iter().map(at));
        Ok(())
    }

    pub(crate) fn curators(&self) -> Result<&LeaderTracker> {
        Ok(&self.curators.as_ref().context("it owns nothing")?.0)
    }

    /// A client of the shepherd, which is this owner of the cluster of `node`.
    pub(crate) async fn shepherd_client(&self, node: &Node) -> Result<CuratorClient> {
        let (_, _, anchor) = self.curators.as_ref().context("it owns nothing")?;
        let founded = ClusterIdentity {
            ca_certificate: anchor.certificate.clone(),
            curators: vec![std::net::SocketAddr::new(node.address, CURATOR_PORT).to_string()],
            founded_at: node.clock.now(),
        };
        let trust = StatementTrust::in_memory(anchor.clone(), node.clock.clone());
        let key = || (OwnerKeySlot::Current, &*self.key);
        let mut client = None;
        until("the shepherd has a certificate", async || {
            match CuratorClient::claim_certificate(&founded, 0, key(), &trust).await {
                Ok(claimed) => client = Some(claimed),
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error.into()),
            }
            Ok(client.is_some())
        })
        .await?;
        client.context("no client")
    }

    /// The order for a machine to join, with a new ticket.
    pub(crate) async fn join(&self, through: &Node) -> Result<OrderKind> {
        let (curators, _, anchor) = self.curators.as_ref().context("it owns nothing")?;
        let mut tickets = TicketsClient::new(curators.channel());
        let request = wire::CreateTicketRequest {
            lifetime_ms: 3_600_000,
            max_uses: Some(1),
            purpose: "a test".to_owned(),
        };
        let made = patiently(async || tickets.create(request.clone()).await).await?;
        Ok(OrderKind::Join {
            ticket: hex::encode(made.secret),
            ca_certificate: hex::encode(&anchor.certificate),
            curators: vec![std::net::SocketAddr::new(through.address, CURATOR_PORT).to_string()],
            epoch: 0,
            statement: None,
        })
    }

    /// Approves the node of this key, as soon as it has registered.
    pub(crate) async fn approve(&self, node: &Node) -> Result<()> {
        let mut management = ManagementClient::new(self.curators()?.channel());
        until("it has registered and is approved", async || {
            let Ok(key) = node.key() else { return Ok(false) };
            let approving = wire::ApproveRequest { public_key: key.0.to_vec(), ..Default::default() };
            let approved = management.approve(approving).await;
            match approved {
                Ok(_) => Ok(true),
                Err(status) if matches!(status.code(), Code::NotFound | Code::Unavailable) => Ok(false),
                Err(status) => Err(status.into()),
            }
        })
        .await
        .with_context(|| node.report())
    }

    /// Adds and removes roles. Repeats the call for as long as it has to wait.
    pub(crate) async fn roles(&self, node: &Node, give: &[&str], take: &[&str]) -> Result<wire::Node> {
        self.update_roles(wire::UpdateRolesRequest {
            node_id: node.id()?.to_string(),
            add_roles: give.iter().map(|&name| name.to_owned()).collect(),
            remove_roles: take.iter().map(|&name| name.to_owned()).collect(),
            ..Default::default()
        })
        .await
    }

    /// Ends the membership of a node with a disk that is not wiped.
    pub(crate) async fn remove_member(&self, node: &Node) -> Result<wire::Node> {
        self.update_roles(wire::UpdateRolesRequest {
            node_id: node.id()?.to_string(),
            remove_roles: vec!["consensus-member".to_owned()],
            start_rotation: true,
            ..Default::default()
        })
        .await
    }

    async fn update_roles(&self, request: wire::UpdateRolesRequest) -> Result<wire::Node> {
        let mut management = ManagementClient::new(self.curators()?.channel());
        let answer = patiently(async || management.update_roles(request.clone()).await).await?;
        answer.node.context("no node")
    }

    /// Sets the desired Kubernetes of the cluster: without it no node can get a Kubernetes role.
    pub(crate) async fn put_kubernetes(&self) -> Result<()> {
        let mut kubernetes = KubernetesClient::new(self.curators()?.channel());
        let settings = Some(crate::harness::curators::kubernetes_settings());
        let request = wire::PutKubernetesRequest { settings, expected_revision: None };
        patiently(async || kubernetes.put(request.clone()).await).await?;
        Ok(())
    }

    /// All nodes, and how the leader evaluates each.
    pub(crate) async fn nodes(&self) -> Result<Vec<wire::ListedNode>> {
        let mut management = ManagementClient::new(self.curators()?.channel());
        let listed =
            patiently(async || management.list_nodes(wire::ListNodesRequest::default()).await).await?;
        Ok(listed.nodes)
    }

    /// Waits until a node has reported its location.
    pub(crate) async fn wait_for_node_status(&self, node: &Node) -> Result<()> {
        let id = node.id()?.to_string();
        let reported = until("the node has reported its location", async || {
            let nodes = self.nodes().await?.into_iter().filter_map(|listed| listed.node);
            Ok(nodes.into_iter().any(|node| node.node_id == id && node.status.is_some()))
        });
        reported.await.with_context(|| node.report())
    }

    /// Deletes a node, as one of a machine that is gone.
    pub(crate) async fn delete(&self, node: &Node) -> Result<()> {
        let mut management = ManagementClient::new(self.curators()?.channel());
        let request = wire::DeleteRequest {
            node_id: node.id()?.to_string(),
            bypass_has_roles: true,
            bypass_not_decommissioned: true,
            ..Default::default()
        };
        until("the node is deleted", async || match management.delete(request.clone()).await {
            Ok(_) => Ok(true),
            // The response to an earlier call was lost.
            Err(status) if status.code() == Code::NotFound => Ok(true),
            Err(status) if passes(&status) => Ok(false),
            Err(status) => Err(status.into()),
        })
        .await
    }

    /// The replacement of the cluster's authority, if there is one.
    pub(crate) async fn authority_rotation(&self) -> Result<Option<wire::AuthorityRotation>> {
        let mut management = ManagementClient::new(self.curators()?.channel());
        let cluster = patiently(async || management.get_cluster(wire::GetClusterRequest {}).await).await?;
        Ok(cluster.authority_rotation)
    }

    /// The members of etcd, from the curator.
    pub(crate) async fn members(&self) -> Result<Vec<wire::EtcdMember>> {
        let mut management = ManagementClient::new(self.curators()?.channel());
        Ok(patiently(async || management.get_consensus(wire::GetConsensusRequest {}).await).await?.members)
    }

    /// Waits until this many members vote and are reachable, and this many nodes are healthy.
    pub(crate) async fn until_well(&self, voters: usize, healthy: usize) -> Result<()> {
        self.until_counted(voters, voters, healthy).await
    }

    /// The same if some of all these members are out of reach.
    pub(crate) async fn until_well_without(&self, all: usize, voters: usize) -> Result<()> {
        self.until_counted(all, voters, voters).await
    }

    async fn until_counted(&self, all: usize, voters: usize, healthy: usize) -> Result<()> {
        let mut last = String::new();
        let waited = until("the cluster is well", async || {
            let members = self.members().await?;
            let nodes = self.nodes().await?;
            let vote = members.iter().filter(|member| !member.learner && member.started && member.reachable);
            let live = nodes.iter().filter(|listed| {
                listed.health.is_some_and(|health| health.kind() == wire::node_health::Kind::Healthy)
            });
            let (vote, live) = (vote.count(), live.count());
            last = format!("{vote} of {} vote, {live} of {} are healthy", members.len(), nodes.len());
            Ok(vote == voters && members.len() == all && live == healthy)
        });
        let waited = waited.await;
        waited.with_context(|| last.clone())
    }
}

fn way<const N: usize>(
    anchor: &TrustAnchor,
    own: Arc<rustls::sign::CertifiedKey>,
    addresses: [String; N],
    clock: &Clock,
) -> (LeaderTracker, JoinSet<()>) {
    let (anchor, clock) = (anchor.clone(), clock.clone());
    let configure = move |expected| client_config(anchor.clone(), expected, Some(own.clone()), clock.clone());
    let curators = LeaderTracker::new(Arc::new(configure));
    curators.set_directory(addresses);
    let mut following = JoinSet::new();
    following.spawn({
        let curators = curators.clone();
        async move { match curators.track_leader().await {} }
    });
    (curators, following)
}

/// Repeats a call until its response is not "try again".
pub(crate) async fn patiently<T>(
    mut call: impl AsyncFnMut() -> Result<tonic::Response<T>, Status>,
) -> Result<T> {
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        match call().await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if passes(&status) && std::time::Instant::now() < end => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(status) => return Err(status.into()),
        }
    }
}

/// Whether a call of the shepherd's client may succeed later.
pub(super) fn is_transient(error: &CuratorCallError) -> bool {
    match error {
        CuratorCallError::Rejected { status, .. } => passes(status),
        CuratorCallError::TimedOut { .. } | CuratorCallError::NotFollowed { .. } => true,
        _ => false,
    }
}

/// tonic reports a connection that breaks in the middle of a response as another code than UNAVAILABLE.
fn passes(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Unimplemented)
}
