//! Leader election over an etcd lease.
//!
//! Each candidate creates a key under the election's name, bound to a lease that it keeps alive. The candidate whose
//! key was created first leads; the others wait in the order of theirs. When a lease has ended, etcd deletes the
//! candidate's key, and the next candidate leads. The leading key and its create revision are the [`LeaderGuard`] of
//! everything that its owner writes.
//!
//! # The role of a candidate
//!
//! At any time a candidate has exactly one of three roles ([`CandidateRole`]): leader; follower, which knows who leads;
//! or unknown. The role is unknown
//!
//! * before the candidate has seen its own key,
//! * when its key is gone,
//! * when its lease was not confirmed for as long as the lease lives. The time is counted from before the *request*, so
//!   that the candidate stops before another one can begin.
//! * when it has lost the connection to etcd, unless it is the leader.
//!
//! # Rounds
//!
//! One lease is one round. A round ends with its lease or its key, or when it cannot begin because etcd does not
//! answer. The next begins with a new lease after a pause. A leader that is elected again therefore has another guard.
//! Each round first deletes the keys that an earlier round or process of this candidate left: all keys with its name,
//! since this round has not created its own yet. Their lease may have seconds to live, and they would send every client
//! to a candidate that does not respond.

use std::convert::Infallible;
use std::time::Duration;

use proto::etcdserverpb as wire;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::client::{Client, EtcdError};
use crate::election_view::{CandidateRole, ElectionView, candidate_name, encode_candidate};
use crate::guard::LeaderGuard;
use crate::key_watcher::{KeyEvent, KeyWatcher, WatchStatus};
use crate::namespace::KeySelector;
use crate::retry::RETRY_BACKOFF;
use crate::transaction::{compare_create_revision, compare_mod_revision};

/// How long revoking the lease may take at the end. A lease that is not revoked expires by itself.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(1);

/// A candidate, and the election it takes part in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The prefix of the election's keys, such as `/leader`.
    pub election: String,
    /// Name of this candidate, which is its node's; the same after a restart, and unique.
    pub name: String,
    /// How long after its last sign of life a leader is replaced. Whole seconds, at least one. etcd raises it to its
    /// own minimum, which is two seconds with its usual timeouts.
    pub ttl: Duration,
}

/// Takes part in the election until cancelled, and publishes each change of the candidate's role. Errors of etcd are
/// retried.
///
/// At the end, however it ends, the role is [`CandidateRole::Unknown`]. When cancelled, it revokes its lease within a
/// second, so that the next candidate need not wait. When dropped, it does not.
pub async fn campaign(
    client: &Client,
    candidate: &Candidate,
    standing: watch::Sender<CandidateRole>,
    cancel: &CancellationToken,
) {
    let standing = RolePublisher(standing);
    let mut failures = 0_u32;
    while !cancel.is_cancelled() {
        standing.set(CandidateRole::Unknown);
        let mut stood = false;
        if let Err(error) = run_round(client, candidate, &standing, cancel, &mut stood).await {
            failures = if stood { 1 } else { failures.saturating_add(1) };
            tracing::info!(candidate = candidate.name, failures, %error, "a round of the election is over");
        }
        standing.set(CandidateRole::Unknown);
        let pause = tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random()));
        let _ = cancel.run_until_cancelled(pause).await;
    }
}

/// Why a round ended.
#[derive(Clone, Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error("the lease {0:x} ended, or was not confirmed for as long as it lives")]
    LeaseExpired(i64),
    #[error("the key {0} of this candidate was deleted")]
    KeyDeleted(String),
}

/// Publishes the role. A reader after the end must not find a leader there, so dropping it publishes unknown.
struct RolePublisher(watch::Sender<CandidateRole>);

impl RolePublisher {
    fn set(&self, new: CandidateRole) {
        self.0.send_if_modified(|old| {
            let changed = *old != new;
            *old = new;
            changed
        });
    }
}

impl Drop for RolePublisher {
    fn drop(&mut self) {
        self.set(CandidateRole::Unknown);
    }
}

