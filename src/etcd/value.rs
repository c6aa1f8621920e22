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
//! * A deletion is an event, also of a key that was deleted while etcd was out of sight: after each new look, what was
//!   known before and is not there any more counts as deleted. A key that came and went before it was told never was.
//! * Nothing is told twice: a key that has the bytes that were told last is not told again, however often etcd names
//!   it, unless it was deleted in between and made anew. So the mod revision told with a value may be an older one than
//!   etcd has; whoever writes reads first.
//!
//! # How it is made
//!
//! A task follows etcd and keeps `Known`, which is pure; `next` only takes from it, and takes nothing before it
//! answers, so that a caller may drop the future at any time. The task also reads when nobody asks, so that etcd never
//! waits for a slow caller.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

use crate::etcd::client::{Client, EtcdError, Listing, Record};
use crate::etcd::namespace::Keys;
use crate::etcd::pause;
use crate::proto::etcdserverpb as wire;

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
    known: Mutex<Known>,
    news: Notify,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D> Follower<D> {
    /// Begins to follow. `decode` makes of a key and its bytes what the caller wants.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn new(client: &Client, keys: Keys, decode: D) -> Self {
        let shared = Arc::new(Shared::default());
        let (seen, sight) = watch::channel(Sight::Never);
        let mut task = JoinSet::new();
        task.spawn(follow(client.clone(), keys, shared.clone(), seen));
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
            let told = self.shared.known().take();
            match told {
                None => self.shared.news.notified().await,
                Some(Told::BacklogDone) => return Ok(Event::BacklogDone),
                Some(Told::Deleted(key)) => return Ok(Event::Deleted { key }),
                Some(Told::Put(key, seen)) => {
                    let Seen { create_revision, mod_revision, .. } = seen;
                    return match (self.decode)(&key, &seen.value) {
                        Ok(value) => Ok(Event::Put { key, value, create_revision, mod_revision }),
                        Err(source) => Err(Undecodable { key, mod_revision, source }),
                    };
                }
            }
        }
    }
}

/// Looks and watches for ever.
async fn follow(client: Client, keys: Keys, shared: Arc<Shared>, sight: watch::Sender<Sight>) {
    let began = Instant::now();
    let mut failures = 0_u32;
    loop {
        let mut looked = false;
        let Err(error) = look_and_watch(&client, &keys, &shared, &sight, &mut looked).await;
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

/// Looks at all there is, then watches for as long as etcd answers.
async fn look_and_watch(
    client: &Client,
    keys: &Keys,
    shared: &Shared,
    sight: &watch::Sender<Sight>,
    looked: &mut bool,
) -> Result<Infallible, EtcdError> {
    let doing = format!("watching {}", keys.name());
    let listing = client.list(keys).await?;
    let (key, range_end) = keys.outside(client.namespace())?;
    let create =
        wire::WatchCreateRequest { key, range_end, start_revision: listing.revision + 1, fragment: true };
    shared.known().look(listing);
    shared.news.notify_one();

    // It ends when this does. With a request that has no end, the connection would keep the stream open when nobody
    // reads it any more, and etcd its watch.
    let (ask, asked) = mpsc::channel(1);
    let request_union = Some(wire::watch_request::RequestUnion::CreateRequest(create));
    let _ = ask.try_send(wire::WatchRequest { request_union });
    let asked = ReceiverStream::new(asked);
    let mut watch = client.watch();
    let mut answers = client.open(&doing, asked, async |asked| watch.watch(asked).await).await?;
    loop {
        let answer = match answers.message().await {
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
            *looked = true;
            sight.send_replace(Sight::Following { since: Instant::now() });
        }
        if answer.events.is_empty() {
            continue;
        }
        let mut known = shared.known();
        for event in answer.events {
            let deleted = event.r#type() == wire::event::EventType::Delete;
            let Some(pair) = event.kv else { continue };
            let record = client.record(pair);
            if deleted { known.deleted(record.key) } else { known.put(record) }
        }
        drop(known);
        shared.news.notify_one();
    }
}

/// A value and its revision.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    value: Arc<[u8]>,
    create_revision: i64,
    mod_revision: i64,
}

impl Seen {
    /// Whether it is no news to whoever knows the other.
    fn says_the_same_as(&self, other: &Self) -> bool {
        self.create_revision == other.create_revision && self.value == other.value
    }
}

/// What is to be told next.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Put(String, Seen),
    Deleted(String),
    BacklogDone,
}

/// One place in the order of telling.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Next {
    Key(String),
    BacklogDone,
}

/// What is known of the keys, what was told of it, and in which order the rest will be. No I/O.
#[derive(Debug, Default)]
struct Known {
    looked: bool,
    now: BTreeMap<String, Seen>,
    told: BTreeMap<String, Seen>,
    queue: VecDeque<Next>,
    /// The keys in the queue, each once.
    queued: HashSet<String>,
}

impl Known {
    /// All there is, as of now.
    fn look(&mut self, listing: Listing) {
        let there: HashSet<&str> = listing.records.iter().map(|record| record.key.as_str()).collect();
        let gone = self.now.keys().filter(|key| !there.contains(key.as_str())).cloned().collect::<Vec<_>>();
        for key in gone {
            self.deleted(key);
        }
        for record in listing.records {
            self.put(record);
        }
        if !std::mem::replace(&mut self.looked, true) {
            self.queue.push_back(Next::BacklogDone);
        }
    }

