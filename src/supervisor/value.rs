//! The newest of something, for whoever asks, however late.
//!
//! Parts of a node tell each other what is so, not what happened: a part that was just started, or started again, must
//! act on the same as one that was there all along. So a value keeps its newest state and gives it to every watcher
//! first; what was overwritten before somebody looked is gone, and nothing is lost by that. One consequence: wait with a
//! condition only for states, never for passing events.
//!
//! A value that was never set differs from one that was set to nothing: watchers of the first wait.
//!
//! Whoever sets a value does not wait for those who watch it, and a value lives as long as somebody holds it or watches
//! it, longer than the runnable that made it.

use std::sync::Arc;

use tokio::sync::watch;

/// A cell that is set by some and watched by others. Cloning it gives another hold on the same cell.
pub struct Value<T>(Arc<watch::Sender<Option<T>>>);

impl<T> Clone for Value<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone + Send + Sync> Default for Value<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Clone + Send + Sync> Value<T> {
    /// A value that was never set.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }

    /// Sets it, and tells all watchers, also where it is what it was: to set is to say something.
    pub fn set(&self, value: T) {
        self.0.send_replace(Some(value));
    }

    /// Makes it one that was never set: who watches waits for the next.
    pub fn forget(&self) {
        self.0.send_replace(None);
    }

    /// What it was last set to, if ever.
    #[must_use]
    pub fn latest(&self) -> Option<T> {
        self.0.borrow().clone()
    }

    /// Begins to watch it. The first that the watcher gets is the newest, whenever that was set.
    #[must_use]
    pub fn watch(&self) -> Watcher<T> {
        let mut receiver = self.0.subscribe();
        receiver.mark_changed();
        Watcher { receiver, _cell: self.0.clone() }
    }
}

/// One who watches a value. Each sees each state once, the newest at the time, and only one task at a time looks.
pub struct Watcher<T> {
    receiver: watch::Receiver<Option<T>>,
    /// The value lives at least as long, so that waiting for it has no end but its being set.
    _cell: Arc<watch::Sender<Option<T>>>,
}

impl<T: Clone + Send + Sync> Watcher<T> {
    /// Waits until the value was set since the last look, and gives the newest.
    ///
    /// Whoever drops this before it is ready has lost nothing: the next call gives it.
    pub async fn next(&mut self) -> T {
        loop {
            if let Some(value) = self.pending() {
                return value;
            }
            if self.receiver.changed().await.is_err() {
                // Not while the cell is held, just above.
                std::future::pending::<()>().await;
            }
            // That took note of the change; nothing is awaited before it is read.
            let newest = self.receiver.borrow_and_update().clone();
            if let Some(value) = newest {
                return value;
            }
        }
    }

    /// Waits until the value is one for which `holds`. States that it was in meanwhile are passed over.
    pub async fn next_where(&mut self, holds: impl Fn(&T) -> bool) -> T {
        loop {
            let value = self.next().await;
            if holds(&value) {
                return value;
            }
        }
    }