/// Runs one round, from the grant of a lease to its end. Ends without an error only when cancelled.
async fn run_round(
    client: &Client,
    candidate: &Candidate,
    standing: &RolePublisher,
    cancel: &CancellationToken,
    stood: &mut bool,
) -> Result<(), RoundError> {
    let prepare = async {
        delete_stale_keys(client, candidate).await?;
        CandidateLease::grant(client, candidate.ttl).await
    };
    // A lease that was being granted at the cancellation expires by itself.
    let Some(lease) = cancel.run_until_cancelled(prepare).await else { return Ok(()) };
    let lease = lease?;
    let work = async {
        let own = create_candidate_key(client, candidate, &lease).await?;
        tokio::select! {
            error = lease.keep_alive(client) => Err(error),
            error = watch_election(client, candidate, &own, standing, stood) => Err(error),
        }
    };
    let ended = cancel.run_until_cancelled(work).await;
    // The role comes first: the revocation takes time.
    standing.set(CandidateRole::Unknown);
    lease.revoke(client).await;
    ended.unwrap_or(Ok(()))
}

/// Deletes the keys with this candidate's name, each only if it is still as it was read: it may be renewed meanwhile.
async fn delete_stale_keys(client: &Client, candidate: &Candidate) -> Result<(), EtcdError> {
    let keys = election_keys(candidate);
    for record in client.list(&keys).await?.records {
        if candidate_name(&record.value).as_deref() != Some(candidate.name.as_str()) {
            continue;
        }
        let compare = compare_mod_revision(client.namespace().to_etcd_key(&record.key)?, record.mod_revision);
        let delete = client.delete_operation(&KeySelector::One(record.key.clone()))?;
        client
            .transact(
                format!("deleting {}, which an earlier process of this candidate left", record.key),
                vec![compare],
                vec![delete],
                vec![],
            )
            .await?;
        tracing::info!(
            key = record.key,
            "deleted a key that an earlier process of this candidate left in the election"
        );
    }
    Ok(())
}

/// Creates this round's key. No other candidate can have it, because its name is the lease's.
async fn create_candidate_key(
    client: &Client,
    candidate: &Candidate,
    lease: &CandidateLease,
) -> Result<LeaderGuard, EtcdError> {
    let key = format!("{}/{:x}", candidate.election, lease.id);
    let value = encode_candidate(&candidate.name, lease.ttl);
    let compare = compare_create_revision(client.namespace().to_etcd_key(&key)?, 0);
    let put = client.put_operation(&key, &value, lease.id)?;
    let doing = format!("standing for election with {key}");
    let done = client.transact(doing.clone(), vec![compare], vec![put], vec![]).await?;
    if !done.succeeded {
        return Err(EtcdError::Rejected { operation: doing, message: "the key exists already".to_owned() });
    }
    Ok(LeaderGuard { key, create_revision: done.revision })
}

/// Watches the keys of the election, and publishes the role of this candidate, until its own key is gone.
async fn watch_election(
    client: &Client,
    candidate: &Candidate,
    own: &LeaderGuard,
    standing: &RolePublisher,
    stood: &mut bool,
) -> RoundError {
    let whole = |_: &str, value: &[u8]| Ok::<_, Infallible>(value.to_vec());
    let mut follower = KeyWatcher::new(client, election_keys(candidate), whole);
    let mut sight = follower.status();
    let mut places = ElectionView::default();
    loop {
        tokio::select! {
            event = follower.next_event() => match event {
                Ok(KeyEvent::Put { key, value, create_revision, .. }) => places.put_key(key, &value, create_revision),
                Ok(KeyEvent::Deleted { key }) if key == own.key => return RoundError::KeyDeleted(key),
                Ok(KeyEvent::Deleted { key }) => places.delete_key(&key),
                Ok(KeyEvent::BacklogDone) => places.is_complete = true,
                Err(error) => match error.source {},
            },
            // The sender lives as long as the watcher.
            _ = sight.changed() => {}
        }
        let seen = matches!(*sight.borrow_and_update(), WatchStatus::Watching { .. });
        let now = places.candidate_role(own, seen);
        *stood |= now != CandidateRole::Unknown;
        standing.set(now);
    }
}

