//! Following a key, or all keys under a prefix: what is there now, and what it becomes.
//!
//! A follower asks etcd for all that is there, then watches from the very next revision on, so that nothing falls
//! between. Whatever ends the watch (a member that stops, a lost leader of the members, a compaction that was faster)
//! it begins again in the same way, with a pause, until it is dropped.
//!
//! # What the one who follows is told
//!
//! * The newest value of each key, never the history: values that came and went between two calls of
//!   [`Follower::next`] are not told. However slow he is, no more is kept than one value for each key.
//! * First what was there at the start, then [`Event::BacklogDone`] once and never again, then what changes.
//! * A deletion is an event, also of a key that was deleted while etcd was out of sight: what was known before and is not in
//!   a newer listing any more counts as deleted. A key that came and went before it was told never was.
//! * Nothing is told twice: a key that has the bytes that were told last is not told again, however often etcd names
//!   it, unless it was deleted in between and made anew. So the mod revision told with a value may be an older one than
//!   etcd has; whoever writes reads first.
//!
//! # Events that etcd loses
//!
//! A watch of etcd should deliver every event or end with an error. Some releases break that promise. Before 3.4.34 and
//! 3.5.16 a compaction removes the deletion that is the compacted revision itself. A watch that is to begin exactly there
//! is not refused, because only an older beginning is; it never delivers that deletion
//! ([etcd issue 18089](https://github.com/etcd-io/etcd/issues/18089)). So the follower lists the keys again while its watch
//! goes on:
//!
//! * Once, as soon as the watch exists. A deletion that etcd took from the watch is older than the watch, so this listing
//!   misses the key. A watch that begins one revision earlier would do as well, but etcd takes a watch that begins in the
//!   past for one that is behind, and delivers its first events up to 100 ms late.
//! * Then every [`pause::LISTING`] or so. This bounds what any other lost event can do: a watch of an old etcd that falls
//!   behind may go on at a compacted revision, too. The whole listing is read, because no cheaper question proves that
//!   nothing was lost: a count and a newest revision stay right where an older write of another key is missing.
//!   [`pause::LISTING`] says what that costs.
//!
//! # How it is made
//!
//! A task follows etcd and feeds a `WatchCache`, which is pure and puts events and listings in order; `next` only takes
//! from it, and takes nothing before it answers, so that a caller may drop the future at any time. The task also reads
//! when nobody asks, so that etcd never waits for a slow caller.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use crate::etcd::client::{Client, EtcdError, Listing};
use crate::etcd::namespace::Keys;
use crate::etcd::pause;
use crate::etcd::watch_cache::{Change, WatchCache};
use crate::proto::etcdserverpb as wire;

/// Periodic listings that may fail in a row before the follower takes etcd for lost and begins again.
const MOST_FAILED_LISTINGS: u32 = 5;

/// What happened to one key, or that the beginning is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<T> {
    /// The key has this value.
    Put {
        /// The key within its namespace.
        key: String,
        /// Its value.
        value: T,
        /// The store's revision when the key came to be.
        create_revision: i64,
        /// The store's revision of these bytes when they were first seen here.
        mod_revision: i64,
    },
    /// The key, which was told before, is gone.
    Deleted {
        /// The key within its namespace.
        key: String,
    },
    /// All that was there at the start has been told.
    BacklogDone,
}

/// A value that could not be understood. The next event comes all the same, and so does this key's next value.
#[derive(Debug, thiserror::Error)]
#[error("the value of {key} in etcd at revision {mod_revision} cannot be understood: {source}")]
pub struct Undecodable<E: std::error::Error + 'static> {
    /// The key within its namespace.
    pub key: String,
    /// The store's revision of the value.
    pub mod_revision: i64,
    /// Why.
    pub source: E,
}

/// How well etcd is seen.
#[derive(Clone, Debug)]
pub enum Sight {
    /// Nothing was seen yet.
    Never,
    /// What changes is told as it changes.
    Following {
        /// Since when.
        since: Instant,
    },
    /// What was told may be old: nothing has been seen since then. A member that falls silent is noticed within ten
    /// seconds, one that has lost the others within a few of its election timeouts.
    Lost {
        /// When it was noticed.
        since: Instant,
        /// Why, as a sentence.
        why: String,
    },
}

/// Follows keys until it is dropped.
#[derive(Debug)]
pub struct Follower<D> {
    shared: Arc<Shared>,
    sight: watch::Receiver<Sight>,
    decode: D,
    _task: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Shared {
    cache: Mutex<WatchCache>,
    changed: Notify,
}

impl Shared {
    fn cache(&self) -> MutexGuard<'_, WatchCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D> Follower<D> {
    /// Begins to follow. `decode` makes of a key and its bytes what the caller wants.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn new(client: &Client, keys: Keys, decode: D) -> Self {
        Self::with_listing_interval(client, keys, pause::LISTING, decode)
    }

    /// The same with another mean interval between two listings of the keys; the default is [`pause::LISTING`].
    #[must_use]
    pub fn with_listing_interval(client: &Client, keys: Keys, interval: Duration, decode: D) -> Self {
        let shared = Arc::new(Shared::default());
        let (seen, sight) = watch::channel(Sight::Never);
        let mut task = JoinSet::new();
        task.spawn(follow(client.clone(), keys, interval, shared.clone(), seen));
        Self { shared, sight, decode, _task: task }
    }

