//! The orders of the inbox that have keys of Kubernetes Secrets, and what is reported of them.
//!
//! The keys come over the agent's callback connection, and never from a curator: they are not in etcd, which has the
//! Secrets. An order is stored in `secret_keys.json`. From there, [`kubernetes`](crate::cluster::kubernetes) writes the
//! configuration of the API server. The order of before it stays the stored one, and gets its number.

use model::cluster::secret_keys::{KEY_BYTES, PLAIN_PROVIDER};
use proto::agent::v1 as wire;

use crate::cluster::files::{ClusterFiles, ClusterFilesError, SecretKeysOrder, SecretsProvider};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_order::{NodeOrder, OrderKind};
use crate::cluster::order_inbox::{Acceptance, Rejection};

/// Most providers in an order.
const MAX_PROVIDERS: usize = 64;
/// Longest name of a key.
const MAX_NAME_BYTES: usize = 100;

/// What happens with an order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SecretKeysDecision {
    /// It is not newer than the stored one.
    Ignore,
    /// The keys are not used, for this reason.
    Reject(String),
    /// This has to be stored.
    Accept(SecretKeysOrder),
}

/// Decides about an order of this number. `stored` is the order that this machine has, `is_node` whether it is a node, and
/// `present` are the keys that it has.
fn decide_secret_keys(
    stored: Option<&NodeOrder>,
    is_node: bool,
    present: &SecretKeysOrder,
    (generation, order): (i64, &wire::EncryptSecrets),
) -> SecretKeysDecision {
    let rejected = |reason: &str| SecretKeysDecision::Reject(reason.to_owned());
    match stored {
        Some(stored) if generation <= stored.generation => return SecretKeysDecision::Ignore,
        Some(stored) if matches!(stored.what, OrderKind::Leave {}) => {
            return rejected("this machine leaves its cluster, so it gets no keys of Kubernetes Secrets");
        }
        Some(_) if is_node => {}
        _ => {
            return rejected(
                "this machine is no node of a cluster yet, so it gets no keys of Kubernetes Secrets",
            );
        }
    }
    match parse_order(present, order) {
        Ok(next) => SecretKeysDecision::Accept(next),
        Err(reason) => {
            SecretKeysDecision::Reject(format!("the keys of Kubernetes Secrets are not used: {reason}"))
        }
    }
}

/// The order to store. The error is a part of a sentence, and has nothing of a key.
fn parse_order(present: &SecretKeysOrder, order: &wire::EncryptSecrets) -> Result<SecretKeysOrder, String> {
    if order.providers.is_empty() || order.providers.len() > MAX_PROVIDERS {
        return Err(format!("the order has {} of them", order.providers.len()));
    }
    let providers: Vec<SecretsProvider> =
        order.providers.iter().map(parse_provider).collect::<Result<_, _>>()?;
    let has = |name: &str| providers.iter().any(|provider| provider.name == name);
    if let Some(writes) = present.writing_key().filter(|name| !has(name)) {
        return Err(format!(
            "the order lacks {writes}, which the API server of this machine writes with; if the database was restored from a \
             backup, restore a later backup"
        ));
    }
    let plain = providers.iter().filter(|provider| provider.key.is_none()).count();
    let is_at_an_end =
        [providers.first(), providers.last()].into_iter().flatten().any(|end| end.key.is_none());
    if plain > 1 || plain == 1 && !is_at_an_end {
        return Err("plain text is neither the first nor the last way to store them".to_owned());
    }
    Ok(SecretKeysOrder { providers, rewrite: order.rewrite })
}

fn parse_provider(provider: &wire::SecretsProvider) -> Result<SecretsProvider, String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let name = &provider.name;
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(is_part) {
        return Err(format!("{name:?} is no name of a key"));
    }
    let expected = if name == PLAIN_PROVIDER { 0 } else { KEY_BYTES };
    if provider.key.len() != expected {
        return Err(format!("{name} has {} bytes, and needs {expected}", provider.key.len()));
    }
    let key = (expected > 0).then(|| hex::encode(&provider.key));
    Ok(SecretsProvider { name: name.clone(), key })
}

/// Accepts an order with keys of Secrets. They are durable before it is reported.
pub(super) fn store_secret_keys(
    files: &ClusterFiles,
    facts: &NodeFacts,
    generation: i64,
    order: &wire::EncryptSecrets,
) -> Result<Acceptance, Rejection> {
    let cannot = |error: ClusterFilesError| Rejection::Temporary(error.to_string());
    let stored = files.read_order().map_err(cannot)?;
    let is_node = files.read_credentials().map_err(cannot)?.is_some();
    let present = files.read_secret_keys().map_err(cannot)?;
    match decide_secret_keys(stored.as_ref(), is_node, &present, (generation, order)) {
        SecretKeysDecision::Ignore => Ok(Acceptance::Ignored),
        SecretKeysDecision::Reject(why) => Err(Rejection::Permanent(why)),
        SecretKeysDecision::Accept(next) => {
            files.write_secret_keys(&next).map_err(cannot)?;
            if let Some(stored) = stored {
                files.write_order(&NodeOrder { generation, ..stored }).map_err(cannot)?;
            }
            facts.secret_keys.set(next);
            Ok(Acceptance::Keys)
        }
    }
}

