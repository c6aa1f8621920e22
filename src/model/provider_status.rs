//! What a provider says of a machine: its state, its power, whether it is taken.
//!
//! The BMDB stores these names, and a newer release may have written one that
//! this one does not know. Decoding therefore never fails: an unknown name is
//! kept as `Other`, shown as it is, and treated as no statement at all. A
//! decoder that failed instead would stop every page and loop of an older
//! `shepherd` during an upgrade.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// State of a machine as its provider tells it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ProviderStatus {
    /// The provider knows of it and cannot find it.
    Missing,
    /// Being made ready by the provider.
    Provisioning,
    /// The provider gave up making it ready; it will never run.
    ProvisioningFailedPermanent,
    /// Powered on.
    Running,
    /// Powered off.
    Stopped,
    /// The provider does not tell.
    Unknown,
    /// A name written by a newer release.
    Other(String),
}

impl ProviderStatus {
    /// Every status this release knows.
    pub const KNOWN: [Self; 6] = [
        Self::Missing,
        Self::Provisioning,
        Self::ProvisioningFailedPermanent,
        Self::Running,
        Self::Stopped,
        Self::Unknown,
    ];

    /// The name used in the database, on the wire and on pages.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Missing => "Missing",
            Self::Provisioning => "Provisioning",
            Self::ProvisioningFailedPermanent => "ProvisioningFailedPermanent",
            Self::Running => "Running",
            Self::Stopped => "Stopped",
            Self::Unknown => "Unknown",
            Self::Other(name) => name,
        }
    }

    /// Whether the machine will never be of use and is ignored when lists are compared.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::ProvisioningFailedPermanent)
    }
}

impl From<&str> for ProviderStatus {
    fn from(name: &str) -> Self {
        Self::KNOWN
            .into_iter()
            .find(|known| known.as_str() == name)
            .unwrap_or_else(|| Self::Other(name.to_owned()))
    }
}

impl FromStr for ProviderStatus {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(Self::from(name))
    }
}

impl fmt::Display for ProviderStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a machine has power.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PowerState {
    /// It has.
    On,
    /// It has not.
    Off,
    /// Nobody can tell.
    Unknown,
    /// A name written by a newer release.
    Other(String),
}

impl PowerState {
    /// Every state this release knows.
    pub const KNOWN: [Self; 3] = [Self::On, Self::Off, Self::Unknown];

    /// The name used in the database, on the wire and on pages.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Unknown => "unknown",
            Self::Other(name) => name,
        }
    }
}

impl From<&str> for PowerState {
    fn from(name: &str) -> Self {
        Self::KNOWN
            .into_iter()
            .find(|known| known.as_str() == name)
            .unwrap_or_else(|| Self::Other(name.to_owned()))
    }
}

impl FromStr for PowerState {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(Self::from(name))
    }
}

impl fmt::Display for PowerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether somebody has a machine already, as far as the provider can know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Usage {
    /// Capacity that can become a machine: reserved, not handed out. It is no machine yet, so the
    /// provider's id of it is the reservation's.
    KnownUnused {
        /// What to name when asking for it.
        reservation: String,
    },
    /// A machine that was handed out.
    KnownUsed,
    /// The provider keeps no account: unused unless the BMDB has it.
    PossiblyUsed,
}

impl Usage {
    /// The name used on pages and in logs.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::KnownUnused { .. } => "KnownUnused",
            Self::KnownUsed => "KnownUsed",
            Self::PossiblyUsed => "PossiblyUsed",
        }
    }

    /// The reservation of unused capacity.
    #[must_use]
    pub fn reservation(&self) -> Option<&str> {
        match self {
            Self::KnownUnused { reservation } => Some(reservation),
            Self::KnownUsed | Self::PossiblyUsed => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for status in ProviderStatus::KNOWN {
            assert_eq!(ProviderStatus::from(status.as_str()), status);
        }
        for state in PowerState::KNOWN {
            assert_eq!(PowerState::from(state.as_str()), state);
        }
    }

    #[test]
    fn a_name_of_a_newer_release_is_kept() {
        let status = ProviderStatus::from("Hibernating");
        assert_eq!(status, ProviderStatus::Other("Hibernating".into()));
        assert_eq!(status.as_str(), "Hibernating");
        assert!(!status.is_failed());
        assert_eq!(PowerState::from("dimmed").as_str(), "dimmed");
    }
}
