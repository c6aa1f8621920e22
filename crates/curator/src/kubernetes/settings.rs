//! Kubernetes settings of a cluster: validation, revisions, immutable fields.
//!
//! The settings are validated as a whole, and all problems are reported at once. Settings that differ in nothing but
//! the order of the add-ons are equal. Two things are immutable: the address ranges, which are in certificates, in
//! running components and in what applications have stored, and the domain, which is in all of these as well. Nothing
//! that runs would follow such a change, and a change that half of it followed would be worse than none.

use std::collections::BTreeSet;

use etcd::key_space::{KUBERNETES, KeyError};
use etcd::record::{self, RecordError};
use model::kubernetes::address_ranges::ClusterRanges;
use model::role_declaration::{is_fetchable_url, parse_sha256};
use prost::Message as _;
use proto::curator::v1 as wire;

use crate::kubernetes::error::KubernetesError;

/// Most add-ons in the settings of a cluster.
const MAX_ADD_ONS: usize = 64;
/// Longest DNS label, and longest name of an add-on.
const MAX_LABEL_CHARS: usize = 63;
/// Longest domain, in characters: service names precede it, and a whole name has at most 253 characters.
const MAX_DOMAIN_CHARS: usize = 100;
/// Longest name of a Kubernetes object.
const MAX_NAME_CHARS: usize = 253;

/// Valid Kubernetes settings of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesSettings {
    spec: wire::KubernetesSettings,
    ranges: ClusterRanges,
    revision: u64,
}

/// The etcd key of the record.
pub fn settings_record_key() -> Result<String, KeyError> {
    KUBERNETES.key("settings")
}

impl KubernetesSettings {
    /// Validates what an owner requested and sorts its add-ons; the result has no revision yet.
    pub fn new(mut settings: wire::KubernetesSettings) -> Result<Self, KubernetesError> {
        settings.add_ons.sort_by(|one, other| one.name.cmp(&other.name));
        let mut faults = Vec::new();
        validate_digest(&mut faults, "bundle", &settings.bundle);
        validate_url(&mut faults, "bundle_url", &settings.bundle_url);
        let ranges =
            match ClusterRanges::new(&settings.service_range, &settings.pod_range, settings.node_prefix) {
                Ok(ranges) => Some(ranges),
                Err(wrong) => {
                    faults.extend(wrong);
                    None
                }
            };
        if !is_domain(&settings.domain) || settings.domain.len() > MAX_DOMAIN_CHARS {
            faults.push(format!(
                "domain: {:?} is not a domain: it has at most {MAX_DOMAIN_CHARS} lower-case letters, digits, \
                 dots and dashes, such as cluster.local",
                truncate(&settings.domain)
            ));
        }
        validate_add_ons(&mut faults, &settings.add_ons);
        if let Some(storage) = &settings.storage {
            if !is_driver_name(&storage.driver) {
                faults.push(format!(
                    "storage.driver: {:?} is not a valid name of a driver: it has 1 to {MAX_LABEL_CHARS} \
                     letters, digits, dots and dashes",
                    truncate(&storage.driver)
                ));
            }
            if !is_domain(&storage.class) || storage.class.len() > MAX_NAME_CHARS {
                faults.push(format!(
                    "storage.class: {:?} is not a valid name of an object: it has lower-case letters, digits, \
                     dots and dashes",
                    truncate(&storage.class)
                ));
            }
        }
        match ranges {
            Some(ranges) if faults.is_empty() => Ok(Self { spec: settings, ranges, revision: 0 }),
            _ => Err(KubernetesError::InvalidSettings(faults)),
        }
    }

    /// The settings as the owner requested them, with add-ons sorted by name.
    #[must_use]
    pub const fn spec(&self) -> &wire::KubernetesSettings {
        &self.spec
    }

    /// The address ranges of services and pods.
    #[must_use]
    pub const fn ranges(&self) -> &ClusterRanges {
        &self.ranges
    }