/// What is reported of the keys of Secrets: their names alone.
pub(super) fn report_secret_keys(files: &ClusterFiles) -> Result<wire::SecretsReport, ClusterFilesError> {
    let (order, status) = (files.read_secret_keys()?, files.read_secret_keys_status());
    let list = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let ordered = list(&order.provider_list());
    // A role server without Kubernetes runs no API server.
    let running = if cfg!(feature = "reconciler") { list(&status.running) } else { ordered.clone() };
    Ok(wire::SecretsReport { ordered, rewrite: order.rewrite, running, rewritten: status.rewritten })
}

#[cfg(test)]
mod tests {
    use proto::agent::v1::cluster_order::Operation as OrderedOperation;

    use super::*;
    use crate::cluster::files::secret_keys_tests::secret_keys_order;
    use crate::cluster::files::{Credentials, SecretKeysStatus};
    use crate::cluster::order_inbox::tests::{founding, inbox, wire_order};

    fn order(providers: &[(&str, usize)]) -> wire::EncryptSecrets {
        let provider = |(name, bytes): &(&str, usize)| wire::SecretsProvider {
            name: (*name).to_owned(),
            key: vec![0xab; *bytes],
        };
        wire::EncryptSecrets { providers: providers.iter().map(provider).collect(), rewrite: false }
    }

    #[test]
    fn list_without_the_key_that_writes_here_is_rejected() {
        let rejected = |present: &SecretKeysOrder, sent: &wire::EncryptSecrets| {
            parse_order(present, sent).err().unwrap_or_default()
        };
        let none = SecretKeysOrder::default();
        let one = secret_keys_order(&[("key1-a", 1)]);
        let plain = secret_keys_order(&[(PLAIN_PROVIDER, 0), ("key1-a", 1)]);
        for (present, sent, reason) in [
            (&none, order(&[("key1-a", 32)]), ""),
            (&one, order(&[("key2-b", 32), ("key1-a", 32)]), ""),
            (&one, order(&[("key1-a", 32), ("key2-b", 32)]), ""),
            (&plain, order(&[("key2-b", 32)]), ""),
            (&none, order(&[(PLAIN_PROVIDER, 0), ("key1-a", 32)]), ""),
            (&none, order(&[("key1-a", 32), (PLAIN_PROVIDER, 0)]), ""),
            (&one, order(&[("key2-b", 32)]), "the order lacks key1-a"),
            (&none, order(&[]), "the order has 0 of them"),
            (&none, order(&[("key1-a", 31)]), "key1-a has 31 bytes, and needs 32"),
            (&none, order(&[(PLAIN_PROVIDER, 32)]), "identity has 32 bytes, and needs 0"),
            (&none, order(&[("key 1", 32)]), "\"key 1\" is no name of a key"),
            (&none, order(&[("a", 32), (PLAIN_PROVIDER, 0), ("b", 32)]), "plain text is neither"),
            (&none, order(&[(PLAIN_PROVIDER, 0), ("b", 32), (PLAIN_PROVIDER, 0)]), "plain text is neither"),
        ] {
            let text = rejected(present, &sent);
            assert!(text.starts_with(reason) && text.is_empty() == reason.is_empty(), "{reason}: {text}");
            assert!(!text.contains("abab"), "{text}");
        }
    }

    #[test]
    fn keys_are_stored_before_they_are_reported_and_replace_no_order() {
        let (_directory, order_inbox) = inbox();
        let (files, facts) = (&order_inbox.0.files, &order_inbox.0.facts);
        let send = |generation, sent: &wire::EncryptSecrets| {
            order_inbox.accept(&wire_order(generation, OrderedOperation::EncryptSecrets(sent.clone())));
        };
        order_inbox.accept(&founding(2, "ams"));
        send(3, &order(&[("key1-a", 32)]));
        assert!(order_inbox.report().error.contains("is no node"), "{}", order_inbox.report().error);
        let credentials = Credentials { certificate: String::new(), ca_certificate: "00".to_owned() };
        files.write_credentials(&credentials).unwrap();
        files.read_or_create_key().unwrap();

        let stored = files.read_order().unwrap().unwrap();
        send(4, &order(&[("key1-a", 32)]));
        let report = order_inbox.report();
        assert_eq!((report.generation, report.secrets.unwrap().ordered), (4, vec!["key1-a".to_owned()]));
        assert_eq!(files.read_order().unwrap(), Some(NodeOrder { generation: 4, ..stored }));
        assert_eq!(facts.secret_keys.latest(), Some(files.read_secret_keys().unwrap()));
        send(4, &order(&[("key2-b", 32), ("key1-a", 32)]));
        assert_eq!(files.read_secret_keys().unwrap().provider_list(), "key1-a", "it had that order");

        let status = SecretKeysStatus { running: "key1-a".to_owned(), rewritten: "key1-a".to_owned() };
        files.write_secret_keys_status(&status).unwrap();
        send(5, &wire::EncryptSecrets { rewrite: true, ..order(&[("key2-b", 32), ("key1-a", 32)]) });
        let secrets = order_inbox.report().secrets.unwrap();
        assert_eq!((secrets.ordered.join(" ").as_str(), secrets.rewrite), ("key2-b key1-a", true));
        assert_eq!(secrets.rewritten, "key1-a");
        if cfg!(feature = "reconciler") {
            assert_eq!(secrets.running, ["key1-a"], "its API server has not restarted");
        }
        send(6, &order(&[("key3-c", 32)]));
        let report = order_inbox.report();
        assert!(report.error.contains("the order lacks key2-b"), "{}", report.error);
        assert_eq!(report.generation, 6);
    }
}
