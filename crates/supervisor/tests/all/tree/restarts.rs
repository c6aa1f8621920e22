//! Which runnables start again, when, and what they leave behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use shepherd_supervisor::context::{Runnable, Starting};
use shepherd_supervisor::exit_reason::RunnableError;
use shepherd_supervisor::report::TreeReport;
use shepherd_supervisor::state::RunnableState;
use shepherd_supervisor::supervise::Supervisor;
use tokio::sync::Notify;

use super::{NEVER, PATIENCE, SOON, failing_when, rest, resting, root, starts, supervisor, until};
use testkit::aloud::TestResult;
use testkit::memory::peak_of;

/// Counts the runs that exist now, and the most that existed at once.
#[derive(Default)]
struct Running {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Running {
    fn now(&self) -> usize {
        self.now.load(Ordering::SeqCst)
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }
}

/// Counts one run while it exists.
struct Counted(Arc<Running>);

impl Counted {
    fn new(running: &Arc<Running>) -> Self {
        let now = running.now.fetch_add(1, Ordering::SeqCst) + 1;
        running.most.fetch_max(now, Ordering::SeqCst);
        Self(running.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Starts a tree of binary groups, and counts the runs. The leaves return slowly.
fn binary(depth: usize, running: Arc<Running>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let running = running.clone();
        async move {
            let _counted = Counted::new(&running);
            if depth > 0 {
                let below = || binary(depth - 1, running.clone());
                starting.start_group([("left", below()), ("right", below())])?;
                return rest(starting).await;
            }
            let end = rest(starting).await;
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            end
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_sibling_returns_wholly_before_it_starts_again() -> TestResult {
    const DEPTH: usize = 5;
    let all = 2_usize.pow(5 + 1) - 1;
    for panics in [false, true] {
        let (notify, running) = (Arc::new(Notify::new()), Arc::new(Running::default()));
        let tree = {
            let (notify, running) = (notify.clone(), running.clone());
            supervisor(
                SOON,
                root(move |starting| {
                    let notify = notify.clone();
                    let dies = Runnable::new(move |starting: Starting| {
                        let notify = notify.clone();
                        async move {
                            let healthy = starting.mark_healthy();
                            healthy.scope().until_cancelled(notify.notified()).await?;
                            assert!(!panics, "panic of the test");
                            Err(RunnableError::msg("failed by the test"))
                        }
                    });
                    Ok(starting.start_group([("dies", dies), ("deep", binary(DEPTH, running.clone()))])?)
                }),
            )
        };
        for round in 1..5 {
            until(&tree, |report| {
                report.is_healthy() && report.entries.len() == all + 2 && starts(report, "root.deep") == round
            })
            .await?;
            assert_eq!(running.now(), all, "one instance of each");
            notify.notify_one();
        }
        let report = until(&tree, |report| starts(report, "root.dies") == 5).await?;
        let why = report.get("root.dies").and_then(|entry| entry.last_failure.as_deref());
        assert_eq!(why, Some(if panics { "it panicked: panic of the test" } else { "failed by the test" }));
        assert_eq!(running.most(), all, "two instances of one at once");
        tree.stop().await;
        assert_eq!(running.now(), 0);
    }
    Ok(())
}

#[tokio::test]
async fn backoff_of_a_dead_child_ends_with_its_parent() -> TestResult {
    let notify = Arc::new(Notify::new());
    let tree = {
        let notify = notify.clone();
        supervisor(
            NEVER,
            root(move |starting| {
                let parent = root(|starting| {
                    let dead = Runnable::new(async |_| Err(RunnableError::msg("broken")));
                    Ok(starting.start("child", dead)?)
                });
                Ok(starting.start_group([("parent", parent), ("sibling", failing_when(&notify))])?)
            }),
        )
    };
    let waits =
        |report: &TreeReport| report.get("root.parent.child").is_some_and(|entry| entry.restart_in.is_some());
    let report = until(&tree, waits).await?;
    let delay = report.get("root.parent.child").and_then(|entry| entry.restart_in).context("it waits")?;
    assert!(delay > Duration::from_hours(10) && delay < Duration::from_hours(37), "{delay:?}");
    // The parent dies because of its group, not by itself: it restarts at once.
    notify.notify_one();
    until(&tree, |report| starts(report, "root.parent") == 2 && waits(report)).await?;
    assert_eq!(
        tree.report().state_of("root.sibling"),
        Some(RunnableState::New),
        "that one waits for its own back-off"
    );
    tree.stop().await;
    Ok(())
}

#[tokio::test]
async fn one_may_say_that_it_is_done_and_return_after_its_parent_failed() -> TestResult {
    let (fail, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let tree = {
        let (fail, go) = (fail.clone(), go.clone());
        supervisor(
            SOON,
            root(move |starting| {
                let (fail, go) = (fail.clone(), go.clone());
                let parent = Runnable::new(move |starting: Starting| {
                    let (fail, go) = (fail.clone(), go.clone());
                    async move {
                        let late = Runnable::new(move |starting: Starting| {
                            let go = go.clone();
                            async move {
                                let done = starting.mark_healthy().mark_done();
                                go.notified().await;
                                Ok(done)
                            }
                        });
                        starting.start("late", late)?;
                        let healthy = starting.mark_healthy();
                        healthy.scope().until_cancelled(fail.notified()).await?;
                        Err(RunnableError::msg("failed by the test"))
                    }
                });
                Ok(starting.start("parent", parent)?)
            }),
        )
    };
    until(&tree, |report| report.is_healthy() && report.entries.len() == 3).await?;
    assert_eq!(
        tree.report().state_of("root.parent.late"),
        Some(RunnableState::Healthy),
        "it has not returned yet"
    );
    fail.notify_one();
    let waits = |report: &TreeReport| report.get("root.parent").and_then(|entry| entry.waits_for.clone());
    let report = until(&tree, |report| waits(report).is_some()).await?;
    assert_eq!(waits(&report).as_deref(), Some("root.parent.late"));
    go.notify_one();
    until(&tree, |report| starts(report, "root.parent") == 2).await?;
    go.notify_one();
    until(&tree, |report| report.state_of("root.parent.late") == Some(RunnableState::Done)).await?;
    tree.stop().await;
    Ok(())
}

#[tokio::test]
async fn done_member_and_its_child_start_again_with_their_group() -> TestResult {
    let notify = Arc::new(Notify::new());
    let tree = {
        let notify = notify.clone();
        supervisor(
            SOON,
            root(move |starting| {
                let done = Runnable::new(async |starting: Starting| {
                    starting.start("inner", resting())?;
                    Ok(starting.mark_healthy().mark_done())
                });
                Ok(starting.start_group([("done", done), ("sibling", failing_when(&notify))])?)
            }),
        )
    };
    let done = |report: &TreeReport| {
        report.state_of("root.done") == Some(RunnableState::Done)
            && report.state_of("root.done.inner") == Some(RunnableState::Healthy)
    };
    until(&tree, done).await?;
    notify.notify_one();
    until(&tree, |report| starts(report, "root.done") == 2 && done(report)).await?;
    assert_eq!(starts(&tree.report(), "root.sibling"), 2);
    tree.stop().await;
    Ok(())
}

#[tokio::test]
async fn nothing_starts_again_once_all_are_requested_to_end() -> TestResult {
    let begun = Arc::new(AtomicUsize::new(0));
    let tree = {
        let begun = begun.clone();
        supervisor(
            SOON,
            root(move |starting| {
                let begun = begun.clone();
                let fails_when_requested = Runnable::new(move |starting: Starting| {
                    begun.fetch_add(1, Ordering::SeqCst);
                    async move {
                        starting.mark_healthy().scope().cancelled().await;
                        Err(RunnableError::msg("it fails on its way out"))
                    }
                });
                Ok(starting.start_group([("one", fails_when_requested), ("two", resting())])?)
            }),
        )
    };
    until(&tree, |report| report.is_healthy() && report.entries.len() == 3).await?;
    tokio::time::timeout(PATIENCE, tree.stop()).await?;
    assert_eq!(begun.load(Ordering::SeqCst), 1);
    Ok(())
}

const RUNNABLES: usize = 10_000;

/// Ten thousand restarts leave no memory allocated. All of them run on this thread, and its bytes are counted.
#[test]
fn ten_thousand_start_again_and_again_within_bounded_memory() -> TestResult {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let notify = Arc::new(Notify::new());
    let whole = async |tree: &Supervisor, round| {
        let whole = |report: &TreeReport| {
            report.entries.len() == RUNNABLES + 3
                && report.is_healthy()
                && starts(report, "root.many") == round
        };
        // This does not look at every change: each of ten thousand changes would print ten thousand lines.
        let looking = async {
            while !whole(&tree.report()) {
                tree.wait_quiescent().await;
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, looking).await
    };
    let (tree, first) = peak_of(|| {
        runtime.block_on(async {
            let notify = notify.clone();
            let tree = supervisor(SOON, root(move |starting| many(starting, &notify)));
            whole(&tree, 1).await.map(|()| tree)
        })
    });
    let tree = tree?;
    let (restarted, more) = peak_of(|| {
        runtime.block_on(async {
            for round in 2..=20 {
                notify.notify_one();
                whole(&tree, round).await?;
            }
            TestResult::Ok(())
        })
    });
    restarted?;
    // The tree uses as much again beside itself. If anything of each start were stored, it would use nineteen times as
    // much.
    assert!(more < first + first / 2, "{first} bytes at first, {more} more in the end");
    assert!(first < RUNNABLES * 8192, "{} bytes for each", first / RUNNABLES);
    runtime.block_on(tree.stop());
    Ok(())
}

/// Starts ten thousand runnables in a hundred groups, which are all in a group with one that fails at each
/// notification.
fn many(starting: &Starting, notify: &Arc<Notify>) -> Result<(), RunnableError> {
    let groups = root(|starting| {
        for group in 0..RUNNABLES / 100 {
            let names: Vec<_> = (0..100).map(|number| format!("n{group}-{number}")).collect();
            starting.start_group(names.iter().map(|name| (name.as_str(), resting())))?;
        }
        Ok(())
    });
    Ok(starting.start_group([("many", groups), ("trigger", failing_when(notify))])?)
}
