//! The contract between a source of machines and the control loops.
//!
//! # Capabilities are types
//!
//! Not every source can do everything: a device list cannot make machines
//! appear, a hosting company may reboot but not cut power. What a provider can
//! do is asked as an `Option` of a trait object ([`Provider::creation`],
//! [`Provider::power`], [`Provider::reboot`]), so a caller cannot call what is
//! not there. Within one provider machines still differ (one row of a device
//! list has a power command, the next has not), so [`Provider::rungs`] answers
//! for one machine, with the reason where the answer is no.
//!
//! # Rules every provider keeps
//!
//! The conformance suite in `tests/all/providers.rs` holds each of them.
//!
//! * A list is whole or an error. A half list reads as machines that vanished,
//!   and vanished machines stop creation for the whole provider.
//! * Ids are the provider's own, and stable.
//! * Every outward call ends within a limit of the provider's own.
//! * [`Creation::create`] with an intent id seen before returns the machine made
//!   then. That is what makes creation exactly-once when an answer is lost.
//! * [`Release::release`] with an intent id seen before takes nothing back a second time.
//! * An error says whether trying again may help ([`ErrorClass`]) and which
//!   endpoint it came from, so that one slow endpoint is told from a slow fleet.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::model::host_key::HostKey;
use crate::model::ids::IntentId;
use crate::model::provider_status::{PowerState, ProviderStatus, Usage};

/// The operator's name for one provider: 1 to 63 of `a`–`z`, `0`–`9`, `-`, with neither end a dash.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ProviderName(String);

/// A provider's name that is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is no name for a provider: use 1 to 63 lower-case letters, digits and dashes, with no dash first or last"
)]
pub struct InvalidProviderName(String);

impl ProviderName {
    /// The name itself.
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

/// One machine, or one piece of unused capacity, as a provider tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderMachine {
    /// The provider's id; the reservation's, when [`Usage::KnownUnused`].
    pub id: String,
    /// Whether somebody has it.
    pub usage: Usage,
    /// DNS name or IP literal, without user, port or brackets. `None` while it has none.
    pub address: Option<String>,
    /// TCP port of its SSH server; `None` means 22.
    pub ssh_port: Option<u16>,
    /// User to log in as; `None` means the configured one.
    pub ssh_user: Option<String>,
    /// Where it stands, in the provider's words.
    pub location: Option<String>,
    /// What the provider knows of its state.
    pub status: ProviderStatus,
    /// SSH host keys that the provider vouches for; empty when it tells none.
    pub host_keys: Vec<HostKey>,
    /// The intent it was created under, where the provider can carry one.
    pub intent: Option<IntentId>,
}

/// What a failure of a provider means for the next try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// Trying again later may help, nothing needs a person yet.
    Transient,
    /// The same call will fail again.
    Permanent,
    /// The provider does not know the machine.
    NotFound,
    /// The configuration is wrong or lacks something.
    Configuration,
    /// What it said cannot be understood; believing a part of it would be a guess.
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

/// A provider could not do what was asked.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{sentence}")]
pub struct ProviderError {
    /// What it means for the next try.
    pub class: ErrorClass,
    /// What was being done, to what, what happened: for a person. Carries no secret.
    pub sentence: String,
    /// The address whose slowness or failure this is, as `https://host:port`, `file:///path` or a command.
    pub endpoint: String,
}

impl ProviderError {
    /// An error of the class given.
    pub fn new(class: ErrorClass, endpoint: impl Into<String>, sentence: impl Into<String>) -> Self {
        Self { class, sentence: sentence.into(), endpoint: endpoint.into() }
    }
}

/// A change of power.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PowerAction {
    /// Give power; nothing changes when it has it.
    On,
    /// Cut power without asking the operating system.
    Off,
    /// Cut power, then give it.
    Cycle,
}

impl PowerAction {
    /// The word handed to a power command and to an API.
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
    /// Call [`RebootControl::reboot`].
    Provider,
    /// Run this argument vector on the machine over SSH. The caller does: providers know no SSH.
    Ssh(Vec<String>),
    /// It must not be tried.
    Refused {
        /// Why, as a sentence for people.
        reason: String,
    },
}

/// Whether a machine's power can be switched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PowerSupport {
    /// It can.
    Available,
    /// It cannot.
    Unavailable {
        /// Why, as a sentence for people.
        reason: String,
    },
}

