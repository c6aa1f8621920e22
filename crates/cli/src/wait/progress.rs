//! How far the waiting is: which objects have met the goal, what to print, and when it ends. Time is passed in.

use std::collections::HashSet;
use std::time::Duration;

use crate::wait::condition::WaitGoal;
use crate::wait::decide::{Verdict, decide_object};
use crate::wait::snapshot::Snapshot;
use model::time::Timestamp;

/// Time between two reads of the objects.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Read the objects again after this time.
    ReadAfter(Duration),
    /// Each object has met the goal.
    Met,
    /// The time is over.
    TimedOut,
    /// An object cannot meet the goal any more.
    Impossible,
}

/// What is new about an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// Whether it has just met the goal.
    pub has_met: bool,
    /// Steps that were not printed before, to follow its name.
    pub steps: Vec<String>,
}

/// How far the waiting for some objects is.
#[derive(Clone, Debug)]
pub struct WaitProgress {
    goal: WaitGoal,
    timeout: Duration,
    objects: Vec<ObjectProgress>,
}

#[derive(Clone, Debug)]
struct ObjectProgress {
    verdict: Verdict,
    printed: HashSet<String>,
}

impl WaitProgress {
    /// Nothing is known of `count` objects. A timeout of zero means that they are read once.
    #[must_use]
    pub fn new(goal: WaitGoal, timeout: Duration, count: usize) -> Self {
        let object = ObjectProgress { verdict: Verdict::Waiting, printed: HashSet::new() };
        Self { goal, timeout, objects: vec![object; count] }
    }

    /// The objects that have not met the goal, by their places.
    #[must_use]
    pub fn list_open_objects(&self) -> Vec<usize> {
        let objects = self.objects.iter().enumerate();
        objects.filter(|(_, object)| object.verdict != Verdict::Met).map(|(place, _)| place).collect()
    }

    /// Why an object cannot meet the goal any more; `None` if it can.
    #[must_use]
    pub fn find_obstacle(&self, place: usize) -> Option<&str> {
        match &self.objects.get(place)?.verdict {
            Verdict::Impossible(reason) => Some(reason),
            Verdict::Met | Verdict::Waiting => None,
        }
    }

    /// Records what was read of an object that has not met the goal.
    pub fn record(&mut self, place: usize, snapshot: &Snapshot, now: Timestamp) -> News {
        let Some(object) = self.objects.get_mut(place) else { return News::default() };
        object.verdict = decide_object(snapshot, self.goal, now);
        let steps =
            snapshot.describe_steps().into_iter().filter(|step| object.printed.insert(step.key.clone()));
        let steps = steps.map(|step| step.text).collect();
        News { has_met: object.verdict == Verdict::Met, steps }
    }

    /// What to do when the waiting has lasted for this long.
    #[must_use]
    pub fn decide_next_step(&self, elapsed: Duration) -> NextStep {
        let open = self.list_open_objects();
        if open.is_empty() {
            NextStep::Met
        } else if open.iter().any(|place| self.find_obstacle(*place).is_some()) {
            NextStep::Impossible
        } else if elapsed >= self.timeout {
            NextStep::TimedOut
        } else {
            NextStep::ReadAfter(POLL_INTERVAL.min(self.timeout.saturating_sub(elapsed)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::condition::MachineGoal;
    use crate::wait::snapshot::MachineState;
    use model::phase::Phase;

    const READY: WaitGoal = WaitGoal::Machine(MachineGoal::Phase(Phase::Ready));

    fn machine(phase: Phase) -> Snapshot {
        Snapshot::Machine(MachineState { phase: phase.as_str().to_owned(), ..MachineState::default() })
    }

    /// When and how the waiting ends for machines that are in these phases, one read after the other; the last one
    /// stays.
    fn end(timeout: u64, phases: &[&[Phase]]) -> (Duration, NextStep) {
        let mut progress = WaitProgress::new(READY, Duration::from_secs(timeout), phases.len());
        let mut elapsed = Duration::ZERO;
        for read in 0.. {
            for place in progress.list_open_objects() {
                let phase = phases[place].get(read).or(phases[place].last()).unwrap();
                progress.record(place, &machine(*phase), Timestamp::UNIX_EPOCH);
            }
            match progress.decide_next_step(elapsed) {
                NextStep::ReadAfter(wait) => elapsed += wait,
                end => return (elapsed, end),
            }
        }
        unreachable!("the waiting has no end")
    }

    #[test]
    fn waiting_ends_when_all_have_met_the_goal_or_the_time_is_over() {
        use Phase::{New, Provided, Ready, Retired, Silent};
        for (timeout, phases, seconds, expected) in [
            (300, &[&[Ready][..]][..], 0, NextStep::Met),
            (300, &[&[New, Provided, Ready]], 2, NextStep::Met),
            (300, &[&[Ready], &[New, New, New, Ready]], 3, NextStep::Met),
            // One that has met the goal has met it.
            (300, &[&[Ready, Silent], &[New, Ready]], 1, NextStep::Met),
            (300, &[&[New]], 300, NextStep::TimedOut),
            (300, &[&[New], &[Ready]], 300, NextStep::TimedOut),
            (300, &[&[New, Retired], &[New]], 1, NextStep::Impossible),
            (300, &[&[Retired]], 0, NextStep::Impossible),
            (0, &[&[Ready]], 0, NextStep::Met),
            (0, &[&[New]], 0, NextStep::TimedOut),
            (0, &[&[Retired]], 0, NextStep::Impossible),
            (300, &[], 0, NextStep::Met),
        ] {
            let found = end(timeout, phases);
            assert_eq!(found, (Duration::from_secs(seconds), expected), "{timeout} {phases:?}");
        }
    }

    #[test]
    fn last_read_is_at_the_end_of_the_time() {
        let mut progress = WaitProgress::new(READY, Duration::from_millis(1500), 1);
        progress.record(0, &machine(Phase::New), Timestamp::UNIX_EPOCH);
        for (elapsed, expected) in [
            (0, NextStep::ReadAfter(Duration::from_secs(1))),
            (1000, NextStep::ReadAfter(Duration::from_millis(500))),
            (1500, NextStep::TimedOut),
        ] {
            assert_eq!(progress.decide_next_step(Duration::from_millis(elapsed)), expected, "{elapsed}");
        }
    }

    #[test]
    fn each_step_is_new_once() {
        let mut progress = WaitProgress::new(READY, Duration::from_mins(5), 1);
        let mut news = |phase| progress.record(0, &machine(phase), Timestamp::UNIX_EPOCH);
        for (phase, has_met, steps) in [
            (Phase::New, false, &["is New"][..]),
            (Phase::New, false, &[]),
            (Phase::Provided, false, &["is Provided"]),
            (Phase::New, false, &[]),
            (Phase::Ready, true, &["is Ready"]),
        ] {
            let steps = steps.iter().map(|step| (*step).to_owned()).collect();
            assert_eq!(news(phase), News { has_met, steps }, "{phase}");
        }
        assert!(progress.list_open_objects().is_empty());
    }

    #[test]
    fn obstacle_is_the_reason() {
        let mut progress = WaitProgress::new(READY, Duration::from_mins(5), 2);
        progress.record(0, &machine(Phase::Retired), Timestamp::UNIX_EPOCH);
        assert_eq!(progress.find_obstacle(0), Some("is Retired, and stays so"));
        assert_eq!((progress.find_obstacle(1), progress.find_obstacle(2)), (None, None));
    }
}
