//! Client of a cluster's curators.
//!
//! The shepherd is an owner of the cluster: the cluster was founded with the public half of a key that is sealed in the
//! BMDB, and that key is [replaced](crate::model::cluster::owner_key) from time to time. The key alone allows one
//! thing: to claim a certificate. The claimed certificate lasts for an hour and is kept in memory. The next holder of
//! the cluster's lease claims another one. Everything here uses only what the curators' contract allows any owner.
//!
//! From the first statement of the cluster's authority on, only a curator's certificate that is not revoked is followed
//! ([`statements`](crate::manager::cluster::statements)).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message as _;
use secrecy::{ExposeSecret as _, SecretSlice};
use tonic::{Code, Status};
use uuid::Uuid;

use crate::bmdb::cluster::owner_key::current_secret_name;
use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::fleet::secret::{SecretError, SecretsKey};
use crate::curator_client::certificate::{RenewalPoint, Validity, decide_renewal};
use crate::curator_client::clock::Clock;
use crate::curator_client::cluster_snapshot::{
    ClusterSnapshot, ClusterSnapshotError, MAX_SNAPSHOT_BYTES, snapshot_digest,
};
use crate::curator_client::identity::{Identity, IdentityError};
use crate::curator_client::known_epoch::KnownEpoch;
use crate::curator_client::leader_channel::{LeaderChannel, LeaderTracker, OwnCertificate};
use crate::curator_client::peer_renewal::PeerRenewalError;
use crate::curator_client::pki::{PkiError, TrustAnchor};
use crate::curator_client::statement_trust::StatementTrust;
use crate::curator_client::status_text::describe_status;
use crate::curator_client::tls::certified_key;
use crate::manager::cluster::curator_responses::{parse_authority, parse_node};
use crate::manager::cluster::statements::{is_about, is_change_due};
use crate::model::cluster::declaration::digests_by_role;
use crate::model::cluster::kubernetes::ObservedKubernetes;
use crate::model::cluster::owner_key::OwnerKeySlot;
use crate::model::cluster::state::{ClusterIdentity, EtcdMember, ObservedCluster};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::credentials_client::CredentialsClient;
use crate::proto::curator::v1::declarations_client::DeclarationsClient;
use crate::proto::curator::v1::management_client::ManagementClient;
use crate::proto::curator::v1::snapshots_client::SnapshotsClient;
use crate::proto::curator::v1::tickets_client::TicketsClient;

/// How long a claimed certificate is valid.
const CERTIFICATE_LIFETIME: Duration = Duration::from_hours(1);
/// How long curators have to answer one call.
pub const CURATOR_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of a whole snapshot. Nothing else is done for the cluster meanwhile.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_mins(1);

/// The operation of a call that has the authority replaced.
const REPLACING: &str = "having the authority of the cluster replaced";

