//! A cluster of curators for one test, each beside a real etcd server, and its clients.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use curator::bootstrap::{
    BootstrapError, BootstrapRequest, BootstrapResult, bootstrap_cluster, create_authority,
    issue_curator_from_local_etcd,
};
use curator::kubernetes::key_rotation::TOKEN_OVERLAP;
use curator::membership::peer_url;
use curator::node_address::AddressRule;
use curator::service::curator_error::CuratorError;
use curator::service::curator_server::{Curator, CuratorSettings};
use curator::service::gate_monitor::{GateMonitor, GateNumbers};
use curator::service::statement_monitor::StatementMonitor;
use curator::statement_record::statement_record_key;
use curator_client::certificate::{Serial, Validity};
use curator_client::cluster::{authority_record_key, decode_authority};
use curator_client::curator_channel::open_channel;
use curator_client::leader_channel::{LeaderTracker, TlsConfigProvider};
use curator_client::node::{ConsensusMember, Node, NodeState};
use curator_client::node_status::NodeStatus;
use curator_client::peer_identity::Revocations;
use curator_client::pki::{Authority, CURATOR_LIFETIME, NODE_LIFETIME, TrustAnchor};
use curator_client::tls::{CuratorCheck, CuratorCheckProvider, client_config, curator_client_config};
use etcd::client::Client;
use etcd::namespace::KeySelector;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::kubernetes_client::KubernetesClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::registration_client::RegistrationClient;
use proto::curator::v1::tickets_client::TicketsClient;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::etcd_servers::{self, PATIENCE, in_time};
use crate::key_holder::Holder;
use crate::shifted_clock::Shifted;

/// The desired Kubernetes settings of a test's cluster.
#[must_use]
pub fn kubernetes_settings() -> wire::KubernetesSettings {
    wire::KubernetesSettings {
        bundle: "ab".repeat(32),
        service_range: "10.96.0.0/16".to_owned(),
        pod_range: "10.128.0.0/20".to_owned(),
        node_prefix: 24,
        domain: "cluster.local".to_owned(),
        ..Default::default()
    }
}

/// Sets the desired Kubernetes settings of a cluster.
pub async fn put_kubernetes(owner: Channel) -> Result<()> {
    let request =
        wire::PutKubernetesRequest { settings: Some(kubernetes_settings()), expected_revision: Some(0) };
    KubernetesClient::new(owner).put(request).await?;
    Ok(())
}

/// Lifetime that a certificate request has by default.
pub const AN_HOUR_MS: u64 = 3_600_000;

/// The options of a cluster of curators.
pub struct ClusterOptions {
    /// The number of curators.
    pub size: usize,
    /// The address of the loopback interface at which they listen.
    pub listen: IpAddr,
    /// The lease of a leader.
    pub ttl: Duration,
    /// The time between two comparisons with the members of etcd.
    pub sync_interval: Duration,
    /// Where curators take the addresses of nodes from.
    pub address_rule: AddressRule,
    /// The deadline of calls to etcd.
    pub deadline: Duration,
    /// How many files the process of a curator may open, as its gate counts.
    pub files: u64,
    /// How many curators, the last ones, first show a node's certificate, as a release without curators' certificates. With
    /// any, the cluster was founded without a statement.
    pub old_curators: usize,
    /// How long every curator must have been ready before the first statement of such a cluster.
    pub first_statement_wait: Duration,
    /// The time between two comparisons of the leader's clock with those of the others.
    pub clock_interval: Duration,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            size: 1,
            listen: Ipv4Addr::LOCALHOST.into(),
            // A host that is busy with other tests may stop for some seconds, and a leader that loses its lease ends
            // everything that depends on it.
            ttl: Duration::from_mins(1),
            sync_interval: Duration::from_millis(200),
            address_rule: AddressRule::reported_on_loopback(),
            deadline: Duration::from_secs(30),
            files: 1 << 20,
            old_curators: 0,
            first_statement_wait: Duration::ZERO,
            // Tests count the connections that curators accept.
            clock_interval: Duration::from_hours(1),
        }
    }
}

/// Curators, each beside its own etcd. They end with this value.
pub struct Cluster {
    running: Vec<Option<Running>>,
    /// The nodes that the curators run on.
    pub nodes: Vec<Holder>,
    /// The one owner, who may order anything.
    pub owner: Holder,
    /// The id of the cluster.
    pub id: Uuid,
    /// The certificate of its authority, as a client trusts it.
    pub anchor: TrustAnchor,
    /// The authority that signed the first certificates.
    pub authority: Authority,
    /// The clock of curators and clients.
    pub time: Shifted,
    /// Why the curator that leads signs no statement.
    pub statements: StatementMonitor,
    /// The certificates that the curators show, or showed last.
    curator_certificates: Vec<Vec<u8>>,
    /// By how many seconds the clock of each curator is ahead of `time`.
    clocks_ahead: Vec<Arc<AtomicU32>>,
    wanted: ClusterOptions,
    /// The members of etcd, one for each curator.
    pub etcd: etcd_servers::Cluster,
}

