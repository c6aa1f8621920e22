//! Provider trait, its capabilities and errors: the contract between a source of machines and the control loops.
//!
//! # Capabilities are types
//!
//! Not every source can do everything: a device list cannot make machines appear, a hosting company may reboot but not
//! cut power. Each capability is an `Option` of a trait object ([`Provider::creation`], [`Provider::power`],
//! [`Provider::reboot`], [`Provider::release`]), so a caller cannot call what does not exist. Machines within one
//! provider still differ (one row of a device list has a power command, the next has none), so
//! [`Provider::capabilities`] answers for one machine, with a reason for each capability that it lacks.
//!
//! # Rules for every provider
//!
//! The conformance suite in `tests/all/providers.rs` checks each of them.
//!
//! * A list is complete or an error. A partial list reads as machines that vanished, and vanished machines stop
//!   creation for the whole provider.
//! * Ids are the provider's own, and stable.
//! * Every outward call ends within a limit of the provider's own.
//! * [`CreationControl::create`] with a known intent id returns the machine that was made then. That is what makes
//!   creation exactly-once when an answer is lost.
//! * [`ReleaseControl::release`] with a known intent id releases nothing a second time.
//! * A kind declares how many of its machines are adopted, and how fast, if the configuration does not say so
//!   ([`AdoptionLimits`][crate::model::adoption::AdoptionLimits]). If a machine may cost money or belong to others, that is a small number.
//! * An error states whether a retry may help ([`ErrorClass`]) and which endpoint it came from, so that one slow
//!   endpoint can be distinguished from a slow fleet.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::model::host_key::HostKey;
use crate::model::ids::IntentId;
use crate::model::provider_status::{MachineUsage, PowerState, ProviderStatus};

/// The operator's name for one provider: 1 to 63 of `a`–`z`, `0`–`9`, `-`, with neither end a dash.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ProviderName(String);

/// The error for a text that is no valid provider name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is not a valid name for a provider: use 1 to 63 lower-case letters, digits and dashes, with no dash \
     first or last"
)]
pub struct InvalidProviderName(String);

impl ProviderName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ProviderName {
    type Err = InvalidProviderName;

    fn from_str(name: &str) -> Result<Self, InvalidProviderName> {
        let fits = (1..=63).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !name.starts_with('-')
            && !name.ends_with('-');
        if fits { Ok(Self(name.to_owned())) } else { Err(InvalidProviderName(name.to_owned())) }
    }
}

impl TryFrom<String> for ProviderName {
    type Error = InvalidProviderName;

    fn try_from(name: String) -> Result<Self, InvalidProviderName> {
        name.parse()
    }
}

impl From<ProviderName> for String {
    fn from(name: ProviderName) -> Self {
        name.0
    }
}

impl fmt::Display for ProviderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One machine, or one piece of unused capacity, as a provider reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderMachine {
    /// The provider's id; the reservation's, when [`MachineUsage::KnownUnused`].
    pub id: String,
    /// Whether and by whom it is used.
    pub usage: MachineUsage,
    /// DNS name or IP literal, without user, port or brackets. `None` while it has none.
    pub address: Option<String>,
    /// TCP port of its SSH server; `None` means 22.
    pub ssh_port: Option<u16>,
    /// User to log in as; `None` means the configured one.
    pub ssh_user: Option<String>,
    /// Its location, in the provider's words.
    pub location: Option<String>,
    /// Its state as far as the provider knows.
    pub status: ProviderStatus,
    /// SSH host keys that the provider vouches for; empty if it reports none.
    pub host_keys: Vec<HostKey>,
    /// The intent it was created under, if the provider stores intents.
    pub intent: Option<IntentId>,
}

/// What a provider's failure means for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// A retry may help. No person is needed yet.
    Transient,
    /// The same call will fail again.
    Permanent,
    /// The provider does not know the machine.
    NotFound,
    /// The configuration is wrong or lacks something.
    Configuration,
    /// The answer cannot be understood. Believing a part of it would be a guess.
    Unreadable,
}

impl ErrorClass {
    /// The name used in logs and as a metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::Permanent => "permanent",
            Self::NotFound => "not_found",
            Self::Configuration => "configuration",
            Self::Unreadable => "unreadable",
        }
    }
}

/// Why a provider could not carry out a call.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{message}")]
pub struct ProviderError {
    /// What the failure means for a retry.
    pub class: ErrorClass,
    /// What was attempted on what, and what happened, as text for people. Contains no secret.
    pub message: String,
    /// The endpoint that failed or was slow, as `https://host:port`, `file:///path` or a command.
    pub endpoint: String,
}

impl ProviderError {
    /// An error of the class given.
    pub fn new(class: ErrorClass, endpoint: impl Into<String>, sentence: impl Into<String>) -> Self {
        Self { class, message: sentence.into(), endpoint: endpoint.into() }
    }
}

/// A change of a machine's power.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PowerAction {
    /// Switch the power on. Nothing changes if it is on already.
    On,
    /// Switch the power off without a shutdown of the operating system.
    Off,
    /// Switch the power off, then on.
    Cycle,
}

impl PowerAction {
    /// The word that power commands and APIs receive.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Cycle => "cycle",
        }
    }
}

/// How a machine is rebooted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RebootMethod {
    /// The provider reboots it: call [`RebootControl::reboot`].
    Provider,
    /// Run this argument vector on the machine over SSH. The caller does: providers know no SSH.
    Ssh(Vec<String>),
    /// The machine must not be rebooted.
    Unsupported {
        /// Why, as a sentence for people.
        reason: String,
    },
}

