//! Kinds of power orders: reboot, power on, off or cycle.
//!
//! Whether an order is accepted and what happens next is decided by [`power_control`][crate::power_control].

use std::fmt;
use std::str::FromStr;

use crate::policy::DisruptionKind;
use crate::process::UnknownName;

/// The kinds of power orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PowerOrderKind {
    /// Reboot, by the provider or over SSH.
    Reboot,
    /// Switch the power on.
    On,
    /// Switch the power off.
    Off,
    /// Switch the power off and on.
    Cycle,
}

impl PowerOrderKind {
    /// All kinds of orders.
    pub const ALL: [Self; 4] = [Self::Reboot, Self::On, Self::Off, Self::Cycle];

    /// The name used in the database and by people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reboot => "reboot",
            Self::On => "on",
            Self::Off => "off",
            Self::Cycle => "cycle",
        }
    }

    /// Phrase for the end of "an order to".
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Reboot => "reboot it",
            Self::On => "switch it on",
            Self::Off => "switch it off",
            Self::Cycle => "switch it off and on",
        }
    }

    /// Participle for the end of "it is to be".
    #[must_use]
    pub const fn participle(self) -> &'static str {
        match self {
            Self::Reboot => "rebooted",
            Self::On => "switched on",
            Self::Off => "switched off",
            Self::Cycle => "switched off and on",
        }
    }

    /// The kind of budget that it uses up. Power-on uses none: it changes nothing for a machine that has power, and
    /// disrupts nobody on a machine that has none.
    #[must_use]
    pub const fn disruption(self) -> Option<DisruptionKind> {
        match self {
            Self::Reboot => Some(DisruptionKind::Reboot),
            Self::Off | Self::Cycle => Some(DisruptionKind::PowerCycle),
            Self::On => None,
        }
    }

    /// Kind of the intents recorded for it.
    #[must_use]
    pub const fn intent_kind(self) -> &'static str {
        match self.disruption() {
            Some(step) => step.as_str(),
            None => "power-on",
        }
    }

    /// Whether the machine should report afterwards, from another boot.
    #[must_use]
    pub const fn reboots(self) -> bool {
        !matches!(self, Self::Off)
    }
}

impl fmt::Display for PowerOrderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PowerOrderKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "order about power",
            name: name.to_owned(),
            known: "reboot, on, off, cycle",
        })
    }
}
