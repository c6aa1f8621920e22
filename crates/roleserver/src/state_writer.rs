//! The state writer: a queue of writes and a thread that carries them out in order.
//!
//! The heartbeat loop hands over what it has to store, and continues. A disk that does not answer holds up the queue and
//! nothing else. Each write has a name, and only the newest write of a name waits: a file is written as a whole, so
//! an older content that nobody has read is of no use. The queue is therefore as short as the list of names. A write
//! that replaces a waiting one takes its place: a name that is written often must not keep waiting behind the others.
//!
//! The thread exists only while there is something to write.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A write: a function that reports its own failure.
type Write = Box<dyn FnOnce() + Send>;

/// The queue of writes. Clones share it.
#[derive(Clone, Default)]
pub struct StateWriter(Arc<WriterInner>);

#[derive(Default)]
struct WriterInner {
    queue: Mutex<WriteQueue>,
    /// Notified when the queue has become empty.
    idle: Condvar,
}

#[derive(Default)]
struct WriteQueue {
    writes: VecDeque<(&'static str, Write)>,
    /// Whether the thread runs.
    is_running: bool,
}

impl WriteQueue {
    /// Adds a write at the end, or in the place of a waiting one of the same name, so that none waits for ever.
    fn push(&mut self, name: &'static str, write: Write) {
        match self.writes.iter_mut().find(|(waiting, _)| *waiting == name) {
            Some((_, waiting)) => *waiting = write,
            None => self.writes.push_back((name, write)),
        }
    }
}

impl WriterInner {
    fn queue(&self) -> MutexGuard<'_, WriteQueue> {
        // No write runs under the lock, so a panic leaves the queue as it is.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out writes until none is left.
    fn run(&self) {
        let mut thread = RunningThread { inner: self, has_ended: false };
        loop {
            let next = {
                let mut queue = self.queue();
                let next = queue.writes.pop_front();
                if next.is_none() {
                    queue.is_running = false;
                    self.idle.notify_all();
                }
                next
            };
            let Some((_, write)) = next else {
                thread.has_ended = true;
                return;
            };
            write();
        }
    }
}

/// Ends the thread's turn if a write panics. The next write starts another thread.
struct RunningThread<'w> {
    inner: &'w WriterInner,
    /// Whether it found the queue empty. From then on another thread may run.
    has_ended: bool,
}

impl Drop for RunningThread<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.inner.queue().is_running = false;
            self.inner.idle.notify_all();
        }
    }
}

impl StateWriter {
    /// Queues a write, and returns at once. It replaces a write of the same name that has not begun.
    pub fn enqueue(&self, name: &'static str, write: impl FnOnce() + Send + 'static) {
        let mut queue = self.0.queue();
        queue.push(name, Box::new(write));
        if queue.is_running {
            return;
        }
        queue.is_running = true;
        drop(queue);
        let inner = self.0.clone();
        let started = std::thread::Builder::new().name("state-writer".to_owned()).spawn(move || inner.run());
        if let Err(error) = started {
            tracing::warn!(%error, "no thread for writing state files could be started; writing them now");
            self.0.run();
        }
    }

    /// Waits until everything that was queued is written, for at most `limit`. Returns whether it is.
    #[must_use]
    pub fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut queue = self.0.queue();
        while queue.is_running {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.0.idle.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.writes.is_empty()
    }
}

impl std::fmt::Debug for StateWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StateWriter")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    #[test]
    fn writes_are_in_order_and_only_the_newest_of_a_name_waits() {
        let writer = StateWriter::default();
        let (log, written) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel();
        writer.enqueue("slow", move || {
            begin.send(()).unwrap();
            released.recv().unwrap();
        });
        begun.recv_timeout(PATIENCE).unwrap();
        // The disk does not answer, and every call returns.
        for (name, content) in [("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", 5)] {
            let log = log.clone();
            writer.enqueue(name, move || log.send((name, content)).unwrap());
        }
        assert!(!writer.flush(Duration::ZERO));
        assert!(written.try_recv().is_err(), "no write overtakes another");
        release.send(()).unwrap();
        assert!(writer.flush(PATIENCE));
        drop(log);
        assert_eq!(written.iter().collect::<Vec<_>>(), [("a", 3), ("b", 5), ("c", 4)]);
        assert!(writer.flush(Duration::ZERO), "nothing waits");
    }

    #[test]
    fn write_that_panics_does_not_end_the_writer() {
        let writer = StateWriter::default();
        writer.enqueue("a", || panic!("on purpose"));
        let _ = writer.flush(PATIENCE);
        let (log, written) = mpsc::channel();
        writer.enqueue("b", move || log.send(()).unwrap());
        written.recv_timeout(PATIENCE).unwrap();
    }
}
