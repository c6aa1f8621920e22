//! What a curator has while it leads: store, caches, authority, heartbeats, locks.
//!
//! Heartbeats are in the leader's memory alone: a new leader listens for as long as the heartbeat timeout before it
//! reports the health of any node. All else is in etcd. Changes of etcd's members, and of what depends on them, are
//! made one at a time. Other records need no order but that of their revisions.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use curator_client::authority_ring::AuthorityRing;
use curator_client::certificate::{IssuedCertificate, Serial, Validity};
use curator_client::clock::Clock;
use curator_client::cluster::{Cluster, OwnerKeyError};
use curator_client::node::NodeState;
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::peer_authorities::identify_peer_by_any;
use curator_client::peer_identity::Peer;
use curator_client::pki::{CURATOR_LIFETIME, NODE_LIFETIME};
use curator_client::pki_revocation_list::PeerRevocations;
use etcd::guard::KeyChange;
use futures::{Stream, StreamExt as _};
use proto::curator::v1 as wire;
use tokio::sync::{MutexGuard as AsyncMutexGuard, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status};

use crate::credential::{CertificateKind, Credential, CredentialHolder};
use crate::entitlement::{check_peer_certificate, peer_lifetime};
use crate::membership::{EtcdMember, Nodes, SyncAction, plan_sync};
use crate::node_health::HeartbeatTracker;
use crate::node_lifecycle;
use crate::peer_revocation::revoked_peer_serials;
use crate::permissions::{self, MethodPermission};
use crate::record_retention::RecordRetention;
use crate::role_orders::MemberChange;
use crate::service::curator_certificates::CuratorCertificates;
use crate::service::error::ServiceError;
use crate::service::etcd_members;
use crate::service::record_cache::{CachedRecords, RecordCache};
use crate::service::store::{Store, node_change, record_change};

/// How long a revocation waits until the cache shows it. A leader whose cache is later than that is about to lose its
/// lease.
const CACHE_WAIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a stream checks its certificate again, which may have expired.
const CERTIFICATE_RECHECK_INTERVAL: Duration = Duration::from_mins(1);

/// The certificates that a connection showed, and whose keys it proved.
pub(super) type PeerCertificates = Arc<[Vec<u8>]>;

/// The caller of an authorized call.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) peer: Peer,
    pub(super) permission: &'static MethodPermission,
    /// The certificates that prove it, for later checks.
    pub(super) certificates: PeerCertificates,
    /// The source of its connection.
    pub(super) remote: std::net::SocketAddr,
}

impl Caller {
    /// The caller of this request, as the auth router stored it.
    pub(super) fn from_request<T>(request: &Request<T>) -> Result<Self, Status> {
        let caller = request.extensions().get::<Self>();
        caller.cloned().ok_or_else(|| Status::internal("this call bypassed authorization: please report it"))
    }

    /// The calling node; an error for other peers.
    pub(super) fn require_node(&self) -> Result<NodeId, ServiceError> {
        match self.peer {
            Peer::Node { id, .. } => Ok(id),
            _ => Err(self.wrong_peer_kind()),
        }
    }

    /// The key of a caller that proves nothing but that key; an error for other peers.
    pub(super) fn require_key(&self) -> Result<PublicKey, ServiceError> {
        match self.peer {
            Peer::Registering { key } => Ok(key),
            _ => Err(self.wrong_peer_kind()),
        }
    }

    /// Checks that the call may concern this node.
    pub(super) fn authorize_node(&self, node: NodeId) -> Result<(), ServiceError> {
        Ok(permissions::authorize_node(self.permission, &self.peer, node)?)
    }

    fn wrong_peer_kind(&self) -> ServiceError {
        permissions::PermissionError::WrongPeerKind {
            peer: self.peer.to_string(),
            method: self.permission.method,
        }
        .into()
    }
}