    /// What was set since the last look, if anything.
    pub fn pending(&mut self) -> Option<T> {
        if !self.receiver.has_changed().unwrap_or(false) {
            return None;
        }
        self.receiver.borrow_and_update().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::task::Poll;

    use futures::poll;

    /// What a watcher gives without waiting.
    async fn now<T: Clone + Send + Sync>(watcher: &mut Watcher<T>) -> Option<T> {
        match poll!(std::pin::pin!(watcher.next())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn forgotten_value_is_waited_for_by_early_and_late_watchers() {
        let value = Value::new();
        value.set(1);
        let mut early = value.watch();
        value.forget();
        let mut late = value.watch();
        assert_eq!((value.latest(), now(&mut early).await, now(&mut late).await), (None, None, None));
        value.set(2);
        assert_eq!((now(&mut early).await, now(&mut late).await), (Some(2), Some(2)));
    }

    #[tokio::test]
    async fn late_watcher_gets_the_newest_first_and_then_only_what_is_newer() {
        let value = Value::new();
        let mut early = value.watch();
        assert_eq!(now(&mut early).await, None, "never set");
        value.set(1);
        value.set(2);
        let mut late = value.watch();
        assert_eq!((now(&mut early).await, now(&mut late).await), (Some(2), Some(2)));
        assert_eq!((now(&mut early).await, now(&mut late).await), (None, None));
        for number in 3..=100 {
            value.set(number);
        }
        assert_eq!(now(&mut early).await, Some(100), "what was overwritten is gone");
        assert_eq!(value.latest(), Some(100));
    }

    #[tokio::test]
    async fn setting_what_is_there_already_is_told() {
        let value = Value::new();
        let mut watcher = value.watch();
        for _ in 0..3 {
            value.set("same");
            assert_eq!(now(&mut watcher).await, Some("same"));
        }
    }

    #[tokio::test]
    async fn nothing_is_something_to_be_set_to() {
        let value: Value<Option<u8>> = Value::new();
        let mut watcher = value.watch();
        assert_eq!(now(&mut watcher).await, None);
        value.set(None);
        assert_eq!(now(&mut watcher).await, Some(None));
    }

    #[tokio::test]
    async fn look_that_was_given_up_takes_nothing_with_it() {
        let value = Value::new();
        let mut watcher = value.watch();
        {
            let mut look = std::pin::pin!(watcher.next());
            assert!(poll!(look.as_mut()).is_pending());
            value.set(7);
            // Woken, and dropped without another poll.
        }
        assert_eq!(now(&mut watcher).await, Some(7));
    }

    #[tokio::test]
    async fn state_that_holds_is_waited_for_past_others() {
        let value = Value::new();
        let mut watcher = value.watch();
        let mut look = Box::pin(watcher.next_where(|number: &u32| number.is_multiple_of(10)));
        for number in [3, 7] {
            value.set(number);
            assert!(poll!(look.as_mut()).is_pending());
        }
        value.set(20);
        assert_eq!(look.await, 20);
        assert_eq!(now(&mut watcher).await, None, "what was passed over is not given later");
    }

    #[tokio::test]
    async fn watcher_outlives_those_who_set_it() {
        let value = Value::new();
        let mut watcher = value.watch();
        value.set(1);
        drop(value);
        assert_eq!(now(&mut watcher).await, Some(1));
        assert_eq!(now(&mut watcher).await, None, "and waits as before, without an end");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn watchers_of_different_haste_see_growing_states_and_the_last() {
        const LAST: u64 = 2000;
        let value = Value::new();
        let watchers: Vec<_> = (0..100)
            .map(|haste| {
                let mut watcher = value.watch();
                tokio::spawn(async move {
                    let mut seen = 0;
                    while seen < LAST {
                        let next = watcher.next().await;
                        assert!(next > seen, "{next} after {seen}");
                        seen = next;
                        for _ in 0..haste {
                            tokio::task::yield_now().await;
                        }
                    }
                })
            })
            .collect();
        for number in 1..=LAST {
            value.set(number);
            tokio::task::yield_now().await;
        }
        for watcher in watchers {
            watcher.await.unwrap();
        }
    }

    #[tokio::test]
    async fn watchers_that_come_and_go_leave_nothing() {
        let value = Value::new();
        value.set(0);
        let mut kept: Vec<_> = (0..100).map(|_| value.watch()).collect();
        for _ in 0..10_000 {
            drop(value.watch());
        }
        assert_eq!(value.0.receiver_count(), 100);
        // Each watcher is one hold on the cell; the value itself is the other one.
        assert_eq!(Arc::strong_count(&value.0), 101);
        value.set(1);
        for watcher in &mut kept {
            assert_eq!(now(watcher).await, Some(1));
        }
    }
}
