//! How many runnables have something to do.
//!
//! A test that asks "did it react?" must know when there is nothing left to react, and a pause says nothing about that on
//! a busy host. So every runnable is polled through a wrapper that counts it from the moment it is woken until it waits
//! again. One that wakes another is counted itself while it does, so that the count does not touch zero in between: where
//! it is zero, all that could follow inside the tree has followed. What comes from outside, a timer, a socket, a task that
//! a runnable spawned itself, is not counted before it wakes one.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures::task::{ArcWake, AtomicWaker, waker};
use tokio::sync::Notify;

/// Waiting for something; not counted.
const ASLEEP: u8 = 0;
/// Woken, and not polled yet; counted, as are the following.
const AWAKE: u8 = 1;
const POLLED: u8 = 2;
const POLLED_AND_WOKEN: u8 = 3;

/// The count, for one supervisor.
#[derive(Default)]
pub(super) struct Awake {
    count: AtomicUsize,
    none: Notify,
}

impl Awake {
    fn one_more(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn one_less(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.none.notify_waiters();
        }
    }

    pub(super) fn is_none(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Waits until none is awake and `holds`, at one and the same time.
    pub(super) async fn until_none(&self, holds: impl Fn() -> bool) {
        loop {
            let mut none = std::pin::pin!(self.none.notified());
            // From now on nothing is missed, also what comes before it is first waited for.
            none.as_mut().enable();
            // In this order: what holds is changed by those who are awake.
            if self.is_none() && holds() && self.is_none() {
                return;
            }
            none.await;
        }
    }
}

struct Task {
    state: AtomicU8,
    awake: Arc<Awake>,
    waker: AtomicWaker,
}

impl ArcWake for Task {
    fn wake_by_ref(task: &Arc<Self>) {
        if task.state.compare_exchange(ASLEEP, AWAKE, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            task.awake.one_more();
        } else {
            // Where that fails it is awake already, or has ended.
            let _ = task.state.compare_exchange(POLLED, POLLED_AND_WOKEN, Ordering::SeqCst, Ordering::SeqCst);
        }
        task.waker.wake();
    }
}

/// A future that is counted while it has something to do, from the moment it is made.
pub(super) struct Counted<F> {
    task: Arc<Task>,
    future: Pin<Box<F>>,
}

impl<F> Counted<F> {
    pub(super) fn new(awake: Arc<Awake>, future: F) -> Self {
        awake.one_more();
        let task = Task { state: AtomicU8::new(AWAKE), awake, waker: AtomicWaker::new() };
        Self { task: Arc::new(task), future: Box::pin(future) }
    }
}

impl<F: Future> Future for Counted<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let task = self.task.clone();
        task.waker.register(context.waker());
        if task.state.swap(POLLED, Ordering::SeqCst) == ASLEEP {
            task.awake.one_more();
        }
        let own = waker(task.clone());
        let polled = self.future.as_mut().poll(&mut Context::from_waker(&own));
        // One that has ended is counted until it is dropped: whoever learns that it ended may follow from it.
        if polled.is_pending()
            && task.state.compare_exchange(POLLED, ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            task.awake.one_less();
        } else {
            task.state.store(AWAKE, Ordering::SeqCst);
        }
        polled
    }
}

impl<F> Drop for Counted<F> {
    fn drop(&mut self) {
        if self.task.state.swap(POLLED, Ordering::SeqCst) != ASLEEP {
            self.task.awake.one_less();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use futures::task::noop_waker;
    use tokio::sync::oneshot;

    fn polled<F: Future>(future: &mut Counted<F>) -> bool {
        Pin::new(future).poll(&mut Context::from_waker(&noop_waker())).is_ready()
    }

    #[test]
    fn task_counts_from_its_waking_until_it_waits() {
        let awake = Arc::new(Awake::default());
        let count = || awake.count.load(Ordering::SeqCst);
        let (sender, receiver) = oneshot::channel::<()>();
        let mut first = Counted::new(awake.clone(), receiver);
        assert_eq!(count(), 1, "not polled yet");
        assert!(!polled(&mut first));
        assert_eq!(count(), 0);
        let mut second = Counted::new(awake.clone(), async { sender.send(()) });
        assert!(polled(&mut second));
        assert_eq!(count(), 2, "one has ended, and the other one was woken by it");
        drop(second);
        assert_eq!(count(), 1);
        assert!(polled(&mut first));
        drop(first);
        assert!(awake.is_none());
    }

    #[test]
    fn task_that_wakes_itself_stays_awake() {
        let awake = Arc::new(Awake::default());
        let mut left = 3;
        let mut task = Counted::new(
            awake.clone(),
            std::future::poll_fn(move |context| {
                left -= 1;
                context.waker().wake_by_ref();
                if left == 0 { Poll::Ready(()) } else { Poll::Pending }
            }),
        );
        assert!(!polled(&mut task) && !awake.is_none());
        assert!(!polled(&mut task) && !awake.is_none());
        assert!(polled(&mut task) && !awake.is_none());
        drop(task);
        assert!(awake.is_none());
    }

    #[test]
    fn task_that_is_dropped_asleep_counts_no_more() {
        let awake = Arc::new(Awake::default());
        let (sender, receiver) = oneshot::channel::<()>();
        let mut task = Counted::new(awake.clone(), receiver);
        assert!(!polled(&mut task));
        drop(task);
        drop(sender);
        assert!(awake.is_none());
    }
}
