//! Who of several leads.
//!
//! Each candidate puts a key under the election's name, bound to a lease that he keeps alive. The candidate whose key
//! was created first leads; the others wait in the order of theirs. etcd deletes the key of one whose lease has ended,
//! and the next one leads. The key that leads and its create revision are the [`Guard`] of all that its owner writes.
//!
//! # What a candidate is
//!
//! At any time exactly one of three things ([`Standing`]): the leader; a follower who knows who leads; or neither, which
//! is the truth when it is not known. A candidate is neither before he has seen his own key, when his lease has not
//! been confirmed for as long as it lives (counted from before he *asked*, so that he stops before anybody can begin),
//! when his key is gone, and, if he is not the leader, when he does not see etcd any more.
//!
//! # Rounds
//!
//! One lease is one round. A round ends with its lease or its key, and the next begins with a new lease after a pause;
//! a leader that is elected again therefore has another guard. Each round first removes what is left of a former life
//! of this candidate: a key with its name that it did not put there now, whose lease may have seconds to live, through
//! which everybody is sent to somebody who does not answer.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::etcd::client::{Client, EtcdError, created_at, written_at};
use crate::etcd::guard::Guard;
use crate::etcd::namespace::Keys;
use crate::etcd::pause;
pub use crate::etcd::places::{Leader, Standing};
use crate::etcd::places::{Places, name_in, value_of};
use crate::etcd::value::{Event, Follower, Sight};
use crate::proto::etcdserverpb as wire;

/// How long giving back the lease may take when all else is over. What is not given back ends by itself.
const FAREWELL: Duration = Duration::from_secs(1);

/// Who stands, and for what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// What the keys of the election begin with: `/leader`.
    pub election: String,
    /// Name of this candidate, its node; the same after a restart, and nobody else's.
    pub name: String,
    /// How long after its last sign of life a leader is replaced. Whole seconds, at least one; etcd makes it at least
    /// its own shortest, which is two with its usual timeouts.
    pub ttl: Duration,
}

/// Stands until cancelled, and says at any time what the candidate is. Only etcd can be in the way, and that passes.
///
/// At the end, however it ends, the standing is [`Standing::Neither`]. Cancelled, it gives its lease back within a
/// second, so that the next one need not wait for it; dropped, it does not.
pub async fn stand(
    client: &Client,
    candidate: &Candidate,
    standing: watch::Sender<Standing>,
    cancel: &CancellationToken,
) {
    let standing = Published(standing);
    let mut failures = 0_u32;
    while !cancel.is_cancelled() {
        standing.set(Standing::Neither);
        let mut stood = false;
        if let Err(error) = round(client, candidate, &standing, cancel, &mut stood).await {
            failures = if stood { 1 } else { failures.saturating_add(1) };
            tracing::info!(candidate = candidate.name, failures, %error, "a round of the election is over");
        }
        standing.set(Standing::Neither);
        let pause = tokio::time::sleep(pause::after_failure(failures, rand::random()));
        let _ = cancel.run_until_cancelled(pause).await;
    }
}

/// Why a round ended.
#[derive(Clone, Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error("the lease {0:x} ended, or was not confirmed for as long as it lives")]
    LeaseEnded(i64),
    #[error("the key {0} of this candidate was deleted")]
    KeyGone(String),
}

/// Where the standing is told. Whoever reads it after the end must not find a leader there.
struct Published(watch::Sender<Standing>);

impl Published {
    fn set(&self, new: Standing) {
        self.0.send_if_modified(|old| {
            let changed = *old != new;
            *old = new;
            changed
        });
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        self.set(Standing::Neither);
    }
}

/// One lease, from its beginning to its end. Ends without an error only when cancelled.
async fn round(
    client: &Client,
    candidate: &Candidate,
    standing: &Published,
    cancel: &CancellationToken,
    stood: &mut bool,
) -> Result<(), RoundError> {
    let prepare = async {
        remove_former_life(client, candidate).await?;
        Lease::grant(client, candidate.ttl).await
    };
    // A lease that was being granted when this was cancelled ends by itself.
    let Some(lease) = cancel.run_until_cancelled(prepare).await else { return Ok(()) };
    let lease = lease?;
    let work = async {
        let own = put_own_key(client, candidate, &lease).await?;
        tokio::select! {
            error = lease.keep_alive(client) => Err(error),
            error = observe(client, candidate, &own, standing, stood) => Err(error),
        }
    };
    let ended = cancel.run_until_cancelled(work).await;
    // First of all: what follows takes time.
    standing.set(Standing::Neither);
    lease.give_back(client).await;
    ended.unwrap_or(Ok(()))
}

/// Deletes the keys that say to be this candidate's, each only as it was read: it may be renewed meanwhile.
async fn remove_former_life(client: &Client, candidate: &Candidate) -> Result<(), EtcdError> {
    let keys = keys_of(candidate);
    for record in client.list(&keys).await?.records {
        if name_in(&record.value).as_deref() != Some(candidate.name.as_str()) {
            continue;
        }
        let compare = written_at(client.namespace().outside(&record.key)?, record.mod_revision);
        let delete = client.delete_operation(&Keys::One(record.key.clone()))?;
        client
            .transact(
                format!("deleting {} of a former life", record.key),
                vec![compare],
                vec![delete],
                vec![],
            )
            .await?;
        tracing::info!(key = record.key, "removed what a former life of this candidate left in the election");
    }
    Ok(())
}

