//! Waiting for a person: what stands in the way, and when it stands there no more.
//!
//! An [`Obstacle`] is why a machine was left to a person, as something to decide
//! by; the sentence beside it is for people and decides nothing. A machine that
//! answers, and whose obstacle is our key, our program or our records, is never
//! rebooted for it: no power cycle has yet put a line into `authorized_keys`.
//!
//! Nobody has to say that a machine is well which says so itself. One whose
//! agent reports again for a whole silence limit, without a gap of that length,
//! is taken back ([`healing`]). Its reports prove more than what was tried in
//! vain did: they come from the agent whose key is pinned.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use crate::model::facts::MachineFacts;
use crate::model::policy::Policy;
use crate::model::time::{Timestamp, after};

/// What only a person can move out of the way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Every step of the ladder was tried in vain.
    LadderExhausted,
    /// Its SSH server shows another host key than the pinned one.
    HostKeyChanged,
    /// Its SSH server lets us in by none of the ways we have.
    LoginRefused,
    /// It answers, and cannot be taken over as it is set up, or as we are.
    Unfit,
    /// It has seen a newer lease than ours: a restored backup, or a second database.
    StaleFence,
    /// What answers at its address is enrolled as another machine.
    OtherMachine,
    /// What answers at its address belongs to another bare metal database.
    OtherBmdb,
    /// Nobody wrote it down.
    Unknown,
    /// A name written by a newer release.
    Other(String),
}

impl Obstacle {
    /// Every obstacle this release knows.
    pub const KNOWN: [Self; 8] = [
        Self::LadderExhausted,
        Self::HostKeyChanged,
        Self::LoginRefused,
        Self::Unfit,
        Self::StaleFence,
        Self::OtherMachine,
        Self::OtherBmdb,
        Self::Unknown,
    ];

    /// The name used in the database and on pages.
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

    /// Whether trying once more is no use, or a risk: a person is called at the first sight of it.
    ///
    /// A machine that has seen a newer lease is one: whoever holds the lease here and is refused for it
    /// asks a database that has forgotten, and each try would use up a fence until one passes.
    /// The others may be put right on the machine while we wait, so that who puts the role server on new
    /// machines tries again by itself.
    #[must_use]
    pub const fn calls_at_once(&self) -> bool {
        matches!(self, Self::HostKeyChanged | Self::StaleFence | Self::OtherMachine | Self::OtherBmdb)
    }

    /// Whether it was met at the machine's address, and says nothing once the machine has another one.
    #[must_use]
    pub const fn is_of_the_address(&self) -> bool {
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
        Self::KNOWN
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

/// What a report does for a machine that waits for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Healing {
    /// It is the first one, or the first after a gap: the time begins to run.
    Begins,
    /// It has reported for long enough: nobody is waited for any more.
    Done,
}

/// What a report that was accepted at `now` does for a machine of which `facts` were known before it.
/// `None` for a machine that waits for nobody, and while the time runs.
#[must_use]
pub fn healing(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Option<Healing> {
    let waiting = facts.needs_human.as_ref()?;
    let limit = policy.recovery_silence_timeout.0;
    let Some(heard_since) = waiting.heard_since else { return Some(Healing::Begins) };
    let last = facts.heartbeat.as_ref().map_or(heard_since, |heartbeat| heartbeat.at);
    if after(last, limit) <= now {
        return Some(Healing::Begins);
    }
    (after(heard_since, limit) <= now).then_some(Healing::Done)
}

/// When a machine that waits for a person is taken back, if its agent goes on reporting. `None` while it
/// does not report.
#[must_use]
pub fn healed_at(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Option<Timestamp> {
    let heard_since = facts.needs_human.as_ref()?.heard_since?;
    let limit = policy.recovery_silence_timeout.0;
    let reports = facts.heartbeat.as_ref().is_some_and(|heartbeat| after(heartbeat.at, limit) > now);
    reports.then(|| after(heard_since, limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::{Heartbeat, NeedsHuman};
    use crate::model::ids::MachineId;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn waiting(heard_since: Option<i64>, last: Option<i64>) -> MachineFacts {
        let mut facts = MachineFacts::unknown(MachineId::generate(), at(0));
        facts.needs_human = Some(NeedsHuman {
            since: at(0),
            reason: "tried in vain".into(),
            obstacle: Obstacle::LadderExhausted,
            heard_since: heard_since.map(at),
        });
        facts.heartbeat = last.map(|last| Heartbeat {
            at: at(last),
            boot_id: "b".into(),
            incarnation: "i".into(),
            sequence: 1,
        });
        facts
    }

    #[test]
    fn machine_is_taken_back_when_it_has_reported_for_a_silence_limit_without_a_gap() {
        use Healing::{Begins, Done};
        let policy = Policy::default();
        for (name, heard_since, last, now, expected) in [
            ("never heard before", None, None, 1000, Some(Begins)),
            ("heard before it was given up", None, Some(-900), 1000, Some(Begins)),
            ("heard for a while", Some(1000), Some(1500), 1530, None),
            ("a moment too early", Some(1000), Some(1570), 1599, None),
            ("heard for the limit", Some(1000), Some(1570), 1600, Some(Done)),
            ("a gap just short of the limit", Some(1000), Some(1001), 1600, Some(Done)),
            ("a gap of the limit", Some(1000), Some(1000), 1600, Some(Begins)),
            ("heard twice, an hour apart", Some(1000), Some(1000), 4600, Some(Begins)),
        ] {
            assert_eq!(healing(&waiting(heard_since, last), &policy, at(now)), expected, "{name}");
        }
        let nobody = MachineFacts::unknown(MachineId::generate(), at(0));
        assert_eq!(healing(&nobody, &policy, at(1000)), None);
    }

    #[test]
    fn who_reports_no_more_is_not_about_to_be_taken_back() {
        let policy = Policy::default();
        assert_eq!(healed_at(&waiting(Some(1000), Some(1500)), &policy, at(1530)), Some(at(1600)));
        assert_eq!(healed_at(&waiting(Some(1000), Some(1500)), &policy, at(2100)), None);
        assert_eq!(healed_at(&waiting(None, Some(-900)), &policy, at(-800)), None);
    }

    #[test]
    fn names_survive_a_round_trip_and_those_of_a_newer_release_are_kept() {
        for obstacle in Obstacle::KNOWN {
            assert_eq!(Obstacle::from(obstacle.as_str()), obstacle);
        }
        assert_eq!(Obstacle::from("gremlins").as_str(), "gremlins");
    }
}
