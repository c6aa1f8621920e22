//! Runnables that end, cancel or name themselves in ways that they must not.

use std::sync::Arc;

use shepherd_supervisor::context::{Healthy, Runnable, Starting};
use shepherd_supervisor::exit_reason::{Cancelled, Done, RunnableError};
use shepherd_supervisor::report::TreeReport;
use shepherd_supervisor::state::RunnableState;
use tokio::sync::{Notify, mpsc};

use super::{NEVER, PATIENCE, SOON, failing_when, resting, root, starts, supervisor, until};
use testkit::aloud::TestResult;

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
