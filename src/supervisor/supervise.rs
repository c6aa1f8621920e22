//! The tasks of a tree, on tokio.
//!
//! The tree decides, under a lock that is never held over an await; here its decisions are carried out. Each life is a
//! task. When it has returned it says so to the tree, asks those to end whom the tree names, and starts those whom the
//! tree names: so no task watches all the others, and nothing is polled in intervals.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::supervisor::awake::{Awake, Counted};
use crate::supervisor::backoff::Backoff;
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::name::Name;
use crate::supervisor::outcome::{Cancelled, End, Outcome, classify};
use crate::supervisor::report::Report;
use crate::supervisor::tree::{After, Life, NotStarted, State, Transition, Tree};

/// How long one that has returned waits for those below it before a person is told.
const PATIENCE: Duration = Duration::from_secs(30);

/// Who is told of every change of state, in their order. It is called under the tree's lock: it must be quick, and must
/// not ask the supervisor for anything.
pub type Observer = Box<dyn Fn(&Transition) + Send + Sync>;

/// Runs a tree of runnables. When it is dropped all of them are asked to end.
pub struct Supervisor {
    shared: Arc<Shared>,
}

/// How a supervisor is to run.
pub struct Settings {
    /// How long dead ones wait.
    pub backoff: Backoff,
    /// Who is told of changes.
    pub observer: Option<Observer>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { backoff: Backoff::USUAL, observer: None }
    }
}

struct Work {
    runnable: Runnable,
    /// Of the life that it has now.
    token: CancellationToken,
}

pub(super) struct Shared {
    tree: Mutex<Tree<Work>>,
    /// Counts the changes of the tree.
    changed: watch::Sender<u64>,
    awake: Arc<Awake>,
    tasks: TaskTracker,
    began: Instant,
    observer: Option<Observer>,
}

impl Supervisor {
    /// Starts a tree with this root.
    #[must_use]
    pub fn start(root: Runnable, settings: Settings) -> Self {
        let work = Work { runnable: root, token: CancellationToken::new() };
        let (tree, life) = Tree::new(work, settings.backoff, Duration::ZERO);
        let shared = Arc::new(Shared {
            tree: Mutex::new(tree),
            changed: watch::Sender::new(0),
            awake: Arc::default(),
            tasks: TaskTracker::new(),
            began: Instant::now(),
            observer: settings.observer,
        });
        if let Some(observer) = &shared.observer {
            observer(&Transition { path: "root".into(), from: None, to: State::New });
        }
        shared.spawn(vec![(life, Duration::ZERO)]);
        Self { shared }
    }

    /// The tree as it is now.
    #[must_use]
    pub fn report(&self) -> Report {
        self.shared.report()
    }