/// One leadership of this curator, from election to loss.
#[derive(Debug)]
pub(super) struct LeaderContext {
    /// The node of this curator.
    pub(super) node_id: NodeId,
    /// Guarded access to the records in etcd.
    pub(super) store: Store,
    pub(super) cache: Arc<RecordCache>,
    /// The cluster as it was when the leadership began. Its owner keys may have changed since.
    pub(super) cluster: Cluster,
    /// The authority that signs, and the other one while it is replaced.
    pub(super) authorities: watch::Sender<Arc<AuthorityRing>>,
    pub(super) clock: Clock,
    /// Where the addresses of nodes come from.
    pub(super) address_rule: crate::node_address::AddressRule,
    /// Cancelled when this curator no longer leads.
    pub(super) ended: CancellationToken,
    /// How long a rotated service-account key stays trusted for the tokens that it signed.
    pub(super) token_overlap: Duration,
    /// The nodes of the curators that the first statement waits for.
    pub(super) statement_waits: Mutex<BTreeSet<NodeId>>,
    /// The certificates of curators, from the task that has read them.
    pub(super) curator_certificates: CuratorCertificates,
    heartbeats: Mutex<HeartbeatTracker>,
    membership_lock: tokio::sync::Mutex<()>,
}

/// The stream of a streaming response.
pub(super) type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The response once the leadership has ended.
#[must_use]
pub(super) fn not_leader_status() -> Status {
    Status::unavailable("this curator leads no longer; ask Leader/Watch who does")
}

impl LeaderContext {
    /// Begins to lead: reads the cluster and its authority.
    pub(super) async fn load(
        own: NodeId,
        store: Store,
        view: Arc<RecordCache>,
        clock: Clock,
        ended: CancellationToken,
        token_overlap: Duration,
        address_rule: crate::node_address::AddressRule,
    ) -> Result<Self, ServiceError> {
        let none = || {
            let sentence =
                "this etcd holds no cluster: it was never bootstrapped, or is that of something else";
            ServiceError::rejected(Code::Internal, sentence)
        };
        let cluster = store.cluster().await?.ok_or_else(none)?.value;
        let authorities = store.authorities().await?.ok_or_else(none)?.value;
        let heartbeats = Mutex::new(HeartbeatTracker::start_at(clock.monotonic()));
        let membership = tokio::sync::Mutex::new(());
        Ok(Self {
            node_id: own,
            store,
            cache: view,
            cluster,
            authorities: watch::Sender::new(Arc::new(authorities)),
            clock,
            address_rule,
            ended,
            token_overlap,
            statement_waits: Mutex::default(),
            curator_certificates: CuratorCertificates::default(),
            heartbeats,
            membership_lock: membership,
        })
    }

