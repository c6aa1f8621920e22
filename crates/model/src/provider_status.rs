//! Machine status, power state and usage as reported by a provider.
//!
//! The BMDB stores these names, and a newer release may have written one that this release does not know. Decoding
//! therefore never fails: an unknown name is kept as `Other`, shown as it is, and treated as no statement at all. A
//! decoder that failed instead would stop every page and loop of an older `shepherd` during an upgrade.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// State of a machine as its provider reports it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ProviderStatus {
    /// The provider has a record of it and cannot find it.
    Missing,
    /// The provider is making it ready.
    Provisioning,
    /// The provider gave up making it ready; it will never run.
    ProvisioningFailedPermanent,
    /// The machine is powered on.
    Running,
    /// The machine is powered off.
    Stopped,
    /// The provider does not report a status.
    Unknown,
    /// A name written by a newer release.
    Other(String),
}

impl ProviderStatus {
    /// Every status this release knows.
    pub const NAMED: [Self; 6] = [
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

    /// Whether the machine will never be of use, so that comparisons of lists ignore it.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::ProvisioningFailedPermanent)
    }
}

impl From<&str> for ProviderStatus {
    fn from(name: &str) -> Self {
        Self::NAMED
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
    /// The machine has power.
    On,
    /// The machine has no power.
    Off,
    /// The power state is not known.
    Unknown,
    /// A name written by a newer release.
    Other(String),
}

impl PowerState {
    /// Every state this release knows.
    pub const NAMED: [Self; 3] = [Self::On, Self::Off, Self::Unknown];

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
        Self::NAMED
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

/// Whether a machine is in use already, as far as the provider can know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MachineUsage {
    /// Capacity that can become a machine: reserved, not allocated. It is no machine yet, so the provider's id of it is
    /// the reservation's.
    KnownUnused {
        /// The name to request it by.
        reservation: String,
    },
    /// A machine that is allocated.
    KnownUsed,
    /// The provider keeps no record: unused unless the BMDB has it.
    PossiblyUsed,
}

impl MachineUsage {
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
        for status in ProviderStatus::NAMED {
            assert_eq!(ProviderStatus::from(status.as_str()), status);
        }
        for state in PowerState::NAMED {
            assert_eq!(PowerState::from(state.as_str()), state);
        }
    }

    #[test]
    fn unknown_name_is_preserved() {
        let status = ProviderStatus::from("Hibernating");
        assert_eq!(status, ProviderStatus::Other("Hibernating".into()));
        assert_eq!(status.as_str(), "Hibernating");
        assert!(!status.is_failed());
        assert_eq!(PowerState::from("dimmed").as_str(), "dimmed");
    }
}