fn election_keys(candidate: &Candidate) -> KeySelector {
    // With the separator, or `/leader` would match the keys of `/leaders`.
    KeySelector::Prefix(format!("{}/", candidate.election))
}

/// A lease that was granted.
#[derive(Debug)]
pub(super) struct CandidateLease {
    id: i64,
    ttl: Duration,
    /// Right before the request was sent: the lease lives at least its time to live from then on.
    requested_at: Instant,
}

impl CandidateLease {
    pub(super) async fn grant(client: &Client, ttl: Duration) -> Result<Self, EtcdError> {
        let requested_at = Instant::now();
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX).max(1);
        let doing = format!("requesting a lease of {seconds} s from etcd");
        let mut lease = client.lease();
        let request = wire::LeaseGrantRequest { ttl: seconds, id: 0 };
        let granted = client
            .call_unary(doing.clone(), request, async |request| lease.lease_grant(request).await)
            .await?;
        if !granted.error.is_empty() {
            return Err(EtcdError::Rejected { operation: doing, message: granted.error });
        }
        let ttl = Duration::from_secs(granted.ttl.try_into().unwrap_or(0));
        Ok(Self { id: granted.id, ttl, requested_at })
    }

    pub(super) const fn id(&self) -> i64 {
        self.id
    }

    /// The time since right before the lease was requested.
    pub(super) fn age(&self) -> Duration {
        self.requested_at.elapsed()
    }

    /// Keeps the lease alive until it has ended, or may have.
    async fn keep_alive(&self, client: &Client) -> RoundError {
        let doing = format!("keeping the lease {:x} alive", self.id);
        let ended = RoundError::LeaseExpired(self.id);
        let mut confirmed = self.requested_at;
        let mut failures = 0_u32;
        loop {
            // The first request is in the channel before the stream is opened: etcd responds with nothing until then.
            let (requests, receiver) = mpsc::channel(1);
            let question = wire::LeaseKeepAliveRequest { id: self.id };
            let mut requested_at = Instant::now();
            let _ = requests.try_send(question);
            let mut lease = client.lease();
            let questions = ReceiverStream::new(receiver);
            let opening =
                client.open_stream(&doing, questions, async |request| lease.lease_keep_alive(request).await);
            let Ok(opened) = tokio::time::timeout_at(confirmed + self.ttl, opening).await else {
                return ended;
            };
            if let Ok(mut answers) = opened {
                while let Ok(Ok(Some(answer))) =
                    tokio::time::timeout(self.renewal_interval(), answers.message()).await
                {
                    if answer.ttl <= 0 {
                        return ended;
                    }
                    (confirmed, failures) = (requested_at, 0);
                    tokio::time::sleep(self.renewal_interval()).await;
                    requested_at = Instant::now();
                    let _ = requests.try_send(question);
                }
            }
            failures = failures.saturating_add(1);
            tracing::debug!(lease = self.id, failures, "a lease was not confirmed; the renewal is retried");
            let pause = RETRY_BACKOFF.delay(failures, rand::random()).min(self.renewal_interval());
            let over = confirmed + self.ttl;
            tokio::time::sleep_until(over.min(Instant::now() + pause)).await;
            if Instant::now() >= over {
                return ended;
            }
        }
    }

    fn renewal_interval(&self) -> Duration {
        self.ttl / 3
    }

    /// Revokes the lease and thereby deletes the key, so that the next candidate need not wait.
    pub(super) async fn revoke(&self, client: &Client) {
        let mut lease = client.lease();
        let doing = format!("revoking the lease {:x}", self.id);
        let request = wire::LeaseRevokeRequest { id: self.id };
        let revoke = client.call_unary(doing, request, async |request| lease.lease_revoke(request).await);
        match tokio::time::timeout(REVOKE_TIMEOUT, revoke).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a lease was not revoked; it expires by itself"),
            Err(_) => {
                tracing::debug!(lease = self.id, "a lease was not revoked in time; it expires by itself");
            }
        }
    }
}
