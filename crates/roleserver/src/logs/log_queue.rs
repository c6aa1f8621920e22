//! The queue of the role server's own log lines, and the thread that writes them.
//!
//! Lines go to standard error and to a file, and both may be on a disk that does not answer. One thread runs nearly
//! everything in the role server, and it must not wait for a line while it renews leases. So lines are queued, and a
//! thread writes them in order. It exists only while there is something to write.
//!
//! Of a queue that is full, the newest lines are dropped, and a line reports how many. Once nothing but the end of the
//! process is left, lines are written at once ([`LogQueue::finish`]).

use std::collections::VecDeque;
use std::fmt;
use std::io::{Result, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Most bytes that wait to be written.
const MAX_QUEUED_BYTES: usize = 1 << 20;

type WriteLine = Box<dyn Fn(&[u8]) + Send + Sync>;

/// A writer of lines that returns at once. Clones share the queue.
#[derive(Clone)]
pub struct LogQueue(Arc<Shared>);

struct Shared {
    queue: Mutex<LineQueue>,
    /// Notified when the queue has become empty.
    idle: Condvar,
    write_line: WriteLine,
}

#[derive(Default)]
struct LineQueue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    dropped: u64,
    /// Whether the thread runs.
    is_running: bool,
    /// Whether lines are written at once.
    is_finished: bool,
}

impl LineQueue {
    fn push(&mut self, line: &[u8]) {
        if self.bytes + line.len() > MAX_QUEUED_BYTES {
            self.dropped += 1;
            return;
        }
        self.bytes += line.len();
        self.lines.push_back(line.to_vec());
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        if let Some(line) = self.lines.pop_front() {
            self.bytes -= line.len();
            return Some(line);
        }
        let dropped = std::mem::take(&mut self.dropped);
        if dropped == 0 {
            return None;
        }
        let notice = format!("{dropped} lines were dropped here, because the log could not be written\n");
        Some(notice.into_bytes())
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, LineQueue> {
        // Nothing is written under the lock, so a panic leaves the queue as it is.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_line(&self) -> Option<Vec<u8>> {
        let mut queue = self.queue();
        let next = queue.pop();
        if next.is_none() {
            queue.is_running = false;
            self.idle.notify_all();
        }
        next
    }

    /// Writes lines until none is left.
    fn run(&self) {
        while let Some(line) = self.next_line() {
            (self.write_line)(&line);
        }
    }
}

impl LogQueue {
    /// A queue with `write_line` as the writer of its lines. It must not panic, and has nobody to report a failure to.
    #[must_use]
    pub fn new(write_line: impl Fn(&[u8]) + Send + Sync + 'static) -> Self {
        let write_line = Box::new(write_line);
        Self(Arc::new(Shared { queue: Mutex::default(), idle: Condvar::new(), write_line }))
    }

    fn enqueue(&self, line: &[u8]) {
        let mut queue = self.0.queue();
        if queue.is_finished && !queue.is_running {
            drop(queue);
            (self.0.write_line)(line);
            return;
        }
        queue.push(line);
        if queue.is_running {
            return;
        }
        queue.is_running = true;
        drop(queue);
        let shared = self.0.clone();
        if std::thread::Builder::new().name("log".to_owned()).spawn(move || shared.run()).is_err() {
            self.0.run();
        }
    }

    /// Waits until every queued line is written, for at most `limit`. Later lines are written at once: the process is
    /// about to end, or to be replaced.
    pub fn finish(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut queue = self.0.queue();
        queue.is_finished = true;
        while queue.is_running {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.0.idle.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl fmt::Debug for LogQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogQueue")
    }
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Write for LogQueue {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.enqueue(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    /// A queue with a first line that waits until the sender is dropped, and what was written.
    fn blocked_queue() -> (LogQueue, mpsc::Sender<()>, mpsc::Receiver<String>) {
        let ((release, released), (log, written)) = (mpsc::channel::<()>(), mpsc::channel());
        let released = Mutex::new(released);
        let queue = LogQueue::new(move |line| {
            let _ = released.lock().unwrap().recv();
            log.send(String::from_utf8_lossy(line).into_owned()).unwrap();
        });
        (queue, release, written)
    }

    #[test]
    fn lines_wait_for_the_disk_and_their_writers_do_not() {
        let (mut queue, release, written) = blocked_queue();
        for line in ["one\n", "two\n", "three\n"] {
            // Each of these would never return if it waited for the line to be written.
            queue.make_writer().write_all(line.as_bytes()).unwrap();
        }
        assert!(written.try_recv().is_err(), "nothing is written yet");
        drop(release);
        queue.finish(PATIENCE);
        assert_eq!(written.try_iter().collect::<Vec<_>>(), ["one\n", "two\n", "three\n"]);
        queue.write_all(b"last\n").unwrap();
        assert_eq!(written.try_iter().collect::<Vec<_>>(), ["last\n"], "it is written at once");
    }

    #[test]
    fn full_queue_drops_the_newest_lines_and_says_so() {
        let (mut queue, release, written) = blocked_queue();
        let line = vec![b'x'; 1 << 16];
        // Sixteen have room. The first one may have left the queue to be written before the last one comes.
        for _ in 0..20 {
            queue.write_all(&line).unwrap();
        }
        queue.finish(Duration::ZERO);
        drop(release);
        queue.finish(PATIENCE);
        let lines: Vec<String> = written.try_iter().collect();
        let kept = lines.iter().filter(|found| found.len() == line.len()).count();
        assert!((16..=17).contains(&kept), "{kept}");
        let notice = format!("{} lines were dropped here, because the log could not be written\n", 20 - kept);
        assert_eq!(lines.last(), Some(&notice));
    }
}
