//! The supervisor's tree at work: which runnables restart and when, what a failure cancels, and what a test may wait
//! for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use backoff::ExponentialBackoff;
use shepherd_supervisor::combine::{CombinedInputs, derive_value};
use shepherd_supervisor::context::{Healthy, Runnable, Starting};
use shepherd_supervisor::exit_reason::{Cancelled, Done, RunnableError};
use shepherd_supervisor::report::TreeReport;
use shepherd_supervisor::state::{RunnableState, Transition};
use shepherd_supervisor::supervise::{Supervisor, SupervisorSettings};
use shepherd_supervisor::watch_cell::WatchCell;
use tokio::sync::{Notify, mpsc};

use testkit::aloud::TestResult;
use testkit::memory::peak_of;

/// The deadline of every wait. A tree that has not reached a state by then never will.
const PATIENCE: Duration = Duration::from_mins(5);
/// Dead runnables restart soon.
const SOON: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(1), factor: 1.5, max: Duration::from_millis(20) };
/// Dead runnables do not restart while a test runs.
const NEVER: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_hours(24), factor: 1.0, max: Duration::from_hours(24) };

fn supervisor(backoff: ExponentialBackoff, root: Runnable) -> Supervisor {
    Supervisor::start(root, SupervisorSettings { backoff, observer: None })
}

/// Reports that it is healthy, and ends when its scope is cancelled.
async fn rest(starting: Starting) -> Result<Done, RunnableError> {
    let healthy = starting.mark_healthy();
    Err(healthy.scope().cancelled().await.into())
}

fn resting() -> Runnable {
    Runnable::new(rest)
}

/// Reports that it is healthy, and fails at each notification.
fn failing_when(notify: &Arc<Notify>) -> Runnable {
    let notify = notify.clone();
    Runnable::new(move |starting: Starting| {
        let notify = notify.clone();
        async move {
            let healthy = starting.mark_healthy();
            healthy.scope().until_cancelled(notify.notified()).await?;
            Err(RunnableError::msg("failed by the test"))
        }
    })
}

/// A root whose children `start` starts.
fn root(start: impl Fn(&Starting) -> Result<(), RunnableError> + Send + Sync + 'static) -> Runnable {
    let start = Arc::new(start);
    Runnable::new(move |starting: Starting| {
        let start = start.clone();
        async move {
            start(&starting)?;
            rest(starting).await
        }
    })
}

async fn until(supervisor: &Supervisor, holds: impl Fn(&TreeReport) -> bool) -> anyhow::Result<TreeReport> {
    tokio::time::timeout(PATIENCE, supervisor.wait_until(holds))
        .await
        .with_context(|| format!("waiting for the tree, which is\n{}", supervisor.report()))
}

fn starts(report: &TreeReport, path: &str) -> u64 {
    report.get(path).map_or(0, |entry| entry.start_count)
}