    /// Grows by one with each change; 0 before the first write.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        self.revision
    }

    /// The settings to write if `known` is in force; `None` if they are equal. If `expected` is given, it must be the
    /// revision in force (0: none).
    pub fn into_next_revision(
        self,
        known: Option<&Self>,
        expected: Option<u64>,
    ) -> Result<Option<Self>, KubernetesError> {
        let in_force = known.map_or(0, Self::revision);
        if let Some(expected) = expected
            && expected != in_force
        {
            return Err(KubernetesError::RevisionConflict { current: in_force, expected });
        }
        let Some(known) = known else { return Ok(Some(Self { revision: 1, ..self })) };
        if known.spec == self.spec {
            return Ok(None);
        }
        let (was, is) = (&known.spec, &self.spec);
        for (field, from, to) in [
            ("service_range", was.service_range.clone(), is.service_range.clone()),
            ("pod_range", was.pod_range.clone(), is.pod_range.clone()),
            ("node_prefix", was.node_prefix.to_string(), is.node_prefix.to_string()),
            ("domain", was.domain.clone(), is.domain.clone()),
        ] {
            if from != to {
                return Err(KubernetesError::Immutable { field, from, to });
            }
        }
        Ok(Some(Self { revision: in_force + 1, ..self }))
    }

    /// Encodes the record for etcd.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let settings = Some(self.spec.clone());
        wire::KubernetesRecord { format: record::FORMAT, settings, revision: self.revision }.encode_to_vec()
    }

    /// Decodes the record that is stored under `key`.
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

/// Validates the bundle that a node runs and the URL it is fetched from; the error has all problems.
pub fn validate_bundle(bundle: &str, from: &str) -> Result<(), KubernetesError> {
    let mut faults = Vec::new();
    validate_digest(&mut faults, "bundle", bundle);
    validate_url(&mut faults, "url", from);
    if faults.is_empty() { Ok(()) } else { Err(KubernetesError::InvalidSettings(faults)) }
}

fn validate_add_ons(faults: &mut Vec<String>, add_ons: &[wire::KubernetesAddOn]) {
    if add_ons.len() > MAX_ADD_ONS {
        faults.push(format!("add_ons: there are {}; {MAX_ADD_ONS} is the maximum", add_ons.len()));
        return;
    }
    let mut names = BTreeSet::new();
    for add_on in add_ons {
        let name = truncate(&add_on.name);
        if !is_add_on_name(&add_on.name) {
            faults.push(format!(
                "add_ons: {name:?} is not a valid name of an add-on: it has 1 to {MAX_LABEL_CHARS} letters, \
                 digits and dashes, with no dash at either end"
            ));
        }
        if !names.insert(&add_on.name) {
            faults.push(format!("add_ons: there are two of the name {name:?}"));
        }
        validate_digest(faults, &format!("add_ons.{name}"), &add_on.digest);
        validate_url(faults, &format!("add_ons.{name}.url"), &add_on.url);
    }
}

fn validate_digest(faults: &mut Vec<String>, field: &str, text: &str) {
    if let Err(error) = parse_sha256(text) {
        faults.push(format!("{field}: {error}"));
    }
}

fn validate_url(faults: &mut Vec<String>, field: &str, text: &str) {
    if !text.is_empty() && !is_fetchable_url(text) {
        faults.push(format!("{field}: it is {:?}, and http://HOST/PATH is wanted", truncate(text)));
    }
}