/// What the recovery ladder can stand on for one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rungs {
    /// How it is rebooted.
    pub reboot: RebootMethod,
    /// Whether its power can be cycled.
    pub power: PowerSupport,
}

impl Rungs {
    /// Whether a reboot can be tried.
    #[must_use]
    pub fn can_reboot(&self) -> bool {
        !matches!(self.reboot, RebootMethod::Refused { .. })
    }

    /// Whether a power cycle can be tried.
    #[must_use]
    pub fn can_power_cycle(&self) -> bool {
        self.power == PowerSupport::Available
    }
}

/// Longest time that a provider takes for any call: its own limits lie within.
pub const CALL_LIMIT: Duration = Duration::from_mins(1);

/// A source of machines.
#[async_trait]
pub trait Provider: Send + Sync {
    /// The operator's name for it.
    fn name(&self) -> &ProviderName;

    /// Which code stands behind it: `static`, `simulated`.
    fn kind(&self) -> &'static str;

    /// Everything it has: machines and unused capacity. Whole, or an error.
    async fn list(&self) -> Result<Vec<ProviderMachine>, ProviderError>;

    /// One machine as it is now; `None` when the provider does not know the id.
    async fn look_at(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError>;

    /// Handing out machines, where it can.
    fn creation(&self) -> Option<&dyn Creation>;

    /// Power, where it can for any of its machines.
    fn power(&self) -> Option<&dyn PowerControl>;

    /// Reboots, where it can for any of its machines.
    fn reboot(&self) -> Option<&dyn RebootControl>;

    /// Taking machines back, where it can.
    fn release(&self) -> Option<&dyn Release> {
        None
    }

    /// What recovery can do to one machine, each "no" with its reason.
    async fn rungs(&self, id: &str) -> Result<Rungs, ProviderError> {
        let reboot = match self.reboot() {
            Some(control) => control.method(id).await?,
            None => {
                RebootMethod::Refused { reason: format!("provider {} cannot reboot machines", self.name()) }
            }
        };
        let power = match self.power() {
            Some(control) => control.support(id).await?,
            None => PowerSupport::Unavailable {
                reason: format!("provider {} has no power over machines", self.name()),
            },
        };
        Ok(Rungs { reboot, power })
    }
}

/// Handing out machines.
#[async_trait]
pub trait Creation: Send + Sync {
    /// Hands out one machine, from the capacity named where one is (a reservation, or the id of a
    /// possibly used machine). The same intent id returns the same machine, whenever asked again.
    async fn create(
        &self,
        intent: IntentId,
        reservation: Option<&str>,
    ) -> Result<ProviderMachine, ProviderError>;

    /// The machine made under an intent, if one was. `Ok(None)` is a statement: none was.
    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError>;
}

/// Taking machines back.
#[async_trait]
pub trait Release: Send + Sync {
    /// Takes one machine back, once for each intent: an intent that was carried out before changes nothing,
    /// even if the id has come to stand for somebody else's machine since. An error of class
    /// [`ErrorClass::NotFound`] says that there is nothing to be taken back.
    async fn release(&self, id: &str, intent: IntentId) -> Result<(), ProviderError>;
}

/// Power of single machines.
#[async_trait]
pub trait PowerControl: Send + Sync {
    /// Whether this machine's power can be switched.
    async fn support(&self, id: &str) -> Result<PowerSupport, ProviderError>;

    /// Switches it. Returns when the order was taken; [`Self::power_state`] shows the effect.
    async fn power(&self, id: &str, action: PowerAction, intent: IntentId) -> Result<(), ProviderError>;

    /// Whether it has power now.
    async fn power_state(&self, id: &str) -> Result<PowerState, ProviderError>;
}

/// Reboots of single machines.
#[async_trait]
pub trait RebootControl: Send + Sync {
    /// How this machine is rebooted.
    async fn method(&self, id: &str) -> Result<RebootMethod, ProviderError>;

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
    fn a_refused_reboot_is_no_rung() {
        let refused = Rungs {
            reboot: RebootMethod::Refused { reason: "it is this host".into() },
            power: PowerSupport::Available,
        };
        assert!(!refused.can_reboot() && refused.can_power_cycle());
        let ssh = Rungs {
            reboot: RebootMethod::Ssh(vec!["systemctl".into(), "reboot".into()]),
            power: PowerSupport::Unavailable { reason: "no power command".into() },
        };
        assert!(ssh.can_reboot() && !ssh.can_power_cycle());
    }
}
