//! What a curator has for as long as it leads, and everything a call is answered from.
//!
//! Heartbeats are known to the leader alone, in memory: a new leader listens for as long as a silence counts before it
//! says anything of anybody. All else stands in etcd. Changes of etcd's members, and of what they follow from, are made
//! one at a time; other records need no order but that of their revisions.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use tokio::sync::MutexGuard as AsyncMutexGuard;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status};

use crate::curator::clock::Clock;
use crate::curator::cluster::{Cluster, OwnerKeyRefusal};
use crate::curator::credential::{Credential, Holder};
use crate::curator::health::Heartbeats;
use crate::curator::life_cycle;
use crate::curator::membership::{Change as Disagreement, Member, sync};
use crate::curator::node::State;
use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::peer::{Peer, identify};
use crate::curator::permissions::{self, Row};
use crate::curator::pki::{Authority, Issued, NODE_LIFETIME, PEER_LIFETIME, Serial, Validity};
use crate::curator::roles::Step;
use crate::curator::service::failure::Failure;
use crate::curator::service::members;
use crate::curator::service::store::{Store, put, put_node};
use crate::curator::service::view::{Seen, View};
use crate::etcd::guard::Change;
use crate::model::time::before;
use crate::proto::curator::v1 as wire;

/// How long whoever revoked something waits for the view to show it; a view that is so late is of a leader that is
/// about to lose its lease.
const VIEW_LIMIT: Duration = Duration::from_secs(10);
/// How often a stream looks at its certificate again, which may have expired.
const LOOK_AGAIN: Duration = Duration::from_mins(1);
/// How long tickets are shown that nobody can use any more.
const OVER_FOR: Duration = Duration::from_hours(7 * 24);

/// Certificates that a connection showed and proved the keys of.
pub type ShownCertificates = Arc<[Vec<u8>]>;

/// Who makes a call, once it was let in.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Who.
    pub peer: Peer,
    /// What was called.
    pub row: &'static Row,
    /// What proves it.
    pub shown: ShownCertificates,
}

impl Caller {
    /// Who makes this call.
    pub fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        let caller = request.extensions().get::<Self>();
        caller.cloned().ok_or_else(|| Status::internal("this call came past the door: please report it"))
    }

    /// The node that calls.
    pub fn node(&self) -> Result<NodeId, Failure> {
        match self.peer {
            Peer::Node { id, .. } => Ok(id),
            _ => Err(self.wrong_kind()),
        }
    }

    /// The key that the caller proves, where nothing else is known of him.
    pub fn key(&self) -> Result<PublicKey, Failure> {
        match self.peer {
            Peer::Registering { key } => Ok(key),
            _ => Err(self.wrong_kind()),
        }
    }

    /// Whether the call may be about this node.
    pub fn may_act_on(&self, node: NodeId) -> Result<(), Failure> {
        Ok(permissions::may_act_on(self.row, &self.peer, node)?)
    }

    fn wrong_kind(&self) -> Failure {
        permissions::Refusal::WrongKind { peer: self.peer.to_string(), method: self.row.method }.into()
    }
}

/// One leadership.
#[derive(Debug)]
pub struct Leading {
    /// The node that leads.
    pub own: NodeId,
    /// The records.
    pub store: Store,
    /// The records as they were last seen.
    pub view: Arc<View>,
    /// The cluster as it was when this began. Its owners' keys may be others by now.
    pub cluster: Cluster,
    /// Its authority.
    pub authority: Authority,
    /// The time.
    pub clock: Clock,
    /// Cancelled when it does not lead any more.
    pub ended: CancellationToken,
    /// How long tokens of service accounts are waited for that a key signed which is being replaced.
    pub token_overlap: Duration,
    heartbeats: Mutex<Heartbeats>,
    membership: tokio::sync::Mutex<()>,
}

/// A stream of answers.
pub type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What is answered when the leadership is over.
#[must_use]
pub fn over() -> Status {
    Status::unavailable("this curator leads no longer; ask Leader/Watch who does")
}

