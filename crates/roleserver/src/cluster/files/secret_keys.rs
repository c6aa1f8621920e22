//! The files `secret_keys.json` and `secret_keys_status.json`: keys of Kubernetes Secrets by the shepherd's newest order,
//! and what this node has done with them.
//!
//! The first one is written before the order is reported. It belongs to the node, and goes with it. The second one is a
//! hint: damaged, it counts as empty, and comes again from the running API server.

use std::fmt;

use model::cluster::secret_keys::PLAIN_PROVIDER;
use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};

const FILE_NAME: &str = "secret_keys.json";
const STATUS_FILE_NAME: &str = "secret_keys_status.json";

/// A way to store Secrets. `Debug` shows no key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretsProvider {
    /// Name of the key, or `identity` for plain text.
    pub name: String,
    /// The key in hexadecimal digits; `None` for plain text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl fmt::Debug for SecretsProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The order that has the keys of Secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretKeysOrder {
    /// How API servers store Secrets. The first one writes.
    pub providers: Vec<SecretsProvider>,
    /// Whether every Secret has to be written again.
    #[serde(default)]
    pub rewrite: bool,
}

impl SecretKeysOrder {
    /// The names of the providers, separated by spaces.
    #[must_use]
    pub fn provider_list(&self) -> String {
        self.providers.iter().map(|provider| provider.name.as_str()).collect::<Vec<_>>().join(" ")
    }

    /// The name of the key that writes; `None` for plain text.
    #[must_use]
    pub fn writing_key(&self) -> Option<&str> {
        let first = self.providers.first()?.name.as_str();
        (first != PLAIN_PROVIDER).then_some(first)
    }
}

/// What this node has done with the keys of Secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretKeysStatus {
    /// The providers that its API server was started with, or would be started with.
    pub running: String,
    /// The key that every Secret was written again with; empty: none.
    pub rewritten: String,
}

impl ClusterFiles {
    /// Reads the order that has the keys of Secrets; empty if this node has none.
    pub fn read_secret_keys(&self) -> Result<SecretKeysOrder, ClusterFilesError> {
        self.read_json(FILE_NAME).map(Option::unwrap_or_default)
    }

    /// Stores an order that has keys of Secrets.
    pub fn write_secret_keys(&self, order: &SecretKeysOrder) -> Result<(), ClusterFilesError> {
        self.write_json(FILE_NAME, order)
    }

    /// Reads what was done with the keys; empty also for a damaged file.
    #[must_use]
    pub fn read_secret_keys_status(&self) -> SecretKeysStatus {
        self.read_json(STATUS_FILE_NAME).ok().flatten().unwrap_or_default()
    }

    /// Stores what was done with the keys.
    pub fn write_secret_keys_status(&self, status: &SecretKeysStatus) -> Result<(), ClusterFilesError> {
        self.write_hint(STATUS_FILE_NAME, status)
    }
}

#[cfg(test)]
pub(in crate::cluster) mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::cluster::files::tests::files;

    /// An order with these providers. The key of each is its number, 32 times.
    pub(in crate::cluster) fn secret_keys_order(providers: &[(&str, u8)]) -> SecretKeysOrder {
        let provider = |(name, key): &(&str, u8)| SecretsProvider {
            name: (*name).to_owned(),
            key: (*name != PLAIN_PROVIDER).then(|| hex::encode([*key; 32])),
        };
        SecretKeysOrder { providers: providers.iter().map(provider).collect(), rewrite: false }
    }

    #[test]
    fn keys_are_stored_for_their_owner_alone_and_show_in_no_text() {
        let (directory, files) = files();
        assert_eq!(files.read_secret_keys().unwrap(), SecretKeysOrder::default());
        let order = secret_keys_order(&[("key1-a", 0xab), (PLAIN_PROVIDER, 0)]);
        files.write_secret_keys(&order).unwrap();
        assert_eq!(files.read_secret_keys().unwrap(), order);
        let path = directory.path().join("cluster").join(FILE_NAME);
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!format!("{order:?}").contains("abab"), "{order:?}");
        assert_eq!(
            (order.provider_list().as_str(), order.writing_key()),
            ("key1-a identity", Some("key1-a"))
        );
        assert_eq!(secret_keys_order(&[(PLAIN_PROVIDER, 0), ("key1-a", 1)]).writing_key(), None);
        files.remove_all_except_order().unwrap();
        assert_eq!(files.read_secret_keys().unwrap(), SecretKeysOrder::default(), "they go with the node");
    }
}
