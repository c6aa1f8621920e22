//! Kubernetes of a cluster: desired spec and observed state.
//!
//! The desired spec is in the BMDB. Which nodes run Kubernetes follows from their parts: members of the control plane
//! run its control plane, workers run its pods. The steps between the two states are in
//! [`plan`][crate::cluster::plan].

use std::collections::BTreeMap;
use std::fmt;

use proto::curator::v1 as wire;
use serde::{Deserialize, Serialize};

use crate::kubernetes::address_ranges::ClusterRanges;
use crate::process::UnknownName;
use crate::time::Timestamp;

/// Role of nodes that run the control plane of Kubernetes.
pub const CONTROLLER_ROLE: &str = "kubernetes-controller";
/// Role of nodes that run pods.
pub const WORKER_ROLE: &str = "kubernetes-worker";
/// Most add-ons of one cluster.
pub const MAX_ADD_ONS: usize = 64;
const MAX_NAME_CHARS: usize = 63;

/// Desired Kubernetes of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KubernetesSpec {
    /// SHA-256 of the bundle that its nodes run, 64 hexadecimal digits.
    pub bundle: String,
    /// Version of Kubernetes in the bundle.
    pub version: String,
    /// IPv4 range of service addresses (CIDR).
    pub service_range: String,
    /// IPv4 range that is divided among nodes for their pods (CIDR).
    pub pod_range: String,
    /// Prefix length of one node's part of `pod_range`.
    pub node_prefix: u32,
    /// DNS domain of service names.
    pub domain: String,
    /// Digests of files with Kubernetes objects, by add-on name.
    pub add_ons: BTreeMap<String, String>,
    /// Driver that provisions volumes; `None` for no storage.
    pub storage: Option<VolumeDriver>,
}

/// A driver that provisions volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeDriver {
    /// Name of the CSI driver.
    pub driver: String,
    /// Name of the storage class that uses the driver.
    pub class: String,
}

/// Range of services if the operator sets none.
pub const DEFAULT_SERVICE_RANGE: &str = "10.96.0.0/16";
/// Range of pods if the operator sets none.
pub const DEFAULT_POD_RANGE: &str = "10.128.0.0/12";
/// Prefix length of a node's range if the operator sets none.
pub const DEFAULT_NODE_PREFIX: u32 = 24;
/// DNS domain of services if the operator sets none.
pub const DEFAULT_DOMAIN: &str = "cluster.local";

impl KubernetesSpec {
    /// Validates the spec; the error is a sentence.
    pub fn validate(&self) -> Result<(), String> {
        ClusterRanges::new(&self.service_range, &self.pod_range, self.node_prefix)
            .map_err(|faults| faults.join("; "))?;
        if !self.domain.split('.').all(is_dns_label) || self.domain.len() > 200 {
            return Err(format!("{:?} is not a domain; write it as cluster.local", self.domain));
        }
        if self.add_ons.len() > MAX_ADD_ONS {
            return Err(format!("{} add-ons are too many: {MAX_ADD_ONS} are enough", self.add_ons.len()));
        }
        if let Some(name) = self.add_ons.keys().find(|name| !is_dns_label(name)) {
            return Err(format!(
                "{name:?} names no add-on: it has 1 to {MAX_NAME_CHARS} lower-case letters, digits and dashes"
            ));
        }
        if let Some(VolumeDriver { driver, class }) = &self.storage {
            for (what, name) in [("a driver of storage", driver), ("a class of storage", class)] {
                if name.is_empty() || name.len() > MAX_NAME_CHARS || !name.split('.').all(is_dns_label) {
                    return Err(format!("{name:?} names no {}; write it as csi.example.org", &what[2..]));
                }
            }
        }
        Ok(())
    }

    /// The settings for the curators. They have no URLs, because nodes fetch files from shepherds by digest.
    #[must_use]
    pub fn to_settings(&self) -> wire::KubernetesSettings {
        wire::KubernetesSettings {
            bundle: self.bundle.clone(),
            bundle_url: String::new(),
            service_range: self.service_range.clone(),
            pod_range: self.pod_range.clone(),
            node_prefix: self.node_prefix,
            domain: self.domain.clone(),
            add_ons: (self.add_ons.iter())
                .map(|(name, digest)| wire::KubernetesAddOn {
                    name: name.clone(),
                    digest: digest.clone(),
                    url: String::new(),
                })
                .collect(),
            storage: self.storage.as_ref().map(|storage| wire::KubernetesStorage {
                driver: storage.driver.clone(),
                class: storage.class.clone(),
            }),
        }
    }
}

