//! The supervisor: runs the tree's tasks on tokio and carries out the tree's decisions.
//!
//! The tree decides, under a lock that is never held over an await. Each run is a task. When it has returned, it
//! reports its exit to the tree, cancels the runs that the tree names, and starts the runs that the tree names. So no
//! task watches all the others, and nothing is polled in intervals.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use backoff::ExponentialBackoff;
use futures::FutureExt as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::context::{Runnable, Scope, Starting};
use crate::exit_reason::{Cancelled, ExitReason, TaskOutcome, classify_exit};
use crate::name::RunnableName;
use crate::quiescence::{CountedFuture, Quiescence};
use crate::report::TreeReport;
use crate::state::{RunId, RunnableState, Transition};
use crate::tree::{AddChildError, Effects, Tree};

/// How long a run that has returned waits for those below it before a warning is logged.
const BLOCKED_WARNING_DELAY: Duration = Duration::from_secs(30);

/// Receives every change of state, in order. It is called under the tree's lock, so it must be quick and must not call
/// the supervisor.
pub type TransitionObserver = Box<dyn Fn(&Transition) + Send + Sync>;

/// Runs a tree of runnables. When it is dropped, all of them are cancelled.
pub struct Supervisor {
    shared: Arc<Shared>,
}

/// Options of a supervisor.
pub struct SupervisorSettings {
    /// How long dead runnables wait before a restart.
    pub backoff: ExponentialBackoff,
    /// Receives the changes of state, for metrics and logs; `None` if they are not needed.
    pub observer: Option<TransitionObserver>,
}

impl Default for SupervisorSettings {
    fn default() -> Self {
        Self { backoff: ExponentialBackoff::DEFAULT, observer: None }
    }
}

struct SupervisedRunnable {
    runnable: Runnable,
    /// The token of its current run.
    token: CancellationToken,
}

pub(super) struct Shared {
    tree: Mutex<Tree<SupervisedRunnable>>,
    /// Counts the changes of the tree.
    changed: watch::Sender<u64>,
    quiescence: Arc<Quiescence>,
    tasks: TaskTracker,
    began: Instant,
    observer: Option<TransitionObserver>,
}

impl Supervisor {
    /// Starts a tree with this root.
    #[must_use]
    pub fn start(root: Runnable, settings: SupervisorSettings) -> Self {
        let work = SupervisedRunnable { runnable: root, token: CancellationToken::new() };
        let (tree, run) = Tree::new(work, settings.backoff, Duration::ZERO);
        let shared = Arc::new(Shared {
            tree: Mutex::new(tree),
            changed: watch::Sender::new(0),
            quiescence: Arc::default(),
            tasks: TaskTracker::new(),
            began: Instant::now(),
            observer: settings.observer,
        });
        if let Some(observer) = &shared.observer {
            observer(&Transition { path: "root".into(), from: None, to: RunnableState::New });
        }
        shared.spawn_runs(vec![(run, Duration::ZERO)]);
        Self { shared }
    }

    /// The state of the tree at this moment.
    #[must_use]
    pub fn report(&self) -> TreeReport {
        self.shared.report()
    }

