//! Provider configuration: one table `[[provider]]` of the configuration file, and the provider that it describes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reqwest::Url;
use serde::Deserialize;

use crate::providers::http;
use crate::providers::provider::{Provider, ProviderError, ProviderName};
use crate::providers::simulated::{SimulatedConfig, SimulatedProvider};
use crate::providers::static_provider::{StaticConfig, StaticProvider};
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
    },
    /// A provider that is a simulator.
    Simulated {
        /// The operator's name for the provider.
        name: ProviderName,
        /// URL of the simulator's API: `http://host:port`.
        url: String,
    },
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
            Self::Simulated { name, url } => format!("{name} (simulated): {}", redact_provider_url(url)),
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
        ProviderConfiguration::Simulated { name, url } => {
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
