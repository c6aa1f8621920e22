//! List-and-watch on etcd keys: newest value of each key, deletions, reconnects.
//!
//! A watcher lists all keys, then watches from the very next revision on, so that no change falls between. Whatever
//! ends the watch (a member that stops, a lost Raft leader, a compaction that was faster), the watcher begins again in
//! the same way after a pause, until it is dropped.
//!
//! # What a watcher delivers
//!
//! * The newest value of each key, never the history: values that came and went between two calls of
//!   [`KeyWatcher::next_event`] are not delivered. However slow the caller is, at most two values for each key are
//!   stored: the newest, and the one that was delivered last.
//! * First the keys that exist at the start, then [`KeyEvent::BacklogDone`] exactly once, then changes.
//! * A deletion is an event, also of a key that was deleted while the watch was broken: a key that was delivered before
//!   and is missing from a newer listing counts as deleted. A key that came and went before it was delivered causes no
//!   event.
//! * Nothing is delivered twice: a key whose bytes are those that were last delivered causes no event, however often
//!   etcd names it, unless it was deleted and created again in between. So the mod revision of a delivered value may be
//!   older than etcd's; a caller that writes reads first.
//!
//! # Events that etcd loses
//!
//! A watch of etcd should deliver every event or end with an error. Some releases break that promise. Before 3.4.34 and
//! 3.5.16, a compaction also removes the deletion at the compacted revision. etcd accepts a watch that begins
//! exactly there, because it rejects only an older start, and that watch never delivers the deletion ([etcd issue
//! 18089](https://github.com/etcd-io/etcd/issues/18089)). Before 3.4.36 and 3.5.18, the deletion is still lost if the
//! member restarts within such a compaction ([etcd issue 19179](https://github.com/etcd-io/etcd/issues/19179)). So the
//! watcher lists the keys again while its watch continues:
//! * Once, as soon as the watch exists. A deletion that etcd dropped from the watch is older than the watch, so this
//!   listing lacks the key. A watch that begins one revision earlier would do as well, but etcd treats a watch that
//!   begins in the past as one that is behind, and delivers its first events up to 100 ms late.
//! * Then about every [`LISTING`]. This bounds the effect of any other lost event: a watch of an old etcd that
//!   falls behind may go on at a compacted revision, too. The whole listing is read, because no cheaper request proves
//!   that nothing was lost: a count and a newest revision stay right if an older write of another key is missing.
//!   [`LISTING`] states what that costs.
//!
//! # How it works
//!
//! A task watches etcd and feeds a `WatchCache`, which is pure and puts events and listings in order. `next_event` only
//! takes from the cache, and takes nothing before it returns, so that a caller may drop the future at any time. The
//! task also reads while no caller waits, so that etcd never waits for a slow caller.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backoff::spread_interval;
use proto::etcdserverpb as wire;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use crate::client::{Client, EtcdError, Listing};
use crate::namespace::KeySelector;
use crate::retry::RETRY_BACKOFF;
use crate::watch_cache::{Change, WatchCache};

/// The mean interval between two listings of a watcher.
///
/// It bounds how long a watcher can miss an event that etcd lost. The silence of a member can be noticed that much
/// later.
///
/// The price, for a member of a cluster of a thousand nodes: it has some fifteen watchers, and three of them list all
/// nodes, up to 2 MB each. That is 600 kB and five pages a second, read from an etcd on the same host. A watcher that
/// exists once for each node needs a longer interval.
pub const LISTING: Duration = Duration::from_secs(10);

/// Periodic listings that may fail in a row before the watcher considers etcd lost and begins again.
const MOST_FAILED_LISTINGS: u32 = 5;

/// A change of one key, or the end of the backlog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyEvent<T> {
    /// The key has this value.
    Put {
        /// The key within its namespace.
        key: String,
        /// The decoded value of the key.
        value: T,
        /// The store's revision when the key came to be.
        create_revision: i64,
        /// The store's revision of the first write with these bytes that was seen here.
        mod_revision: i64,
    },
    /// The key, which was delivered before, is gone.
    Deleted {
        /// The key within its namespace.
        key: String,
    },
    /// All keys that existed at the start have been delivered.
    BacklogDone,
}