    /// Waits until `holds` is true of the tree, and returns that report.
    pub async fn wait_until(&self, holds: impl Fn(&TreeReport) -> bool) -> TreeReport {
        let mut changes = self.shared.changed.subscribe();
        loop {
            let report = self.report();
            if holds(&report) {
                return report;
            }
            if changes.changed().await.is_err() {
                // Unreachable while `self` holds the sender.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until every runnable waits for something from outside the tree, and none for its back-off.
    ///
    /// For tests: all consequences of what was done before have happened. Tasks that a runnable spawned by itself,
    /// timers and connections are outside.
    pub async fn wait_quiescent(&self) {
        let starting = || self.report().entries.iter().any(|entry| entry.restart_in.is_some());
        self.shared.quiescence.wait_idle(|| !starting()).await;
    }

    /// Cancels all runnables, and waits until they have returned.
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
        parent: RunId,
        members: Vec<(RunnableName, Runnable)>,
    ) -> Result<(), AddChildError> {
        let members = members
            .into_iter()
            .map(|(name, runnable)| (name, SupervisedRunnable { runnable, token: CancellationToken::new() }))
            .collect();
        let mut tree = self.lock_tree();
        let (started, effects) = tree.add_children(parent, members, self.now())?;
        self.apply_effects(tree, effects);
        self.spawn_runs(started.into_iter().map(|run| (run, Duration::ZERO)).collect());
        Ok(())
    }

    pub(super) fn mark_healthy(self: &Arc<Self>, run: RunId) {
        let mut tree = self.lock_tree();
        let effects = tree.mark_healthy(run, self.now());
        self.apply_effects(tree, effects);
    }

    pub(super) fn mark_done(&self, run: RunId) {
        self.lock_tree().mark_done(run);
    }

    pub(super) fn report(&self) -> TreeReport {
        self.lock_tree().report(self.now())
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// A panic under the lock is assumed to leave the tree intact: those of its operations that can fail take effect as
    /// a whole or not at all.
    fn lock_tree(&self) -> MutexGuard<'_, Tree<SupervisedRunnable>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(self: &Arc<Self>) {
        let mut tree = self.lock_tree();
        let effects = tree.close();
        self.apply_effects(tree, effects);
        self.tasks.close();
    }

    /// Carries out the effects of an event.
    fn apply_effects(self: &Arc<Self>, tree: MutexGuard<'_, Tree<SupervisedRunnable>>, effects: Effects) {
        let tokens: Vec<_> = effects
            .cancel
            .iter()
            .filter_map(|slot| tree.payload(*slot).map(|work| work.token.clone()))
            .collect();
        if let Some(observer) = &self.observer {
            for transition in &effects.transitions {
                observer(transition);
            }
        }
        if !effects.transitions.is_empty() {
            self.changed.send_modify(|count| *count += 1);
        }
        drop(tree);
        // Before the following runs, which have tokens of their own.
        for token in tokens {
            token.cancel();
        }
        self.spawn_runs(effects.start.into_iter().map(|start| (start.run, start.delay)).collect());
    }

    fn spawn_runs(self: &Arc<Self>, runs: Vec<(RunId, Duration)>) {
        for (run, delay) in runs {
            let (scope, runnable) = {
                let mut tree = self.lock_tree();
                // A run may have been removed meanwhile, with the parent that started it.
                let Some((work, parent, path)) = tree.payload_and_parent(run) else { continue };
                work.token = parent.map_or_else(CancellationToken::new, |parent| parent.token.child_token());
                let token = work.token.clone();
                (Scope { shared: self.clone(), run, path, token }, work.runnable.clone())
            };
            // It may have been cancelled before it had this token.
            if self.lock_tree().is_cancelled(run) {
                scope.token.cancel();
            }
            let span = tracing::info_span!("runnable", path = %scope.path);
            let task = execute_run(self.clone(), scope, runnable, delay).instrument(span);
            self.tasks.spawn(CountedFuture::new(self.quiescence.clone(), task));
        }
    }

    fn handle_exit(self: &Arc<Self>, scope: &Scope, outcome: TaskOutcome) {
        let mut tree = self.lock_tree();
        let end = classify_exit(outcome, scope.run, tree.is_cancelled(scope.run));
        match &end {
            ExitReason::Dead(why) => tracing::warn!(error = why, "a runnable died"),
            ExitReason::Done => tracing::debug!("a runnable is done"),
            ExitReason::Cancelled => tracing::debug!("a runnable ended after its cancellation"),
        }
        let effects = tree.record_exit(scope.run, end, self.now(), &mut rand::random::<f64>);
        let waits = tree.waits_for(scope.run).is_some();
        self.apply_effects(tree, effects);
        if waits {
            // Nothing waits for this task, and it holds nothing.
            tokio::spawn(warn_if_blocked(Arc::downgrade(self), scope.run, scope.path.clone()));
        }
    }
}

/// After a while, logs the runnable that a returned run still waits for.
async fn warn_if_blocked(shared: Weak<Shared>, run: RunId, path: Arc<str>) {
    tokio::time::sleep(BLOCKED_WARNING_DELAY).await;
    let below = shared.upgrade().and_then(|shared| shared.lock_tree().waits_for(run));
    if let Some(below) = below {
        tracing::warn!(%path, waits_for = %below, "a runnable cannot start again: one below it does not end");
    }
}

/// Executes one run, from its delay to its exit.
async fn execute_run(shared: Arc<Shared>, scope: Scope, runnable: Runnable, delay: Duration) {
    if !delay.is_zero() && scope.until_cancelled(tokio::time::sleep(delay)).await.is_err() {
        let cancelled = Cancelled { run: scope.run, path: scope.path.clone() };
        return shared.handle_exit(&scope, TaskOutcome::Returned(Err(cancelled.into())));
    }
    shared.lock_tree().mark_started(scope.run);
    let body = AssertUnwindSafe(async { runnable.call(Starting(scope.clone())).await });
    let outcome = match body.catch_unwind().await {
        Ok(returned) => TaskOutcome::Returned(returned),
        Err(panic) => TaskOutcome::Panicked(panic_message(panic.as_ref())),
    };
    shared.handle_exit(&scope, outcome);
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
