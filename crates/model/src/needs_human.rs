//! Escalation to a person: obstacles, and self-healing when the agent reports again.
//!
//! An [`Obstacle`] is the reason why a machine was left to a person, in a form that decisions can use. The sentence
//! beside it is for people and decides nothing. If a machine answers and the obstacle is our key, our program or our
//! records, it is never rebooted for it: no power cycle has yet put a line into `authorized_keys`.
//!
//! No operator has to confirm that a machine is well if its agent reports so. If the agent reports again for a whole
//! silence limit, without a gap of that length, the machine is taken back ([`next_healing_step`]). Its reports are
//! stronger evidence than the failed attempts, because they come from the agent whose key is pinned.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use crate::facts::MachineFacts;
use crate::policy::Policy;
use crate::time::{Timestamp, after};

/// A problem that only a person can solve.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Every step of the ladder failed.
    LadderExhausted,
    /// Its SSH server offers another host key than the pinned one.
    HostKeyChanged,
    /// Its SSH server rejects every login that we have.
    LoginRefused,
    /// It answers, but its setup or ours prevents a takeover.
    Unfit,
    /// It has seen a newer lease than ours: a restored backup, or a second database.
    StaleFence,
    /// What answers at its address is enrolled as another machine.
    OtherMachine,
    /// What answers at its address belongs to another bare metal database.
    OtherBmdb,
    /// No obstacle was recorded.
    Unknown,
    /// A name written by a newer release.
    Other(String),
}

impl Obstacle {
    /// Every obstacle this release knows.
    pub const NAMED: [Self; 8] = [
        Self::LadderExhausted,
        Self::HostKeyChanged,
        Self::LoginRefused,
        Self::Unfit,
        Self::StaleFence,
        Self::OtherMachine,
        Self::OtherBmdb,
        Self::Unknown,
    ];

    /// The name used in the database and in documentation.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::LadderExhausted => "ladder-exhausted",
            Self::HostKeyChanged => "host-key-changed",
            Self::LoginRefused => "login-refused",
            Self::Unfit => "unfit",
            Self::StaleFence => "stale-fence",
            Self::OtherMachine => "other-machine",
            Self::OtherBmdb => "other-bmdb",
            Self::Unknown => "unknown",
            Self::Other(name) => name,
        }
    }

    /// Whether another attempt is useless or a risk, so that a person is called at once.
    ///
    /// A machine that has seen a newer fence is such a case. A shepherd that holds the lease here and is rejected for
    /// its fence works with a database that was restored from a backup, and each attempt would use up a fence until one
    /// passes. The other obstacles may be removed on the machine while we wait, so the initializer tries again by
    /// itself.
    #[must_use]
    pub const fn needs_human_at_once(&self) -> bool {
        matches!(self, Self::HostKeyChanged | Self::StaleFence | Self::OtherMachine | Self::OtherBmdb)
    }

    /// Whether it was met at the machine's address, and means nothing once the machine has another address.
    #[must_use]
    pub const fn depends_on_address(&self) -> bool {
        matches!(
            self,
            Self::HostKeyChanged
                | Self::LoginRefused
                | Self::Unfit
                | Self::StaleFence
                | Self::OtherMachine
                | Self::OtherBmdb
        )
    }
}

impl From<&str> for Obstacle {
    fn from(name: &str) -> Self {
        Self::NAMED
            .into_iter()
            .find(|known| known.as_str() == name)
            .unwrap_or_else(|| Self::Other(name.to_owned()))
    }
}

impl FromStr for Obstacle {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(Self::from(name))
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

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
    use crate::facts::{HeartbeatFact, NeedsHuman};
    use crate::ids::MachineId;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn waiting(observed_since: Option<i64>, last: Option<i64>) -> MachineFacts {
        let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
        facts.needs_human = Some(NeedsHuman {
            since: at(0),
            reason: "tried in vain".into(),
            obstacle: Obstacle::LadderExhausted,
            reporting_since: observed_since.map(at),
        });
        facts.heartbeat = last.map(|last| HeartbeatFact {
            received_at: at(last),
            boot_id: "b".into(),
            incarnation: "i".into(),
            sequence: 1,
        });
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

    #[test]
    fn names_round_trip_including_unknown_ones() {
        for obstacle in Obstacle::NAMED {
            assert_eq!(Obstacle::from(obstacle.as_str()), obstacle);
        }
        assert_eq!(Obstacle::from("gremlins").as_str(), "gremlins");
    }
}