    /// Waits until the tree is as `holds` wants it.
    pub async fn until(&self, holds: impl Fn(&Report) -> bool) -> Report {
        let mut changes = self.shared.changed.subscribe();
        loop {
            let report = self.report();
            if holds(&report) {
                return report;
            }
            if changes.changed().await.is_err() {
                // Not while the sender is held, in `self`.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until every runnable waits for something from outside the tree, and none for its back-off.
    ///
    /// For tests: what could follow from what was done before has followed. Tasks that a runnable spawned by itself,
    /// timers and connections are outside.
    pub async fn settled(&self) {
        let starting = || self.report().entries.iter().any(|entry| entry.starts_in.is_some());
        self.shared.awake.until_none(|| !starting()).await;
    }

    /// Asks all to end, and waits until they have.
    pub async fn stop(self) {
        self.shared.close();
        self.shared.tasks.wait().await;
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    pub(super) fn start(
        self: &Arc<Self>,
        parent: Life,
        members: Vec<(Name, Runnable)>,
    ) -> Result<(), NotStarted> {
        let members = members
            .into_iter()
            .map(|(name, runnable)| (name, Work { runnable, token: CancellationToken::new() }))
            .collect();
        let mut tree = self.tree();
        let (started, after) = tree.start(parent, members, self.now())?;
        self.finish(tree, after);
        self.spawn(started.into_iter().map(|life| (life, Duration::ZERO)).collect());
        Ok(())
    }

    pub(super) fn healthy(self: &Arc<Self>, life: Life) {
        let mut tree = self.tree();
        let after = tree.healthy(life, self.now());
        self.finish(tree, after);
    }

    pub(super) fn done(&self, life: Life) {
        self.tree().done(life);
    }

    pub(super) fn report(&self) -> Report {
        self.tree().report(self.now())
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// A panic under the lock is not believed to have left a tree half-way: its operations are whole or not at all
    /// where they can fail.
    fn tree(&self) -> MutexGuard<'_, Tree<Work>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(self: &Arc<Self>) {
        let mut tree = self.tree();
        let after = tree.close();
        self.finish(tree, after);
        self.tasks.close();
    }

    /// Carries out what follows from an event.
    fn finish(self: &Arc<Self>, tree: MutexGuard<'_, Tree<Work>>, after: After) {
        let asked: Vec<_> =
            after.ask.iter().filter_map(|slot| tree.payload(*slot).map(|work| work.token.clone())).collect();
        if let Some(observer) = &self.observer {
            for transition in &after.transitions {
                observer(transition);
            }
        }
        if !after.transitions.is_empty() {
            self.changed.send_modify(|count| *count += 1);
        }
        drop(tree);
        // Before the lives that follow, which have tokens of their own.
        for token in asked {
            token.cancel();
        }
        self.spawn(after.start.into_iter().map(|start| (start.life, start.delay)).collect());
    }

    fn spawn(self: &Arc<Self>, lives: Vec<(Life, Duration)>) {
        for (life, delay) in lives {
            let (scope, runnable) = {
                let mut tree = self.tree();
                // One that was thrown away meanwhile, with the parent that started it.
                let Some((work, parent, path)) = tree.started(life) else { continue };
                work.token = parent.map_or_else(CancellationToken::new, |parent| parent.token.child_token());
                let token = work.token.clone();
                (Scope { shared: self.clone(), life, path, token }, work.runnable.clone())
            };
            // It may have been asked to end before it had this token.
            if self.tree().is_asked(life) {
                scope.token.cancel();
            }
            let span = tracing::info_span!("runnable", path = %scope.path);
            let task = live(self.clone(), scope, runnable, delay).instrument(span);
            self.tasks.spawn(Counted::new(self.awake.clone(), task));
        }
    }

    fn ended(self: &Arc<Self>, scope: &Scope, outcome: Outcome) {
        let mut tree = self.tree();
        let end = classify(outcome, scope.life, tree.is_asked(scope.life));
        match &end {
            End::Dead(why) => tracing::warn!(error = why, "a runnable died"),
            End::Done => tracing::debug!("a runnable is done"),
            End::Cancelled => tracing::debug!("a runnable ended as it was asked to"),
        }
        let after = tree.ended(scope.life, end, self.now(), &mut rand::random::<f64>);
        let waits = tree.waits_for(scope.life).is_some();
        self.finish(tree, after);
        if waits {
            // Nothing waits for this task, and it holds nothing.
            tokio::spawn(tell_who_is_waited_for(Arc::downgrade(self), scope.life, scope.path.clone()));
        }
    }
}

/// Says, after a while, whom one that has returned still waits for.
async fn tell_who_is_waited_for(shared: Weak<Shared>, life: Life, path: Arc<str>) {
    tokio::time::sleep(PATIENCE).await;
    let below = shared.upgrade().and_then(|shared| shared.tree().waits_for(life));
    if let Some(below) = below {
        tracing::warn!(%path, waits_for = %below, "a runnable cannot start again: one below it does not end");
    }
}

/// One life, from its delay to its end.
async fn live(shared: Arc<Shared>, scope: Scope, runnable: Runnable, delay: Duration) {
    if !delay.is_zero() && scope.until_cancelled(tokio::time::sleep(delay)).await.is_err() {
        let cancelled = Cancelled { life: scope.life, path: scope.path.clone() };
        return shared.ended(&scope, Outcome::Returned(Err(cancelled.into())));
    }
    shared.tree().begun(scope.life);
    let body = AssertUnwindSafe(async { runnable.call(Starting(scope.clone())).await });
    let outcome = match body.catch_unwind().await {
        Ok(returned) => Outcome::Returned(returned),
        Err(panic) => Outcome::Panicked(panic_text(panic.as_ref())),
    };
    shared.ended(&scope, outcome);
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it said nothing".to_owned())
}