/// Why a call to the curators failed.
#[derive(Debug, thiserror::Error)]
pub enum CuratorCallError {
    /// The owner key cannot be read or created.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The stored owner key is not a valid identity.
    #[error("the shepherd's key as an owner of the cluster cannot be used: {0}")]
    Key(#[from] IdentityError),
    /// The certificate of the cluster's authority is invalid.
    #[error("the certificate of the cluster's authority cannot be used: {0}")]
    Authority(#[from] PkiError),
    /// The TLS configuration cannot be built.
    #[error("the shepherd's certificate for the cluster cannot be used: {0}")]
    Tls(#[from] rustls::Error),
    /// A curator answered with an error.
    #[error("{operation}: {message}", message = describe_status(.status))]
    Rejected {
        /// The operation, as the error message names it.
        operation: &'static str,
        /// The status that the curator returned.
        status: Status,
    },
    /// No curator answered within `CURATOR_TIMEOUT`.
    #[error("{operation}: no curator of the cluster answered within {} s", CURATOR_TIMEOUT.as_secs())]
    TimedOut {
        /// The operation, as the error message names it.
        operation: &'static str,
    },
    /// Curators answered, and none of them is followed.
    #[error("{operation}: no curator of the cluster is followed: {reason}")]
    NotFollowed {
        /// The operation, as the error message names it.
        operation: &'static str,
        /// Why, as a sentence.
        reason: String,
    },
    /// The stored statement of the cluster's authority is not one; the text names the fault.
    #[error(
        "the cluster's statement in the BMDB is damaged, so that no curator is followed: {0}; run: shepherdctl explain \
         statement"
    )]
    DamagedStatement(String),
    /// The BMDB reported an error.
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    /// The curators sent something that is not a snapshot.
    #[error(transparent)]
    Snapshot(#[from] ClusterSnapshotError),
    /// No certificate can be signed for a member of etcd.
    #[error(transparent)]
    PeerRenewal(#[from] PeerRenewalError),
    /// The snapshot took longer than `SNAPSHOT_TIMEOUT`.
    #[error("taking a snapshot: it was not all here within {} s", SNAPSHOT_TIMEOUT.as_secs())]
    SnapshotTimedOut,
    /// An order for a machine cannot be built at this moment.
    #[error("{0}")]
    OrderUnavailable(&'static str),
    /// The curators accept none of the shepherd's keys.
    #[error(
        "claiming a certificate of the cluster: its curators refuse every key that the shepherd has for it ({tried} were \
         tried); run: shepherdctl explain cluster-key-refused"
    )]
    AllKeysRejected {
        /// Number of keys that were tried.
        tried: usize,
    },
    /// A curator returned something that the contract rules out.
    #[error("a curator gave an invalid answer: {0}")]
    InvalidResponse(String),
}

/// Loads the shepherd's current owner key of a cluster, and creates it if none exists.
pub async fn load_owner_key(
    bmdb: &Bmdb,
    secrets: &SecretsKey,
    cluster: Uuid,
) -> Result<Identity, CuratorCallError> {
    let name = current_secret_name(cluster);
    let made = secrets.get_or_create(bmdb, &name, || {
        let key = Identity::generate().map_err(|error| error.to_string())?;
        Ok(SecretSlice::from(key.pkcs8().to_vec()))
    });
    Ok(Identity::from_pkcs8(made.await?.expose_secret())?)
}

/// Connection to the curators of one cluster. It follows their leader.
pub struct CuratorClient {
    curators: LeaderTracker,
    validity: Option<Validity>,
    /// The certificate that it shows.
    certificate: Vec<u8>,
    claimed_at: Instant,
    trust: StatementTrust,
    /// Which of the shepherd's keys claimed the certificate.
    pub key_slot: OwnerKeySlot,
    follow_task: tokio::task::JoinHandle<()>,
}

impl Drop for CuratorClient {
    fn drop(&mut self) {
        self.follow_task.abort();
    }
}

impl CuratorClient {
    fn new(
        founded: &ClusterIdentity,
        epoch: KnownEpoch,
        certificate: &[u8],
        (by, key): (OwnerKeySlot, &Identity),
        trust: &StatementTrust,
    ) -> Result<Self, CuratorCallError> {
        let own = certified_key(certificate, key.pkcs8())?;
        let own: OwnCertificate = Arc::new(move || Some(own.clone()));
        // The directory of curators is stored with the cluster. What is not stored, the curators report again. Where they
        // have proved themselves is in `trust`, which outlives this connection.
        let curators = LeaderTracker::with_statements(trust.clone(), own, epoch, Arc::new(|_| Ok(())));
        curators.set_directory(founded.curators.iter().cloned());
        let follower = curators.clone();
        let following = tokio::spawn(async move { match follower.track_leader().await {} });
        Ok(Self {
            curators,
            validity: Validity::from_der(certificate),
            certificate: certificate.to_vec(),
            claimed_at: Instant::now(),
            trust: trust.clone(),
            key_slot: by,
            follow_task: following,
        })
    }

    /// Claims a certificate with one of the owner's keys, and uses that certificate from then on.
    ///
    /// Curators of an epoch lower than this one are not followed, nor those that the newest statement in `trust` refuses.
    pub async fn claim_certificate(
        founded: &ClusterIdentity,
        epoch: u64,
        (by, key): (OwnerKeySlot, &Identity),
        trust: &StatementTrust,
    ) -> Result<Self, CuratorCallError> {
        // The BMDB has only epochs that the shepherd has allocated or that a statement has proved.
        let epoch = KnownEpoch::proved(epoch);
        let claiming = Self::new(founded, epoch, key.certificate_der(), (by, key), trust)?;
        let lifetime_ms = u64::try_from(CERTIFICATE_LIFETIME.as_millis()).unwrap_or(u64::MAX);
        let mut credentials = CredentialsClient::new(claiming.channel());
        let call = credentials.claim_owner(wire::ClaimOwnerRequest { lifetime_ms });
        let claimed = call_curator("claiming a certificate of the cluster", call).await;
        let claimed = claimed.map_err(|error| claiming.explain_timeout(error))?;
        Self::new(founded, claiming.curators.known_epoch(), &claimed.certificate, (by, key), trust)
    }

    /// Replaces the error of a call that waited for a leader by the reason why none is followed, if there is one.
    #[must_use]
    pub fn explain_timeout(&self, error: CuratorCallError) -> CuratorCallError {
        let refusal = self.curators.refusal();
        let reason = refusal.borrow().clone();
        match (error, reason) {
            (CuratorCallError::TimedOut { operation }, Some(reason)) => {
                CuratorCallError::NotFollowed { operation, reason }
            }
            (error, _) => error,
        }
    }

    /// Whether it has to be made again: its certificate ends soon, another authority of the cluster signs now, or the
    /// cluster has another `authority` since a theft.
    #[must_use]
    pub fn needs_renewal(&self, authority: &[u8]) -> bool {
        let now = Clock::system().now();
        let authorities = self.trust.authorities();
        !is_about(&self.trust, authority)
            || is_change_due(&self.certificate, &authorities, self.claimed_at.elapsed())
            || self
                .validity
                .is_none_or(|validity| decide_renewal(validity, RenewalPoint::ThirdLeft, now).is_due())
    }

    /// The highest epoch that the BMDB has or a statement of the cluster's authority has proved.
    #[must_use]
    pub fn proved_epoch(&self) -> u64 {
        self.curators.known_epoch().proved
    }

    pub(super) fn channel(&self) -> LeaderChannel {
        self.curators.channel()
    }

    fn management(&self) -> ManagementClient<LeaderChannel> {
        ManagementClient::new(self.channel())
    }

    /// Fetches what the leader reports of its nodes, and the addresses of the curators.
    ///
    /// Role declarations can be long, so they are fetched only for a cluster with declared roles. The same is true of
    /// Kubernetes.
    pub async fn observe_cluster(
        &self,
        declared: bool,
        kubernetes: bool,
    ) -> Result<(ObservedCluster, Vec<String>), CuratorCallError> {
        let mut management = self.management();
        let listed =
            call_curator("listing nodes", management.list_nodes(wire::ListNodesRequest::default())).await?;
        let etcd =
            call_curator("listing members", management.get_consensus(wire::GetConsensusRequest {})).await?;
        let cluster =
            call_curator("reading the directory", management.get_cluster(wire::GetClusterRequest {})).await?;
        let declared = if declared {
            let mut declarations = DeclarationsClient::new(self.channel());
            let list = declarations.list(wire::ListDeclarationsRequest {});
            digests_by_role(&call_curator("listing declared roles", list).await?.declarations)
        } else {
            BTreeMap::new()
        };
        let kubernetes =
            if kubernetes { self.fetch_kubernetes().await } else { ObservedKubernetes::NotQueried };
        let nodes = listed.nodes.into_iter().map(parse_node).collect::<Result<_, _>>();
        let nodes = nodes.map_err(CuratorCallError::InvalidResponse)?;
        let reported = |bytes: u64| (bytes != 0).then_some(bytes);
        let (etcd_bytes, etcd_quota_bytes) = (reported(etcd.database_bytes), reported(etcd.quota_bytes));
        let is_etcd_full = etcd.has_space_alarm;
        let etcd = etcd.members.into_iter().map(|member| EtcdMember {
            node: Some(member.node_id).filter(|id| !id.is_empty() && member.started),
            learner: member.learner,
            reachable: member.reachable,
        });
        let authority = parse_authority(&cluster);
        let curators = cluster.directory.unwrap_or_default().curators;
        self.curators.set_directory(curators.iter().cloned());
        Ok((
            ObservedCluster {
                nodes,
                etcd_members: etcd.collect(),
                etcd_bytes,
                etcd_quota_bytes,
                is_etcd_full,
                declared_digests: declared,
                kubernetes,
                authority,
            },
            curators,
        ))
    }

    /// Creates a ticket that lets one node join.
    pub async fn create_ticket(
        &self,
        purpose: String,
        lifetime: Duration,
    ) -> Result<Vec<u8>, CuratorCallError> {
        let request = wire::CreateTicketRequest {
            lifetime_ms: u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX),
            max_uses: Some(1),
            purpose,
        };
        let mut tickets = TicketsClient::new(self.channel());
        Ok(call_curator("making a ticket", tickets.create(request)).await?.secret)
    }

    /// Approves a node by its public key, and assigns it this address; `None` leaves what is assigned.
    pub async fn approve_node(&self, key: [u8; 32], address: Option<IpAddr>) -> Result<(), CuratorCallError> {
        let address = address.map(|address| address.to_string()).unwrap_or_default();
        let request = wire::ApproveRequest { public_key: key.to_vec(), address };
        call_curator("approving a node", self.management().approve(request)).await.map(drop)
    }

    /// Adds roles to a node and removes roles from it. `start_rotation`: if that ends its membership of etcd, the authority
    /// of the cluster is replaced.
    pub async fn update_roles(
        &self,
        node: &str,
        (give, take): (&[String], &[String]),
        start_rotation: bool,
    ) -> Result<(), CuratorCallError> {
        let request = wire::UpdateRolesRequest {
            node_id: node.to_owned(),
            add_roles: give.to_vec(),
            remove_roles: take.to_vec(),
            start_rotation,
        };
        call_curator("changing roles", self.management().update_roles(request)).await.map(drop)
    }

    /// Declares a role in its stored form, or replaces its declaration.
    pub async fn declare_role(&self, kept: &[u8]) -> Result<(), CuratorCallError> {
        let declaration = wire::Declaration::decode(kept).map_err(|error| {
            CuratorCallError::InvalidResponse(format!("a declaration that cannot be read: {error}"))
        })?;
        let request = wire::PutDeclarationRequest { declaration: Some(declaration), expected_revision: None };
        let mut declarations = DeclarationsClient::new(self.channel());
        call_curator("declaring a role", declarations.put(request)).await.map(drop)
    }

    /// Deletes the declaration of a role that no node has.
    pub async fn delete_declaration(&self, role: &str) -> Result<(), CuratorCallError> {
        let request = wire::DeleteDeclarationRequest { role: role.to_owned() };
        let mut declarations = DeclarationsClient::new(self.channel());
        match call_curator("withdrawing a role", declarations.delete(request)).await {
            Err(CuratorCallError::Rejected { status, .. }) if status.code() == Code::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    /// Fetches a snapshot of the cluster's records: parsed, and the bytes as they were sent.
    pub async fn fetch_snapshot(&self) -> Result<(ClusterSnapshot, Vec<u8>), CuratorCallError> {
        let taken = tokio::time::timeout(SNAPSHOT_TIMEOUT, self.stream_snapshot());
        taken.await.map_err(|_| CuratorCallError::SnapshotTimedOut)?
    }

    async fn stream_snapshot(&self) -> Result<(ClusterSnapshot, Vec<u8>), CuratorCallError> {
        let operation = "taking a snapshot";
        let mut snapshots = SnapshotsClient::new(self.channel());
        let mut pieces = call_curator(operation, snapshots.take(wire::TakeSnapshotRequest {})).await?;
        let (mut encoded, mut known_by) = (Vec::new(), Vec::new());
        loop {
            let piece = tokio::time::timeout(CURATOR_TIMEOUT, pieces.message());
            let piece = piece.await.map_err(|_| CuratorCallError::TimedOut { operation })?;
            let Some(piece) = piece.map_err(|status| CuratorCallError::Rejected { operation, status })?
            else {
                break;
            };
            encoded.extend(piece.chunk);
            if encoded.len() > MAX_SNAPSHOT_BYTES {
                return Err(ClusterSnapshotError::TooLarge(encoded.len()).into());
            }
            known_by = piece.sha256;
        }
        if known_by != snapshot_digest(&encoded) {
            return Err(CuratorCallError::InvalidResponse(
                "a snapshot that was cut off or changed on its way".to_owned(),
            ));
        }
        Ok((ClusterSnapshot::decode(&encoded)?, encoded))
    }

    /// Has the authority with this digest replaced. Curators that have begun already are no error.
    pub async fn rotate_authority(&self, cluster: Uuid, replaces: &[u8]) -> Result<(), CuratorCallError> {
        let request =
            wire::RotateAuthorityRequest { cluster_id: cluster.to_string(), replaces: replaces.to_vec() };
        let mut management = self.management();
        let begun = management.rotate_authority(request);
        match call_curator(REPLACING, begun).await {
            Err(CuratorCallError::Rejected { status, .. }) => match status.code() {
                Code::AlreadyExists => Ok(()),
                Code::Unimplemented => Err(CuratorCallError::OrderUnavailable(
                    "its leading curator is of a release that cannot replace the authority: update its role servers",
                )),
                _ => Err(CuratorCallError::Rejected { operation: REPLACING, status }),
            },
            other => other.map(drop),
        }
    }

    /// Decommissions a node. It cannot join again.
    pub async fn decommission_node(&self, node: &str) -> Result<(), CuratorCallError> {
        let request = wire::DecommissionRequest { node_id: node.to_owned() };
        call_curator("decommissioning a node", self.management().decommission(request)).await.map(drop)
    }

    /// Deletes a node's record from the cluster. Its membership of etcd has ended before: if a race with a curator left
    /// one, its disk counts as not wiped.
    pub async fn delete_node(&self, node: &str) -> Result<(), CuratorCallError> {
        let request =
            wire::DeleteRequest { node_id: node.to_owned(), start_rotation: true, ..Default::default() };
        call_curator("deleting a node", self.management().delete(request)).await.map(drop)
    }
}

/// The `address:port` of the curator on the first node. `None` if the address is not an IP address.
#[must_use]
pub fn curator_endpoint(address: &str, port: u16) -> Option<String> {
    Some(std::net::SocketAddr::new(address.parse().ok()?, port).to_string())
}

/// Whether this is the CA certificate of that cluster.
#[must_use]
pub fn is_authority_of(certificate: &[u8], cluster: Uuid) -> bool {
    TrustAnchor::parse(certificate).is_ok_and(|anchor| anchor.cluster == cluster)
}

pub(super) async fn call_curator<T>(
    operation: &'static str,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, CuratorCallError> {
    match tokio::time::timeout(CURATOR_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(CuratorCallError::Rejected { operation, status }),
        Err(_) => Err(CuratorCallError::TimedOut { operation }),
    }
}
