//! Whether credentials are still good, asked again and again by streams that were opened with them.
//!
//! However many streams a credential has, it is looked up about once a second: an answer holds for a second
//! from when it was asked for, and whoever asks meanwhile waits for the same one. That it could not be
//! looked up is told to those who waited for it, and remembered by nobody.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use tokio::time::Instant;
use tonic::Status;
use uuid::Uuid;

/// How long an answer holds.
const HOLDS: Duration = Duration::from_secs(1);
/// Most credentials that are remembered; more than a server has streams.
const REMEMBERED: usize = 1000;

/// An answer, or a look that is under way.
type Answer = Shared<BoxFuture<'static, Result<bool, Status>>>;

/// What is known of credentials for a second.
#[derive(Default)]
pub(super) struct Good {
    answers: Mutex<HashMap<Uuid, (Instant, Answer)>>,
}

impl Good {
    /// The answer about a credential at `now`: `look`'s, unless there is one that holds.
    pub(super) fn ask(
        &self,
        credential: Uuid,
        now: Instant,
        look: impl FnOnce() -> BoxFuture<'static, Result<bool, Status>>,
    ) -> Answer {
        let mut answers = self.answers();
        if let Some(known) = answers.get(&credential)
            && holds(known, now)
        {
            return known.1.clone();
        }
        let answer = look().shared();
        if answers.len() >= REMEMBERED {
            answers.retain(|_, known| holds(known, now));
        }
        if answers.len() < REMEMBERED {
            answers.insert(credential, (now, answer.clone()));
        }
        answer
    }

    /// Forgets what does not hold any more.
    pub(super) fn forget_idle(&self) {
        let now = Instant::now();
        let mut answers = self.answers();
        answers.retain(|_, known| holds(known, now));
        answers.shrink_to_fit();
    }

    fn answers(&self) -> MutexGuard<'_, HashMap<Uuid, (Instant, Answer)>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn holds((asked, answer): &(Instant, Answer), now: Instant) -> bool {
    now.saturating_duration_since(*asked) < HOLDS && !matches!(answer.peek(), Some(Err(_)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn many_streams_of_a_credential_cost_one_look_a_second() {
        let (good, looks, now) = (Good::default(), AtomicUsize::new(0), Instant::now());
        let [one, other] = [1, 2].map(Uuid::from_u128);
        let ask = |credential, after: u64, answer: Result<bool, Status>| {
            good.ask(credential, now + Duration::from_millis(after), || {
                looks.fetch_add(1, Ordering::Relaxed);
                Box::pin(std::future::ready(answer))
            })
        };
        // Before the first of them has its answer.
        let together: Vec<Answer> = (0..200).map(|_| ask(one, 0, Ok(true))).collect();
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
    async fn there_is_an_end_to_what_is_remembered() {
        let (good, now) = (Good::default(), Instant::now());
        for id in 0..2000 {
            assert!(good.ask(Uuid::from_u128(id), now, || Box::pin(async { Ok(true) })).await.unwrap());
        }
        assert_eq!(good.answers().len(), REMEMBERED);
        let later = good.ask(Uuid::from_u128(5000), now + HOLDS, || Box::pin(async { Ok(true) }));
        assert!(later.await.unwrap());
        assert_eq!(good.answers().len(), 1, "those that hold no more make room");
    }
}
