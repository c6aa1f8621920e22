//! Provider configuration: one table `[[provider]]` of the configuration file, and the provider that it describes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reqwest::Url;
use serde::{Deserialize, Deserializer};

use crate::model::adoption::{AdoptionLimits, AdoptionSettings};
use crate::model::time::Rate;
use crate::providers::http;
use crate::providers::provider::{Provider, ProviderError, ProviderName};
use crate::providers::simulated::{self, SimulatedConfig, SimulatedProvider};
use crate::providers::static_provider::{self, StaticConfig, StaticProvider};
use crate::service::failure::ExitFailure;
use crate::service::os_process::hostname;

/// One provider as configured.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ProviderConfiguration {
    /// A static provider with a device list.
    Static {
        /// The operator's name for the provider.
        name: ProviderName,
        /// URL of the list: `file://` or `http(s)://`.
        device_list_url: String,
        /// SHA-256 of the only list that is accepted, in hexadecimal.
        device_list_sha256: Option<String>,
        /// File that holds the SSH password of its machines. They log in by it, and never by the SSH key.
        ssh_password_path: Option<PathBuf>,
        /// Where the addresses of nodes on its machines come from.
        #[serde(default)]
        node_address: NodeAddressSource,
        /// Most of its machines that are adopted; 0 for no limit.
        max_machines: Option<usize>,
        /// How often one of its machines is adopted.
        #[serde(default, deserialize_with = "deserialize_rate")]
        device_creation_rate: Option<Rate>,
    },
    /// A provider that is a simulator.
    Simulated {
        /// The operator's name for the provider.
        name: ProviderName,
        /// URL of the simulator's API: `http://host:port`.
        url: String,
        /// Most of its machines that are adopted; 0 for no limit.
        max_machines: Option<usize>,
        /// How often a machine is requested from it.
        #[serde(default, deserialize_with = "deserialize_rate")]
        device_creation_rate: Option<Rate>,
    },
}

fn deserialize_rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Rate>, D::Error> {
    let rate: Result<Rate, _> = String::deserialize(deserializer)?.parse();
    rate.map(Some).map_err(|error| serde::de::Error::custom(format!("device_creation_rate: {error}")))
}

/// Where the address of a node comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeAddressSource {
    /// The address of its machine in the list, if there is one at which others reach it.
    #[default]
    List,
    /// The source of its connection to the curators: nodes do not reach each other at the addresses in the list.
    Connection,
}

/// Names of the providers whose lists assign no addresses to nodes.
pub(super) fn connection_providers(providers: &[ProviderConfiguration]) -> BTreeSet<String> {
    let source = |provider: &&ProviderConfiguration| match provider {
        ProviderConfiguration::Static { node_address, .. } => *node_address == NodeAddressSource::Connection,
        // A list of loopback addresses.
        ProviderConfiguration::Simulated { .. } => false,
    };
    providers.iter().filter(source).map(|provider| provider.name().to_string()).collect()
}

impl ProviderConfiguration {
    /// The operator's name for the provider.
    #[must_use]
    pub fn name(&self) -> &ProviderName {
        match self {
            Self::Static { name, .. } | Self::Simulated { name, .. } => name,
        }
    }

    /// What bounds the adoption of its machines: the keys of its table, the flags of the shepherd, or its kind.
    pub(super) fn adoption_limits(&self, flags: AdoptionSettings) -> AdoptionLimits {
        let (kind, max_machines, creation_rate) = match self {
            Self::Static { max_machines, device_creation_rate, .. } => {
                (static_provider::ADOPTION_LIMITS, *max_machines, *device_creation_rate)
            }
            Self::Simulated { max_machines, device_creation_rate, .. } => {
                (simulated::ADOPTION_LIMITS, *max_machines, *device_creation_rate)
            }
        };
        kind.override_with(flags).override_with(AdoptionSettings { max_machines, creation_rate })
    }

    /// The file that holds the SSH password of its machines.
    pub(super) fn ssh_password_path(&self) -> Option<&Path> {
        match self {
            Self::Static { ssh_password_path, .. } => ssh_password_path.as_deref(),
            Self::Simulated { .. } => None,
        }
    }

    /// Describes the provider in one line without secrets.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Static { name, device_list_url, .. } => {
                format!("{name} (static): {}", redact_provider_url(device_list_url))
            }
            Self::Simulated { name, url, .. } => format!("{name} (simulated): {}", redact_provider_url(url)),
        }
    }
}