impl Leading {
    /// Begins to lead: reads what there is one of.
    pub async fn begin(
        own: NodeId,
        store: Store,
        view: Arc<View>,
        clock: Clock,
        ended: CancellationToken,
        token_overlap: Duration,
    ) -> Result<Self, Failure> {
        let none = || {
            let sentence =
                "this etcd holds no cluster: it was never bootstrapped, or is that of something else";
            Failure::refused(Code::Internal, sentence)
        };
        let cluster = store.cluster().await?.ok_or_else(none)?.value;
        let authority = store.authority().await?.ok_or_else(none)?.value;
        let heartbeats = Mutex::new(Heartbeats::listening_since(clock.running()));
        let membership = tokio::sync::Mutex::new(());
        Ok(Self { own, store, view, cluster, authority, clock, ended, token_overlap, heartbeats, membership })
    }

    /// Heartbeats heard so far.
    pub fn heartbeats(&self) -> MutexGuard<'_, Heartbeats> {
        self.heartbeats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps all others from changing members, and what follows from them, meanwhile.
    pub async fn membership(&self) -> AsyncMutexGuard<'_, ()> {
        self.membership.lock().await
    }

    /// Finds out who a peer is; refuses whose certificate is worth nothing by now.
    pub async fn identify(&self, shown: &[Vec<u8>]) -> Result<Peer, Failure> {
        let refused =
            |error: &dyn std::fmt::Display| Failure::refused(Code::Unauthenticated, error.to_string());
        let judged = {
            let seen = self.view.seen();
            identify(shown, self.authority.anchor(), &seen.revocations, self.clock.now())
        };
        let peer = judged.map_err(|error| refused(&error))?;
        if let Peer::Node { id, key, .. } = &peer {
            let seen = self.view.seen().nodes.get(id).cloned();
            if life_cycle::credentials_hold(seen.as_deref(), *id, key).is_err() {
                // The view is a moment late, and a node that has just come must not be sent away.
                let now = self.store.node(id).await?.map(|stored| stored.value);
                life_cycle::credentials_hold(now.as_ref(), *id, key).map_err(|error| refused(&error))?;
            }
        }
        Ok(peer)
    }

    /// A stream to a caller, which ends when the leadership does, or when his certificate is worth nothing any more.
    pub fn stream<T: Send + 'static>(
        self: &Arc<Self>,
        caller: &Caller,
        answers: impl Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> Answers<T> {
        let (leading, shown) = (self.clone(), caller.shown.clone());
        let mut distrust = self.view.distrust();
        let end = async move {
            let mut look_again = tokio::time::interval(LOOK_AGAIN);
            // At once: what was revoked between the door and here was not noticed.
            loop {
                tokio::select! {
                    () = leading.ended.cancelled() => return over(),
                    _ = look_again.tick() => {}
                    changed = distrust.changed() => if changed.is_err() { return over() },
                }
                match leading.identify(&shown).await {
                    Ok(_) => {}
                    Err(failure) if failure.code() == Code::Unauthenticated => return failure.into(),
                    // etcd is away: the leadership ends by that, or goes on.
                    Err(error) => tracing::debug!(%error, "a certificate could not be looked at again"),
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

    /// Waits until the view shows what was just written, so that it holds for every call from now on.
    pub async fn until_seen(&self, holds: impl Fn(&Seen) -> bool) -> Result<(), Failure> {
        tokio::time::timeout(VIEW_LIMIT, self.view.wait_until(holds)).await.map_err(|_| {
            let sentence = "it is written, and this curator does not see it yet; ask again";
            Failure::refused(Code::Unavailable, sentence)
        })
    }

    /// Signs a certificate for a node, and says what is to be kept of it.
    pub fn issue_node(&self, key: &PublicKey) -> Result<(Issued, Change), Failure> {
        let validity = Validity::starting(self.clock.now(), NODE_LIFETIME);
        let issued = self.authority.issue_node(key, Serial::new(rand::random()), validity)?;
        let change = kept(&issued, Holder::Node(NodeId::of(key)), *key)?;
        Ok((issued, change))
    }

    /// Signs a certificate for a node's member of etcd, and says what is to be kept of it.
    pub fn issue_peer(&self, key: &PublicKey, address: IpAddr) -> Result<(Issued, Change), Failure> {
        let validity = Validity::starting(self.clock.now(), PEER_LIFETIME);
        let issued = self.authority.issue_peer(key, address, Serial::new(rand::random()), validity)?;
        let change = kept(&issued, Holder::Node(NodeId::of(key)), *key)?;
        Ok((issued, change))
    }

    /// Signs a certificate for an owner, and says what is to be kept of it.
    pub fn issue_owner(
        &self,
        name: &str,
        key: &PublicKey,
        lifetime: Duration,
    ) -> Result<(Credential, Issued, Change), Failure> {
        if lifetime.is_zero() {
            return Err(Failure::invalid(
                "the certificate would expire at once; say how long it is to be good for",
            ));
        }
        if self.view.seen().revocations.owners.contains(key) {
            return Err(OwnerKeyRefusal::Removed(*key).into());
        }
        let validity = Validity::starting(self.clock.now(), lifetime);
        let issued = self.authority.issue_owner(name, key, Serial::new(rand::random()), validity)?;
        let holder = Holder::Owner(name.to_owned());
        let change = kept(&issued, holder.clone(), *key)?;
        Ok((Credential::of(&issued, holder, *key), issued, change))
    }

    /// Where the cluster is to be found.
    #[must_use]
    pub fn directory(&self) -> wire::Directory {
        let seen = self.view.seen();
        let curators = seen.nodes.present().filter_map(|node| {
            let runs = node.state == State::Up && node.roles.consensus_member.is_some();
            let status = node.status.as_ref().filter(|_| runs)?;
            Some(std::net::SocketAddr::new(status.address, status.curator_port?).to_string())
        });
        wire::Directory {
            cluster_id: self.cluster.id.to_string(),
            ca_certificate: self.authority.anchor().certificate.clone(),
            curators: curators.collect(),
        }
    }

    /// The members of etcd, and how each does.
    pub async fn members(&self) -> Result<Vec<Member>, Failure> {
        members::list(self.store.client()).await
    }

    /// Has etcd change its members; what is so already is no fault.
    pub async fn step(&self, step: &Step) -> Result<(), Failure> {
        members::step(self.store.client(), step).await
    }

    /// Makes members and records agree by at most one change. Says what it changed, for the log.
    pub async fn sync_members(&self) -> Result<Option<Disagreement>, Failure> {
        let _alone = self.membership().await;
        let members = self.members().await?;
        let stored = self.store.nodes().await?;
        let tick = match sync(self.own, &members, &stored.nodes) {
            Ok(tick) => tick,
            Err(abort) => return Err(Failure::refused(Code::Unavailable, abort.to_string())),
        };
        for refusal in tick.withheld {
            tracing::debug!(%refusal, "a member of etcd is not removed yet");
        }
        let Some(change) = tick.change else { return Ok(None) };
        if let Disagreement::RemoveMember { member, .. } = &change {
            self.step(&Step::Remove { member: *member }).await?;
        }
        // Of a node that was listed; one that has changed since is for the next tick.
        if let Some(changed) = change.record(&stored.nodes) {
            let revision = stored.revisions.get(&changed.id).copied();
            self.store.write(&[put_node(&changed, revision)?]).await?;
        }
        Ok(Some(change))
    }

    /// Removes what nobody needs any more: certificates and revocations that have ended by themselves, tickets that
    /// have been over for a week.
    pub async fn clear_away(&self) -> Result<usize, Failure> {
        let now = self.clock.now();
        let mut over = Vec::new();
        for credential in self.store.credentials().await? {
            if now > credential.value.validity.until {
                over.push((Credential::etcd_key(credential.value.serial)?, credential.revision));
            }
        }
        for revocation in self.store.revoked_certificates().await? {
            let crate::curator::credential::Revocation::Certificate(_, until) = revocation.value else {
                continue;
            };
            if now > until {
                over.push((revocation.value.etcd_key()?, revocation.revision));
            }
        }
        for ticket in self.store.tickets().await? {
            let ended =
                ticket.value.revoked_at.unwrap_or(ticket.value.expires_at).min(ticket.value.expires_at);
            if ended < before(now, OVER_FOR) {
                over.push((crate::etcd::key_space::TICKETS.key(ticket.value.id())?, ticket.revision));
            }
        }
        let count = over.len();
        for part in over.chunks(100) {
            let deletions: Vec<Change> = part
                .iter()
                .map(|(key, revision)| Change::Delete {
                    key: key.clone(),
                    expected: crate::etcd::guard::Expected::At(*revision),
                })
                .collect();
            self.store.write(&deletions).await?;
        }
        let seen = self.view.seen();
        self.heartbeats().keep_only(|node| seen.nodes.get(node).is_some());
        Ok(count)
    }
}

fn kept(issued: &Issued, holder: Holder, key: PublicKey) -> Result<Change, Failure> {
    let credential = Credential::of(issued, holder, key);
    Ok(put::<()>(Credential::etcd_key(issued.serial)?, credential.encode(), None))
}
