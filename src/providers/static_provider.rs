//! The static provider: machines named in a device list.
//!
//! A list keeps no account of who has what, so each of its machines is *possibly
//! used*, and creating one only records that it is wanted: nothing happens
//! outside, so nothing can be made twice. Power comes from each device's own
//! command, a reboot from a command run over SSH by the caller.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::model::ids::IntentId;
use crate::model::provider_status::{PowerState, ProviderStatus, Usage};
use crate::providers::provider::{
    Creation, ErrorClass, PowerAction, PowerControl, PowerSupport, Provider, ProviderError, ProviderMachine,
    ProviderName, RebootControl, RebootMethod, Release,
};
use crate::providers::static_commands;
use crate::providers::static_list::Device;
use crate::providers::static_source::Source;

const KIND: &str = "static";
const LOOKUP_LIMIT: Duration = Duration::from_secs(2);

/// What an operator says of a device list.
#[derive(Clone, Debug)]
pub struct StaticConfig {
    /// The provider's name.
    pub name: ProviderName,
    /// `file:///path` or `http(s)://host/path` of the list.
    pub device_list_url: String,
    /// The SSH user of devices that name none: decides how the default reboot command is written.
    pub default_ssh_user: String,
}

/// Machines named in a device list.
pub struct StaticProvider {
    name: ProviderName,
    default_ssh_user: String,
    source: Source,
    recorded: Mutex<Recorded>,
}

/// Which device was recorded under which intent, by this process. At most one entry a device.
#[derive(Default)]
struct Recorded {
    by_intent: HashMap<IntentId, String>,
    by_id: HashMap<String, IntentId>,
}

impl StaticProvider {
    /// Checks the configuration; reads nothing yet.
    pub fn new(config: StaticConfig) -> Result<Self, ProviderError> {
        let StaticConfig { name, device_list_url, default_ssh_user } = config;
        let source = Source::new(&device_list_url)?;
        Ok(Self { name, default_ssh_user, source, recorded: Mutex::default() })
    }

    fn machine(&self, device: &Device) -> ProviderMachine {
        let intent = self.recorded().by_id.get(&device.id).copied();
        ProviderMachine {
            id: device.id.clone(),
            usage: Usage::PossiblyUsed,
            address: Some(device.address.clone()),
            ssh_port: device.port,
            ssh_user: device.user.clone(),
            location: device.location.clone(),
            status: ProviderStatus::Unknown,
            host_keys: Vec::new(),
            intent,
        }
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn find(&self, id: &str) -> Result<Option<Device>, ProviderError> {
        Ok(self.source.devices().await?.iter().find(|device| device.id == id).cloned())
    }

    async fn known(&self, id: &str) -> Result<Device, ProviderError> {
        self.find(id).await?.ok_or_else(|| {
            let sentence = format!("machine {id:?} is not in the device list of provider {}", self.name);
            ProviderError::new(ErrorClass::NotFound, self.source.endpoint(), sentence)
        })
    }

    async fn power_command(&self, id: &str) -> Result<Vec<String>, ProviderError> {
        self.known(id).await?.power_command.ok_or_else(|| {
            ProviderError::new(ErrorClass::Configuration, self.source.endpoint(), no_power_command(id))
        })
    }
}

#[async_trait]
impl Provider for StaticProvider {
    fn name(&self) -> &ProviderName {
        &self.name
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    async fn list(&self) -> Result<Vec<ProviderMachine>, ProviderError> {
        Ok(self.source.devices().await?.iter().map(|device| self.machine(device)).collect())
    }

    async fn look_at(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        Ok(self.find(id).await?.map(|device| self.machine(&device)))
    }

    fn creation(&self) -> Option<&dyn Creation> {
        Some(self)
    }

    fn power(&self) -> Option<&dyn PowerControl> {
        Some(self)
    }

    fn reboot(&self) -> Option<&dyn RebootControl> {
        Some(self)
    }

    fn release(&self) -> Option<&dyn Release> {
        Some(self)
    }
}

/// As nothing was handed out, nothing is taken back: whoever wrote the list takes the device off it.
#[async_trait]
impl Release for StaticProvider {
    async fn release(&self, id: &str, _intent: IntentId) -> Result<(), ProviderError> {
        self.known(id).await.map(drop)
    }
}

#[async_trait]
impl Creation for StaticProvider {
    async fn create(
        &self,
        intent: IntentId,
        reservation: Option<&str>,
    ) -> Result<ProviderMachine, ProviderError> {
        if let Some(made) = self.find_by_intent(intent).await? {
            return Ok(made);
        }
        let Some(id) = reservation else {
            return Err(ProviderError::new(
                ErrorClass::Configuration,
                self.source.endpoint(),
                format!("provider {} makes no machines of its own accord; name one of its list", self.name),
            ));
        };
        let device = self.known(id).await?;
        {
            let mut recorded = self.recorded();
            if let Some(before) = recorded.by_id.insert(id.to_owned(), intent) {
                recorded.by_intent.remove(&before);
            }
            recorded.by_intent.insert(intent, id.to_owned());
        }
        Ok(self.machine(&device))
    }

    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError> {
        let recorded = self.recorded().by_intent.get(&intent).cloned();
        match recorded {
            Some(id) => self.look_at(&id).await,
            // After a restart this is still true of the world: nothing was made there.
            None => Ok(None),
        }
    }
}

#[async_trait]
impl PowerControl for StaticProvider {
    async fn support(&self, id: &str) -> Result<PowerSupport, ProviderError> {
        Ok(match self.known(id).await?.power_command {
            Some(_) => PowerSupport::Available,
            None => PowerSupport::Unavailable { reason: no_power_command(id) },
        })
    }