struct Running {
    address: SocketAddr,
    gate: GateMonitor,
    cancel: CancellationToken,
    task: JoinSet<Result<(), CuratorError>>,
}

impl Cluster {
    /// Starts one curator, which leads.
    pub async fn start() -> Result<Self> {
        let cluster = Self::start_with(ClusterOptions::default()).await?;
        cluster.until_one_leads(None).await?;
        Ok(cluster)
    }

    /// Founds a cluster and starts its curators.
    pub async fn start_with(wanted: ClusterOptions) -> Result<Self> {
        let nodes = (0..wanted.size).map(|_| Holder::new()).collect::<Result<Vec<_>>>()?;
        let etcd = etcd_servers::Cluster::start_named(nodes.iter().map(|node| node.id.to_string()).collect())
            .await?;
        let (owner, id, time) = (Holder::new()?, Uuid::new_v4(), Shifted::new());
        let founding = founding(id, &nodes[0], &owner, time.now())?;
        let client = etcd.client();
        let founded: BootstrapResult = bootstrap_cluster(&client, &founding, time.now()).await?;
        if wanted.old_curators > 0 {
            client.delete_unguarded(&KeySelector::One(statement_record_key()?)).await?;
        }
        let anchor = TrustAnchor::parse(&founded.ca_certificate)?;
        let key = authority_record_key()?;
        let authority = decode_authority(&key, &client.get(&key).await?.context("authority")?.value)?;
        let members = client.list_members().await?;
        // Other tests cover the ways in which nodes join.
        for node in &nodes[1..] {
            let mut record = Node::new(node.key, NodeState::Up, time.now());
            let member = members.iter().find(|member| member.name == node.id.to_string());
            record.roles.consensus_member =
                member.map(|member| ConsensusMember { member_id: member.id.0, peers: BTreeMap::new() });
            client.put_unguarded(&Node::etcd_key(&node.id)?, &record.encode()?).await?;
        }
        let running = nodes.iter().map(|_| None).collect();
        let curator_certificates = vec![Vec::new(); nodes.len()];
        let clocks_ahead = nodes.iter().map(|_| Arc::default()).collect();
        let mut cluster = Self {
            running,
            nodes,
            owner,
            id,
            anchor,
            authority,
            time,
            statements: StatementMonitor::default(),
            curator_certificates,
            clocks_ahead,
            wanted,
            etcd,
        };
        for number in 0..cluster.nodes.len() {
            let shown = if number + cluster.wanted.old_curators < cluster.nodes.len() {
                cluster.issue_curator_certificate(number).await?
            } else {
                certificate(&cluster.authority, &cluster.nodes[number], cluster.time.now())?
            };
            cluster.run_with(number, shown).await?;
        }
        Ok(cluster)
    }

    /// Starts the curator of a node, on another port than before. The node's status has the new port.
    pub async fn run(&mut self, number: usize) -> Result<()> {
        let shown = self.issue_curator_certificate(number).await?;
        self.run_with(number, shown).await
    }

    /// Like [`Cluster::run`], and the curator shows this certificate.
    pub async fn run_with(&mut self, number: usize, shown: Vec<u8>) -> Result<()> {
        self.curator_certificates[number] = shown;
        let node = &self.nodes[number];
        let client = self.client_of(number);
        let gate = GateMonitor::default();
        let curator =
            self.bind_curator(node, number, &self.curator_certificates[number], gate.clone()).await?;
        let address = curator.address;
        let key = Node::etcd_key(&node.id)?;
        let record = client.get(&key).await?.context("no record")?;
        let mut record = Node::decode(&key, &record.value)?;
        record.status =
            Some(NodeStatus::from_report(&status(address), self.time.now()).map_err(anyhow::Error::msg)?);
        client.put_unguarded(&key, &record.encode()?).await?;
        let (cancel, mut task) = (CancellationToken::new(), JoinSet::new());
        let stop = cancel.clone();
        task.spawn(async move { curator.run(&stop).await });
        self.running[number] = Some(Running { address, gate, cancel, task });
        Ok(())
    }