/// Builds the provider for a configuration. `default_ssh_user` is for machines whose provider names no user.
pub(super) fn build_provider(
    configuration: &ProviderConfiguration,
    default_ssh_user: &str,
) -> Result<Arc<dyn Provider>, ExitFailure> {
    let wrong = |error: ProviderError| {
        ExitFailure::usage(format!("provider {}: {}", configuration.name(), error.message))
    };
    Ok(match configuration {
        ProviderConfiguration::Static { name, device_list_url, device_list_sha256, .. } => {
            let config = StaticConfig {
                name: name.clone(),
                device_list_url: device_list_url.clone(),
                device_list_sha256: device_list_sha256.clone(),
                default_ssh_user: default_ssh_user.to_owned(),
            };
            Arc::new(StaticProvider::new(config).map_err(wrong)?)
        }
        ProviderConfiguration::Simulated { name, url, .. } => {
            let config = SimulatedConfig {
                name: name.clone(),
                url: url.clone(),
                caller: Some(format!("{}-{}", hostname(), std::process::id())),
            };
            Arc::new(SimulatedProvider::new(config).map_err(wrong)?)
        }
    })
}

/// A URL without the parts that may be secret: user, password and query.
fn redact_provider_url(url: &str) -> String {
    match Url::parse(url) {
        Ok(url) if url.scheme() == "file" => format!("file://{}", url.path()),
        Ok(url) if url.has_host() => http::redact_url(&url),
        Ok(url) => format!("{}:…", url.scheme()),
        // Never shown in full: a text that is no URL may still contain a password.
        Err(error) => format!("(no URL: {error})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_the_addresses_of_nodes_unless_its_table_rules_that_out() {
        let provider = |name: &str, more: &str| -> ProviderConfiguration {
            let table =
                format!("kind = \"static\"\nname = \"{name}\"\ndevice_list_url = \"file:///x\"\n{more}");
            toml::from_str(&table).unwrap()
        };
        let providers = [
            provider("default", ""),
            provider("list", "node_address = \"list\""),
            provider("front", "node_address = \"connection\""),
        ];
        assert_eq!(connection_providers(&providers), BTreeSet::from(["front".to_owned()]));
    }

    #[test]
    fn keys_of_a_table_count_before_flags_and_those_before_the_kind() {
        let limits = |kind: &str, more: &str, flags: AdoptionSettings| {
            let url = if kind == "static" { "device_list_url" } else { "url" };
            let table = format!("kind = \"{kind}\"\nname = \"a\"\n{url} = \"file:///x\"\n{more}");
            let provider: ProviderConfiguration = toml::from_str(&table).unwrap();
            let limits = provider.adoption_limits(flags);
            (limits.max_machines, limits.creation_rate.map(|rate| rate.to_string()))
        };
        let (none, slow) = (AdoptionSettings::default(), "device_creation_rate = \"1m,1\"");
        let flags = AdoptionSettings { max_machines: Some(7), creation_rate: Some("1s,2".parse().unwrap()) };
        for (kind, more, flags, expected) in [
            ("static", "", none, (None, None)),
            ("simulated", "", none, (Some(50), Some("5s,1"))),
            ("static", "", flags, (Some(7), Some("1s,2"))),
            ("simulated", "", flags, (Some(7), Some("1s,2"))),
            ("static", "max_machines = 9", flags, (Some(9), Some("1s,2"))),
            ("simulated", "max_machines = 0", flags, (None, Some("1s,2"))),
            ("static", slow, none, (None, Some("1m,1"))),
            ("simulated", slow, flags, (Some(7), Some("1m,1"))),
        ] {
            let expected = (expected.0, expected.1.map(str::to_owned));
            assert_eq!(limits(kind, more, flags), expected, "{kind} {more:?} {flags:?}");
        }
    }

    #[test]
    fn credentials_of_a_url_are_not_shown() {
        for (url, shown) in [
            ("https://kim:secret@h/x@y", "https://h/x@y"),
            ("https://kim:se%2Fcret@h:8443/x", "https://h:8443/x"),
            ("https://h/x?token=secret#secret", "https://h/x"),
            ("file:///etc/x", "file:///etc/x"),
        ] {
            assert_eq!(redact_provider_url(url), shown);
        }
        for url in ["https://kim:se/cret@h/x", "kim:secret@h"] {
            assert!(!redact_provider_url(url).contains("cret"), "{}", redact_provider_url(url));
        }
    }
}