    /// How well etcd is seen, now and from now on.
    #[must_use]
    pub fn sight(&self) -> watch::Receiver<Sight> {
        self.sight.clone()
    }

    /// The next event; waits for one as long as it takes.
    ///
    /// Cancel-safe: an event is taken only by the call that returns it.
    pub async fn next<T, E>(&mut self) -> Result<Event<T>, Undecodable<E>>
    where
        D: FnMut(&str, &[u8]) -> Result<T, E>,
        E: std::error::Error + 'static,
    {
        loop {
            let change = self.shared.cache().take();
            match change {
                None => self.shared.changed.notified().await,
                Some(Change::BacklogDone) => return Ok(Event::BacklogDone),
                Some(Change::Deleted(key)) => return Ok(Event::Deleted { key }),
                Some(Change::Put(key, entry)) => {
                    let (create_revision, mod_revision) = (entry.create_revision, entry.mod_revision);
                    return match (self.decode)(&key, &entry.value) {
                        Ok(value) => Ok(Event::Put { key, value, create_revision, mod_revision }),
                        Err(source) => Err(Undecodable { key, mod_revision, source }),
                    };
                }
            }
        }
    }
}

/// Looks and watches for ever.
async fn follow(
    client: Client,
    keys: Keys,
    interval: Duration,
    shared: Arc<Shared>,
    sight: watch::Sender<Sight>,
) {
    let began = Instant::now();
    let mut failures = 0_u32;
    loop {
        let mut looked = false;
        let Err(error) = list_and_watch(&client, &keys, interval, &shared, &sight, &mut looked).await;
        failures = if looked { 1 } else { failures.saturating_add(1) };
        let why = error.to_string();
        tracing::debug!(keys = keys.name(), failures, why, "etcd is not followed, and will be tried again");
        sight.send_modify(|sight| {
            let since = match sight {
                Sight::Never => began,
                Sight::Following { .. } => Instant::now(),
                Sight::Lost { since, .. } => *since,
            };
            *sight = Sight::Lost { since, why };
        });
        tokio::time::sleep(pause::after_failure(failures, rand::random())).await;
    }
}

/// Lists all there is, then watches for as long as etcd answers, and lists again from time to time.
async fn list_and_watch(
    client: &Client,
    keys: &Keys,
    interval: Duration,
    shared: &Shared,
    sight: &watch::Sender<Sight>,
    looked: &mut bool,
) -> Result<Infallible, EtcdError> {
    let doing = format!("watching {}", keys.name());
    let listing = client.list(keys).await?;
    let (key, range_end) = keys.outside(client.namespace())?;
    let create =
        wire::WatchCreateRequest { key, range_end, start_revision: listing.revision + 1, fragment: true };
    shared.cache().restart(listing);
    shared.changed.notify_one();

    // It ends when this does. With a request that has no end, the connection would keep the stream open when nobody
    // reads it any more, and etcd its watch.
    let (ask, asked) = mpsc::channel(1);
    let request_union = Some(wire::watch_request::RequestUnion::CreateRequest(create));
    let _ = ask.try_send(wire::WatchRequest { request_union });
    let asked = ReceiverStream::new(asked);
    let mut watch = client.watch();
    let mut answers = client.open(&doing, asked, async |asked| watch.watch(asked).await).await?;
    let mut exists = false;
    let mut listing = Box::pin(list_after(Duration::ZERO, client, keys));
    loop {
        let answer = tokio::select! {
            answer = answers.message() => answer,
            listed = &mut listing, if exists => {
                shared.cache().merge(listed?);
                shared.changed.notify_one();
                let pause = pause::between_listings(interval, rand::random());
                listing.set(list_after(pause, client, keys));
                continue;
            }
        };
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => return Err(EtcdError::Away { doing, said: "etcd ended the watch".to_owned() }),
            Err(status) => return Err(client.stream_error(&doing, &status)),
        };
        if answer.compact_revision > 0 {
            return Err(EtcdError::Compacted { doing });
        }
        if answer.canceled {
            return Err(EtcdError::Away { doing, said: answer.cancel_reason });
        }
        if answer.created {
            (exists, *looked) = (true, true);
            sight.send_replace(Sight::Following { since: Instant::now() });
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

/// Lists the keys after a pause. A listing that fails is tried again: the watch beside it may be well.
async fn list_after(pause: Duration, client: &Client, keys: &Keys) -> Result<Listing, EtcdError> {
    tokio::time::sleep(pause).await;
    let mut failures = 0;
    loop {
        match client.list(keys).await {
            Ok(listing) => return Ok(listing),
            Err(error) if failures >= MOST_FAILED_LISTINGS => return Err(error),
            Err(error) => {
                failures += 1;
                tracing::debug!(keys = keys.name(), failures, %error, "a periodic listing failed");
                tokio::time::sleep(pause::after_failure(failures, rand::random())).await;
            }
        }
    }
}
