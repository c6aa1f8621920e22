//! Credential checks of streams, which may outlive the credential that opened them.
//!
//! A stream checks repeatedly whether its credential is still active. However many streams a credential has, it is
//! looked up about once a second: a result is valid for a second from the start of its look-up, and callers in the
//! meantime wait for the same look-up. A failed look-up is returned to those who wait for it, and is not cached.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use tokio::time::Instant;
use tonic::Status;
use uuid::Uuid;

use crate::api::api_error::bmdb_status;
use bmdb::connection::read_pool::ReadPool;
use bmdb::orders::credential;

/// How long a result is valid.
const CACHE_TTL: Duration = Duration::from_secs(1);
/// Most cached credentials; more than a server has streams.
const MAX_ENTRIES: usize = 1000;

/// Looks up whether credentials are still active; cheap to clone.
#[derive(Clone)]
pub struct CredentialChecks {
    read_pool: ReadPool,
    cache: Arc<CredentialCache>,
}

impl CredentialChecks {
    /// Checks that query through `read_pool`.
    #[must_use]
    pub fn new(read_pool: ReadPool) -> Self {
        Self { read_pool, cache: Arc::default() }
    }

    /// Whether a credential is active, as of at most a second ago.
    pub async fn is_active(&self, id: Uuid) -> Result<bool, Status> {
        let answer = self.cache.get_or_look_up(id, Instant::now(), || {
            let read_pool = self.read_pool.clone();
            Box::pin(async move {
                let found =
                    read_pool.read(move |tx| Box::pin(async move { credential::find_by_id(tx, id).await }));
                Ok(found.await.map_err(bmdb_status)?.is_some_and(|found| found.active))
            })
        });
        answer.await
    }

    /// Removes results that are no longer valid.
    pub fn forget_idle(&self) {
        self.cache.forget_idle();
    }
}

/// A result, or a look-up in progress.
type SharedLookup = Shared<BoxFuture<'static, Result<bool, Status>>>;

/// Results of look-ups, valid for a second.
#[derive(Default)]
struct CredentialCache {
    entries: Mutex<HashMap<Uuid, (Instant, SharedLookup)>>,
}

impl CredentialCache {
    /// The result for a credential at `now`: the cached one if it is valid, or that of `look`.
    fn get_or_look_up(
        &self,
        credential: Uuid,
        now: Instant,
        look: impl FnOnce() -> BoxFuture<'static, Result<bool, Status>>,
    ) -> SharedLookup {
        let mut answers = self.lock_entries();
        if let Some(known) = answers.get(&credential)
            && is_fresh(known, now)
        {
            return known.1.clone();
        }
        let answer = look().shared();
        if answers.len() >= MAX_ENTRIES {
            answers.retain(|_, known| is_fresh(known, now));
        }
        if answers.len() < MAX_ENTRIES {
            answers.insert(credential, (now, answer.clone()));
        }
        answer
    }

    /// Removes results that are no longer valid.
    fn forget_idle(&self) {
        let now = Instant::now();
        let mut answers = self.lock_entries();
        answers.retain(|_, known| is_fresh(known, now));
        answers.shrink_to_fit();
    }

    fn lock_entries(&self) -> MutexGuard<'_, HashMap<Uuid, (Instant, SharedLookup)>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_fresh((requested_at, answer): &(Instant, SharedLookup), now: Instant) -> bool {
    now.saturating_duration_since(*requested_at) < CACHE_TTL && !matches!(answer.peek(), Some(Err(_)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn many_streams_share_one_lookup_per_second() {
        let (good, looks, now) = (CredentialCache::default(), AtomicUsize::new(0), Instant::now());
        let [one, other] = [1, 2].map(Uuid::from_u128);
        let ask = |credential, after: u64, answer: Result<bool, Status>| {
            good.get_or_look_up(credential, now + Duration::from_millis(after), || {
                looks.fetch_add(1, Ordering::Relaxed);
                Box::pin(std::future::ready(answer))
            })
        };
        // All of them start before the first one has its result.
        let together: Vec<SharedLookup> = (0..200).map(|_| ask(one, 0, Ok(true))).collect();
        for answer in futures::future::join_all(together).await {
            assert!(answer.unwrap());
        }
        assert!(ask(one, 999, Ok(false)).await.unwrap());
        assert_eq!(looks.load(Ordering::Relaxed), 1);
        assert!(!ask(other, 0, Ok(false)).await.unwrap());
        assert!(!ask(one, 1000, Ok(false)).await.unwrap(), "it holds for a second and no longer");
        assert_eq!(looks.load(Ordering::Relaxed), 3);
        assert!(ask(one, 2000, Err(Status::unavailable("busy"))).await.is_err());
        assert!(ask(one, 2001, Ok(true)).await.unwrap(), "an error is not remembered");
    }

    #[tokio::test]
    async fn cache_size_is_bounded() {
        let (good, now) = (CredentialCache::default(), Instant::now());
        for id in 0..2000 {
            assert!(
                good.get_or_look_up(Uuid::from_u128(id), now, || Box::pin(async { Ok(true) })).await.unwrap()
            );
        }
        assert_eq!(good.lock_entries().len(), MAX_ENTRIES);
        let later =
            good.get_or_look_up(Uuid::from_u128(5000), now + CACHE_TTL, || Box::pin(async { Ok(true) }));
        assert!(later.await.unwrap());
        assert_eq!(good.lock_entries().len(), 1, "those that hold no more make room");
    }
}
