//! What the shepherd says to the curators of a cluster, and what they answer.
//!
//! The shepherd is an owner of the cluster: the cluster was founded with the public half of a key that is sealed in the
//! BMDB, and [replaced](crate::model::cluster::key) there from time to time. By that key alone it may do one thing, claim a
//! certificate, and what it claims lasts for an hour and is kept in memory. Whoever holds the cluster's lease next claims
//! another one. Nothing here is more than the curators' contract
//! allows any owner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::DateTime;
use prost::Message as _;
use secrecy::{ExposeSecret as _, SecretSlice};
use tonic::{Code, Status};
use uuid::Uuid;

use crate::bmdb::cluster_key::current_secret;
use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::secret::{SecretError, SecretsKey};
use crate::curator::clock::Clock;
use crate::curator::identity::{Identity, IdentityError};
use crate::curator::leader_channel::{Curators, LeaderChannel};
use crate::curator::pki::{Anchor, PkiError, Renewal, Validity, renewal};
use crate::curator::snapshot::{LIMIT, Snapshot, SnapshotError, digest_of};
use crate::curator::tls::{certified, client_config};
use crate::manager::cluster::kubernetes::on_node;
use crate::model::cluster::credential::Issued;
use crate::model::cluster::declared::{ServiceView, known};
use crate::model::cluster::key::{Public, Which};
use crate::model::cluster::kubernetes::{CONTROLLER, Known, WORKER};
use crate::model::cluster::state::{CONSENSUS_MEMBER, EtcdMember, Founded, Health, Node, NodeState, Seen};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::credentials_client::CredentialsClient;
use crate::proto::curator::v1::declarations_client::DeclarationsClient;
use crate::proto::curator::v1::management_client::ManagementClient;
use crate::proto::curator::v1::node_health::Kind;
use crate::proto::curator::v1::service_status::Kind as Doing;
use crate::proto::curator::v1::snapshots_client::SnapshotsClient;
use crate::proto::curator::v1::tickets_client::TicketsClient;

/// How long a certificate that was claimed is good.
const CERTIFICATE_LIFETIME: Duration = Duration::from_hours(1);
/// How long curators have to answer.
pub const ANSWER: Duration = Duration::from_secs(5);
/// For all of a snapshot: meanwhile nothing else is done for the cluster.
const SNAPSHOT: Duration = Duration::from_mins(1);

