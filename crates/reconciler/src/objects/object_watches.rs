//! Watches on Kubernetes kinds between passes.
//!
//! Changes by others are noticed at once. A pass lists each kind. From then on the kind is watched, until the server no
//! longer has the events since then. A change may then have been missed, so another pass is needed; it lists the kind
//! again, as every pass does. So a watch makes no request that a pass would not make, and the state of an object always
//! starts from a list.
//!
//! A server drops events that are some minutes old. If nothing changes for longer, it sends bookmarks from time to
//! time, and a watch that breaks continues from the last bookmark.
//!
//! # Why the watcher of `kube` is not used
//!
//! `kube` sends the requests and decodes the events. Its `runtime::watcher` (5.0) would also repeat them, which is
//! `run_watch` and `watch_once` here, 60 lines. It is not used, for these reasons:
//!
//! * It begins with a list of its own, and no version can be given to it to begin from ([kube
//!   1419](https://github.com/kube-rs/kube/issues/1419)). A pass must list nevertheless: its success means that the
//!   objects were right after it had begun, and no cache can prove that. So each kind would be listed twice when its
//!   watch begins, and twice whenever the server has dropped the events. What changed between the two lists would have
//!   to be found by comparing them.
//! * Only an error delays its next request. A watch that ends without an event is no error, so a server that ends each
//!   watch at once would get requests as fast as it answers. Here the delay grows.
//! * It lists again after an event with the status 410. A response with that status it repeats from the same version
//!   for ever.
//! * It has one client for all its life. Here each watch uses the present certificate.
//! * Its objects have typed metadata, which lose the fields that the types do not know.
//! * The feature `runtime` adds 24 packages to the 210 of a role server with the reconciler: 130,000 lines of source.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd::retry::RETRY_BACKOFF;
use futures::StreamExt as _;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::objects::api_client::{ApiError, ObjectEvent, ReloadingClient};
use crate::objects::object_kind::{ObjectKind, ResourceType, resource_version};
use crate::objects::watch_cache::WatchCache;

/// After this time without a pass, this program leads no longer, and the watches end.
const IDLE_TIMEOUT: Duration = Duration::from_mins(5);

/// All watches of a reconciler.
#[derive(Debug)]
pub(super) struct ObjectWatches {
    kubernetes: Arc<ReloadingClient>,
    shared: Arc<SharedCache>,
    tasks: Mutex<BTreeMap<ResourceType, WatchTask>>,
}

#[derive(Debug)]
struct WatchTask {
    /// Set when the watch has ended. It is set before that is signalled, so that the pass which follows starts the next
    /// watch.
    ended: Arc<AtomicBool>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct SharedCache {
    cache: Mutex<WatchCache>,
    changed: Notify,
    last_pass: Mutex<Instant>,
}

/// A pass under way: until it is dropped, no event counts as a change.
#[derive(Debug)]
pub(super) struct PassGuard<'w>(&'w ObjectWatches);

impl Drop for PassGuard<'_> {
    fn drop(&mut self) {
        self.0.cache().end_pass();
        self.0.shared.changed.notify_waiters();
    }
}

impl ObjectWatches {
    pub(super) fn new(kubernetes: Arc<ReloadingClient>) -> Self {
        let shared = SharedCache {
            cache: Mutex::default(),
            changed: Notify::new(),
            last_pass: Mutex::new(Instant::now()),
        };
        Self { kubernetes, shared: Arc::new(shared), tasks: Mutex::default() }
    }