#[tokio::test]
async fn members_of_a_group_become_healthy_and_share_the_fate_of_a_dead_one() -> TestResult {
    let notify = Arc::new(Notify::new());
    let tree = {
        let notify = notify.clone();
        supervisor(
            SOON,
            root(move |starting| {
                starting.start_group([("one", failing_when(&notify)), ("two", resting())])?;
                Ok(starting.start("three", resting())?)
            }),
        )
    };
    until(&tree, |report| report.is_healthy() && report.entries.len() == 4).await?;
    notify.notify_one();
    let report = until(&tree, |report| starts(report, "root.two") == 2 && report.is_healthy()).await?;
    assert_eq!(starts(&report, "root.one"), 2);
    assert_eq!(starts(&report, "root.three"), 1);
    assert_eq!(report.get("root.one").and_then(|e| e.last_failure.as_deref()), Some("failed by the test"));
    assert_eq!(report.get("root.two").and_then(|e| e.last_failure.as_deref()), None);
    tree.stop().await;
    Ok(())
}

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
async fn own_cancellation_is_distinguished_from_everything_that_looks_like_it() -> TestResult {
    #[derive(Debug, thiserror::Error)]
    #[error("reading from the server failed")]
    struct Read(#[source] Cancelled);
    // One member of the group takes the cancellation of another run for its own. Another one reacts to its own
    // cancellation with an error of its connection. A third one returns its cancellation behind another error.
    let notify = Arc::new(Notify::new());
    let tree = {
        let notify = notify.clone();
        supervisor(
            SOON,
            root(move |starting| {
                let (sender, receiver) = mpsc::unbounded_channel::<Cancelled>();
                let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
                let proper = Runnable::new(move |starting: Starting| {
                    let sender = sender.clone();
                    async move {
                        let cancelled = starting.mark_healthy().scope().cancelled().await;
                        let _ = sender.send(cancelled.clone());
                        Err(Read(cancelled).into())
                    }
                });
                let foreign = Runnable::new(move |starting: Starting| {
                    let receiver = receiver.clone();
                    async move {
                        let _healthy = starting.mark_healthy();
                        let cancelled = receiver.lock().await.recv().await;
                        Err(cancelled.map_or_else(|| RunnableError::msg("no sender"), RunnableError::from))
                    }
                });
                let careless = Runnable::new(async |starting: Starting| {
                    let healthy = starting.mark_healthy();
                    healthy.scope().cancelled().await;
                    Err(std::io::Error::other("connection reset").into())
                });
                Ok(starting.start_group([
                    ("careless", careless),
                    ("foreign", foreign),
                    ("proper", proper),
                    ("trigger", failing_when(&notify)),
                ])?)
            }),
        )
    };
    until(&tree, |report| report.is_healthy() && report.entries.len() == 5).await?;
    notify.notify_one();
    let report = until(&tree, |report| {
        let all = ["careless", "foreign", "proper", "trigger"];
        report.is_healthy() && all.iter().all(|name| starts(report, &format!("root.{name}")) >= 2)
    })
    .await?;
    let why = |name: &str| report.get(&format!("root.{name}")).and_then(|entry| entry.last_failure.clone());
    assert_eq!(why("proper"), None);
    assert_eq!(why("careless").as_deref(), Some("connection reset"));
    assert_eq!(why("foreign").as_deref(), Some("root.proper was cancelled"));
    tree.stop().await;
    Ok(())
}

/// A runnable that passes on its own `Done`, and one that returns the `Done` of the other.
fn one_who_gives_its_end_away() -> (Runnable, Runnable) {
    let kept: Arc<std::sync::Mutex<Option<Done>>> = Arc::default();
    let hands_out = {
        let kept = kept.clone();
        Runnable::new(move |starting: Starting| {
            let kept = kept.clone();
            async move {
                let done = starting.mark_healthy().mark_done();
                *kept.lock().map_err(|_| RunnableError::msg("poisoned"))? = Some(done);
                Err(RunnableError::msg("it gave away what says that it is done"))
            }
        })
    };
    let takes = Runnable::new(move |starting: Starting| {
        let kept = kept.clone();
        async move {
            let healthy: Healthy = starting.mark_healthy();
            loop {
                let done = kept.lock().map_err(|_| RunnableError::msg("poisoned"))?.take();
                if let Some(done) = done {
                    return Ok(done);
                }
                healthy.scope().until_cancelled(tokio::task::yield_now()).await?;
            }
        }
    });
    (hands_out, takes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_misbehave_do_not_disturb_the_others() -> TestResult {
    let (pings, mut answers) = (mpsc::unbounded_channel::<u32>(), mpsc::unbounded_channel::<u32>());
    let ping = pings.0;
    let (pings, answer) = (Arc::new(tokio::sync::Mutex::new(pings.1)), answers.0.clone());
    let fail = Arc::new(Notify::new());
    let let_go = tokio_util::sync::CancellationToken::new();
    let tree = {
        let (fail, let_go) = (fail.clone(), let_go.clone());
        supervisor(
            SOON,
            root(move |starting| {
                // Never checks the cancellation of its scope, and occupies a worker thread all the time.
                let deaf = {
                    let let_go = let_go.clone();
                    Runnable::new(move |starting: Starting| {
                        let let_go = let_go.clone();
                        async move {
                            let _healthy = starting.mark_healthy();
                            while !let_go.is_cancelled() {
                                tokio::task::yield_now().await;
                            }
                            Err(RunnableError::msg("it was let go"))
                        }
                    })
                };
                let beside_deaf = Runnable::new(async |_| Err(RunnableError::msg("it always fails")));
                starting.start_group([("deaf", deaf), ("beside-deaf", beside_deaf)])?;
                let panics = Runnable::new(async |_| panic!("always"));
                starting.start("panics", panics)?;
                let breeds = Runnable::new(async |starting: Starting| {
                    for number in 0..50 {
                        starting
                            .start(&format!("child-{number}"), Runnable::new(async |_| panic!("bred")))?;
                    }
                    tokio::task::yield_now().await;
                    Err(RunnableError::msg("it has bred"))
                });
                starting.start("breeds", breeds)?;
                let (hands_out, takes) = one_who_gives_its_end_away();
                starting.start("hands-out", hands_out)?;
                starting.start("takes", takes)?;
                let (pings, answer) = (pings.clone(), answer.clone());
                let one = Runnable::new(move |starting: Starting| {
                    let (pings, answer) = (pings.clone(), answer.clone());
                    async move {
                        let healthy = starting.mark_healthy();
                        loop {
                            let mut pings = healthy.scope().until_cancelled(pings.lock()).await?;
                            let ping = healthy.scope().until_cancelled(pings.recv()).await?;
                            let _ = answer.send(ping.ok_or_else(|| RunnableError::msg("no pings"))?);
                        }
                    }
                });
                Ok(starting.start_group([("one", one), ("one-sibling", failing_when(&fail))])?)
            }),
        )
    };
    for round in 0..5 {
        for number in 0..200 {
            ping.send(number)?;
            let answer = tokio::time::timeout(PATIENCE, answers.1.recv()).await?;
            assert_eq!(answer, Some(number), "round {round}");
        }
        let before = starts(&tree.report(), "root.one");
        fail.notify_one();
        until(&tree, |report| {
            starts(report, "root.one") > before
                && report.state_of("root.one-sibling") == Some(RunnableState::Healthy)
        })
        .await?;
    }
    // The failed runnable waits for the one below `nobody` that ignores the stop. Its siblings wait for nothing else.
    let report = until(&tree, |report| {
        report.get("root.takes").is_some_and(|entry| entry.last_failure.is_some())
            && starts(report, "root.beside-deaf") > 1
    })
    .await?;
    assert_eq!(starts(&report, "root.deaf"), 1);
    assert_eq!(
        report.get("root.takes").and_then(|entry| entry.last_failure.as_deref()),
        Some("it returned what says that another runnable is done")
    );
    let_go.cancel();
    tree.stop().await;
    Ok(())
}

#[tokio::test]
async fn observer_sees_every_change_of_each_in_its_order() -> TestResult {
    let (sender, mut seen) = mpsc::unbounded_channel::<Transition>();
    let (fail, finish) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let tree = {
        let (fail, finish) = (fail.clone(), finish.clone());
        let top = root(move |starting| {
            let finish = finish.clone();
            let two = Runnable::new(move |starting: Starting| {
                let finish = finish.clone();
                async move {
                    let healthy = starting.mark_healthy();
                    healthy.scope().until_cancelled(finish.notified()).await?;
                    Ok(healthy.mark_done())
                }
            });
            Ok(starting.start_group([("one", failing_when(&fail)), ("two", two)])?)
        });
        let observer = Box::new(move |transition: &Transition| drop(sender.send(transition.clone())));
        Supervisor::start(top, SupervisorSettings { backoff: SOON, observer: Some(observer) })
    };
    until(&tree, |report| report.is_healthy() && report.entries.len() == 3).await?;
    fail.notify_one();
    until(&tree, |report| report.is_healthy() && starts(report, "root.one") == 2).await?;
    finish.notify_one();
    until(&tree, |report| report.state_of("root.two") == Some(RunnableState::Done)).await?;
    tree.stop().await;
    let mut of = std::collections::BTreeMap::<String, Vec<&str>>::new();
    while let Ok(transition) = seen.try_recv() {
        let states = of.entry(transition.path.to_string()).or_default();
        assert_eq!(transition.from.map(RunnableState::as_str), states.last().copied(), "{}", transition.path);
        states.push(transition.to.as_str());
    }
    let states = |path: &str| of.get(path).map(|states| states.join(" ")).unwrap_or_default();
    assert_eq!(states("root"), "new healthy cancelled");
    assert_eq!(states("root.one"), "new healthy dead new healthy cancelled");
    assert_eq!(states("root.two"), "new healthy cancelled new healthy done");
    Ok(())
}

/// From a role to the runnables that the role requires, by a decision in between, while everything on the way dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_from_a_value_has_followed_once_the_tree_is_settled() -> TestResult {
    const ROUNDS: u32 = 200;
    let (roles, address, wish, works) =
        (WatchCell::new(), WatchCell::new(), WatchCell::new(), WatchCell::new());
    let tree = {
        let (roles, address, wish, works) = (roles.clone(), address.clone(), wish.clone(), works.clone());
        supervisor(
            NEVER,
            root(move |starting| {
                let inputs = {
                    let (roles, address) = (roles.clone(), address.clone());
                    move || {
                        CombinedInputs::new((None, None))
                            .with(&roles, |known: &mut (Option<u32>, Option<u32>), value| {
                                known.0 = Some(value);
                            })
                            .with(&address, |known, value| known.1 = Some(value))
                    }
                };
                let decide = |known: &(Option<u32>, Option<u32>)| Some(known.0? * 1000 + known.1?);
                starting.start("decides", derive_value(inputs, decide, &wish))?;
                let (wish, works) = (wish.clone(), works.clone());
                let launcher = Runnable::new(move |starting: Starting| {
                    let (mut wish, works) = (wish.watch(), works.clone());
                    async move {
                        let scope = starting.scope().clone();
                        let wanted = scope.until_cancelled(wish.next()).await?;
                        let works = works.clone();
                        starting.start(
                            "work",
                            Runnable::new(move |starting: Starting| {
                                works.set(wanted);
                                rest(starting)
                            }),
                        )?;
                        let healthy = starting.mark_healthy();
                        let other = wish.next_matching(|other| *other != wanted);
                        healthy.scope().until_cancelled(other).await?;
                        Ok(healthy.mark_done())
                    }
                });
                // A group of its own, which a runnable without a backoff restarts at once when it dies at each change.
                // Runnables that died with their group wait for nothing.
                Ok(starting.start("launcher", launcher)?)
            }),
        )
    };
    tree.wait_quiescent().await;
    assert_eq!(works.latest(), None);
    roles.set(1);
    tree.wait_quiescent().await;
    assert_eq!((wish.latest(), works.latest()), (None, None), "half of what is known decides nothing");
    address.set(0);
    tree.wait_quiescent().await;
    assert_eq!((wish.latest(), works.latest()), (Some(1000), Some(1000)));
    for round in 1..=ROUNDS {
        address.set(round);
        tree.wait_quiescent().await;
        assert_eq!(wish.latest(), Some(1000 + round));
    }
    assert_eq!(tree.report().state_of("root.launcher"), Some(RunnableState::Done));
    assert_eq!(works.latest(), Some(1000), "one that is done is not started again");
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

#[tokio::test]
async fn children_with_wrong_names_are_refused_with_words() -> TestResult {
    let (sender, mut receiver) = mpsc::unbounded_channel::<String>();
    let tree = supervisor(
        NEVER,
        root(move |starting| {
            starting.start("taken", resting())?;
            for name in ["taken", "a.b", ""] {
                if let Err(error) = starting.start(name, resting()) {
                    let _ = sender.send(error.to_string());
                }
            }
            Ok(())
        }),
    );
    until(&tree, TreeReport::is_healthy).await?;
    let mut all = Vec::new();
    while let Ok(text) = receiver.try_recv() {
        all.push(text);
    }
    assert_eq!(
        all,
        [
            "no child was started: two children of root are to be called taken; give each a name of its own",
            "no child was started: \"a.b\" is not a valid name of a runnable: it has 1 to 64 lower-case letters, digits, \
             dashes and underscores",
            "no child was started: \"\" is not a valid name of a runnable: it has 1 to 64 lower-case letters, digits, dashes \
             and underscores",
        ]
    );
    tree.stop().await;
    Ok(())
}

const RUNNABLES: usize = 10_000;

/// Ten thousand restarts leave no memory allocated. All of them run on this thread, whose bytes are counted.
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