/// A value that could not be decoded. The next event and this key's next value are delivered nevertheless.
#[derive(Debug, thiserror::Error)]
#[error("the value of {key} in etcd at revision {mod_revision} cannot be decoded: {source}")]
pub struct ValueDecodeError<E: std::error::Error + 'static> {
    /// The key within its namespace.
    pub key: String,
    /// The store's revision of the value.
    pub mod_revision: i64,
    /// The error of the caller's decoder.
    pub source: E,
}

/// Whether the watcher is connected to etcd.
#[derive(Clone, Debug)]
pub enum WatchStatus {
    /// Nothing has been seen yet.
    NotStarted,
    /// Changes are delivered as they happen.
    Watching {
        /// When this watch began.
        since: Instant,
    },
    /// Delivered values may be outdated: no change has been seen since the loss. A member that falls silent is noticed
    /// within ten seconds, one that has lost the others within a few of its election timeouts.
    Disconnected {
        /// When it was noticed.
        since: Instant,
        /// The cause, as a sentence.
        reason: String,
    },
}

/// Watches keys until it is dropped.
#[derive(Debug)]
pub struct KeyWatcher<D> {
    shared: Arc<SharedState>,
    status: watch::Receiver<WatchStatus>,
    decode: D,
    _task: JoinSet<()>,
}

#[derive(Debug, Default)]
struct SharedState {
    cache: Mutex<WatchCache>,
    changed: Notify,
}

impl SharedState {
    fn cache(&self) -> MutexGuard<'_, WatchCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D> KeyWatcher<D> {
    /// Begins to watch. `decode` turns a key and its bytes into the caller's type.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn new(client: &Client, keys: KeySelector, decode: D) -> Self {
        Self::with_listing_interval(client, keys, LISTING, decode)
    }

    /// As [`new`](Self::new), with another mean interval between two listings; the default is [`LISTING`].
    #[must_use]
    pub fn with_listing_interval(client: &Client, keys: KeySelector, interval: Duration, decode: D) -> Self {
        let shared = Arc::new(SharedState::default());
        let (seen, sight) = watch::channel(WatchStatus::NotStarted);
        let mut task = JoinSet::new();
        task.spawn(run_watch(client.clone(), keys, interval, shared.clone(), seen));
        Self { shared, status: sight, decode, _task: task }
    }

    /// The connection to etcd: the current status and its changes.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<WatchStatus> {
        self.status.clone()
    }

    /// Waits for the next event, without a limit.
    ///
    /// Cancel-safe: an event is taken only by the call that returns it.
    pub async fn next_event<T, E>(&mut self) -> Result<KeyEvent<T>, ValueDecodeError<E>>
    where
        D: FnMut(&str, &[u8]) -> Result<T, E>,
        E: std::error::Error + 'static,
    {
        loop {
            let change = self.shared.cache().take();
            match change {
                None => self.shared.changed.notified().await,
                Some(Change::BacklogDone) => return Ok(KeyEvent::BacklogDone),
                Some(Change::Deleted(key)) => return Ok(KeyEvent::Deleted { key }),
                Some(Change::Put(key, entry)) => {
                    let (create_revision, mod_revision) = (entry.create_revision, entry.mod_revision);
                    return match (self.decode)(&key, &entry.value) {
                        Ok(value) => Ok(KeyEvent::Put { key, value, create_revision, mod_revision }),
                        Err(source) => Err(ValueDecodeError { key, mod_revision, source }),
                    };
                }
            }
        }
    }
}

/// Lists and watches for ever.
async fn run_watch(
    client: Client,
    keys: KeySelector,
    interval: Duration,
    shared: Arc<SharedState>,
    sight: watch::Sender<WatchStatus>,
) {
    let began = Instant::now();
    let mut failures = 0_u32;
    loop {
        let mut looked = false;
        let Err(error) = list_and_watch(&client, &keys, interval, &shared, &sight, &mut looked).await;
        failures = if looked { 1 } else { failures.saturating_add(1) };
        let why = error.to_string();
        tracing::debug!(
            keys = keys.display_name(),
            failures,
            reason = why,
            "the watch on etcd failed, and is started again"
        );
        sight.send_modify(|sight| {
            let since = match sight {
                WatchStatus::NotStarted => began,
                WatchStatus::Watching { .. } => Instant::now(),
                WatchStatus::Disconnected { since, .. } => *since,
            };
            *sight = WatchStatus::Disconnected { since, reason: why };
        });
        tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
    }
}