    /// The heartbeats received so far, locked.
    pub(super) fn lock_heartbeats(&self) -> MutexGuard<'_, HeartbeatTracker> {
        self.heartbeats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks membership: meanwhile nobody else changes members, or what depends on them.
    pub(super) async fn lock_membership(&self) -> AsyncMutexGuard<'_, ()> {
        self.membership_lock.lock().await
    }

    /// Identifies a peer; rejects one whose certificate is not accepted at this moment.
    pub(super) async fn identify_peer(&self, shown: &[Vec<u8>]) -> Result<Peer, ServiceError> {
        let refused =
            |error: &dyn std::fmt::Display| ServiceError::rejected(Code::Unauthenticated, error.to_string());
        let judged = {
            let (trusted, seen) = (self.authority_ring().trusted(), self.cache.records());
            identify_peer_by_any(shown, &trusted, &seen.revocations, self.clock.now())
        };
        let peer = judged.map_err(|error| refused(&error))?;
        if let Peer::Node { id, key, .. } = &peer {
            let seen = self.cache.records().nodes.get(id).cloned();
            if node_lifecycle::check_credentials(seen.as_deref(), *id, key).is_err() {
                // The cache is a moment late, and a node that was just committed must not be rejected.
                let now = self.store.node(id).await?.map(|stored| stored.value);
                node_lifecycle::check_credentials(now.as_ref(), *id, key).map_err(|error| refused(&error))?;
            }
        }
        Ok(peer)
    }

    /// A response stream that ends when the leadership does, or when the caller's certificate is no longer accepted.
    pub(super) fn guard_stream<T: Send + 'static>(
        self: &Arc<Self>,
        caller: &Caller,
        answers: impl Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> ResponseStream<T> {
        let (leading, shown) = (self.clone(), caller.certificates.clone());
        let mut distrust = self.cache.subscribe_trust_changes();
        let end = async move {
            let mut look_again = tokio::time::interval(CERTIFICATE_RECHECK_INTERVAL);
            // The first check is immediate: a revocation since the call was authorized would be missed otherwise.
            loop {
                tokio::select! {
                    () = leading.ended.cancelled() => return not_leader_status(),
                    _ = look_again.tick() => {}
                    changed = distrust.changed() => if changed.is_err() { return not_leader_status() },
                }
                match leading.identify_peer(&shown).await {
                    Ok(_) => {}
                    Err(failure) if failure.code() == Code::Unauthenticated => return failure.into(),
                    // etcd is unavailable: the leadership ends because of that, or continues.
                    Err(error) => tracing::debug!(%error, "a certificate could not be checked again"),
                }
            }
        };
        let (mut end, mut answers) = (Box::pin(end), Box::pin(answers));
        let mut over = false;
        Box::pin(futures::stream::poll_fn(move |context| {
            if over {
                return Poll::Ready(None);
            }
            if let Poll::Ready(status) = end.as_mut().poll(context) {
                over = true;
                return Poll::Ready(Some(Err(status)));
            }
            answers.poll_next_unpin(context)
        }))
    }

    /// Waits until the cache shows what was just written, so that it applies to every later call.
    pub(super) async fn wait_until_cached(
        &self,
        holds: impl Fn(&CachedRecords) -> bool,
    ) -> Result<(), ServiceError> {
        tokio::time::timeout(CACHE_WAIT_TIMEOUT, self.cache.wait_until(holds)).await.map_err(|_| {
            let sentence = "it is written, and this curator has not received it from etcd yet; try again";
            ServiceError::rejected(Code::Unavailable, sentence)
        })
    }

    /// Signs a certificate for a node; also returns the credential record to write.
    pub(super) fn issue_node_certificate(
        &self,
        key: &PublicKey,
    ) -> Result<(IssuedCertificate, KeyChange), ServiceError> {
        let validity = Validity::starting(self.clock.now(), NODE_LIFETIME);
        let issued = self.authority().issue_node_certificate(key, Serial::new(rand::random()), validity)?;
        let holder = CredentialHolder::Node(NodeId::from_key(key));
        let change = credential_change(&issued, holder, *key, CertificateKind::Node)?;
        Ok((issued, change))
    }

    /// Signs a certificate for a node's curator; also returns the credential record to write.
    pub(super) fn issue_curator_certificate(
        &self,
        key: &PublicKey,
    ) -> Result<(IssuedCertificate, KeyChange), ServiceError> {
        let validity = Validity::starting(self.clock.now(), CURATOR_LIFETIME);
        let issued =
            self.authority().issue_curator_certificate(key, Serial::new(rand::random()), validity)?;
        let holder = CredentialHolder::Node(NodeId::from_key(key));
        let change = credential_change(&issued, holder, *key, CertificateKind::Curator)?;
        Ok((issued, change))
    }

    /// Signs a peer certificate for a node's etcd member; also returns the credential record to write. `member` is the
    /// number that etcd gave to the membership.
    pub(super) async fn issue_etcd_peer_certificate(
        &self,
        key: &PublicKey,
        address: IpAddr,
        member: u64,
    ) -> Result<(IssuedCertificate, KeyChange), ServiceError> {
        let lifetime = peer_lifetime(self.store.statement().await?.is_some());
        let validity = Validity::starting(self.clock.now(), lifetime);
        let issued = self.authority().issue_etcd_peer_certificate(
            key,
            address,
            Serial::new(rand::random()),
            validity,
        )?;
        check_peer_certificate(&issued.certificate, address, lifetime)?;
        let holder = CredentialHolder::Node(NodeId::from_key(key));
        let change = credential_change(&issued, holder, *key, CertificateKind::EtcdPeer { member })?;
        Ok((issued, change))
    }

    /// Signs a certificate for an owner; also returns the credential record to write.
    pub(super) fn issue_owner_certificate(
        &self,
        name: &str,
        key: &PublicKey,
        lifetime: Duration,
    ) -> Result<(Credential, IssuedCertificate, KeyChange), ServiceError> {
        if lifetime.is_zero() {
            return Err(ServiceError::invalid_argument(
                "the certificate would expire at once; give the time for which it is valid",
            ));
        }
        if self.cache.records().revocations.owners.contains(key) {
            return Err(OwnerKeyError::Removed(*key).into());
        }
        let validity = Validity::starting(self.clock.now(), lifetime);
        let issued =
            self.authority().issue_owner_certificate(name, key, Serial::new(rand::random()), validity)?;
        let holder = CredentialHolder::Owner(name.to_owned());
        let change = credential_change(&issued, holder.clone(), *key, CertificateKind::Owner)?;
        let credential = Credential::from_issued(&issued, holder, *key, CertificateKind::Owner);
        Ok((credential, issued, change))
    }

    /// The directory of the cluster: its id, the authority's certificate and the addresses of the curators.
    #[must_use]
    pub(super) fn directory(&self) -> wire::Directory {
        let seen = self.cache.records();
        let curators = seen.nodes.nodes().filter_map(|node| {
            let runs = node.state == NodeState::Up && node.roles.consensus_member.is_some();
            let status = node.status.as_ref().filter(|_| runs)?;
            Some(std::net::SocketAddr::new(status.address, status.curator_port?).to_string())
        });
        wire::Directory {
            cluster_id: self.cluster.id.to_string(),
            ca_certificate: self.authority().anchor().certificate.clone(),
            curators: curators.collect(),
        }
    }

    /// The members of etcd, and whether each is reachable.
    pub(super) async fn list_members(&self) -> Result<Vec<EtcdMember>, ServiceError> {
        etcd_members::list_members(self.store.client()).await
    }

    /// Changes etcd's members; a change that was made before is no error.
    pub(super) async fn change_members(&self, step: &MemberChange) -> Result<(), ServiceError> {
        etcd_members::change_members(self.store.client(), step).await
    }

    /// Makes members and records agree by at most one change. Returns the change, for the log.
    pub(super) async fn sync_members(&self) -> Result<Option<SyncAction>, ServiceError> {
        let _alone = self.lock_membership().await;
        let members = self.list_members().await?;
        let stored = self.store.nodes().await?;
        let revoked = self.cache.records().revocations.nodes.clone();
        let tick = match plan_sync(self.node_id, &members, &stored.nodes, &revoked) {
            Ok(tick) => tick,
            Err(abort) => return Err(ServiceError::rejected(Code::Unavailable, abort.to_string())),
        };
        for rejection in tick.blocked {
            tracing::debug!(%rejection, "a member of etcd is not removed yet");
        }
        let Some(change) = tick.action else {
            // Only while both agree: a membership that ends counts as ended once its record shows that, too.
            if let Err(error) = self.update_peer_revocations(&members, &stored.nodes).await {
                tracing::warn!(%error, "the list of revoked peers of etcd was not written");
            }
            return Ok(None);
        };
        if let SyncAction::RemoveMember { member, .. } = &change {
            self.change_members(&MemberChange::RemoveMember { member: *member }).await?;
        }
        // The record is written only if the node has not changed since it was read; otherwise the next tick decides.
        if let Some(changed) = change.updated_record(&stored.nodes) {
            let revision = stored.revisions.get(&changed.id).copied();
            let mut changes = vec![node_change(&changed, revision)?];
            if matches!(change, SyncAction::RemoveRoles { .. }) {
                // The call that ended the membership is lost, and what it demanded, or the node was revoked. No disk counts
                // as wiped then.
                Box::pin(self.add_rotation_after_removal(&mut changes)).await?;
            }
            self.store.write(&changes).await?;
        }
        Ok(Some(change))
    }

    /// The list of revoked peers that etcd reads, DER. It is empty of serial numbers before the first one is stored.
    pub(super) async fn peer_revocation_list(&self) -> Result<Vec<u8>, ServiceError> {
        match self.store.peer_revocations().await? {
            Some(stored) => Ok(stored.value.list),
            None => Ok(self.authority().sign_peer_revocation_list(&BTreeSet::new(), 0, self.clock.now())?),
        }
    }

    /// Puts the peer certificates of ended memberships on the list that etcd's members read. The caller holds the lock of
    /// membership, and has read the members and then the nodes under it.
    async fn update_peer_revocations(
        &self,
        members: &[EtcdMember],
        nodes: &Nodes,
    ) -> Result<(), ServiceError> {
        let stored = self.store.peer_revocations().await?;
        let (credentials, revision) = self.store.credentials_at().await?;
        self.curator_certificates.pass_on(revision, &credentials);
        let (none, now) = (BTreeSet::new(), self.clock.now());
        let former = stored.as_ref().map(|stored| &stored.value);
        let listed = former.map_or(&none, |former| &former.serials);
        let serials = revoked_peer_serials(listed, &credentials, members, nodes);
        // A list without serial numbers is written as well: etcd starts with the list only where there is one.
        if former.is_some_and(|former| former.serials == serials) {
            return Ok(());
        }
        let number = former.map_or(1, |former| former.number.saturating_add(1));
        let next = PeerRevocations::sign(&self.authority(), serials, number, now)?;
        let change = record_change(PeerRevocations::etcd_key()?, next.encode(), stored.as_ref());
        self.store.write(&[change]).await?;
        tracing::info!(number, serials = next.serials.len(), "the list of revoked peers of etcd was written");
        Ok(())
    }

    /// Deletes the records that nobody needs any more, as [`RecordRetention`] decides. Returns their number.
    pub(super) async fn delete_expired(&self) -> Result<usize, ServiceError> {
        let (members, offsets) = Box::pin(self.measure_clocks()).await?;
        let retention = RecordRetention::decide(self.clock.now(), members, &offsets);
        let mut over = Vec::new();
        for credential in self.store.credentials().await? {
            if retention.deletes_credential(&credential.value) {
                over.push((Credential::etcd_key(credential.value.serial)?, credential.revision));
            }
        }
        for revocation in self.store.revoked_certificates().await? {
            if retention.deletes_revocation(&revocation.value) {
                over.push((revocation.value.etcd_key()?, revocation.revision));
            }
        }
        for ticket in self.store.tickets().await? {
            if retention.deletes_ticket(&ticket.value) {
                over.push((etcd::key_space::TICKETS.key(ticket.value.id())?, ticket.revision));
            }
        }
        let count = over.len();
        for part in over.chunks(100) {
            let deletions: Vec<KeyChange> = part
                .iter()
                .map(|(key, revision)| KeyChange::Delete {
                    key: key.clone(),
                    expected: etcd::guard::ExpectedRevision::At(*revision),
                })
                .collect();
            self.store.write(&deletions).await?;
        }
        let seen = self.cache.records();
        self.lock_heartbeats().retain_nodes(|node| seen.nodes.get(node).is_some());
        Ok(count)
    }
}

/// The record of a certificate that was just signed, if the certificate has what its kind may have.
fn credential_change(
    issued: &IssuedCertificate,
    holder: CredentialHolder,
    key: PublicKey,
    kind: CertificateKind,
) -> Result<KeyChange, ServiceError> {
    let credential = Credential::from_issued(issued, holder, key, kind);
    crate::entitlement::check_credential(&issued.certificate, &credential)?;
    Ok(record_change::<()>(Credential::etcd_key(issued.serial)?, credential.encode(), None))
}