    pub(super) fn cache(&self) -> MutexGuard<'_, WatchCache> {
        self.shared.cache()
    }

    /// Starts a pass, which ends when the guard is dropped.
    pub(super) fn begin_pass(&self) -> PassGuard<'_> {
        self.cache().begin_pass();
        *self.shared.last_pass.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        PassGuard(self)
    }

    /// Watches a kind from the version of a list on, unless it is watched already.
    pub(super) fn watch_kind(&self, kind: &ObjectKind, listed: &str) {
        let mut running = self.lock_tasks();
        let resource = kind.resource();
        if running.get(&resource).is_some_and(|running| !running.ended.load(Ordering::SeqCst)) {
            return;
        }
        let ended = Arc::new(AtomicBool::new(false));
        let (kubernetes, shared) = (Arc::clone(&self.kubernetes), Arc::clone(&self.shared));
        let (kind, listed, ends) = (kind.clone(), listed.to_owned(), Arc::clone(&ended));
        let following = async move {
            let forgotten = run_watch(&kubernetes, &shared, &kind, listed).await;
            ends.store(true, Ordering::SeqCst);
            if forgotten {
                shared.mark_incomplete(&kind.resource());
            }
        };
        running.insert(resource, WatchTask { ended, _task: AbortOnDropHandle::new(tokio::spawn(following)) });
    }

    /// Ends the watches of all other kinds.
    pub(super) fn retain_kinds(&self, followed: impl Fn(&ResourceType) -> bool) {
        self.lock_tasks().retain(|resource, _| followed(resource));
        self.cache().retain_kinds(followed);
    }

    /// Waits until there is something for a pass to do.
    pub(super) async fn wait_for_changes(&self) {
        loop {
            let notified = self.shared.changed.notified();
            tokio::pin!(notified);
            // Enabled before the check, so that a notification in between is not missed.
            notified.as_mut().enable();
            if self.cache().has_changes() {
                return;
            }
            notified.await;
        }
    }

    fn lock_tasks(&self) -> MutexGuard<'_, BTreeMap<ResourceType, WatchTask>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedCache {
    fn cache(&self) -> MutexGuard<'_, WatchCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_in_use(&self) -> bool {
        self.last_pass.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < IDLE_TIMEOUT
    }

    fn mark_incomplete(&self, resource: &ResourceType) {
        self.cache().mark_incomplete(resource);
        self.changed.notify_waiters();
    }
}

/// Watches a kind until its server has dropped the events. Returns `false` if it ended because no pass was made.
async fn run_watch(
    kubernetes: &ReloadingClient,
    shared: &SharedCache,
    kind: &ObjectKind,
    listed: String,
) -> bool {
    let resource = kind.resource();
    let (mut version, mut failures) = (listed, 0);
    while shared.is_in_use() {
        match watch_once(kubernetes, shared, kind, &mut version).await {
            Ok(notified) => failures = if notified { 0 } else { failures + 1 },
            Err(ApiError::Rejected(status)) if status.code == 410 || status.reason == "Expired" => {
                tracing::debug!(kind = %resource, version, "the server no longer has the events since then");
                return true;
            }
            Err(error) => {
                failures += 1;
                tracing::debug!(kind = %resource, %error, failures, "a watch ended");
            }
        }
        if failures > 0 {
            tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
        }
    }
    // The next leader lists again.
    tracing::debug!(kind = %resource, "no pass was made for a while, so the watch ends");
    false
}

/// One watch request. Returns whether any event arrived.
async fn watch_once(
    kubernetes: &ReloadingClient,
    shared: &SharedCache,
    kind: &ObjectKind,
    version: &mut String,
) -> Result<bool, ApiError> {
    let resource = kind.resource();
    let events = kubernetes.client().await?.watch(kind, version).await?;
    tokio::pin!(events);
    let mut notified = false;
    while let Some(event) = events.next().await {
        notified = true;
        match event? {
            ObjectEvent::Bookmark(until) => *version = until,
            ObjectEvent::Updated(object) => {
                resource_version(&object).clone_into(version);
                shared.cache().observe_object(&resource, object, true);
                shared.changed.notify_waiters();
            }
            ObjectEvent::Deleted(object) => {
                resource_version(&object).clone_into(version);
                shared.cache().observe_object(&resource, object, false);
                shared.changed.notify_waiters();
            }
        }
    }
    Ok(notified)
}