/// Whether every part between dots is a DNS label in lower case (RFC 1123).
fn is_domain(text: &str) -> bool {
    text.split('.').all(|label| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        (1..=MAX_LABEL_CHARS).contains(&label.len())
            && label.chars().all(inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

fn is_add_on_name(text: &str) -> bool {
    (1..=MAX_LABEL_CHARS).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Whether this can be the name of a driver (CSI specification, `GetPluginInfoResponse.name`).
fn is_driver_name(text: &str) -> bool {
    let outer = |c: char| c.is_ascii_alphanumeric();
    (1..=MAX_LABEL_CHARS).contains(&text.len())
        && text.chars().all(|c| outer(c) || c == '.' || c == '-')
        && text.starts_with(outer)
        && text.ends_with(outer)
}

fn truncate(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use tonic::Code;

    use super::*;

    pub(crate) fn sample_spec() -> wire::KubernetesSettings {
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

    pub(crate) fn settings() -> KubernetesSettings {
        KubernetesSettings::new(sample_spec()).unwrap().into_next_revision(None, None).unwrap().unwrap()
    }

    #[test]
    fn record_round_trips() {
        let key = settings_record_key().unwrap();
        assert_eq!(KubernetesSettings::decode(&key, &settings().encode()).unwrap(), settings());
        let unrevised = KubernetesSettings::new(sample_spec()).unwrap();
        let error = KubernetesSettings::decode(&key, &unrevised.encode()).unwrap_err().to_string();
        assert!(error.contains("no revision") && error.contains(&key), "{error}");
        let broken = wire::KubernetesRecord { format: record::FORMAT, settings: None, revision: 1 };
        assert!(KubernetesSettings::decode(&key, &broken.encode_to_vec()).is_err());
        assert!(KubernetesSettings::decode(&key, &[]).is_err());
    }

    #[test]
    fn all_invalid_fields_are_reported() {
        type Change = fn(&mut wire::KubernetesSettings);
        let cases: [(Change, &[&str]); 19] = [
            (|_| {}, &[]),
            (|settings| settings.bundle_url.clear(), &[]),
            (|settings| settings.storage = None, &[]),
            (|settings| settings.add_ons.clear(), &[]),
            (|settings| settings.bundle.clear(), &["bundle: \"\" is not a SHA-256"]),
            (|settings| settings.bundle.make_ascii_uppercase(), &["bundle: "]),
            (|settings| settings.bundle_url = "ftp://a/b".to_owned(), &["bundle_url: it is"]),
            (|settings| settings.service_range = "10.96.0.1/16".to_owned(), &["service_range: "]),
            (|settings| settings.node_prefix = 8, &["node_prefix: "]),
            (|settings| settings.domain.clear(), &["domain: "]),
            (|settings| settings.domain = "Cluster.local".to_owned(), &["domain: "]),
            (|settings| settings.domain = "cluster.local.".to_owned(), &["domain: "]),
            (|settings| settings.domain = format!("{0}.{0}", "a".repeat(60)), &["domain: "]),
            (
                |settings| settings.add_ons[0].name = "-".to_owned(),
                &["\"-\" is not a valid name of an add-on"],
            ),
            (|settings| settings.add_ons[0].name = "net".to_owned(), &["two of the name \"net\""]),
            (|settings| settings.add_ons[1].digest.clear(), &["add_ons.net: \"\" is not a SHA-256"]),
            (|settings| settings.add_ons = vec![settings.add_ons[0].clone(); 65], &["there are 65"]),
            (
                |settings| {
                    settings.storage =
                        Some(wire::KubernetesStorage { driver: "a/b".to_owned(), class: "A".to_owned() });
                },
                &["storage.driver", "storage.class"],
            ),
            (
                |settings| {
                    (settings.bundle, settings.domain, settings.pod_range) =
                        (String::new(), "-".to_owned(), "10".to_owned());
                },
                &["bundle", "domain", "pod_range"],
            ),
        ];
        for (change, expected) in cases {
            let mut settings = sample_spec();
            change(&mut settings);
            let faults = match KubernetesSettings::new(settings.clone()) {
                Ok(_) => Vec::new(),
                Err(KubernetesError::InvalidSettings(faults)) => faults,
                Err(other) => panic!("{other}"),
            };
            assert_eq!(faults.len(), expected.len(), "{faults:?}");
            for words in expected {
                assert!(faults.iter().any(|fault| fault.contains(words)), "{words}: {faults:?}");
            }
        }
    }

    #[test]
    fn equal_settings_are_a_no_op_and_immutable_fields_are_rejected() {
        type Change = fn(&mut wire::KubernetesSettings);
        let known = settings();
        let mut turned = sample_spec();
        turned.add_ons.reverse();
        assert_eq!(
            KubernetesSettings::new(turned).unwrap().into_next_revision(Some(&known), Some(1)).unwrap(),
            None
        );
        let mut other = sample_spec();
        other.bundle = "ef".repeat(32);
        let changed = KubernetesSettings::new(other.clone())
            .unwrap()
            .into_next_revision(Some(&known), Some(1))
            .unwrap()
            .unwrap();
        assert_eq!((changed.revision(), changed.spec().bundle.as_str()), (2, "ef".repeat(32).as_str()));
        for (expected, known, refused) in [
            (Some(0), None, false),
            (Some(1), None, true),
            (Some(0), Some(&known), true),
            (Some(2), Some(&known), true),
        ] {
            let answer = KubernetesSettings::new(other.clone()).unwrap().into_next_revision(known, expected);
            let refusal = answer.err().map(|refusal| refusal.code());
            assert_eq!(refusal, refused.then_some(Code::FailedPrecondition), "{expected:?}");
        }
        let fixed: [(Change, &str); 4] = [
            (
                |kubernetes_settings| kubernetes_settings.service_range = "10.97.0.0/16".to_owned(),
                "service_range",
            ),
            (|kubernetes_settings| kubernetes_settings.pod_range = "10.128.0.0/20".to_owned(), "pod_range"),
            (|kubernetes_settings| kubernetes_settings.node_prefix = 25, "node_prefix"),
            (|kubernetes_settings| kubernetes_settings.domain = "other.local".to_owned(), "domain"),
        ];
        for (change, field) in fixed {
            let mut kubernetes_settings = other.clone();
            change(&mut kubernetes_settings);
            let refusal = KubernetesSettings::new(kubernetes_settings)
                .unwrap()
                .into_next_revision(Some(&known), None)
                .unwrap_err();
            assert_eq!(refusal.code(), Code::FailedPrecondition);
            assert!(refusal.to_string().contains(field), "{refusal}");
        }
    }
}