/// Whether a machine's power can be switched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PowerSupport {
    /// The power can be switched.
    Available,
    /// The power cannot be switched.
    Unavailable {
        /// Why, as a sentence for people.
        reason: String,
    },
}

/// What the recovery ladder can use for one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineCapabilities {
    /// How it is rebooted.
    pub reboot: RebootMethod,
    /// Whether its power can be cycled.
    pub power: PowerSupport,
}

impl MachineCapabilities {
    /// Whether a reboot can be tried.
    #[must_use]
    pub fn can_reboot(&self) -> bool {
        !matches!(self.reboot, RebootMethod::Unsupported { .. })
    }

    /// Whether the power can be switched off and on.
    #[must_use]
    pub fn can_power_cycle(&self) -> bool {
        self.power == PowerSupport::Available
    }
}

/// Longest time that a provider takes for any call: its own limits lie within.
pub const MAX_CALL_TIME: Duration = Duration::from_mins(1);

/// A source of machines.
#[async_trait]
pub trait Provider: Send + Sync {
    /// The operator's name for it.
    fn name(&self) -> &ProviderName;

    /// The kind of implementation: `static`, `simulated`.
    fn kind(&self) -> &'static str;

    /// All its machines and unused capacity: a complete list, or an error.
    async fn list(&self) -> Result<Vec<ProviderMachine>, ProviderError>;

    /// One machine as it is now; `None` when the provider does not know the id.
    async fn find_machine(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError>;

    /// Creation of machines, if the provider supports it.
    fn creation(&self) -> Option<&dyn CreationControl>;

    /// Power control, if the provider supports it for any of its machines.
    fn power(&self) -> Option<&dyn PowerControl>;

    /// Reboots, if the provider supports them for any of its machines.
    fn reboot(&self) -> Option<&dyn RebootControl>;

    /// Release of machines, if the provider supports it.
    fn release(&self) -> Option<&dyn ReleaseControl> {
        None
    }

    /// What recovery can do to one machine, with a reason for each capability that it lacks.
    async fn capabilities(&self, id: &str) -> Result<MachineCapabilities, ProviderError> {
        let reboot = match self.reboot() {
            Some(control) => control.reboot_method(id).await?,
            None => RebootMethod::Unsupported {
                reason: format!("provider {} cannot reboot machines", self.name()),
            },
        };
        let power = match self.power() {
            Some(control) => control.power_support(id).await?,
            None => PowerSupport::Unavailable {
                reason: format!("provider {} has no power over machines", self.name()),
            },
        };
        Ok(MachineCapabilities { reboot, power })
    }
}

/// Creates machines, exactly once per intent.
#[async_trait]
pub trait CreationControl: Send + Sync {
    /// Creates one machine from the named capacity, if one is named (a reservation, or the id of a possibly used
    /// machine). The same intent id always returns the same machine.
    async fn create(
        &self,
        intent: IntentId,
        reservation: Option<&str>,
    ) -> Result<ProviderMachine, ProviderError>;

    /// The machine that was made under an intent. `Ok(None)` is a statement: none was made.
    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError>;
}

/// Releases machines, once per intent.
#[async_trait]
pub trait ReleaseControl: Send + Sync {
    /// Releases one machine, once for each intent. An intent that was carried out before changes nothing, even if the
    /// id refers to another customer's machine since. An error of class [`ErrorClass::NotFound`] means that there is
    /// nothing to release.
    async fn release(&self, id: &str, intent: IntentId) -> Result<(), ProviderError>;
}

/// Power of single machines.
#[async_trait]
pub trait PowerControl: Send + Sync {
    /// Whether this machine's power can be switched.
    async fn power_support(&self, id: &str) -> Result<PowerSupport, ProviderError>;

    /// Switches it. Returns when the order was accepted; [`Self::power_state`] shows the effect.
    async fn set_power(&self, id: &str, action: PowerAction, intent: IntentId) -> Result<(), ProviderError>;

    /// Whether it has power now.
    async fn power_state(&self, id: &str) -> Result<PowerState, ProviderError>;
}

/// Reboots of single machines.
#[async_trait]
pub trait RebootControl: Send + Sync {
    /// How this machine is rebooted.
    async fn reboot_method(&self, id: &str) -> Result<RebootMethod, ProviderError>;

    /// Reboots it, where the method is [`RebootMethod::Provider`]; an error of class
    /// [`ErrorClass::Configuration`] otherwise.
    async fn reboot(&self, id: &str, intent: IntentId) -> Result<(), ProviderError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_name_is_a_dns_label() {
        for good in ["rack-a", "a", "hetzner-1", &"x".repeat(63)] {
            assert_eq!(good.parse::<ProviderName>().unwrap().as_str(), good);
        }
        for bad in ["", "Rack", "rack_a", "-a", "a-", "a b", "ä", &"x".repeat(64)] {
            assert!(bad.parse::<ProviderName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn unsupported_reboot_is_no_capability() {
        let refused = MachineCapabilities {
            reboot: RebootMethod::Unsupported { reason: "it is this host".into() },
            power: PowerSupport::Available,
        };
        assert!(!refused.can_reboot() && refused.can_power_cycle());
        let ssh = MachineCapabilities {
            reboot: RebootMethod::Ssh(vec!["systemctl".into(), "reboot".into()]),
            power: PowerSupport::Unavailable { reason: "no power command".into() },
        };
        assert!(ssh.can_reboot() && !ssh.can_power_cycle());
    }
}