/// Why nothing was answered.
#[derive(Debug, thiserror::Error)]
pub enum CuratorError {
    /// The key of the owner cannot be had.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// It is none.
    #[error("the shepherd's key as an owner of the cluster cannot be used: {0}")]
    Key(#[from] IdentityError),
    /// The cluster's authority is none.
    #[error("the certificate of the cluster's authority cannot be used: {0}")]
    Authority(#[from] PkiError),
    /// TLS cannot be had.
    #[error("the shepherd's certificate for the cluster cannot be used: {0}")]
    Tls(#[from] rustls::Error),
    /// It refused, or could not.
    #[error("{doing}: {said}", said = .status.message())]
    Said {
        /// What was asked.
        doing: &'static str,
        /// The answer.
        status: Status,
    },
    /// Nobody answered.
    #[error("{doing}: no curator of the cluster answered within {} s", ANSWER.as_secs())]
    Silent {
        /// What was asked.
        doing: &'static str,
    },
    /// The database.
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    /// What was sent is no snapshot.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A snapshot takes too long.
    #[error("taking a snapshot: it was not all here within {} s", SNAPSHOT.as_secs())]
    Slow,
    /// What is to be asked of a machine cannot be.
    #[error("{0}")]
    Order(&'static str),
    /// None of the shepherd's keys is taken.
    #[error(
        "claiming a certificate of the cluster: its curators refuse every key that the shepherd has for it ({tried} were \
         tried); see docs/issues/cluster-key-refused.md"
    )]
    AllRefused {
        /// How many there are.
        tried: usize,
    },
    /// Something was answered that cannot be.
    #[error("a curator said something that cannot be: {0}")]
    Odd(String),
}

/// The shepherd's key as an owner of a cluster that is in force, made when there is none.
pub async fn owner_key(bmdb: &Bmdb, secrets: &SecretsKey, cluster: Uuid) -> Result<Identity, CuratorError> {
    let name = current_secret(cluster);
    let made = secrets.get_or_create(bmdb, &name, || {
        let key = Identity::generate().map_err(|error| error.to_string())?;
        Ok(SecretSlice::from(key.pkcs8().to_vec()))
    });
    Ok(Identity::from_pkcs8(made.await?.expose_secret())?)
}

/// The way to the curators of one cluster.
pub struct Way {
    curators: Curators,
    validity: Option<Validity>,
    /// By which of the shepherd's keys it was found.
    pub by: Which,
    following: tokio::task::JoinHandle<()>,
}

impl Drop for Way {
    fn drop(&mut self) {
        self.following.abort();
    }
}

impl Way {
    fn new(
        founded: &Founded,
        epoch: u64,
        certificate: &[u8],
        (by, key): (Which, &Identity),
    ) -> Result<Self, CuratorError> {
        let anchor = Anchor::parse(&founded.ca_certificate)?;
        let own = certified(certificate, key.pkcs8())?;
        let configure =
            move |expected| client_config(anchor.clone(), expected, Some(own.clone()), Clock::host());
        // Kept with what they answer; what is not kept is heard again.
        let curators = Curators::of_epoch(Arc::new(configure), epoch, Arc::new(|_| Ok(())));
        curators.learn(founded.curators.iter().cloned());
        let follower = curators.clone();
        let following = tokio::spawn(async move { match follower.follow().await {} });
        Ok(Self { curators, validity: Validity::read(certificate), by, following })
    }

    /// Claims a certificate by one of the owner's keys, and goes by that from then on.
    ///
    /// Curators of a lower epoch than this are not followed.
    pub async fn claim(
        founded: &Founded,
        epoch: u64,
        (by, key): (Which, &Identity),
    ) -> Result<Self, CuratorError> {
        let claiming = Self::new(founded, epoch, key.certificate_der(), (by, key))?;
        let lifetime_ms = u64::try_from(CERTIFICATE_LIFETIME.as_millis()).unwrap_or(u64::MAX);
        let mut credentials = CredentialsClient::new(claiming.channel());
        let asking = credentials.claim_owner(wire::ClaimOwnerRequest { lifetime_ms });
        let claimed = answered("claiming a certificate of the cluster", asking).await?;
        Self::new(founded, claiming.epoch(), &claimed.certificate, (by, key))
    }

    /// Whether its certificate is to be claimed anew.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let now = Clock::host().now();
        self.validity.is_none_or(|validity| !matches!(renewal(validity, now), Renewal::NotBefore(_)))
    }

    /// The highest epoch of the cluster that its curators spoke of.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.curators.epoch()
    }

    pub(super) fn channel(&self) -> LeaderChannel {
        self.curators.channel()
    }

    fn management(&self) -> ManagementClient<LeaderChannel> {
        ManagementClient::new(self.channel())
    }

    /// What the leader says of its nodes, and where curators are.
    ///
    /// Declared roles are asked for where somebody here declared one: they can be long. So is Kubernetes.
    pub async fn see(&self, declared: bool, kubernetes: bool) -> Result<(Seen, Vec<String>), CuratorError> {
        let mut management = self.management();
        let listed =
            answered("listing nodes", management.list_nodes(wire::ListNodesRequest::default())).await?;
        let etcd =
            answered("listing members", management.get_consensus(wire::GetConsensusRequest {})).await?;
        let cluster =
            answered("asking for the directory", management.get_cluster(wire::GetClusterRequest {})).await?;
        let declared = if declared {
            let mut declarations = DeclarationsClient::new(self.channel());
            let list = declarations.list(wire::ListDeclarationsRequest {});
            known(&answered("listing declared roles", list).await?.declarations)
        } else {
            BTreeMap::new()
        };
        let kubernetes = if kubernetes { self.kubernetes().await } else { Known::NotAsked };
        let nodes = listed.nodes.into_iter().map(node).collect::<Result<_, _>>()?;
        let etcd = etcd.members.into_iter().map(|member| EtcdMember {
            node: Some(member.node_id).filter(|id| !id.is_empty() && member.started),
            learner: member.learner,
            reachable: member.reachable,
        });
        let curators = cluster.directory.unwrap_or_default().curators;
        self.curators.learn(curators.iter().cloned());
        Ok((Seen { nodes, etcd: etcd.collect(), declared, kubernetes }, curators))
    }

