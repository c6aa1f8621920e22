//! What Kubernetes of a cluster is to be, as its owner says it.
//!
//! It is judged whole, and all that is wrong with it is told at once. What differs in nothing but the order of its add-ons
//! is the same. Two things of it are for ever: the ranges of addresses, which are in certificates, in what runs and in
//! what applications have kept, and the domain, which is in all of them as well. Nothing that runs would follow a change
//! of these, and one that half of it followed would be worse than none.

use std::collections::BTreeSet;

use prost::Message as _;

use crate::curator::kubernetes::refusal::Refusal;
use crate::etcd::key_space::{KUBERNETES, KeyError};
use crate::etcd::record::{self, RecordError};
use crate::model::declaration::{is_url, sha256};
use crate::model::kubernetes::ranges::Ranges;
use crate::proto::curator::v1 as wire;

/// Most add-ons.
const MOST_ADD_ONS: usize = 64;
/// Longest label of a name in DNS, and longest name of an add-on.
const LONGEST_LABEL: usize = 63;
/// Longest domain: the names of services stand before it, and all of a name has 253 characters.
const LONGEST_DOMAIN: usize = 100;
/// Longest name of an object of Kubernetes.
const LONGEST_NAME: usize = 253;

/// What Kubernetes of a cluster is to be, where it can be.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    said: wire::KubernetesSettings,
    ranges: Ranges,
    revision: u64,
}

/// Where it stands in etcd.
pub fn settings_key() -> Result<String, KeyError> {
    KUBERNETES.key("settings")
}

impl Settings {
    /// Takes what an owner said; it has no revision yet.
    pub fn new(mut said: wire::KubernetesSettings) -> Result<Self, Refusal> {
        said.add_ons.sort_by(|one, other| one.name.cmp(&other.name));
        let mut faults = Vec::new();
        digest(&mut faults, "bundle", &said.bundle);
        url(&mut faults, "bundle_url", &said.bundle_url);
        let ranges = match Ranges::new(&said.service_range, &said.pod_range, said.node_prefix) {
            Ok(ranges) => Some(ranges),
            Err(wrong) => {
                faults.extend(wrong);
                None
            }
        };
        if !is_domain(&said.domain) || said.domain.len() > LONGEST_DOMAIN {
            faults.push(format!(
                "domain: {:?} is no domain: it has at most {LONGEST_DOMAIN} lower-case letters, digits, dots and dashes, \
                 such as cluster.local",
                shortened(&said.domain)
            ));
        }
        add_ons(&mut faults, &said.add_ons);
        if let Some(storage) = &said.storage {
            if !is_driver(&storage.driver) {
                faults.push(format!(
                    "storage.driver: {:?} is no name of a driver: it has 1 to {LONGEST_LABEL} letters, digits, dots and \
                     dashes",
                    shortened(&storage.driver)
                ));
            }
            if !is_domain(&storage.class) || storage.class.len() > LONGEST_NAME {
                faults.push(format!(
                    "storage.class: {:?} is no name of an object: it has lower-case letters, digits, dots and dashes",
                    shortened(&storage.class)
                ));
            }
        }
        match ranges {
            Some(ranges) if faults.is_empty() => Ok(Self { said, ranges, revision: 0 }),
            _ => Err(Refusal::Settings(faults)),
        }
    }

    /// As its owner said it, add-ons in order.
    #[must_use]
    pub const fn said(&self) -> &wire::KubernetesSettings {
        &self.said
    }

    /// From which addresses services and pods get theirs.
    #[must_use]
    pub const fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// Grows with each change.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        self.revision
    }

    /// What is to be written where `known` is in force; `None` where it says the same.
    pub fn replacing(self, known: Option<&Self>, expected: Option<u64>) -> Result<Option<Self>, Refusal> {
        let in_force = known.map_or(0, Self::revision);
        if let Some(expected) = expected
            && expected != in_force
        {
            return Err(Refusal::AnotherRevision { in_force, expected });
        }
        let Some(known) = known else { return Ok(Some(Self { revision: 1, ..self })) };
        if known.said == self.said {
            return Ok(None);
        }
        let (was, is) = (&known.said, &self.said);
        for (field, from, to) in [
            ("service_range", was.service_range.clone(), is.service_range.clone()),
            ("pod_range", was.pod_range.clone(), is.pod_range.clone()),
            ("node_prefix", was.node_prefix.to_string(), is.node_prefix.to_string()),
            ("domain", was.domain.clone(), is.domain.clone()),
        ] {
            if from != to {
                return Err(Refusal::Fixed { field, from, to });
            }
        }
        Ok(Some(Self { revision: in_force + 1, ..self }))
    }

    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let settings = Some(self.said.clone());
        wire::KubernetesRecord { format: record::FORMAT, settings, revision: self.revision }.encode_to_vec()
    }

    /// Reads what is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let record = record::decode(key, bytes, |record: &wire::KubernetesRecord| record.format)?;
        if record.revision == 0 {
            return Err(RecordError::new(key, "it says no revision"));
        }
        let settings = Self::new(record.settings.unwrap_or_default())
            .map_err(|error| RecordError::new(key, error.to_string()))?;
        Ok(Self { revision: record.revision, ..settings })
    }
}

