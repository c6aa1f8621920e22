//! Self-healing: when a machine that waits for a person is taken back.
//!
//! No operator has to confirm that a machine is well if its agent reports so. If the agent reports again for a whole
//! silence limit, without a gap of that length, the machine is taken back ([`next_healing_step`]). Its reports are
//! stronger evidence than the failed attempts, because they come from the agent whose key is pinned.

use crate::facts::MachineFacts;
use crate::policy::Policy;
use crate::time::{Timestamp, after};

/// The effect of a report on a machine that waits for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealingStep {
    /// It is the first report, or the first after a gap: the required time starts.
    Started,
    /// It has reported for long enough: the machine no longer waits for a person.
    Completed,
}

/// The effect of a report that was accepted at `now`. `facts` are those before the report. `None` for a machine that
/// does not wait for a person, and while the required time runs.
#[must_use]
pub fn next_healing_step(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Option<HealingStep> {
    let waiting = facts.needs_human.as_ref()?;
    let limit = policy.recovery_silence_timeout.0;
    let Some(observed_since) = waiting.reporting_since else { return Some(HealingStep::Started) };
    let last = facts.heartbeat.as_ref().map_or(observed_since, |heartbeat| heartbeat.received_at);
    if after(last, limit) <= now {
        return Some(HealingStep::Started);
    }
    (after(observed_since, limit) <= now).then_some(HealingStep::Completed)
}

/// When a machine that waits for a person is taken back, if its agent goes on reporting. `None` while it does not
/// report.
#[must_use]
pub fn healed_at(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Option<Timestamp> {
    let observed_since = facts.needs_human.as_ref()?.reporting_since?;
    let limit = policy.recovery_silence_timeout.0;
    let reports = facts.heartbeat.as_ref().is_some_and(|heartbeat| after(heartbeat.received_at, limit) > now);
    reports.then(|| after(observed_since, limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::NeedsHuman;
    use crate::ids::MachineId;
    use crate::needs_human::Obstacle;
    use crate::sample_machine::{at, heartbeat};

    fn waiting(observed_since: Option<i64>, last: Option<i64>) -> MachineFacts {
        let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
        facts.needs_human = Some(NeedsHuman {
            since: at(0),
            reason: "tried in vain".into(),
            obstacle: Obstacle::LadderExhausted,
            reporting_since: observed_since.map(at),
        });
        facts.heartbeat = last.map(heartbeat);
        facts
    }

    #[test]
    fn machine_heals_after_reporting_a_whole_silence_limit_without_a_gap() {
        use HealingStep::{Completed, Started};
        let policy = Policy::default();
        for (name, observed_since, last, now, expected) in [
            ("never reported before", None, None, 1000, Some(Started)),
            ("reported before it was given up", None, Some(-900), 1000, Some(Started)),
            ("reports for a while", Some(1000), Some(1500), 1530, None),
            ("a moment too early", Some(1000), Some(1570), 1599, None),
            ("reports for the limit", Some(1000), Some(1570), 1600, Some(Completed)),
            ("a gap just short of the limit", Some(1000), Some(1001), 1600, Some(Completed)),
            ("a gap of the limit", Some(1000), Some(1000), 1600, Some(Started)),
            ("two reports, an hour apart", Some(1000), Some(1000), 4600, Some(Started)),
        ] {
            assert_eq!(
                next_healing_step(&waiting(observed_since, last), &policy, at(now)),
                expected,
                "{name}"
            );
        }
        let nobody = MachineFacts::empty(MachineId::generate(), at(0));
        assert_eq!(next_healing_step(&nobody, &policy, at(1000)), None);
    }

    #[test]
    fn silent_machine_is_not_about_to_be_healed() {
        let policy = Policy::default();
        assert_eq!(healed_at(&waiting(Some(1000), Some(1500)), &policy, at(1530)), Some(at(1600)));
        assert_eq!(healed_at(&waiting(Some(1000), Some(1500)), &policy, at(2100)), None);
        assert_eq!(healed_at(&waiting(None, Some(-900)), &policy, at(-800)), None);
    }
}
