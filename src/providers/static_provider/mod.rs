//! Static provider: machines of a device list.
//!
//! A list does not record who uses which machine, so each of its machines is *possibly used*. Creating one only records
//! that it is wanted: nothing happens outside, so nothing can be made twice. Power comes from each device's own
//! command, a reboot from a command that the caller runs over SSH.
//!
//! * [`device_list`]: parses the list strictly.
//! * [`device_list_source`]: reads the list from a file or a server, and again when it changes.
//! * [`power_command`]: runs the power command of a device.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::model::adoption::AdoptionLimits;
use crate::model::ids::IntentId;
use crate::model::provider_status::{MachineUsage, PowerState, ProviderStatus};
use crate::providers::provider::{
    CreationControl, ErrorClass, PowerAction, PowerControl, PowerSupport, Provider, ProviderError,
    ProviderMachine, ProviderName, RebootControl, RebootMethod, ReleaseControl,
};
use crate::providers::static_provider::device_list::Device;
use crate::providers::static_provider::device_list_source::DeviceListSource;

pub mod device_list;
pub mod device_list_source;
pub mod power_command;

const KIND: &str = "static";
/// What bounds the adoption of its machines, unless the configuration does: the list is the operator's own.
pub const ADOPTION_LIMITS: AdoptionLimits = AdoptionLimits::UNLIMITED;
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);

/// The configuration of a static provider.
#[derive(Clone, Debug)]
pub struct StaticConfig {
    /// The operator's name for this provider.
    pub name: ProviderName,
    /// `file:///path` or `http(s)://host/path` of the list.
    pub device_list_url: String,
    /// The SHA-256 of the only list that is accepted, in hexadecimal; `None` accepts any.
    pub device_list_sha256: Option<String>,
    /// The SSH user of devices that name none. The default reboot command depends on it.
    pub default_ssh_user: String,
}

/// The machines of a device list.
pub struct StaticProvider {
    name: ProviderName,
    default_ssh_user: String,
    source: DeviceListSource,
    creations: Mutex<CreationIndex>,
}

/// Which device was recorded under which intent, by this process. At most one entry per device.
#[derive(Default)]
struct CreationIndex {
    by_intent: HashMap<IntentId, String>,
    by_id: HashMap<String, IntentId>,
}

impl StaticProvider {
    /// Checks the configuration; reads nothing yet.
    pub fn new(config: StaticConfig) -> Result<Self, ProviderError> {
        let StaticConfig { name, device_list_url, device_list_sha256, default_ssh_user } = config;
        let source = DeviceListSource::new(&device_list_url, device_list_sha256.as_deref())?;
        Ok(Self { name, default_ssh_user, source, creations: Mutex::default() })
    }

    fn to_machine(&self, device: &Device) -> ProviderMachine {
        let intent = self.lock_creations().by_id.get(&device.id).copied();
        ProviderMachine {
            id: device.id.clone(),
            usage: MachineUsage::PossiblyUsed,
            address: Some(device.address.clone()),
            ssh_port: device.port,
            ssh_user: device.user.clone(),
            location: device.location.clone(),
            status: ProviderStatus::Unknown,
            host_keys: device.host_key.iter().cloned().collect(),
            intent,
        }
    }

    fn lock_creations(&self) -> MutexGuard<'_, CreationIndex> {
        self.creations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn find_device(&self, id: &str) -> Result<Option<Device>, ProviderError> {
        Ok(self.source.load_devices().await?.iter().find(|device| device.id == id).cloned())
    }

    async fn require_device(&self, id: &str) -> Result<Device, ProviderError> {
        self.find_device(id).await?.ok_or_else(|| {
            let sentence = format!("machine {id:?} is not in the device list of provider {}", self.name);
            ProviderError::new(ErrorClass::NotFound, self.source.endpoint(), sentence)
        })
    }