/// The spec in the settings of curators. Its version is empty, because settings have none. URLs are dropped, because
/// shepherds never set them.
#[must_use]
pub fn spec_from_settings(settings: wire::KubernetesSettings) -> KubernetesSpec {
    KubernetesSpec {
        bundle: settings.bundle,
        version: String::new(),
        service_range: settings.service_range,
        pod_range: settings.pod_range,
        node_prefix: settings.node_prefix,
        domain: settings.domain,
        add_ons: settings.add_ons.into_iter().map(|add_on| (add_on.name, add_on.digest)).collect(),
        storage: (settings.storage)
            .map(|storage| VolumeDriver { driver: storage.driver, class: storage.class }),
    }
}

/// Whether a text is a label of a DNS name (RFC 1123) in lower case.
pub(super) fn is_dns_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    (1..=MAX_NAME_CHARS).contains(&text.len())
        && text.chars().all(|c| inner(c) || c == '-')
        && text.starts_with(inner)
        && text.ends_with(inner)
}

/// The purpose of a signing key: one of five authorities, or service accounts. The keys of one purpose are rotated
/// together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeyPurpose {
    /// Clients authenticate API servers with it.
    Servers,
    /// API servers and kubelets authenticate clients with it.
    Clients,
    /// Aggregated API servers authenticate a calling API server with it.
    FrontProxy,
    /// A node's etcd and its API server authenticate each other with it.
    Etcd,
    /// API servers verify service-account tokens with it.
    ServiceAccounts,
    /// API servers authenticate kubelets with it.
    Kubelets,
}

impl KeyPurpose {
    /// All purposes, in the order of display and of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Servers, Self::Clients, Self::FrontProxy, Self::Etcd, Self::ServiceAccounts, Self::Kubelets];

    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Servers => "servers",
            Self::Clients => "clients",
            Self::FrontProxy => "front-proxy",
            Self::Etcd => "etcd",
            Self::ServiceAccounts => "service-accounts",
            Self::Kubelets => "kubelets",
        }
    }

    /// Whether the key signs certificates.
    #[must_use]
    pub const fn is_authority(self) -> bool {
        !matches!(self, Self::ServiceAccounts)
    }

    /// The purpose as the curators' protocol names it.
    #[must_use]
    pub const fn to_wire(self) -> wire::KubernetesKeys {
        match self {
            Self::Servers => wire::KubernetesKeys::Servers,
            Self::Clients => wire::KubernetesKeys::Clients,
            Self::FrontProxy => wire::KubernetesKeys::FrontProxy,
            Self::Etcd => wire::KubernetesKeys::Etcd,
            Self::ServiceAccounts => wire::KubernetesKeys::ServiceAccounts,
            Self::Kubelets => wire::KubernetesKeys::Kubelets,
        }
    }

    /// The purpose for a value of the curators' protocol; `None` for an unknown value.
    #[must_use]
    pub fn from_wire(keys: wire::KubernetesKeys) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.to_wire() == keys)
    }
}

impl fmt::Display for KeyPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for KeyPurpose {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "certificates and keys of Kubernetes",
            name: name.to_owned(),
            known: "servers, clients, front-proxy, etcd, service-accounts, kubelets",
        })
    }
}

/// Desired state of a cluster's Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredKubernetes {
    /// The desired spec, as the operator set it.
    pub spec: KubernetesSpec,
    /// Whether Kubernetes has to be removed.
    pub removing: bool,
    /// Rotations that an operator requested and no curator has accepted yet.
    pub pending_rotations: Vec<KeyPurpose>,
}

/// What the curators have of a cluster's Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one in a pass over a cluster, and most have the largest"
)]
pub enum ObservedKubernetes {
    /// The curators were not queried.
    #[default]
    NotQueried,
    /// The curators gave no answer; the text is the reason.
    Unavailable(String),
    /// The cluster has no Kubernetes.
    Absent,
    /// The cluster has Kubernetes with this state.
    Present(CuratorKubernetes),
}