    /// Makes a ticket for one node.
    pub async fn ticket(&self, purpose: String, lifetime: Duration) -> Result<Vec<u8>, CuratorError> {
        let request = wire::CreateTicketRequest {
            lifetime_ms: u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX),
            uses: Some(1),
            purpose,
        };
        let mut tickets = TicketsClient::new(self.channel());
        Ok(answered("making a ticket", tickets.create(request)).await?.secret)
    }

    /// Lets a node in by its key.
    pub async fn approve(&self, key: [u8; 32]) -> Result<(), CuratorError> {
        let request = wire::ApproveRequest { public_key: key.to_vec() };
        answered("approving a node", self.management().approve(request)).await.map(drop)
    }

    /// Changes a node's roles.
    pub async fn roles(&self, node: &str, give: &[String], take: &[String]) -> Result<(), CuratorError> {
        let request =
            wire::UpdateRolesRequest { node_id: node.to_owned(), give: give.to_vec(), take: take.to_vec() };
        answered("changing roles", self.management().update_roles(request)).await.map(drop)
    }

    /// Declares a role as it is kept, or replaces its declaration.
    pub async fn declare(&self, kept: &[u8]) -> Result<(), CuratorError> {
        let declaration = wire::Declaration::decode(kept)
            .map_err(|error| CuratorError::Odd(format!("a declaration that cannot be read: {error}")))?;
        let request = wire::PutDeclarationRequest { declaration: Some(declaration), expected_revision: None };
        let mut declarations = DeclarationsClient::new(self.channel());
        answered("declaring a role", declarations.put(request)).await.map(drop)
    }

    /// Has a role forgotten that no node has.
    pub async fn undeclare(&self, role: &str) -> Result<(), CuratorError> {
        let request = wire::DeleteDeclarationRequest { role: role.to_owned() };
        let mut declarations = DeclarationsClient::new(self.channel());
        match answered("withdrawing a role", declarations.delete(request)).await {
            Err(CuratorError::Said { status, .. }) if status.code() == Code::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    /// Takes a snapshot of its records: what they are, and as they were sent.
    pub async fn snapshot(&self) -> Result<(Snapshot, Vec<u8>), CuratorError> {
        let taken = tokio::time::timeout(SNAPSHOT, self.take_snapshot());
        taken.await.map_err(|_| CuratorError::Slow)?
    }

    async fn take_snapshot(&self) -> Result<(Snapshot, Vec<u8>), CuratorError> {
        let doing = "taking a snapshot";
        let mut snapshots = SnapshotsClient::new(self.channel());
        let mut pieces = answered(doing, snapshots.take(wire::TakeSnapshotRequest {})).await?;
        let (mut encoded, mut known_by) = (Vec::new(), Vec::new());
        loop {
            let piece = tokio::time::timeout(ANSWER, pieces.message());
            let piece = piece.await.map_err(|_| CuratorError::Silent { doing })?;
            let Some(piece) = piece.map_err(|status| CuratorError::Said { doing, status })? else { break };
            encoded.extend(piece.piece);
            if encoded.len() > LIMIT {
                return Err(SnapshotError::TooLarge(encoded.len()).into());
            }
            known_by = piece.sha256;
        }
        if known_by != digest_of(&encoded) {
            return Err(CuratorError::Odd("a snapshot that was cut off or changed on its way".to_owned()));
        }
        Ok((Snapshot::decode(&encoded)?, encoded))
    }

    /// Has a person's certificate signed.
    pub async fn issue_owner(
        &self,
        name: &str,
        public_key: [u8; 32],
        lifetime: Duration,
    ) -> Result<Issued, CuratorError> {
        let request = wire::IssueOwnerRequest {
            public_key: public_key.to_vec(),
            name: name.to_owned(),
            lifetime_ms: u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX),
        };
        let mut credentials = CredentialsClient::new(self.channel());
        let said = answered("having a certificate signed", credentials.issue_owner(request)).await?;
        let odd = || CuratorError::Odd("a certificate without a number or an end".to_owned());
        let credential = said.credential.ok_or_else(odd)?;
        Ok(Issued {
            certificate: said.certificate,
            serial: credential.serial,
            expires_at: DateTime::from_timestamp_millis(credential.not_after_ms).ok_or_else(odd)?,
        })
    }

    /// Has every certificate for that key refused, and the one of that number whether they know it or not.
    pub async fn revoke_owner(&self, public_key: [u8; 32], serial: Option<&str>) -> Result<(), CuratorError> {
        use wire::revoke_credentials_request::Which;
        let mut credentials = CredentialsClient::new(self.channel());
        let listed = credentials.list(wire::ListCredentialsRequest {});
        let listed = answered("listing certificates", listed).await?.credentials;
        let of_the_key = listed.iter().filter(|listed| listed.public_key == public_key && !listed.revoked);
        let mut serials: BTreeSet<&str> = of_the_key.map(|listed| listed.serial.as_str()).collect();
        serials.extend(serial);
        for serial in serials {
            let request = wire::RevokeCredentialsRequest { which: Some(Which::Serial(serial.to_owned())) };
            answered("having a certificate refused", credentials.revoke(request)).await?;
        }
        Ok(())
    }

    /// Has that key take certificates from now on, beside those that may.
    pub async fn add_owner_key(&self, key: Public) -> Result<(), CuratorError> {
        let request = wire::AddOwnerKeyRequest { public_key: key.to_vec() };
        let mut credentials = CredentialsClient::new(self.channel());
        let added = credentials.add_owner_key(request);
        answered("having another key of the shepherd taken", added).await.map(drop)
    }

    /// Has that key refused for ever, and every certificate for it.
    pub async fn remove_owner_key(&self, key: Public) -> Result<(), CuratorError> {
        let request = wire::RemoveOwnerKeyRequest { public_key: key.to_vec() };
        let mut credentials = CredentialsClient::new(self.channel());
        let removed = credentials.remove_owner_key(request);
        answered("having a former key of the shepherd refused", removed).await.map(drop)
    }

    /// Takes a node out for ever.
    pub async fn decommission(&self, node: &str) -> Result<(), CuratorError> {
        let request = wire::DecommissionRequest { node_id: node.to_owned() };
        answered("decommissioning a node", self.management().decommission(request)).await.map(drop)
    }

    /// Forgets a node.
    pub async fn delete(&self, node: &str) -> Result<(), CuratorError> {
        let request = wire::DeleteRequest { node_id: node.to_owned(), ..Default::default() };
        answered("deleting a node", self.management().delete(request)).await.map(drop)
    }
}