    async fn power(&self, id: &str, action: PowerAction, intent: IntentId) -> Result<(), ProviderError> {
        let argv = self.power_command(id).await?;
        static_commands::run(&argv, action.as_str(), Some(intent), static_commands::LIMIT).await?;
        Ok(())
    }

    async fn power_state(&self, id: &str) -> Result<PowerState, ProviderError> {
        let argv = self.power_command(id).await?;
        let printed = static_commands::run(&argv, "status", None, static_commands::LIMIT).await?;
        static_commands::power_state(&printed, argv.first().map_or("", String::as_str))
    }
}

#[async_trait]
impl RebootControl for StaticProvider {
    async fn method(&self, id: &str) -> Result<RebootMethod, ProviderError> {
        let device = self.known(id).await?;
        if let Some(argv) = device.reboot_command {
            return Ok(RebootMethod::Ssh(argv));
        }
        let user = device.user.as_deref().unwrap_or(&self.default_ssh_user);
        Ok(default_reboot(&device.address, &addresses_of(&device.address).await, user))
    }

    async fn reboot(&self, id: &str, _intent: IntentId) -> Result<(), ProviderError> {
        let sentence = format!("machine {id:?} is rebooted by a command over SSH, not by its provider");
        Err(ProviderError::new(ErrorClass::Configuration, self.source.endpoint(), sentence))
    }
}

fn no_power_command(id: &str) -> String {
    format!("machine {id:?} has no PowerCommand in its device list; add one to let its power be switched")
}

/// The reboot of a device that names no command. Refused where the address leads back to this host:
/// the shepherd would reboot itself. Whoever means it writes the command into the list.
fn default_reboot(address: &str, resolved: &[IpAddr], user: &str) -> RebootMethod {
    let own = |ip: &IpAddr| {
        let ip = ip.to_canonical();
        // Connecting to the unspecified address reaches this host.
        ip.is_loopback() || ip.is_unspecified()
    };
    let name = address.trim_end_matches('.').to_ascii_lowercase();
    if name == "localhost" || name.ends_with(".localhost") || resolved.iter().any(own) {
        return RebootMethod::Refused {
            reason: format!(
                "{address} is the shepherd's own host, which the default reboot command would reboot; give the device a RebootCommand"
            ),
        };
    }
    let words: &[&str] =
        if user == "root" { &["systemctl", "reboot"] } else { &["sudo", "-n", "systemctl", "reboot"] };
    RebootMethod::Ssh(words.iter().map(|word| (*word).to_owned()).collect())
}

/// Where an address leads; nothing when that cannot be found out, since SSH will not get there either.
async fn addresses_of(address: &str) -> Vec<IpAddr> {
    if let Ok(ip) = address.parse() {
        return vec![ip];
    }
    match tokio::time::timeout(LOOKUP_LIMIT, tokio::net::lookup_host((address, 22))).await {
        Ok(Ok(found)) => found.map(|address| address.ip()).collect(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_reboot_never_hits_the_shepherds_own_host() {
        let refused = |address: &str, resolved: &[&str]| {
            let resolved: Vec<IpAddr> = resolved.iter().map(|ip| ip.parse().unwrap()).collect();
            matches!(default_reboot(address, &resolved, "root"), RebootMethod::Refused { .. })
        };
        for own in ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::"] {
            assert!(refused(own, &[own]), "{own}");
        }
        assert!(refused("localhost", &[]));
        assert!(refused("LocalHost.", &[]));
        assert!(refused("a.localhost", &[]));
        assert!(refused("me.example", &["192.0.2.1", "127.0.1.1"]), "a name that leads to loopback");
        assert!(!refused("192.0.2.1", &["192.0.2.1"]));
        assert!(!refused("localhost.example", &["192.0.2.1"]));
    }

    #[test]
    fn the_default_reboot_is_written_for_its_user() {
        assert_eq!(
            default_reboot("192.0.2.1", &[], "root"),
            RebootMethod::Ssh(vec!["systemctl".into(), "reboot".into()])
        );
        let RebootMethod::Ssh(argv) = default_reboot("192.0.2.1", &[], "admin") else { panic!() };
        assert_eq!(argv.join(" "), "sudo -n systemctl reboot");
    }
}
