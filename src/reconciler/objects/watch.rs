//! Objects, watched: what others change is told at once.
//!
//! A pass lists each kind, and from that moment on the kind is watched, until the server no longer knows what happened
//! since. Then something may have changed that nobody tells, which is news; the next pass lists anew, as any pass does.
//! So watching asks for nothing that a pass would not ask for, and an object is never known from anywhere but a list.
//!
//! A server forgets what is some minutes old. Where nothing changes for longer, it says from time to time up to where
//! nothing did: a watch that breaks off then goes on from there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::etcd::pause;
use crate::reconciler::objects::kind::{Kind, Resource, resource_version};
use crate::reconciler::objects::kubernetes::{AskError, Kubernetes, Told};
use crate::reconciler::objects::sight::Sight;

/// After so long without a pass nobody leads here any more, and nobody asks for what changes.
const UNASKED: Duration = Duration::from_mins(5);

/// All watches.
#[derive(Debug)]
pub(super) struct Watches {
    kubernetes: Arc<Kubernetes>,
    shared: Arc<Shared>,
    running: Mutex<BTreeMap<Resource, Running>>,
}

#[derive(Debug)]
struct Running {
    /// It watches no more. Set before that is told, so that the pass that hears of it begins the next.
    ended: Arc<AtomicBool>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    sight: Mutex<Sight>,
    told: Notify,
    passed: Mutex<Instant>,
}

/// A pass under way: while it is, nothing is news.
#[derive(Debug)]
pub(super) struct Passing<'w>(&'w Watches);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        self.0.sight().end();
        self.0.shared.told.notify_waiters();
    }
}

impl Watches {
    pub(super) fn new(kubernetes: Arc<Kubernetes>) -> Self {
        let shared =
            Shared { sight: Mutex::default(), told: Notify::new(), passed: Mutex::new(Instant::now()) };
        Self { kubernetes, shared: Arc::new(shared), running: Mutex::default() }
    }

    pub(super) fn sight(&self) -> MutexGuard<'_, Sight> {
        self.shared.sight()
    }

    /// A pass begins.
    pub(super) fn begin(&self) -> Passing<'_> {
        self.sight().begin();
        *self.shared.passed.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        Passing(self)
    }

    /// Watches a kind from what a list has seen, unless it is watched.
    pub(super) fn watch(&self, kind: &Kind, listed: &str) {
        let mut running = self.running();
        let resource = kind.resource();
        if running.get(&resource).is_some_and(|running| !running.ended.load(Ordering::SeqCst)) {
            return;
        }
        let ended = Arc::new(AtomicBool::new(false));
        let (kubernetes, shared) = (Arc::clone(&self.kubernetes), Arc::clone(&self.shared));
        let (kind, listed, ends) = (kind.clone(), listed.to_owned(), Arc::clone(&ended));
        let following = async move {
            let forgotten = follow(&kubernetes, &shared, &kind, listed).await;
            ends.store(true, Ordering::SeqCst);
            if forgotten {
                shared.missed(&kind.resource());
            }
        };
        running.insert(resource, Running { ended, _task: AbortOnDropHandle::new(tokio::spawn(following)) });
    }

    /// Watches nothing but these any more.
    pub(super) fn keep(&self, followed: impl Fn(&Resource) -> bool) {
        self.running().retain(|resource, _| followed(resource));
        self.sight().keep(followed);
    }

    /// Waits until there is something for a pass to do.
    pub(super) async fn news(&self) {
        loop {
            let told = self.shared.told.notified();
            tokio::pin!(told);
            // Before looking: what is told in between must not be missed.
            told.as_mut().enable();
            if self.sight().news() {
                return;
            }
            told.await;
        }
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<Resource, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn sight(&self) -> MutexGuard<'_, Sight> {
        self.sight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_asked(&self) -> bool {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < UNASKED
    }

    fn missed(&self, resource: &Resource) {
        self.sight().missed(resource);
        self.told.notify_waiters();
    }
}

/// Follows a kind until its server has forgotten what happened, or, which is `false`, until nobody asks any more.
async fn follow(kubernetes: &Kubernetes, shared: &Shared, kind: &Kind, listed: String) -> bool {
    let resource = kind.resource();
    let (mut version, mut failures) = (listed, 0);
    while shared.is_asked() {
        match follow_once(kubernetes, shared, kind, &mut version).await {
            Ok(told) => failures = if told { 0 } else { failures + 1 },
            Err(AskError::Refused(status)) if status.code == 410 || status.reason == "Expired" => {
                tracing::debug!(kind = %resource, version, "what happened since is forgotten");
                return true;
            }
            Err(error) => {
                failures += 1;
                tracing::debug!(kind = %resource, %error, failures, "a watch ended");
            }
        }
        if failures > 0 {
            tokio::time::sleep(pause::after_failure(failures, rand::random())).await;
        }
    }
    // Whoever leads next lists anew.
    tracing::debug!(kind = %resource, "nobody asks what changes");
    false
}

/// One watch. Says whether anything was told.
async fn follow_once(
    kubernetes: &Kubernetes,
    shared: &Shared,
    kind: &Kind,
    version: &mut String,
) -> Result<bool, AskError> {
    let resource = kind.resource();
    let events = kubernetes.api().await?.watch(kind, version).await?;
    tokio::pin!(events);
    let mut told = false;
    while let Some(event) = events.next().await {
        told = true;
        match event? {
            Told::Nothing(until) => *version = until,
            Told::Is(object) => {
                resource_version(&object).clone_into(version);
                shared.sight().told(&resource, object, true);
                shared.told.notify_waiters();
            }
            Told::Gone(object) => {
                resource_version(&object).clone_into(version);
                shared.sight().told(&resource, object, false);
                shared.told.notify_waiters();
            }
        }
    }
    Ok(told)
}