    fn put(&mut self, record: Record) {
        let Record { key, value, create_revision, mod_revision } = record;
        let new = Seen { value: value.into(), create_revision, mod_revision };
        // etcd may repeat itself, and bytes that stay the same are no news.
        if self.now.get(&key).is_some_and(|seen| seen.says_the_same_as(&new)) {
            return;
        }
        self.now.insert(key.clone(), new);
        self.line_up(key);
    }

    fn deleted(&mut self, key: String) {
        if self.now.remove(&key).is_some() {
            self.line_up(key);
        }
    }

    fn line_up(&mut self, key: String) {
        if self.queued.insert(key.clone()) {
            self.queue.push_back(Next::Key(key));
        }
    }

    /// The next of what is to be told; from now on it counts as told.
    fn take(&mut self) -> Option<Told> {
        loop {
            let key = match self.queue.pop_front()? {
                Next::BacklogDone => return Some(Told::BacklogDone),
                Next::Key(key) => key,
            };
            self.queued.remove(&key);
            match self.now.get(&key) {
                Some(seen) => {
                    let before = self.told.insert(key.clone(), seen.clone());
                    if before.is_none_or(|before| !before.says_the_same_as(seen)) {
                        return Some(Told::Put(key, seen.clone()));
                    }
                }
                None => {
                    if self.told.remove(&key).is_some() {
                        return Some(Told::Deleted(key));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, value: &str, mod_revision: i64) -> Record {
        Record { key: key.to_owned(), value: value.into(), create_revision: 1, mod_revision }
    }

    fn look(known: &mut Known, records: &[(&str, &str)]) {
        let records = records.iter().map(|(key, value)| record(key, value, 5)).collect();
        known.look(Listing { records, revision: 5 });
    }

    /// All there is to tell: `a=1`, `-a`, `|`.
    fn told(known: &mut Known) -> String {
        let mut told = Vec::new();
        while let Some(next) = known.take() {
            told.push(match next {
                Told::Put(key, seen) => format!("{key}={}", String::from_utf8_lossy(&seen.value)),
                Told::Deleted(key) => format!("-{key}"),
                Told::BacklogDone => "|".to_owned(),
            });
        }
        assert!(known.queued.is_empty());
        told.join(" ")
    }

    #[test]
    fn backlog_is_told_once_and_before_all_that_changes() {
        let mut known = Known::default();
        assert_eq!(told(&mut known), "");
        look(&mut known, &[("a", "1"), ("b", "1")]);
        known.put(record("c", "1", 6));
        known.put(record("a", "2", 7));
        assert_eq!(told(&mut known), "a=2 b=1 | c=1");
        look(&mut known, &[("a", "2"), ("b", "1"), ("c", "1")]);
        assert_eq!(told(&mut known), "");
    }

    #[test]
    fn empty_beginning_is_a_beginning() {
        let mut known = Known::default();
        look(&mut known, &[]);
        assert_eq!(told(&mut known), "|");
        look(&mut known, &[]);
        assert_eq!(told(&mut known), "");
    }

    #[test]
    fn values_that_came_and_went_are_not_told() {
        let mut known = Known::default();
        look(&mut known, &[("a", "1")]);
        assert_eq!(told(&mut known), "a=1 |");
        for number in 2..1000 {
            known.put(record("a", &number.to_string(), number));
        }
        assert_eq!(known.queue.len(), 1, "one place however many values");
        assert_eq!(told(&mut known), "a=999");
        known.put(record("a", "2", 1000));
        known.put(record("a", "999", 1001));
        assert_eq!(told(&mut known), "", "back to what was told last");
        known.put(record("new", "1", 1002));
        known.deleted("new".to_owned());
        assert_eq!(told(&mut known), "", "never told to be there");
        known.deleted("a".to_owned());
        known.put(record("a", "999", 1003));
        assert_eq!(told(&mut known), "", "gone and back as it was");
        known.put(Record { create_revision: 1004, ..record("a", "999", 1004) });
        assert_eq!(told(&mut known), "a=999", "the same bytes in a key made anew");
    }

    #[test]
    fn deletion_is_told_even_when_it_was_not_seen() {
        let mut known = Known::default();
        look(&mut known, &[("a", "1"), ("b", "1"), ("c", "1")]);
        assert_eq!(told(&mut known), "a=1 b=1 c=1 |");
        known.deleted("b".to_owned());
        known.deleted("b".to_owned());
        assert_eq!(told(&mut known), "-b");
        look(&mut known, &[("a", "1"), ("d", "1")]);
        assert_eq!(told(&mut known), "-c d=1");
    }

    #[test]
    fn what_was_never_told_is_not_told_as_deleted() {
        let mut known = Known::default();
        look(&mut known, &[("a", "1"), ("b", "1")]);
        known.deleted("a".to_owned());
        look(&mut known, &[]);
        assert_eq!(told(&mut known), "|");
    }

    #[test]
    fn empty_value_is_a_value() {
        let mut known = Known::default();
        look(&mut known, &[("a", "")]);
        assert_eq!(told(&mut known), "a= |");
        known.deleted("a".to_owned());
        assert_eq!(told(&mut known), "-a");
    }
}