/// Kubernetes of a cluster as its curators have it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CuratorKubernetes {
    /// The spec that the curators have; its version is empty.
    pub spec: KubernetesSpec,
    /// Bundles assigned to single nodes, by node id.
    pub assigned_bundles: BTreeMap<String, String>,
    /// Rotations of keys that are under way.
    pub rotations: Vec<KubernetesKeyRotation>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

impl CuratorKubernetes {
    /// Digest of the bundle that a node has to run.
    #[must_use]
    pub fn bundle_of(&self, node: &str) -> &str {
        self.assigned_bundles.get(node).map_or(self.spec.bundle.as_str(), String::as_str)
    }
}

/// A rotation of keys that is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubernetesKeyRotation {
    /// The keys: a name of [`KeyPurpose`].
    #[serde(rename = "what")]
    pub keys: String,
    /// Stage of the rotation: `trusted` or `signs`, which is shown as `signing`.
    pub stage: String,
    /// When the stage began, if that is known.
    pub since: Option<Timestamp>,
    /// Nodes that do not act on this stage yet.
    pub waits_for: Vec<String>,
    /// When everything that the old key signed has expired; `None`: the stage does not wait for that.
    pub until: Option<Timestamp>,
    /// Nodes that block the rotation now: no further node is notified meanwhile. Empty from older curators.
    #[serde(default)]
    #[serde(rename = "held_by")]
    pub blocked_by: Vec<String>,
    /// When a node was last notified of this stage; `None` if none was yet.
    #[serde(default)]
    #[serde(rename = "told_at")]
    pub notified_at: Option<Timestamp>,
}

/// Kubernetes of one node, from the node's last report.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeKubernetes {
    /// SHA-256 of the node's bundle; empty while nothing runs.
    pub bundle: String,
    /// Version of Kubernetes in the bundle.
    pub version: String,
    /// Its components, ordered by name.
    pub components: Vec<ComponentStatus>,
    /// What the node as a whole waits for; empty if it waits for nothing.
    #[serde(rename = "waits")]
    pub wait_reason: String,
    /// Whether this node maintains the built-in objects.
    #[serde(default)]
    #[serde(rename = "reconciles")]
    pub is_reconciler: bool,
    /// Objects that it could not create because objects of others are in the way.
    #[serde(default)]
    #[serde(rename = "clashes")]
    pub conflicts: Vec<ObjectConflict>,
}

/// Status of one component of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentStatus {
    /// Name of the component.
    pub name: String,
    /// State, as in [`crate::cluster::declaration::ServiceView`].
    pub state: String,
    /// When the state began, by the node's clock.
    pub since: Option<Timestamp>,
    /// How often it was restarted.
    pub restarts: u32,
    /// Why it is not running or not healthy; empty if it is healthy.
    pub message: String,
}

/// An object that could not be created because an object of someone else has its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectConflict {
    /// Kind of the object.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// What is in the way, and what to do.
    pub message: String,
}

impl NodeKubernetes {
    /// Why the node is not healthy (part of a sentence); `None` if it is.
    #[must_use]
    pub fn unhealthy_reason(&self) -> Option<String> {
        if self.bundle.is_empty() || self.components.is_empty() {
            return Some(if self.wait_reason.is_empty() {
                "it runs nothing of Kubernetes yet".to_owned()
            } else {
                self.wait_reason.clone()
            });
        }
        let ill = self.components.iter().find(|component| component.state != "healthy");
        ill.map(ComponentStatus::summary)
            .or_else(|| Some(self.wait_reason.clone()).filter(|waits| !waits.is_empty()))
    }
}

impl ComponentStatus {
    /// The component's state as a part of a sentence.
    #[must_use]
    pub fn summary(&self) -> String {
        let because = if self.message.is_empty() { String::new() } else { format!(": {}", self.message) };
        format!("{} is {}{because}", self.name, self.state)
    }
}