/// Lists all keys, then watches for as long as etcd responds, and lists again periodically.
async fn list_and_watch(
    client: &Client,
    keys: &KeySelector,
    interval: Duration,
    shared: &SharedState,
    sight: &watch::Sender<WatchStatus>,
    looked: &mut bool,
) -> Result<Infallible, EtcdError> {
    let doing = format!("watching {}", keys.display_name());
    let listing = client.list(keys).await?;
    let (key, range_end) = keys.to_etcd_range(client.namespace())?;
    let create =
        wire::WatchCreateRequest { key, range_end, start_revision: listing.revision + 1, fragment: true };
    shared.cache().restart(listing);
    shared.changed.notify_one();

    // The request stream ends with this function. With an endless request, the connection would keep the stream open
    // after its reader is gone, and etcd its watch.
    let (requests, receiver) = mpsc::channel(1);
    let request_union = Some(wire::watch_request::RequestUnion::CreateRequest(create));
    let _ = requests.try_send(wire::WatchRequest { request_union });
    let stream = ReceiverStream::new(receiver);
    let mut watch = client.watch();
    let mut answers = client.open_stream(&doing, stream, async |request| watch.watch(request).await).await?;
    let mut exists = false;
    let mut listing = Box::pin(list_after(Duration::ZERO, client, keys));
    loop {
        let answer = tokio::select! {
            answer = answers.message() => answer,
            listed = &mut listing, if exists => {
                shared.cache().merge(listed?);
                shared.changed.notify_one();
                let pause = between_listings(interval, rand::random());
                listing.set(list_after(pause, client, keys));
                continue;
            }
        };
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                return Err(EtcdError::Unavailable {
                    operation: doing,
                    message: "etcd ended the watch".to_owned(),
                });
            }
            Err(status) => return Err(client.stream_error(&doing, &status)),
        };
        if answer.compact_revision > 0 {
            return Err(EtcdError::Compacted { operation: doing });
        }
        if answer.canceled {
            return Err(EtcdError::Unavailable { operation: doing, message: answer.cancel_reason });
        }
        if answer.created {
            (exists, *looked) = (true, true);
            sight.send_replace(WatchStatus::Watching { since: Instant::now() });
        }
        if answer.events.is_empty() {
            continue;
        }
        let mut cache = shared.cache();
        for event in answer.events {
            let deleted = event.r#type() == wire::event::EventType::Delete;
            let Some(pair) = event.kv else { continue };
            let record = client.record(pair);
            if deleted { cache.delete(record.key, record.mod_revision) } else { cache.put(record) }
        }
        drop(cache);
        shared.changed.notify_one();
    }
}

/// The pause before the next listing: the interval plus or minus a quarter, so that watchers which started together do
/// not stay together. `random` is from 0 to 1.
fn between_listings(interval: Duration, random: f64) -> Duration {
    spread_interval(interval, 0.25, random)
}

/// Lists the keys after a pause. A listing that fails is retried: the watch beside it may still work.
async fn list_after(pause: Duration, client: &Client, keys: &KeySelector) -> Result<Listing, EtcdError> {
    tokio::time::sleep(pause).await;
    let mut failures = 0;
    loop {
        match client.list(keys).await {
            Ok(listing) => return Ok(listing),
            Err(error) if failures >= MOST_FAILED_LISTINGS => return Err(error),
            Err(error) => {
                failures += 1;
                tracing::debug!(keys = keys.display_name(), failures, %error, "a periodic listing failed");
                tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_come_a_quarter_earlier_or_later_than_the_interval() {
        for (random, seconds) in [(0.0, 7.5), (0.5, 10.0), (1.0, 12.5), (7.0, 12.5), (-1.0, 7.5)] {
            assert_eq!(between_listings(LISTING, random), Duration::from_secs_f64(seconds), "{random}");
        }
    }
}
