//! The supervisor's tree at work: which runnables restart and when, what a failure cancels, and what a test may wait
//! for.

mod misbehaviour;
mod restarts;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use backoff::ExponentialBackoff;
use shepherd_supervisor::combine::{CombinedInputs, derive_value};
use shepherd_supervisor::context::{Runnable, Starting};
use shepherd_supervisor::exit_reason::{Done, RunnableError};
use shepherd_supervisor::report::TreeReport;
use shepherd_supervisor::state::{RunnableState, Transition};
use shepherd_supervisor::supervise::{Supervisor, SupervisorSettings};
use shepherd_supervisor::watch_cell::WatchCell;
use tokio::sync::{Notify, mpsc};

use testkit::aloud::TestResult;

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

/// A root with the children that `start` starts.
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
