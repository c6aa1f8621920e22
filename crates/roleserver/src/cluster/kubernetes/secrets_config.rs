//! How an API server encrypts Secrets: the file of `--encryption-provider-config`.
//!
//! The keys come with an order of the shepherd ([`SecretKeysOrder`]). The file is written into the key material of the
//! controller role before the API server starts, for its owner alone. The provider is `secretbox`: authenticated, and with
//! random nonces that are long enough for any number of writes. The first provider writes, and all of them read.
//!
//! # Why an API server restarts for another list
//!
//! It reloads this file by itself only from Kubernetes 1.26 on, and does not report when it has. The next step of a rotation
//! relies on that every API server uses a list, and only one that was started with it certainly does. So the file is part of
//! what it is started with. The shepherd sends another list to one controller after the other.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::cluster::secret_keys::PLAIN_PROVIDER;
use serde_json::{Value, json};

use crate::atomic_file::{self, Durability};
use crate::cluster::files::{SecretKeysOrder, SecretsProvider};

/// Name of the file in the controller's key material. Only controllers have it.
pub const SECRETS_CONFIG: &str = "secrets-encryption.json";

/// The configuration for these keys; `None` if there are none. JSON, which is also YAML.
#[must_use]
pub fn render_config(order: &SecretKeysOrder) -> Option<String> {
    let plain = json!({ "identity": {} });
    let is_plain = |provider: Option<&SecretsProvider>| provider.is_some_and(|one| one.key.is_none());
    let keys: Vec<Value> = order
        .providers
        .iter()
        .filter_map(|provider| {
            let bytes = hex::decode(provider.key.as_ref()?).ok()?;
            Some(json!({ "name": provider.name, "secret": STANDARD.encode(bytes) }))
        })
        .collect();
    let mut providers = Vec::new();
    if is_plain(order.providers.first()) {
        providers.push(plain.clone());
    }
    if !keys.is_empty() {
        providers.push(json!({ "secretbox": { "keys": keys } }));
    }
    if order.providers.len() > 1 && is_plain(order.providers.last()) {
        providers.push(plain);
    }
    let config = json!({
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "EncryptionConfiguration",
        "resources": [{ "resources": ["secrets"], "providers": providers }],
    });
    (!order.providers.is_empty()).then(|| format!("{config:#}\n"))
}

/// The names of the providers in a configuration, separated by spaces; empty if it cannot be read.
#[must_use]
pub fn parse_provider_list(config: &[u8]) -> String {
    let config: Value = serde_json::from_slice(config).unwrap_or_default();
    let providers = config.pointer("/resources/0/providers").and_then(Value::as_array);
    let mut names = Vec::new();
    for provider in providers.into_iter().flatten() {
        match provider.pointer("/secretbox/keys").and_then(Value::as_array) {
            Some(keys) => {
                names.extend(keys.iter().filter_map(|key| key.get("name")?.as_str().map(str::to_owned)));
            }
            None => names.push(PLAIN_PROVIDER.to_owned()),
        }
    }
    names.join(" ")
}

/// Writes the configuration for these keys into the directory of the controller's key material, unless it is there.
pub fn write_config(directory: &Path, order: &SecretKeysOrder) -> std::io::Result<()> {
    let Some(config) = render_config(order) else { return Ok(()) };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let path = directory.join(SECRETS_CONFIG);
    if std::fs::read_to_string(&path).is_ok_and(|present| present == config) {
        return Ok(());
    }
    atomic_file::replace_file(&path, config.as_bytes(), Durability::Durable)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::cluster::files::secret_keys_tests::secret_keys_order;

    #[test]
    fn first_provider_writes_and_plain_text_stays_where_it_is() {
        assert_eq!(render_config(&SecretKeysOrder::default()), None);
        let order = secret_keys_order(&[("key2-b", 2), ("key1-a", 1), (PLAIN_PROVIDER, 0)]);
        let config: Value = serde_json::from_str(&render_config(&order).unwrap()).unwrap();
        assert_eq!(
            config,
            json!({
                "apiVersion": "apiserver.config.k8s.io/v1",
                "kind": "EncryptionConfiguration",
                "resources": [{ "resources": ["secrets"], "providers": [
                    { "secretbox": { "keys": [
                        { "name": "key2-b", "secret": STANDARD.encode([2; 32]) },
                        { "name": "key1-a", "secret": STANDARD.encode([1; 32]) },
                    ] } },
                    { "identity": {} },
                ] }],
            })
        );
        for providers in [
            &[("key1-a", 1)][..],
            &[("key1-a", 1), ("key2-b", 2)],
            &[(PLAIN_PROVIDER, 0), ("key1-a", 1)],
            &[("key1-a", 1), (PLAIN_PROVIDER, 0)],
            &[(PLAIN_PROVIDER, 0)],
        ] {
            let order = secret_keys_order(providers);
            let config = render_config(&order).unwrap();
            assert_eq!(parse_provider_list(config.as_bytes()), order.provider_list(), "{config}");
        }
        assert_eq!(parse_provider_list(b"{"), "");
    }

    #[test]
    fn config_is_written_for_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("controller");
        write_config(&directory, &SecretKeysOrder::default()).unwrap();
        assert!(!directory.exists(), "there is nothing to write");
        let order = secret_keys_order(&[("key1-a", 1)]);
        write_config(&directory, &order).unwrap();
        let path = directory.join(SECRETS_CONFIG);
        let written = std::fs::metadata(&path).unwrap();
        assert_eq!(written.permissions().mode() & 0o777, 0o600);
        assert_eq!(parse_provider_list(&std::fs::read(&path).unwrap()), "key1-a");
        write_config(&directory, &order).unwrap();
        let again = std::fs::metadata(&path).unwrap();
        assert_eq!(written.modified().unwrap(), again.modified().unwrap(), "it is not written again");
    }
}
