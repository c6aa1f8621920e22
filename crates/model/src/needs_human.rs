//! Obstacles: why a machine was left to a person, in a form that decisions can use.
//!
//! The sentence beside an [`Obstacle`] is for people and decides nothing. If a machine answers and the obstacle is our
//! key, our program or our records, it is never rebooted for it: a reboot adds no line to `authorized_keys`.
//!
//! A machine whose agent reports again leaves this state by itself: see [`healing`][crate::healing].

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_including_unknown_ones() {
        for obstacle in Obstacle::NAMED {
            assert_eq!(Obstacle::from(obstacle.as_str()), obstacle);
        }
        assert_eq!(Obstacle::from("gremlins").as_str(), "gremlins");
    }
}