/// Which bundle a node is to run, and where it is fetched; the error is all that is wrong with it.
pub fn check_bundle(bundle: &str, from: &str) -> Result<(), Refusal> {
    let mut faults = Vec::new();
    digest(&mut faults, "bundle", bundle);
    url(&mut faults, "url", from);
    if faults.is_empty() { Ok(()) } else { Err(Refusal::Settings(faults)) }
}

fn add_ons(faults: &mut Vec<String>, add_ons: &[wire::KubernetesAddOn]) {
    if add_ons.len() > MOST_ADD_ONS {
        faults.push(format!("add_ons: there are {}; {MOST_ADD_ONS} are the most", add_ons.len()));
        return;
    }
    let mut names = BTreeSet::new();
    for add_on in add_ons {
        let name = shortened(&add_on.name);
        if !is_add_on(&add_on.name) {
            faults.push(format!(
                "add_ons: {name:?} is no name of an add-on: it has 1 to {LONGEST_LABEL} letters, digits and dashes, with no \
                 dash at either end"
            ));
        }
        if !names.insert(&add_on.name) {
            faults.push(format!("add_ons: there are two of the name {name:?}"));
        }
        digest(faults, &format!("add_ons.{name}"), &add_on.digest);
        url(faults, &format!("add_ons.{name}.url"), &add_on.url);
    }
}

fn digest(faults: &mut Vec<String>, field: &str, text: &str) {
    if let Err(error) = sha256(text) {
        faults.push(format!("{field}: {error}"));
    }
}

fn url(faults: &mut Vec<String>, field: &str, text: &str) {
    if !text.is_empty() && !is_url(text) {
        faults.push(format!("{field}: it is {:?}, and http://HOST/PATH is wanted", shortened(text)));
    }
}

