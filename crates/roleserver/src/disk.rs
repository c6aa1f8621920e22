//! Disk writes that may take long, and what they must not hold up.
//!
//! One thread runs nearly everything in the role server: the heartbeats to shepherds and curators, the renewal of the
//! curator's lease, the supervision of services. An fsync on a failing or overloaded disk can take many seconds. If that
//! thread waited for it, leases would expire and another curator would lead, although the machine is well.
//!
//! * A task that cannot go on before its file is durable uses [`run_beside`]. The task waits, and the runtime continues
//!   with all other tasks on another thread.
//! * The heartbeat loop never waits for the disk. What it writes goes to the [`StateWriter`].
//! * No task waits for a line of the log: a [`LogQueue`] has a thread that writes them.
//! * A write that has waited for longer than [`SLOW_WRITE`] is reported and logged ([`find_slow_write`]). etcd on the
//!   same disk then loses its leadership, and nothing here can prevent that.
//!
//! [`StateWriter`]: crate::state_writer::StateWriter
//! [`LogQueue`]: crate::logs::log_queue::LogQueue

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};

/// A write that takes longer than this is reported. etcd warns of an fsync after one second.
pub const SLOW_WRITE: Duration = Duration::from_secs(5);
/// How often the role server looks for slow writes.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The writes under way in this process.
static WRITES: Mutex<Vec<PendingWrite>> = Mutex::new(Vec::new());

/// A write under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingWrite {
    /// The file or directory that is written.
    pub path: PathBuf,
    /// When the write began.
    pub since: Instant,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The values are plain data, consistent at any time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a write to `path`, and returns its result. On a thread of the role server's runtime, the other tasks of the
/// runtime go on meanwhile.
///
/// The caller must hold no lock that another task takes.
pub fn run_beside<T>(path: &Path, write: impl FnOnce() -> T) -> T {
    let write = || {
        let _registered = RegisteredWrite::new(path);
        write()
    };
    // A runtime with one thread, as tests have, cannot go on beside a write.
    let has_threads =
        Handle::try_current().is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
    if has_threads { tokio::task::block_in_place(write) } else { write() }
}

/// An entry of [`WRITES`], removed when dropped.
struct RegisteredWrite(PendingWrite);

impl RegisteredWrite {
    fn new(path: &Path) -> Self {
        let write = PendingWrite { path: path.to_owned(), since: Instant::now() };
        lock(&WRITES).push(write.clone());
        Self(write)
    }
}

impl Drop for RegisteredWrite {
    fn drop(&mut self) {
        let mut writes = lock(&WRITES);
        if let Some(position) = writes.iter().position(|write| *write == self.0) {
            writes.swap_remove(position);
        }
    }
}

/// The write below this directory that is slow now; of several, the one that waits longest.
#[must_use]
pub fn find_slow_write(directory: &Path) -> Option<PendingWrite> {
    select_slow_write(&lock(&WRITES), directory, Instant::now())
}

/// Selects the slow write below a directory. *Pure.*
fn select_slow_write(writes: &[PendingWrite], directory: &Path, now: Instant) -> Option<PendingWrite> {
    let slow = |write: &&PendingWrite| {
        write.path.starts_with(directory) && now.saturating_duration_since(write.since) >= SLOW_WRITE
    };
    writes.iter().filter(slow).min_by_key(|write| write.since).cloned()
}

impl PendingWrite {
    /// The problem, as a sentence. It does not change while the write waits, so that it is reported once.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "writing {} has taken longer than {} s: the disk is slow or failing, and an etcd on it loses its \
             leadership; look at the disk and at what else uses it",
            self.path.display(),
            SLOW_WRITE.as_secs()
        )
    }
}

/// Logs slow writes below a directory for as long as it is polled: when one begins to be slow, and when it is over.
pub async fn log_slow_writes(directory: PathBuf) {
    let mut known: Option<PendingWrite> = None;
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        let slow = find_slow_write(&directory);
        if slow == known {
            continue;
        }
        match (&slow, &known) {
            (Some(write), _) => tracing::warn!("{}", write.describe()),
            (None, Some(write)) => tracing::info!(path = %write.path.display(), "the slow write has ended"),
            (None, None) => {}
        }
        known = slow;
    }
}