    async fn power_command(&self, id: &str) -> Result<Vec<String>, ProviderError> {
        self.require_device(id).await?.power_command.ok_or_else(|| {
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
        Ok(self.source.load_devices().await?.iter().map(|device| self.to_machine(device)).collect())
    }

    async fn find_machine(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        Ok(self.find_device(id).await?.map(|device| self.to_machine(&device)))
    }

    fn creation(&self) -> Option<&dyn CreationControl> {
        Some(self)
    }

    fn power(&self) -> Option<&dyn PowerControl> {
        Some(self)
    }

    fn reboot(&self) -> Option<&dyn RebootControl> {
        Some(self)
    }

    fn release(&self) -> Option<&dyn ReleaseControl> {
        Some(self)
    }
}

/// Nothing was created, so nothing is released. The operator removes the device from the list.
#[async_trait]
impl ReleaseControl for StaticProvider {
    async fn release(&self, id: &str, _intent: IntentId) -> Result<(), ProviderError> {
        self.require_device(id).await.map(drop)
    }
}

#[async_trait]
impl CreationControl for StaticProvider {
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
        let device = self.require_device(id).await?;
        {
            let mut recorded = self.lock_creations();
            if let Some(before) = recorded.by_id.insert(id.to_owned(), intent) {
                recorded.by_intent.remove(&before);
            }
            recorded.by_intent.insert(intent, id.to_owned());
        }
        Ok(self.to_machine(&device))
    }

    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError> {
        let recorded = self.lock_creations().by_intent.get(&intent).cloned();
        match recorded {
            Some(id) => self.find_machine(&id).await,
            // After a restart this is still true: nothing was made outside.
            None => Ok(None),
        }
    }
}

#[async_trait]
impl PowerControl for StaticProvider {
    async fn power_support(&self, id: &str) -> Result<PowerSupport, ProviderError> {
        Ok(match self.require_device(id).await?.power_command {
            Some(_) => PowerSupport::Available,
            None => PowerSupport::Unavailable { reason: no_power_command(id) },
        })
    }

    async fn set_power(&self, id: &str, action: PowerAction, intent: IntentId) -> Result<(), ProviderError> {
        let argv = self.power_command(id).await?;
        power_command::run_power_command(
            &argv,
            action.as_str(),
            Some(intent),
            power_command::COMMAND_TIMEOUT,
        )
        .await?;
        Ok(())
    }

    async fn power_state(&self, id: &str) -> Result<PowerState, ProviderError> {
        let argv = self.power_command(id).await?;
        let printed =
            power_command::run_power_command(&argv, "status", None, power_command::COMMAND_TIMEOUT).await?;
        power_command::parse_power_state(&printed, argv.first().map_or("", String::as_str))
    }
}

#[async_trait]
impl RebootControl for StaticProvider {
    async fn reboot_method(&self, id: &str) -> Result<RebootMethod, ProviderError> {
        let device = self.require_device(id).await?;
        if let Some(argv) = device.reboot_command {
            return Ok(RebootMethod::Ssh(argv));
        }
        let user = device.user.as_deref().unwrap_or(&self.default_ssh_user);
        Ok(default_reboot_method(&device.address, &resolve_addresses(&device.address).await, user))
    }

    async fn reboot(&self, id: &str, _intent: IntentId) -> Result<(), ProviderError> {
        let sentence = format!("machine {id:?} is rebooted by a command over SSH, not by its provider");
        Err(ProviderError::new(ErrorClass::Configuration, self.source.endpoint(), sentence))
    }
}

fn no_power_command(id: &str) -> String {
    format!("machine {id:?} has no PowerCommand in its device list; add one to let its power be switched")
}

/// The reboot of a device that names no command. It is refused if the address leads back to this host, because the
/// shepherd would reboot itself. An operator who wants that writes the command into the list.
fn default_reboot_method(address: &str, resolved: &[IpAddr], user: &str) -> RebootMethod {
    let own = |ip: &IpAddr| {
        let ip = ip.to_canonical();
        // Connecting to the unspecified address reaches this host.
        ip.is_loopback() || ip.is_unspecified()
    };
    let name = address.trim_end_matches('.').to_ascii_lowercase();
    if name == "localhost" || name.ends_with(".localhost") || resolved.iter().any(own) {
        return RebootMethod::Unsupported {
            reason: format!(
                "{address} is the shepherd's own host, which the default reboot command would reboot; give the device a RebootCommand"
            ),
        };
    }
    let words: &[&str] =
        if user == "root" { &["systemctl", "reboot"] } else { &["sudo", "-n", "systemctl", "reboot"] };
    RebootMethod::Ssh(words.iter().map(|word| (*word).to_owned()).collect())
}

/// The IP addresses of a host name. Empty if the name cannot be resolved, since SSH will fail then too.
async fn resolve_addresses(address: &str) -> Vec<IpAddr> {
    if let Ok(ip) = address.parse() {
        return vec![ip];
    }
    match tokio::time::timeout(LOOKUP_TIMEOUT, tokio::net::lookup_host((address, 22))).await {
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
            matches!(default_reboot_method(address, &resolved, "root"), RebootMethod::Unsupported { .. })
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
            default_reboot_method("192.0.2.1", &[], "root"),
            RebootMethod::Ssh(vec!["systemctl".into(), "reboot".into()])
        );
        let RebootMethod::Ssh(argv) = default_reboot_method("192.0.2.1", &[], "admin") else { panic!() };
        assert_eq!(argv.join(" "), "sudo -n systemctl reboot");
    }
}