/// Whether the curators have the desired spec.
#[must_use]
pub fn is_in_sync(wanted: &KubernetesSpec, has: &CuratorKubernetes) -> bool {
    KubernetesSpec { version: String::new(), ..wanted.clone() } == has.spec
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn kubernetes() -> KubernetesSpec {
        KubernetesSpec {
            bundle: "a".repeat(64),
            version: "1.30.1".to_owned(),
            service_range: DEFAULT_SERVICE_RANGE.to_owned(),
            pod_range: DEFAULT_POD_RANGE.to_owned(),
            node_prefix: DEFAULT_NODE_PREFIX,
            domain: DEFAULT_DOMAIN.to_owned(),
            add_ons: BTreeMap::new(),
            storage: None,
        }
    }

    pub(crate) fn kubernetes_with(change: impl FnOnce(&mut KubernetesSpec)) -> KubernetesSpec {
        let mut changed = kubernetes();
        change(&mut changed);
        changed
    }

    #[test]
    fn invalid_specs_are_rejected_with_a_reason() {
        let add_on = |name: &str| BTreeMap::from([(name.to_owned(), "b".repeat(64))]);
        let storage =
            |driver: &str| Some(VolumeDriver { driver: driver.to_owned(), class: "fast".to_owned() });
        for (spec, expected) in [
            (kubernetes(), ""),
            (kubernetes_with(|k| k.add_ons = add_on("dns")), ""),
            (kubernetes_with(|k| k.storage = storage("csi.example.org")), ""),
            (
                kubernetes_with(|k| k.service_range = "10.96.0.0".into()),
                "service_range: \"10.96.0.0\" is not a range",
            ),
            (
                kubernetes_with(|k| k.service_range = "10.96.0.0/33".into()),
                "service_range: \"10.96.0.0/33\" is not a range",
            ),
            (
                kubernetes_with(|k| k.service_range = "10.96.0.0/8".into()),
                "service_range: 10.96.0.0/8 begins in the middle of a range",
            ),
            (
                kubernetes_with(|k| k.service_range = "10.96.0.0/29".into()),
                "service_range: 10.96.0.0/29 is not a range for services",
            ),
            (
                kubernetes_with(|k| k.pod_range = "10.96.128.0/18".into()),
                "service_range and pod_range: 10.96.0.0/16 and 10.96.128.0/18 have addresses in common",
            ),
            (kubernetes_with(|k| k.node_prefix = 11), "node_prefix: it is 11"),
            (kubernetes_with(|k| k.node_prefix = 29), "node_prefix: it is 29"),
            (kubernetes_with(|k| k.domain = "cluster..local".into()), "\"cluster..local\" is not a domain"),
            (kubernetes_with(|k| k.add_ons = add_on("DNS")), "\"DNS\" names no add-on"),
            (kubernetes_with(|k| k.storage = storage("")), "\"\" names no driver of storage"),
        ] {
            let output = spec.validate().err().unwrap_or_default();
            assert!(
                output.starts_with(expected) && output.is_empty() == expected.is_empty(),
                "{expected}: {output}"
            );
        }
    }

    #[test]
    fn node_is_healthy_when_all_components_are() {
        let component = |name: &str, state: &str, message: &str| ComponentStatus {
            name: name.to_owned(),
            state: state.to_owned(),
            since: None,
            restarts: 0,
            message: message.to_owned(),
        };
        let well = NodeKubernetes {
            bundle: "a".repeat(64),
            components: vec![component("kubelet", "healthy", "")],
            ..NodeKubernetes::default()
        };
        assert_eq!(well.unhealthy_reason(), None);
        let reported = |node: NodeKubernetes| node.unhealthy_reason().unwrap_or_default();
        assert_eq!(reported(NodeKubernetes::default()), "it runs nothing of Kubernetes yet");
        assert_eq!(
            reported(NodeKubernetes { wait_reason: "it fetches".into(), ..NodeKubernetes::default() }),
            "it fetches"
        );
        assert_eq!(reported(NodeKubernetes { wait_reason: "it drains".into(), ..well.clone() }), "it drains");
        let ill =
            vec![component("containerd", "healthy", ""), component("kubelet", "unhealthy", "no answer")];
        assert_eq!(reported(NodeKubernetes { components: ill, ..well }), "kubelet is unhealthy: no answer");
    }

    #[test]
    fn key_sets_round_trip_by_name() {
        for keys in KeyPurpose::ALL {
            assert_eq!(keys.as_str().parse::<KeyPurpose>().unwrap(), keys);
            assert_eq!(KeyPurpose::from_wire(keys.to_wire()), Some(keys));
        }
        assert!("ca".parse::<KeyPurpose>().is_err());
        assert_eq!(KeyPurpose::from_wire(wire::KubernetesKeys::Unspecified), None);
    }
}
