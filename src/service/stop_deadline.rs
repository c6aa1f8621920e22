//! The deadline of a stop, and how its time is divided. The division is *pure*.
//!
//! A stop waits for answers of the database in several places: workers record how their work ended and close their
//! sessions, callback servers answer calls, tasks finish a statement, connections are closed. Each of these has a limit
//! of its own that suits a running service. If the database swallows packets, the limits add up to minutes, and an
//! operator or systemd would have to kill the program.
//!
//! So a stop has one deadline. Work under way has the grace period. From its end on, or from a second signal on, or
//! once no work is left, all remaining steps share [`CLOSING_TIME`]. Each step has a latest end. A step that ends early
//! leaves its time to those after it; one that does not end in time is given up, and the stop continues. What a stop gives
//! up is safe to lose: a session that was not closed expires, and the reaper records its work as lost.

use std::time::Duration;

use tokio::time::Instant;

/// How long a stop takes at most after the grace period. `docs/deploying.md` documents it.
pub const CLOSING_TIME: Duration = Duration::from_secs(20);

/// A step of a stop after the grace period, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopStep {
    /// Workers record how their work ended, and close their sessions.
    Work,
    /// Listeners answer the calls under way.
    Listeners,
    /// Tasks that hold no work end.
    Tasks,
    /// Work that was dropped is cancelled in the database, and the renewal of sessions ends.
    Sessions,
    /// The last traces are sent.
    Traces,
    /// The connections to the database are closed.
    Database,
}

impl StopStep {
    /// Every step, in order.
    pub const ALL: [Self; 6] =
        [Self::Work, Self::Listeners, Self::Tasks, Self::Sessions, Self::Traces, Self::Database];

    /// Its part of [`CLOSING_TIME`], in seconds. Half of it is for the records of work: losing them costs other
    /// shepherds the wait for an expired session.
    const fn share(self) -> u64 {
        match self {
            Self::Work => 10,
            Self::Traces => 4,
            Self::Listeners | Self::Database => 2,
            Self::Tasks | Self::Sessions => 1,
        }
    }

    /// What it is, for the log.
    const fn describe(self) -> &'static str {
        match self {
            Self::Work => "ending the work under way",
            Self::Listeners => "answering calls under way",
            Self::Tasks => "ending the tasks",
            Self::Sessions => "closing the sessions",
            Self::Traces => "sending the last traces",
            Self::Database => "closing the connections to the database",
        }
    }
}

/// When a step ends at the latest, counted from the end of the grace period.
#[must_use]
pub fn latest_end(step: StopStep) -> Duration {
    let shares = StopStep::ALL.into_iter().take_while(|earlier| *earlier <= step).map(StopStep::share);
    Duration::from_secs(shares.sum())
}

/// How long a stop with this grace period takes at most.
#[must_use]
pub fn longest_stop(grace: Duration) -> Duration {
    grace.saturating_add(CLOSING_TIME)
}

/// The deadline of a stop after its grace period.
#[derive(Clone, Copy, Debug)]
pub struct StopDeadline {
    closing_since: Instant,
}

impl StopDeadline {
    /// The deadline of a stop with a grace period that ends now.
    #[must_use]
    pub fn from_now() -> Self {
        Self { closing_since: Instant::now() }
    }

    /// Waits for the future of a step until the latest end of the step; `None` if it did not end in time. It is dropped
    /// then.
    pub async fn limit<F: Future>(self, step: StopStep, future: F) -> Option<F::Output> {
        let ended = tokio::time::timeout_at(self.closing_since + latest_end(step), future).await;
        if ended.is_err() {
            tracing::warn!(
                step = step.describe(),
                "this step of the stop did not end in time, and is given up; if the database does not answer, \
                 sessions that are left open expire by themselves"
            );
        }
        ended.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_divide_the_closing_time_in_order() {
        let seconds = |step| latest_end(step).as_secs();
        for (step, latest) in [
            (StopStep::Work, 10),
            (StopStep::Listeners, 12),
            (StopStep::Tasks, 13),
            (StopStep::Sessions, 14),
            (StopStep::Traces, 18),
            (StopStep::Database, 20),
        ] {
            assert_eq!(seconds(step), latest, "{step:?}");
        }
        assert_eq!(latest_end(StopStep::Database), CLOSING_TIME, "nothing is left over");
        assert!(StopStep::ALL.is_sorted(), "the order of the steps is that of the type");
    }

    #[test]
    fn stop_with_the_default_grace_is_clearly_shorter_than_the_documented_minute() {
        for (grace, longest) in [(0, 20), (5, 25), (30, 50)] {
            assert_eq!(longest_stop(Duration::from_secs(grace)), Duration::from_secs(longest), "{grace}");
        }
        assert_eq!(longest_stop(Duration::MAX), Duration::MAX);
    }

    #[tokio::test]
    async fn step_is_given_up_at_its_end_and_not_before() {
        let deadline = StopDeadline::from_now();
        let over = StopDeadline { closing_since: Instant::now().checked_sub(CLOSING_TIME).unwrap() };
        for step in StopStep::ALL {
            assert_eq!(deadline.limit(step, tokio::task::yield_now()).await, Some(()), "{step:?}");
            assert_eq!(over.limit(step, std::future::pending::<()>()).await, None, "{step:?}");
            assert_eq!(over.limit(step, async { 1 }).await, Some(1), "what has ended is not lost: {step:?}");
        }
    }
}