    /// A curator of any node, beside this etcd and with this certificate. It listens and does not run yet.
    pub async fn bind_curator(
        &self,
        node: &Holder,
        etcd: usize,
        certificate: &[u8],
        gate: GateMonitor,
    ) -> Result<Curator> {
        let shown = SingleCertAndKey::from(node.with(certificate)?);
        let curator = Curator::bind(CuratorSettings {
            node_id: node.id,
            client: self.client_of(etcd),
            listen: SocketAddr::new(self.wanted.listen, 0),
            server_certificate: Arc::new(shown),
            ttl: self.wanted.ttl,
            sync_interval: self.wanted.sync_interval,
            first_statement_wait: self.wanted.first_statement_wait,
            clock_interval: self.wanted.clock_interval,
            token_overlap: TOKEN_OVERLAP,
            clock: self.time.clock_ahead(self.clocks_ahead[etcd].clone()),
            files: self.wanted.files,
            gate,
            statements: self.statements.clone(),
            address_rule: self.wanted.address_rule,
        });
        Ok(curator.await?)
    }

    /// Issues the certificate that a curator shows from now on, from its own etcd, which records it.
    async fn issue_curator_certificate(&self, number: usize) -> Result<Vec<u8>> {
        let (node, now) = (&self.nodes[number], self.time.now());
        match issue_curator_from_local_etcd(&self.client_of(number), node.key, now).await {
            Ok(certificate) => Ok(certificate),
            // The curator runs nevertheless, as one does that had its certificate before.
            Err(BootstrapError::NodeNotInCluster(_)) => {
                let (serial, validity) =
                    (Serial::new(rand::random()), Validity::starting(now, CURATOR_LIFETIME));
                Ok(self.authority.issue_curator_certificate(&node.key, serial, validity)?.certificate)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The certificate that a curator shows, or showed last.
    #[must_use]
    pub fn certificate_of_curator(&self, number: usize) -> &[u8] {
        &self.curator_certificates[number]
    }

    /// Stops a curator as its role server does, and returns its result.
    pub async fn stop(&mut self, number: usize) -> Result<()> {
        let mut running = self.running[number].take().context("it does not run")?;
        running.cancel.cancel();
        in_time("its end", running.task.join_next()).await?.context("it ran")???;
        Ok(())
    }

    /// Sets the clock of a curator ahead of all others.
    pub fn set_clock_ahead(&self, number: usize, by_seconds: u32) {
        self.clocks_ahead[number].store(by_seconds, Ordering::SeqCst);
    }

    /// Ends a curator as a crash does: it releases nothing.
    pub fn kill(&mut self, number: usize) {
        self.running[number] = None;
    }

    /// A client of the etcd beside a curator.
    #[must_use]
    pub fn client_of(&self, number: usize) -> Client {
        self.etcd.client_of(&[number]).with_deadline(self.wanted.deadline)
    }

    /// The address at which a curator listens.
    pub fn address(&self, number: usize) -> Result<String> {
        Ok(self.running[number].as_ref().context("it does not run")?.address.to_string())
    }

    /// The numbers of a curator's gate.
    pub fn gate(&self, number: usize) -> Result<GateNumbers> {
        Ok(self.running[number].as_ref().context("it does not run")?.gate.numbers())
    }

    /// Opens a channel to one curator, as the client with this certificate.
    pub fn channel(&self, number: usize, own: Option<Arc<CertifiedKey>>) -> Result<Channel> {
        let config = client_config(self.anchor.clone(), None, own, self.time.clock())?;
        Ok(open_channel(&self.address(number)?, config))
    }

    /// Tracks the leader, as the client with this certificate.
    #[must_use]
    pub fn curators(&self, own: Option<Arc<CertifiedKey>>) -> LeaderTracker {
        let (anchor, clock) = (self.anchor.clone(), self.time.clock());
        let configure = move |expected| client_config(anchor.clone(), expected, own.clone(), clock.clone());
        self.tracker(Arc::new(configure))
    }

    /// Tracks the leader, and accepts nobody who is no curator, as the client with this certificate.
    #[must_use]
    pub fn strict_curators(&self, own: Option<Arc<CertifiedKey>>) -> LeaderTracker {
        let (anchor, check, clock) = (self.anchor.clone(), self.curators_only(), self.time.clock());
        let configure = move |expected| {
            curator_client_config(anchor.clone(), check.clone(), expected, own.clone(), clock.clone())
        };
        self.tracker(Arc::new(configure))
    }

    /// The demand for a curator's certificate, of which none is revoked.
    #[must_use]
    pub fn curators_only(&self) -> CuratorCheckProvider {
        let (anchors, revocations) = (vec![self.anchor.clone()], Arc::new(Revocations::default()));
        Arc::new(move || {
            Ok(CuratorCheck::Curator { anchors: anchors.clone(), revocations: revocations.clone() })
        })
    }

    fn tracker(&self, configure: TlsConfigProvider) -> LeaderTracker {
        let curators = LeaderTracker::new(configure);
        let addresses = (0..self.nodes.len()).filter_map(|number| self.address(number).ok());
        curators.set_directory(addresses);
        curators
    }

    /// An owner's channel to the first curator, with a certificate that was claimed there.
    pub async fn as_owner(&self) -> Result<Channel> {
        let mut claiming = CredentialsClient::new(self.channel(0, Some(self.owner.itself()?))?);
        let claimed =
            claiming.claim_owner(wire::ClaimOwnerRequest { lifetime_ms: AN_HOUR_MS }).await?.into_inner();
        self.channel(0, Some(self.owner.with(&claimed.certificate)?))
    }

    /// Waits until one of the running curators leads, except the one that is left out. Returns its number.
    pub async fn until_one_leads(&self, left_out: Option<usize>) -> Result<usize> {
        let end = Instant::now() + PATIENCE;
        loop {
            for number in 0..self.nodes.len() {
                if Some(number) != left_out && self.running[number].is_some() && self.leads(number).await? {
                    return Ok(number);
                }
            }
            ensure!(Instant::now() < end, "nobody leads");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether a curator serves as the leader: then it rejects this call only because there is no certificate.
    async fn leads(&self, number: usize) -> Result<bool> {
        let mut management = ManagementClient::new(self.channel(number, None)?);
        let asking = management.get_cluster(wire::GetClusterRequest {});
        match tokio::time::timeout(Duration::from_secs(5), asking).await {
            Ok(Err(status)) => Ok(status.code() == Code::Unauthenticated),
            Ok(Ok(_)) => bail!("{number} let in a client that proved nothing"),
            Err(_) => Ok(false),
        }
    }

    /// Adds a machine as a node, in all steps, and returns its certificate.
    pub async fn take_in(&self, node: &Holder) -> Result<Vec<u8>> {
        let owner = self.as_owner().await?;
        let ticket = ticket(owner.clone(), Some(1)).await?;
        let mut registration = RegistrationClient::new(self.channel(0, Some(node.itself()?))?);
        registration.register(wire::RegisterRequest { ticket, ..Default::default() }).await?;
        let public_key = node.key.0.to_vec();
        let approving = wire::ApproveRequest { public_key, ..Default::default() };
        ManagementClient::new(owner).approve(approving).await?;
        match registration.commit(wire::CommitRequest {}).await?.into_inner().result {
            Some(wire::commit_response::Result::Membership(membership)) => Ok(membership.certificate),
            other => bail!("it was not taken in: {other:?}"),
        }
    }
}

/// The bootstrap of a test's cluster.
pub fn founding(id: Uuid, node: &Holder, owner: &Holder, now: Timestamp) -> Result<BootstrapRequest> {
    Ok(BootstrapRequest {
        authority: Arc::new(create_authority(id, now)?),
        name: "of a test".to_owned(),
        owner_keys: vec![owner.key],
        node_key: node.key,
        machine: None,
        labels: BTreeMap::new(),
        address: None,
        restore: None,
    })
}

/// A certificate of a node, as a curator would issue it now.
pub fn certificate(authority: &Authority, node: &Holder, now: Timestamp) -> Result<Vec<u8>> {
    let validity = Validity::starting(now, NODE_LIFETIME);
    Ok(authority.issue_node_certificate(&node.key, Serial::new(rand::random()), validity)?.certificate)
}

/// A new ticket's secret.
pub async fn ticket(owner: Channel, uses: Option<u32>) -> Result<Vec<u8>> {
    let request =
        wire::CreateTicketRequest { lifetime_ms: AN_HOUR_MS, max_uses: uses, purpose: "a test".to_owned() };
    Ok(TicketsClient::new(owner).create(request).await?.into_inner().secret)
}

/// The status that a node reports if its curator listens there.
#[must_use]
pub fn status(address: SocketAddr) -> wire::NodeStatus {
    wire::NodeStatus {
        external_address: address.ip().to_string(),
        curator_port: address.port().into(),
        version: "1.2.3".to_owned(),
        boot_id: "5f0dd4bc-9d39-4c9b-8c53-5f1b4e8c7d11".to_owned(),
        ..Default::default()
    }
}

/// The peer URL of a member at this address.
pub fn peer_url_of(address: &str) -> Result<String> {
    Ok(peer_url(address.parse()?))
}

/// The status with which a call was rejected.
pub fn refusal<T: std::fmt::Debug>(answer: Result<tonic::Response<T>, Status>) -> Result<(Code, String)> {
    match answer {
        Ok(answer) => bail!("it was let through: {:?}", answer.into_inner()),
        Err(status) => Ok((status.code(), status.message().to_owned())),
    }
}

/// Whether a repetition may find a leader: the curator knows of none, or was the leader until a moment ago. The second
/// case is always possible, because a leadership may end between the response to `Leader/Watch` and the call.
#[must_use]
pub fn found_no_leader(status: &Status) -> bool {
    match status.code() {
        Code::Unavailable => true,
        Code::Unimplemented => status.message().starts_with("this curator does not lead"),
        _ => false,
    }
}