/// Where the curator of the first node is reached.
#[must_use]
pub fn first_curator(address: &str, port: u16) -> Option<String> {
    Some(std::net::SocketAddr::new(address.parse().ok()?, port).to_string())
}

/// Whether this is the certificate of the authority of that cluster.
#[must_use]
pub fn is_authority_of(certificate: &[u8], cluster: Uuid) -> bool {
    Anchor::parse(certificate).is_ok_and(|anchor| anchor.cluster == cluster)
}

pub(super) async fn answered<T>(
    doing: &'static str,
    asking: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, CuratorError> {
    match tokio::time::timeout(ANSWER, asking).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(CuratorError::Said { doing, status }),
        Err(_) => Err(CuratorError::Silent { doing }),
    }
}

fn node(listed: wire::ListedNode) -> Result<Node, CuratorError> {
    let odd = |what: &str| CuratorError::Odd(format!("a node without {what}"));
    let node = listed.node.ok_or_else(|| odd("a record"))?;
    let state = match node.state() {
        wire::NodeState::New => NodeState::New,
        wire::NodeState::Standby => NodeState::Standby,
        wire::NodeState::Up => NodeState::Up,
        wire::NodeState::Decommissioned => NodeState::Decommissioned,
        wire::NodeState::Unspecified => return Err(odd("a state")),
    };
    let said = node.roles.unwrap_or_default();
    let built_in = [
        (CONSENSUS_MEMBER, said.consensus_member.is_some()),
        (CONTROLLER, said.kubernetes_controller),
        (WORKER, said.kubernetes_worker),
    ];
    let built_in = built_in.into_iter().filter(|(_, given)| *given).map(|(role, _)| role.to_owned());
    let health = listed.health.unwrap_or_default();
    let status = node.status.unwrap_or_default();
    let silence = Duration::from_millis(health.since_heartbeat_ms.unwrap_or(0));
    Ok(Node {
        key: node.public_key.try_into().map_err(|_| odd("a key of 32 bytes"))?,
        machine: node.machine_id.parse().ok(),
        state,
        roles: built_in.chain(said.declared).collect(),
        health: match health.kind() {
            Kind::Healthy => Health::Healthy,
            Kind::HeartbeatTimeout => Health::Silent(silence),
            Kind::Unknown | Kind::Unspecified => Health::Unknown,
        },
        services: status.services.into_iter().map(service).collect(),
        kubernetes: status.kubernetes.map(on_node),
        id: node.node_id,
    })
}

/// What a service or a component does, as people are told.
pub(super) const fn doing(kind: Doing) -> &'static str {
    match kind {
        // Of a newer node, perhaps.
        Doing::Unspecified => "unknown",
        Doing::Waiting => "waiting",
        Doing::Starting => "starting",
        Doing::Healthy => "healthy",
        Doing::Unhealthy => "unhealthy",
        Doing::BackingOff => "backing off",
        Doing::Ended => "ended",
        Doing::Stopping => "stopping",
    }
}

fn service(said: wire::ServiceStatus) -> ServiceView {
    ServiceView {
        state: doing(said.kind()).to_owned(),
        since: DateTime::from_timestamp_millis(said.since_ms),
        role: said.role,
        service: said.service,
        restarts: said.restarts,
        message: said.message,
    }
}