/// Whether every part between dots is a label of DNS in lower case (RFC 1123).
fn is_domain(text: &str) -> bool {
    text.split('.').all(|label| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        (1..=LONGEST_LABEL).contains(&label.len())
            && label.chars().all(inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

fn is_add_on(text: &str) -> bool {
    (1..=LONGEST_LABEL).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Whether this can be the name of a driver (CSI specification, `GetPluginInfoResponse.name`).
fn is_driver(text: &str) -> bool {
    let outer = |c: char| c.is_ascii_alphanumeric();
    (1..=LONGEST_LABEL).contains(&text.len())
        && text.chars().all(|c| outer(c) || c == '.' || c == '-')
        && text.starts_with(outer)
        && text.ends_with(outer)
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use tonic::Code;

    use super::*;

    pub(crate) fn said() -> wire::KubernetesSettings {
        let add_on = |name: &str| wire::KubernetesAddOn {
            name: name.to_owned(),
            digest: "cd".repeat(32),
            url: "http://store/a".to_owned(),
        };
        wire::KubernetesSettings {
            bundle: "ab".repeat(32),
            bundle_url: "http://10.0.0.1/bundle".to_owned(),
            service_range: "10.96.0.0/16".to_owned(),
            pod_range: "10.128.0.0/22".to_owned(),
            node_prefix: 24,
            domain: "cluster.local".to_owned(),
            add_ons: vec![add_on("dns"), add_on("net")],
            storage: Some(wire::KubernetesStorage {
                driver: "zfs.csi.example".to_owned(),
                class: "fast".to_owned(),
            }),
        }
    }

    pub(crate) fn settings() -> Settings {
        Settings::new(said()).unwrap().replacing(None, None).unwrap().unwrap()
    }

    #[test]
    fn record_reads_back_as_it_was_written() {
        let key = settings_key().unwrap();
        assert_eq!(Settings::decode(&key, &settings().encode()).unwrap(), settings());
        let unrevised = Settings::new(said()).unwrap();
        let error = Settings::decode(&key, &unrevised.encode()).unwrap_err().to_string();
        assert!(error.contains("no revision") && error.contains(&key), "{error}");
        let broken = wire::KubernetesRecord { format: record::FORMAT, settings: None, revision: 1 };
        assert!(Settings::decode(&key, &broken.encode_to_vec()).is_err());
        assert!(Settings::decode(&key, &[]).is_err());
    }

    #[test]
    fn all_that_is_wrong_is_told_and_nothing_else() {
        type Change = fn(&mut wire::KubernetesSettings);
        let cases: [(Change, &[&str]); 19] = [
            (|_| {}, &[]),
            (|said| said.bundle_url.clear(), &[]),
            (|said| said.storage = None, &[]),
            (|said| said.add_ons.clear(), &[]),
            (|said| said.bundle.clear(), &["bundle: \"\" is no SHA-256"]),
            (|said| said.bundle.make_ascii_uppercase(), &["bundle: "]),
            (|said| said.bundle_url = "ftp://a/b".to_owned(), &["bundle_url: it is"]),
            (|said| said.service_range = "10.96.0.1/16".to_owned(), &["service_range: "]),
            (|said| said.node_prefix = 8, &["node_prefix: "]),
            (|said| said.domain.clear(), &["domain: "]),
            (|said| said.domain = "Cluster.local".to_owned(), &["domain: "]),
            (|said| said.domain = "cluster.local.".to_owned(), &["domain: "]),
            (|said| said.domain = format!("{0}.{0}", "a".repeat(60)), &["domain: "]),
            (|said| said.add_ons[0].name = "-".to_owned(), &["\"-\" is no name of an add-on"]),
            (|said| said.add_ons[0].name = "net".to_owned(), &["two of the name \"net\""]),
            (|said| said.add_ons[1].digest.clear(), &["add_ons.net: \"\" is no SHA-256"]),
            (|said| said.add_ons = vec![said.add_ons[0].clone(); 65], &["there are 65"]),
            (
                |said| {
                    said.storage =
                        Some(wire::KubernetesStorage { driver: "a/b".to_owned(), class: "A".to_owned() });
                },
                &["storage.driver", "storage.class"],
            ),
            (
                |said| {
                    (said.bundle, said.domain, said.pod_range) =
                        (String::new(), "-".to_owned(), "10".to_owned());
                },
                &["bundle", "domain", "pod_range"],
            ),
        ];
        for (change, expected) in cases {
            let mut said = said();
            change(&mut said);
            let faults = match Settings::new(said.clone()) {
                Ok(_) => Vec::new(),
                Err(Refusal::Settings(faults)) => faults,
                Err(other) => panic!("{other}"),
            };
            assert_eq!(faults.len(), expected.len(), "{faults:?}");
            for words in expected {
                assert!(faults.iter().any(|fault| fault.contains(words)), "{words}: {faults:?}");
            }
        }
    }

    #[test]
    fn what_says_the_same_changes_nothing_and_what_nobody_would_follow_is_refused() {
        type Change = fn(&mut wire::KubernetesSettings);
        let known = settings();
        let mut turned = said();
        turned.add_ons.reverse();
        assert_eq!(Settings::new(turned).unwrap().replacing(Some(&known), Some(1)).unwrap(), None);
        let mut other = said();
        other.bundle = "ef".repeat(32);
        let changed =
            Settings::new(other.clone()).unwrap().replacing(Some(&known), Some(1)).unwrap().unwrap();
        assert_eq!((changed.revision(), changed.said().bundle.as_str()), (2, "ef".repeat(32).as_str()));
        for (expected, known, refused) in [
            (Some(0), None, false),
            (Some(1), None, true),
            (Some(0), Some(&known), true),
            (Some(2), Some(&known), true),
        ] {
            let answer = Settings::new(other.clone()).unwrap().replacing(known, expected);
            let refusal = answer.err().map(|refusal| refusal.code());
            assert_eq!(refusal, refused.then_some(Code::FailedPrecondition), "{expected:?}");
        }
        let fixed: [(Change, &str); 4] = [
            (|said| said.service_range = "10.97.0.0/16".to_owned(), "service_range"),
            (|said| said.pod_range = "10.128.0.0/20".to_owned(), "pod_range"),
            (|said| said.node_prefix = 25, "node_prefix"),
            (|said| said.domain = "other.local".to_owned(), "domain"),
        ];
        for (change, field) in fixed {
            let mut said = other.clone();
            change(&mut said);
            let refusal = Settings::new(said).unwrap().replacing(Some(&known), None).unwrap_err();
            assert_eq!(refusal.code(), Code::FailedPrecondition);
            assert!(refusal.to_string().contains(field), "{refusal}");
        }
    }
}