/// Puts the key that stands for this round. Nobody else can have it, for its name is the lease's.
async fn put_own_key(client: &Client, candidate: &Candidate, lease: &Lease) -> Result<Guard, EtcdError> {
    let key = format!("{}/{:x}", candidate.election, lease.id);
    let value = value_of(&candidate.name, lease.ttl);
    let compare = created_at(client.namespace().outside(&key)?, 0);
    let put = client.put_operation(&key, &value, lease.id)?;
    let doing = format!("standing for election with {key}");
    let done = client.transact(doing.clone(), vec![compare], vec![put], vec![]).await?;
    if !done.succeeded {
        return Err(EtcdError::Refused { doing, said: "the key is there already".to_owned() });
    }
    Ok(Guard { key, create_revision: done.revision })
}

/// Follows the keys of the election, and says what they make of this candidate, until its own is gone.
async fn observe(
    client: &Client,
    candidate: &Candidate,
    own: &Guard,
    standing: &Published,
    stood: &mut bool,
) -> RoundError {
    let whole = |_: &str, value: &[u8]| Ok::<_, Infallible>(value.to_vec());
    let mut follower = Follower::new(client, keys_of(candidate), whole);
    let mut sight = follower.sight();
    let mut places = Places::default();
    loop {
        tokio::select! {
            event = follower.next() => match event {
                Ok(Event::Put { key, value, create_revision, .. }) => places.put(key, &value, create_revision),
                Ok(Event::Deleted { key }) if key == own.key => return RoundError::KeyGone(key),
                Ok(Event::Deleted { key }) => places.delete(&key),
                Ok(Event::BacklogDone) => places.complete = true,
                Err(error) => match error.source {},
            },
            // Its other half lives as long as the follower.
            _ = sight.changed() => {}
        }
        let seen = matches!(*sight.borrow_and_update(), Sight::Following { .. });
        let now = places.standing(own, seen);
        *stood |= now != Standing::Neither;
        standing.set(now);
    }
}

fn keys_of(candidate: &Candidate) -> Keys {
    // With what divides them, or `/leader` would see those of `/leaders`.
    Keys::Under(format!("{}/", candidate.election))
}

/// A lease that was granted.
struct Lease {
    id: i64,
    ttl: Duration,
    /// Right before etcd was asked for it: it lives at least until so long after.
    asked: Instant,
}

impl Lease {
    async fn grant(client: &Client, ttl: Duration) -> Result<Self, EtcdError> {
        let asked = Instant::now();
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX).max(1);
        let doing = format!("asking etcd for a lease of {seconds} s");
        let mut lease = client.lease();
        let request = wire::LeaseGrantRequest { ttl: seconds, id: 0 };
        let granted =
            client.call(doing.clone(), request, async |request| lease.lease_grant(request).await).await?;
        if !granted.error.is_empty() {
            return Err(EtcdError::Refused { doing, said: granted.error });
        }
        let ttl = Duration::from_secs(granted.ttl.try_into().unwrap_or(0));
        Ok(Self { id: granted.id, ttl, asked })
    }

    /// Keeps it alive until it has ended, or may have.
    async fn keep_alive(&self, client: &Client) -> RoundError {
        let doing = format!("keeping the lease {:x} alive", self.id);
        let ended = RoundError::LeaseEnded(self.id);
        let mut confirmed = self.asked;
        let mut failures = 0_u32;
        loop {
            // The first question is in it before the stream is opened: etcd answers nothing until then.
            let (ask, asked) = mpsc::channel(1);
            let question = wire::LeaseKeepAliveRequest { id: self.id };
            let mut asked_at = Instant::now();
            let _ = ask.try_send(question);
            let mut lease = client.lease();
            let questions = ReceiverStream::new(asked);
            let opening = client.open(&doing, questions, async |asked| lease.lease_keep_alive(asked).await);
            let Ok(opened) = tokio::time::timeout_at(confirmed + self.ttl, opening).await else {
                return ended;
            };
            if let Ok(mut answers) = opened {
                while let Ok(Ok(Some(answer))) = tokio::time::timeout(self.third(), answers.message()).await {
                    if answer.ttl <= 0 {
                        return ended;
                    }
                    (confirmed, failures) = (asked_at, 0);
                    tokio::time::sleep(self.third()).await;
                    asked_at = Instant::now();
                    let _ = ask.try_send(question);
                }
            }
            failures = failures.saturating_add(1);
            tracing::debug!(lease = self.id, failures, "a lease was not confirmed, and is tried again");
            let pause = pause::after_failure(failures, rand::random()).min(self.third());
            let over = confirmed + self.ttl;
            tokio::time::sleep_until(over.min(Instant::now() + pause)).await;
            if Instant::now() >= over {
                return ended;
            }
        }
    }

    fn third(&self) -> Duration {
        self.ttl / 3
    }

    /// Ends it, and with it the key, so that the next candidate need not wait.
    async fn give_back(&self, client: &Client) {
        let mut lease = client.lease();
        let doing = format!("giving back the lease {:x}", self.id);
        let request = wire::LeaseRevokeRequest { id: self.id };
        let revoke = client.call(doing, request, async |request| lease.lease_revoke(request).await);
        match tokio::time::timeout(FAREWELL, revoke).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a lease was not given back; it ends by itself"),
            Err(_) => {
                tracing::debug!(lease = self.id, "a lease was not given back in time; it ends by itself");
            }
        }
    }
}
