//! A disk on which fsync does not return: the runtime of the role server continues, with the leases that its tasks renew.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use shepherd::roleserver::atomic_file::{Durability, replace_file};
use shepherd::roleserver::disk::fault::{BlockedDisk, block_syncs};
use shepherd::roleserver::disk::find_slow_write;
use tokio::runtime::{Builder, Runtime};

use crate::harness::aloud::TestResult;

/// A lease that a task renews, as the heartbeat and the election do.
struct Lease {
    renewals: Arc<AtomicU32>,
    lapsed: Arc<AtomicBool>,
}

impl Lease {
    /// Its length. A host that stops for some seconds must not look like a slow disk.
    const TTL: Duration = Duration::from_secs(10);
    const INTERVAL: Duration = Duration::from_millis(20);

    fn start() -> Self {
        let lease = Self { renewals: Arc::default(), lapsed: Arc::default() };
        let (renewals, lapsed) = (lease.renewals.clone(), lease.lapsed.clone());
        tokio::spawn(async move {
            loop {
                let before = Instant::now();
                tokio::time::sleep(Self::INTERVAL).await;
                lapsed.fetch_or(before.elapsed() > Self::TTL, Ordering::Relaxed);
                renewals.fetch_add(1, Ordering::Relaxed);
            }
        });
        lease
    }

    /// Waits for so many more renewals. The thread of the test is none of the runtime's.
    fn wait_for_renewals(&self, count: u32) {
        let (first, deadline) = (self.renewals.load(Ordering::Relaxed), Instant::now() + Lease::TTL * 3);
        while self.renewals.load(Ordering::Relaxed) < first + count {
            assert!(Instant::now() < deadline, "no lease is renewed while a file is written");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The runtime that the role server has.
fn runtime() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

fn wait_until_blocked(disk: &BlockedDisk) {
    let deadline = Instant::now() + Duration::from_mins(1);
    while disk.waiting() == 0 {
        assert!(Instant::now() < deadline, "nothing is written");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn leases_are_renewed_while_a_task_waits_for_the_disk() -> TestResult {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("membership.json");
    let runtime = runtime()?;
    let _context = runtime.enter();
    let lease = Lease::start();
    lease.wait_for_renewals(1);
    let disk = block_syncs(directory.path());
    let file = path.clone();
    let task = runtime.spawn(async move { replace_file(&file, b"new", Durability::Durable) });
    wait_until_blocked(&disk);
    lease.wait_for_renewals(100);
    assert!(!task.is_finished() && !path.exists(), "a write that is not durable has not ended");
    assert!(find_slow_write(directory.path()).is_none_or(|write| write.path == path));
    drop(disk);
    runtime.block_on(task)??;
    assert_eq!(std::fs::read(&path)?, b"new");
    assert!(!lease.lapsed.load(Ordering::Relaxed));
    lease.wait_for_renewals(1);
    Ok(())
}
