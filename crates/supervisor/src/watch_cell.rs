//! A watch cell: holds the newest value and wakes every watcher.
//!
//! Parts of a node share their states, not events: a part that was just started, or restarted, must act on the same
//! state as one that was there all along. So a cell stores its newest value and returns it to every watcher first. A
//! value that was overwritten before a watcher read it is gone, and nothing is lost by that. One consequence: wait with
//! a condition only for states, never for passing events.
//!
//! A cell that was never set differs from one that was set to nothing: watchers of the first wait.
//!
//! Setting a value does not wait for the watchers. A cell lives as long as a clone or a watcher of it exists, longer
//! than the runnable that made it.

use std::sync::Arc;

use tokio::sync::watch;

/// A cell that some tasks set and others watch. A clone refers to the same cell.
pub struct WatchCell<T>(Arc<watch::Sender<Option<T>>>);

impl<T> Clone for WatchCell<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone + Send + Sync> Default for WatchCell<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Clone + Send + Sync> WatchCell<T> {
    /// A cell that was never set.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }

    /// Sets the value and wakes all watchers, even if the value is unchanged.
    pub fn set(&self, value: T) {
        self.0.send_replace(Some(value));
    }

    /// Clears the cell as if it had never been set: watchers wait for the next value.
    pub fn clear(&self) {
        self.0.send_replace(None);
    }

    /// The newest value; `None` if it was never set or was cleared.
    #[must_use]
    pub fn latest(&self) -> Option<T> {
        self.0.borrow().clone()
    }

    /// Begins to watch the cell. The watcher first gets the newest value, whenever that was set.
    #[must_use]
    pub fn watch(&self) -> Watcher<T> {
        let mut receiver = self.0.subscribe();
        receiver.mark_changed();
        Watcher { receiver, _cell: self.0.clone() }
    }
}

/// A watcher of a cell. It gets each value at most once, always the newest, and serves only one task at a time.
pub struct Watcher<T> {
    receiver: watch::Receiver<Option<T>>,
    /// Keeps the cell alive, so that waiting ends only when the cell is set.
    _cell: Arc<watch::Sender<Option<T>>>,
}

impl<T: Clone + Send + Sync> Watcher<T> {
    /// Waits for a value that this watcher has not returned yet, and returns the newest.
    ///
    /// Cancel-safe: a value that arrives before a drop is returned by the next call.
    pub async fn next(&mut self) -> T {
        loop {
            if let Some(value) = self.try_next() {
                return value;
            }
            if self.receiver.changed().await.is_err() {
                // Unreachable while the cell is alive, as it is here.
                std::future::pending::<()>().await;
            }
            // The wait consumed the change; nothing is awaited before the value is read.
            let newest = self.receiver.borrow_and_update().clone();
            if let Some(value) = newest {
                return value;
            }
        }
    }

    /// Waits until `holds` is true of the value. Values in between are skipped.
    pub async fn next_matching(&mut self, holds: impl Fn(&T) -> bool) -> T {
        loop {
            let value = self.next().await;
            if holds(&value) {
                return value;
            }
        }
    }

    /// The newest value that this watcher has not returned yet, if there is one.
    pub fn try_next(&mut self) -> Option<T> {
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

    /// What a watcher returns without waiting.
    async fn now<T: Clone + Send + Sync>(watcher: &mut Watcher<T>) -> Option<T> {
        match poll!(std::pin::pin!(watcher.next())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn cleared_cell_makes_early_and_late_watchers_wait() {
        let value = WatchCell::new();
        value.set(1);
        let mut early = value.watch();
        value.clear();
        let mut late = value.watch();
        assert_eq!((value.latest(), now(&mut early).await, now(&mut late).await), (None, None, None));
        value.set(2);
        assert_eq!((now(&mut early).await, now(&mut late).await), (Some(2), Some(2)));
    }

    #[tokio::test]
    async fn late_watcher_gets_the_newest_first_and_then_only_what_is_newer() {
        let value = WatchCell::new();
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
    async fn setting_an_equal_value_notifies_watchers() {
        let value = WatchCell::new();
        let mut watcher = value.watch();
        for _ in 0..3 {
            value.set("same");
            assert_eq!(now(&mut watcher).await, Some("same"));
        }
    }

    #[tokio::test]
    async fn none_differs_from_never_set() {
        let value: WatchCell<Option<u8>> = WatchCell::new();
        let mut watcher = value.watch();
        assert_eq!(now(&mut watcher).await, None);
        value.set(None);
        assert_eq!(now(&mut watcher).await, Some(None));
    }

    #[tokio::test]
    async fn dropped_wait_loses_nothing() {
        let value = WatchCell::new();
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
    async fn next_matching_skips_other_values() {
        let value = WatchCell::new();
        let mut watcher = value.watch();
        let mut look = Box::pin(watcher.next_matching(|number: &u32| number.is_multiple_of(10)));
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
        let value = WatchCell::new();
        let mut watcher = value.watch();
        value.set(1);
        drop(value);
        assert_eq!(now(&mut watcher).await, Some(1));
        assert_eq!(now(&mut watcher).await, None, "and waits as before, without an end");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn fast_and_slow_watchers_see_increasing_values_and_the_last() {
        const LAST: u64 = 2000;
        let value = WatchCell::new();
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
        let value = WatchCell::new();
        value.set(0);
        let mut kept: Vec<_> = (0..100).map(|_| value.watch()).collect();
        for _ in 0..10_000 {
            drop(value.watch());
        }
        assert_eq!(value.0.receiver_count(), 100);
        // Each watcher holds the cell once; the cell itself is the other reference.
        assert_eq!(Arc::strong_count(&value.0), 101);
        value.set(1);
        for watcher in &mut kept {
            assert_eq!(now(watcher).await, Some(1));
        }
    }
}