/// Flushes a file or a directory to the disk. `path` is its name.
pub fn sync_file(file: &File, path: &Path) -> std::io::Result<()> {
    #[cfg(debug_assertions)]
    fault::wait_while_blocked(path);
    #[cfg(not(debug_assertions))]
    let _ = path;
    file.sync_all()
}

/// A disk on which fsync does not return, for tests. Release builds have none of this.
#[cfg(debug_assertions)]
pub mod fault {
    use std::path::{Path, PathBuf};
    use std::sync::{Arc, Condvar, Mutex, PoisonError};

    use super::lock;

    static BLOCKED: Mutex<Vec<Arc<Disk>>> = Mutex::new(Vec::new());

    #[derive(Debug)]
    struct Disk {
        directory: PathBuf,
        /// Number of waiting calls; `None` once the disk works again.
        waiting: Mutex<Option<usize>>,
        changed: Condvar,
    }

    /// A directory below which no fsync returns until this is dropped.
    #[derive(Debug)]
    pub struct BlockedDisk(Arc<Disk>);

    /// Blocks every fsync below a directory, from now on.
    #[must_use]
    pub fn block_syncs(directory: &Path) -> BlockedDisk {
        let disk = Arc::new(Disk {
            directory: directory.to_owned(),
            waiting: Mutex::new(Some(0)),
            changed: Condvar::new(),
        });
        lock(&BLOCKED).push(disk.clone());
        BlockedDisk(disk)
    }

    impl BlockedDisk {
        /// How many calls wait.
        #[must_use]
        pub fn waiting(&self) -> usize {
            lock(&self.0.waiting).unwrap_or_default()
        }
    }

    impl Drop for BlockedDisk {
        fn drop(&mut self) {
            lock(&BLOCKED).retain(|disk| !Arc::ptr_eq(disk, &self.0));
            *lock(&self.0.waiting) = None;
            self.0.changed.notify_all();
        }
    }

    pub(super) fn wait_while_blocked(path: &Path) {
        let disk = lock(&BLOCKED).iter().find(|disk| path.starts_with(&disk.directory)).cloned();
        let Some(disk) = disk else { return };
        let mut waiting = lock(&disk.waiting);
        if let Some(count) = waiting.as_mut() {
            *count += 1;
        }
        while waiting.is_some() {
            waiting = disk.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_write_is_the_longest_one_below_the_directory() {
        let now = Instant::now() + Duration::from_mins(1);
        let write = |path: &str, age: u64| PendingWrite {
            path: path.into(),
            since: now.checked_sub(Duration::from_secs(age)).unwrap(),
        };
        for (writes, slow) in [
            (vec![], None),
            (vec![write("/state/a", 4)], None),
            (vec![write("/state/a", 5)], Some("/state/a")),
            (
                vec![write("/state/a", 6), write("/state/cluster/b", 9), write("/state/c", 1)],
                Some("/state/cluster/b"),
            ),
            (vec![write("/elsewhere/a", 60), write("/state-2/a", 60)], None),
        ] {
            let found = select_slow_write(&writes, Path::new("/state"), now);
            assert_eq!(found.map(|write| write.path), slow.map(PathBuf::from), "{writes:?}");
        }
        assert!(write("/state/a", 5).describe().starts_with("writing /state/a has taken longer than 5 s"));
    }

    #[test]
    fn write_is_registered_while_it_runs() {
        let path = Path::new("/a path of this test");
        let is_there = || lock(&WRITES).iter().any(|write| write.path == path);
        assert!(run_beside(path, is_there));
        assert!(!is_there());
        let panicked = std::panic::catch_unwind(|| run_beside::<()>(path, || panic!("on purpose")));
        assert!(panicked.is_err() && !is_there());
    }
}
