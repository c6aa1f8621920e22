//! Quiescence detection for tests: counts the runnables that have something to do.
//!
//! A test of a reaction must know when nothing is left to react, and a pause proves nothing about that on a busy host.
//! So every runnable is polled through a wrapper that counts it from the moment it is woken until it waits again. A
//! runnable that wakes another is counted itself while it does, so that the count does not touch zero in between. At
//! zero, everything that could follow inside the tree has followed. Events from outside (a timer, a socket, a task that
//! a runnable spawned itself) are not counted before they wake a runnable.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures::task::{ArcWake, AtomicWaker, waker};
use tokio::sync::Notify;

/// Waiting for something; not counted.
const ASLEEP: u8 = 0;
/// Woken, and not polled yet; counted, as are the following states.
const AWAKE: u8 = 1;
const POLLED: u8 = 2;
const POLLED_AND_WOKEN: u8 = 3;

/// The count of runnables with something to do, for one supervisor.
#[derive(Default)]
pub(super) struct Quiescence {
    count: AtomicUsize,
    idle: Notify,
}

impl Quiescence {
    fn increment(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn decrement(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.idle.notify_waiters();
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Waits until no runnable is awake and `holds` is true, at one and the same time.
    pub(super) async fn wait_idle(&self, holds: impl Fn() -> bool) {
        loop {
            let mut none = std::pin::pin!(self.idle.notified());
            // From here on no notification is missed, also one that comes before the await.
            none.as_mut().enable();
            // In this order: only runnables that are awake change the result of `holds`.
            if self.is_idle() && holds() && self.is_idle() {
                return;
            }
            none.await;
        }
    }
}

struct CountedTask {
    state: AtomicU8,
    quiescence: Arc<Quiescence>,
    waker: AtomicWaker,
}

impl ArcWake for CountedTask {
    fn wake_by_ref(task: &Arc<Self>) {
        if task.state.compare_exchange(ASLEEP, AWAKE, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            task.quiescence.increment();
        } else {
            // If that fails, the task is awake already or has ended.
            let _ = task.state.compare_exchange(POLLED, POLLED_AND_WOKEN, Ordering::SeqCst, Ordering::SeqCst);
        }
        task.waker.wake();
    }
}

/// A future that is counted while it has something to do, from its creation on.
pub(super) struct CountedFuture<F> {
    task: Arc<CountedTask>,
    future: Pin<Box<F>>,
}

impl<F> CountedFuture<F> {
    pub(super) fn new(awake: Arc<Quiescence>, future: F) -> Self {
        awake.increment();
        let task = CountedTask { state: AtomicU8::new(AWAKE), quiescence: awake, waker: AtomicWaker::new() };
        Self { task: Arc::new(task), future: Box::pin(future) }
    }
}

impl<F: Future> Future for CountedFuture<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let task = self.task.clone();
        task.waker.register(context.waker());
        if task.state.swap(POLLED, Ordering::SeqCst) == ASLEEP {
            task.quiescence.increment();
        }
        let own = waker(task.clone());
        let polled = self.future.as_mut().poll(&mut Context::from_waker(&own));
        // A task that has ended is counted until it is dropped: observers of its end may still react to it.
        if polled.is_pending()
            && task.state.compare_exchange(POLLED, ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            task.quiescence.decrement();
        } else {
            task.state.store(AWAKE, Ordering::SeqCst);
        }
        polled
    }
}

impl<F> Drop for CountedFuture<F> {
    fn drop(&mut self) {
        if self.task.state.swap(POLLED, Ordering::SeqCst) != ASLEEP {
            self.task.quiescence.decrement();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use futures::task::noop_waker;
    use tokio::sync::oneshot;

    fn poll_once<F: Future>(future: &mut CountedFuture<F>) -> bool {
        Pin::new(future).poll(&mut Context::from_waker(&noop_waker())).is_ready()
    }

    #[test]
    fn task_counts_from_its_waking_until_it_waits() {
        let awake = Arc::new(Quiescence::default());
        let count = || awake.count.load(Ordering::SeqCst);
        let (sender, receiver) = oneshot::channel::<()>();
        let mut first = CountedFuture::new(awake.clone(), receiver);
        assert_eq!(count(), 1, "not polled yet");
        assert!(!poll_once(&mut first));
        assert_eq!(count(), 0);
        let mut second = CountedFuture::new(awake.clone(), async { sender.send(()) });
        assert!(poll_once(&mut second));
        assert_eq!(count(), 2, "one has ended, and the other one was woken by it");
        drop(second);
        assert_eq!(count(), 1);
        assert!(poll_once(&mut first));
        drop(first);
        assert!(awake.is_idle());
    }

    #[test]
    fn task_that_wakes_itself_stays_awake() {
        let awake = Arc::new(Quiescence::default());
        let mut left = 3;
        let mut task = CountedFuture::new(
            awake.clone(),
            std::future::poll_fn(move |context| {
                left -= 1;
                context.waker().wake_by_ref();
                if left == 0 { Poll::Ready(()) } else { Poll::Pending }
            }),
        );
        assert!(!poll_once(&mut task) && !awake.is_idle());
        assert!(!poll_once(&mut task) && !awake.is_idle());
        assert!(poll_once(&mut task) && !awake.is_idle());
        drop(task);
        assert!(awake.is_idle());
    }

    #[test]
    fn task_that_is_dropped_asleep_counts_no_more() {
        let awake = Arc::new(Quiescence::default());
        let (sender, receiver) = oneshot::channel::<()>();
        let mut task = CountedFuture::new(awake.clone(), receiver);
        assert!(!poll_once(&mut task));
        drop(task);
        drop(sender);
        assert!(awake.is_idle());
    }
}
