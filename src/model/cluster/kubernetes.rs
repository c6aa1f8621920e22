//! Kubernetes of a cluster: what an operator wants of it, what its curators have, and what follows.
//!
//! What is wanted stands in the BMDB. The curators are told when they have something else, and again when they lost it, as
//! with declared roles: nobody has to remember what they were told. Which nodes run it follows from their parts: members of
//! the control plane run its control plane, workers run its pods. When it goes, roles are taken first, of workers before
//! controllers, so that the last API server is there for as long as anybody asks it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::cluster::plan::Step;
use crate::model::cluster::state::{Node, Seen};
use crate::model::cluster::upgrade::Upgrade;
use crate::model::kubernetes::ranges::Ranges;
use crate::model::process::UnknownName;
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;

/// The role of nodes that run its control plane.
pub const CONTROLLER: &str = "kubernetes-controller";
/// The role of nodes that run its pods.
pub const WORKER: &str = "kubernetes-worker";
/// Most add-ons of one cluster.
pub const MOST_ADD_ONS: usize = 64;
const LONGEST_NAME: usize = 63;

/// What Kubernetes of a cluster is to be.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Kubernetes {
    /// SHA-256 of the bundle that its nodes run, 64 hexadecimal digits.
    pub bundle: String,
    /// Version of Kubernetes in it.
    pub version: String,
    /// From which services get their addresses.
    pub service_range: String,
    /// From which nodes get theirs for pods.
    pub pod_range: String,
    /// How long the prefix of one node's range is.
    pub node_prefix: u32,
    /// In which services have names.
    pub domain: String,
    /// Digests of files with objects, by names.
    pub add_ons: BTreeMap<String, String>,
    /// Who makes volumes.
    pub storage: Option<Storage>,
}

/// Who makes volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Storage {
    /// Name of the driver (CSI).
    pub driver: String,
    /// Name of the class of storage that asks it.
    pub class: String,
}

/// The ranges and the domain of a cluster whose operator says nothing of them.
pub const SERVICE_RANGE: &str = "10.96.0.0/16";
/// From which nodes get ranges for pods.
pub const POD_RANGE: &str = "10.128.0.0/12";
/// How long the prefix of one node's is.
pub const NODE_PREFIX: u32 = 24;
/// In which services have names.
pub const DOMAIN: &str = "cluster.local";

impl Kubernetes {
    /// Checks it; the error is a sentence.
    pub fn check(&self) -> Result<(), String> {
        Ranges::new(&self.service_range, &self.pod_range, self.node_prefix)
            .map_err(|faults| faults.join("; "))?;
        if !self.domain.split('.').all(is_label) || self.domain.len() > 200 {
            return Err(format!("{:?} is no domain; write it as cluster.local", self.domain));
        }
        if self.add_ons.len() > MOST_ADD_ONS {
            return Err(format!("{} add-ons are too many: {MOST_ADD_ONS} are enough", self.add_ons.len()));
        }
        if let Some(name) = self.add_ons.keys().find(|name| !is_label(name)) {
            return Err(format!(
                "{name:?} names no add-on: it has 1 to {LONGEST_NAME} lower-case letters, digits and dashes"
            ));
        }
        if let Some(Storage { driver, class }) = &self.storage {
            for (what, name) in [("a driver of storage", driver), ("a class of storage", class)] {
                if name.is_empty() || name.len() > LONGEST_NAME || !name.split('.').all(is_label) {
                    return Err(format!("{name:?} names no {}; write it as csi.example.org", &what[2..]));
                }
            }
        }
        Ok(())
    }

    /// As curators are told: without addresses, because its nodes fetch from shepherds what a digest names.
    #[must_use]
    pub fn settings(&self) -> wire::KubernetesSettings {
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

/// What curators were told; no version is in that, and where a file is fetched without shepherds is nothing that we say.
#[must_use]
pub fn told(settings: wire::KubernetesSettings) -> Kubernetes {
    Kubernetes {
        bundle: settings.bundle,
        version: String::new(),
        service_range: settings.service_range,
        pod_range: settings.pod_range,
        node_prefix: settings.node_prefix,
        domain: settings.domain,
        add_ons: settings.add_ons.into_iter().map(|add_on| (add_on.name, add_on.digest)).collect(),
        storage: (settings.storage).map(|storage| Storage { driver: storage.driver, class: storage.class }),
    }
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    (1..=LONGEST_NAME).contains(&text.len())
        && text.chars().all(|c| inner(c) || c == '-')
        && text.starts_with(inner)
        && text.ends_with(inner)
}

/// What of its certificates and keys can be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Keys {
    /// By which clients know API servers and kubelets.
    Servers,
    /// By which those know clients.
    Clients,
    /// By which aggregated API servers know that an API server asks them.
    FrontProxy,
    /// By which a node's etcd and its API server know each other.
    Etcd,
    /// What tokens of service accounts are signed with.
    ServiceAccounts,
}

impl Keys {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Servers, Self::Clients, Self::FrontProxy, Self::Etcd, Self::ServiceAccounts];

    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Servers => "servers",
            Self::Clients => "clients",
            Self::FrontProxy => "front-proxy",
            Self::Etcd => "etcd",
            Self::ServiceAccounts => "service-accounts",
        }
    }

    /// As curators call it.
    #[must_use]
    pub const fn to_wire(self) -> wire::KubernetesKeys {
        match self {
            Self::Servers => wire::KubernetesKeys::Servers,
            Self::Clients => wire::KubernetesKeys::Clients,
            Self::FrontProxy => wire::KubernetesKeys::FrontProxy,
            Self::Etcd => wire::KubernetesKeys::Etcd,
            Self::ServiceAccounts => wire::KubernetesKeys::ServiceAccounts,
        }
    }

    /// What curators call so; none for what nobody here knows.
    #[must_use]
    pub fn of_wire(keys: wire::KubernetesKeys) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.to_wire() == keys)
    }
}

impl std::str::FromStr for Keys {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "certificates and keys of Kubernetes",
            name: name.to_owned(),
            known: "servers, clients, front-proxy, etcd, service-accounts",
        })
    }
}

/// What is wanted of a cluster's Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// What it is to be.
    pub kubernetes: Kubernetes,
    /// Whether it is to go.
    pub removing: bool,
    /// What is to be replaced, as long as no curator was told.
    pub rotate: Vec<Keys>,
}

/// What the curators know of it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one in a pass over a cluster, and most have the largest"
)]
pub enum Known {
    /// They were not asked.
    #[default]
    NotAsked,
    /// They do not say, and why.
    Away(String),
    /// There is none.
    Nothing,
    /// There is one.
    Has(Has),
}

/// What the curators have.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Has {
    /// What it is to be, as they were told; of the version they know nothing.
    pub settings: Kubernetes,
    /// Bundles of nodes that were given one of their own, by node id.
    pub assigned: BTreeMap<String, String>,
    /// What is being replaced.
    pub rotations: Vec<Rotation>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

impl Has {
    /// By which bundle a node is to run.
    #[must_use]
    pub fn bundle_of(&self, node: &str) -> &str {
        self.assigned.get(node).map_or(self.settings.bundle.as_str(), String::as_str)
    }
}

/// A replacement that is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rotation {
    /// Of what: a name of [`Keys`].
    pub what: String,
    /// `trusted` or `signs`.
    pub stage: String,
    /// Since when.
    pub since: Option<Timestamp>,
    /// Nodes that do not act on this stage yet.
    pub waits_for: Vec<String>,
    /// Until when it waits for what was signed before to end.
    pub until: Option<Timestamp>,
    /// Nodes that are waited for now: nobody else is told meanwhile. None by curators of releases before.
    #[serde(default)]
    pub held_by: Vec<String>,
    /// When a node was told of this stage last.
    #[serde(default)]
    pub told_at: Option<Timestamp>,
}

/// What a node runs of Kubernetes, as it said last.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OnNode {
    /// SHA-256 of its bundle; empty while nothing runs.
    pub bundle: String,
    /// Version of Kubernetes in it.
    pub version: String,
    /// Its components, in order of their names.
    pub components: Vec<Component>,
    /// What all of it waits for; empty where it waits for nothing.
    pub waits: String,
    /// Whether it keeps the built-in objects.
    #[serde(default)]
    pub reconciles: bool,
    /// Objects that it could not make because of somebody else's.
    #[serde(default)]
    pub clashes: Vec<Clash>,
}

/// How a component does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Component {
    /// Its name.
    pub name: String,
    /// What it does: as services of roles say it.
    pub state: String,
    /// Since when, by the node's clock.
    pub since: Option<Timestamp>,
    /// How often it was started again.
    pub restarts: u32,
    /// Why it is not running, or not well; empty when it is.
    pub message: String,
}

/// An object that could not be made because somebody else's has its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clash {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// What is in the way and what to do.
    pub message: String,
}

impl OnNode {
    /// Why it is not well, a part of a sentence; none where it is.
    #[must_use]
    pub fn unwell(&self) -> Option<String> {
        if self.bundle.is_empty() || self.components.is_empty() {
            return Some(if self.waits.is_empty() {
                "it runs nothing of Kubernetes yet".to_owned()
            } else {
                self.waits.clone()
            });
        }
        let ill = self.components.iter().find(|component| component.state != "healthy");
        ill.map(Component::said).or_else(|| Some(self.waits.clone()).filter(|waits| !waits.is_empty()))
    }
}

impl Component {
    /// How it does, a part of a sentence.
    #[must_use]
    pub fn said(&self) -> String {
        let because = if self.message.is_empty() { String::new() } else { format!(": {}", self.message) };
        format!("{} is {}{because}", self.name, self.state)
    }
}

/// What the curators are to be told of Kubernetes, and what is waited for, sentences. Upgrades have a plan of their own.
#[must_use]
pub fn next(wanted: Option<&Wanted>, upgrade: Option<&Upgrade>, seen: &Seen) -> (Vec<Step>, Vec<String>) {
    let (mut steps, mut waits) = (Vec::new(), Vec::new());
    let Some(wanted) = wanted else { return (steps, waits) };
    let has = match &seen.kubernetes {
        Known::NotAsked => return (steps, waits),
        Known::Away(why) => {
            waits.push(format!("what its curators have of Kubernetes is not known: {why}"));
            return (steps, waits);
        }
        Known::Nothing => None,
        Known::Has(has) => Some(has),
    };
    if wanted.removing {
        let with = seen.nodes.iter().filter(|node| runs(node.roles.iter())).count();
        match (has, with) {
            (None, _) => steps.push(Step::ForgetKubernetes),
            (Some(_), 0) => steps.push(Step::DeleteKubernetes),
            (Some(_), with) => {
                waits.push(format!("Kubernetes is to go, and {with} of its nodes have roles of it still"));
            }
        }
        return (steps, waits);
    }
    let Some(has) = has.filter(|has| is_told(&wanted.kubernetes, has)) else {
        match has.and_then(|has| all_at_once(&wanted.kubernetes, has, seen)) {
            Some(why) => waits.push(why),
            None => steps.push(Step::PutKubernetes),
        }
        return (steps, waits);
    };
    for keys in &wanted.rotate {
        steps.push(Step::Rotate { keys: *keys });
    }
    for rotation in &has.rotations {
        if !rotation.waits_for.is_empty() {
            waits.push(format!(
                "{} of Kubernetes are replaced, and {} {} not act on it yet",
                rotation.what,
                rotation.waits_for.join(", "),
                if rotation.waits_for.len() == 1 { "does" } else { "do" }
            ));
        }
    }
    if upgrade.is_none() {
        // What was assigned on the way to what is everybody's now.
        let same = has.assigned.iter().filter(|(_, bundle)| **bundle == has.settings.bundle);
        steps.extend(same.map(|(node, _)| Step::ClearBundle { node: node.clone() }));
    }
    (steps, waits)
}

/// Why the curators are not told of another bundle than they have: nodes run that, and would change all at once. So it is
/// where this database or the cluster was brought back from what was kept of it, and the other was not.
fn all_at_once(wanted: &Kubernetes, has: &Has, seen: &Seen) -> Option<String> {
    let runs_other = |node: &&Node| {
        node.kubernetes.as_ref().is_some_and(|kubernetes| !kubernetes.bundle.is_empty())
            && runs(node.roles.iter())
            && has.bundle_of(&node.id) != wanted.bundle
    };
    let others = seen.nodes.iter().filter(runs_other).count();
    let short = |digest: &str| digest.get(..16).unwrap_or(digest).to_owned();
    (has.settings.bundle != wanted.bundle && others > 0).then(|| {
        format!(
            "its curators have the bundle {}, and {} is wanted here; {others} of its nodes would change at once. They go one \
             by one with: shepherdctl cluster upgrade NAME --kubernetes BUNDLE",
            short(&has.settings.bundle),
            short(&wanted.bundle)
        )
    })
}

/// Whether the curators have what is wanted.
#[must_use]
pub fn is_told(wanted: &Kubernetes, has: &Has) -> bool {
    Kubernetes { version: String::new(), ..wanted.clone() } == has.settings
}

fn runs<'r>(mut roles: impl Iterator<Item = &'r String>) -> bool {
    roles.any(|role| role == CONTROLLER || role == WORKER)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::cluster::state::{Health, NodeState};

    pub(crate) fn kubernetes() -> Kubernetes {
        Kubernetes {
            bundle: "a".repeat(64),
            version: "1.30.1".to_owned(),
            service_range: SERVICE_RANGE.to_owned(),
            pod_range: POD_RANGE.to_owned(),
            node_prefix: NODE_PREFIX,
            domain: DOMAIN.to_owned(),
            add_ons: BTreeMap::new(),
            storage: None,
        }
    }

    fn with(change: impl FnOnce(&mut Kubernetes)) -> Kubernetes {
        let mut changed = kubernetes();
        change(&mut changed);
        changed
    }

    #[test]
    fn what_cannot_be_is_refused_in_words() {
        let add_on = |name: &str| BTreeMap::from([(name.to_owned(), "b".repeat(64))]);
        let storage = |driver: &str| Some(Storage { driver: driver.to_owned(), class: "fast".to_owned() });
        for (asked, expected) in [
            (kubernetes(), ""),
            (with(|k| k.add_ons = add_on("dns")), ""),
            (with(|k| k.storage = storage("csi.example.org")), ""),
            (with(|k| k.service_range = "10.96.0.0".into()), "service_range: \"10.96.0.0\" is no range"),
            (
                with(|k| k.service_range = "10.96.0.0/33".into()),
                "service_range: \"10.96.0.0/33\" is no range",
            ),
            (
                with(|k| k.service_range = "10.96.0.0/8".into()),
                "service_range: 10.96.0.0/8 begins in the middle of a range",
            ),
            (
                with(|k| k.service_range = "10.96.0.0/29".into()),
                "service_range: 10.96.0.0/29 is no range for services",
            ),
            (
                with(|k| k.pod_range = "10.96.128.0/18".into()),
                "service_range and pod_range: 10.96.0.0/16 and 10.96.128.0/18 have addresses in common",
            ),
            (with(|k| k.node_prefix = 11), "node_prefix: it is 11"),
            (with(|k| k.node_prefix = 29), "node_prefix: it is 29"),
            (with(|k| k.domain = "cluster..local".into()), "\"cluster..local\" is no domain"),
            (with(|k| k.add_ons = add_on("DNS")), "\"DNS\" names no add-on"),
            (with(|k| k.storage = storage("")), "\"\" names no driver of storage"),
        ] {
            let said = asked.check().err().unwrap_or_default();
            assert!(
                said.starts_with(expected) && said.is_empty() == expected.is_empty(),
                "{expected}: {said}"
            );
        }
    }

    fn seen(known: Known, roles: &[&str]) -> Seen {
        let node = Node {
            id: "node-1".to_owned(),
            key: [1; 32],
            machine: None,
            state: NodeState::Up,
            roles: roles.iter().map(|&role| role.to_owned()).collect(),
            health: Health::Healthy,
            services: Vec::new(),
            kubernetes: None,
        };
        Seen { nodes: vec![node], kubernetes: known, ..Seen::default() }
    }

    #[test]
    fn curators_are_told_what_they_do_not_have_and_forget_what_nobody_runs() {
        let has = |kubernetes: &Kubernetes| {
            Known::Has(Has { settings: told(kubernetes.settings()), ..Has::default() })
        };
        let other = with(|k| k.bundle = "b".repeat(64));
        let wanted = |removing, rotate: &[Keys]| Wanted {
            kubernetes: kubernetes(),
            removing,
            rotate: rotate.to_vec(),
        };
        for (wanted, known, roles, steps, waits) in [
            (wanted(false, &[]), Known::Nothing, vec![], vec![Step::PutKubernetes], 0),
            (wanted(false, &[]), has(&other), vec![WORKER], vec![Step::PutKubernetes], 0),
            (wanted(false, &[]), has(&kubernetes()), vec![WORKER], vec![], 0),
            (wanted(false, &[]), Known::Away("busy".into()), vec![], vec![], 1),
            (wanted(true, &[]), Known::Away("busy".into()), vec![], vec![], 1),
            (wanted(false, &[]), Known::NotAsked, vec![], vec![], 0),
            (
                wanted(false, &[Keys::Etcd]),
                has(&kubernetes()),
                vec![],
                vec![Step::Rotate { keys: Keys::Etcd }],
                0,
            ),
            // Not before they have it: there is nothing to be replaced.
            (wanted(false, &[Keys::Etcd]), Known::Nothing, vec![], vec![Step::PutKubernetes], 0),
            (wanted(true, &[]), has(&kubernetes()), vec![WORKER], vec![], 1),
            (wanted(true, &[]), has(&kubernetes()), vec![CONTROLLER], vec![], 1),
            (wanted(true, &[]), has(&kubernetes()), vec!["web"], vec![Step::DeleteKubernetes], 0),
            (wanted(true, &[]), Known::Nothing, vec![], vec![Step::ForgetKubernetes], 0),
        ] {
            let (planned, waited) = next(Some(&wanted), None, &seen(known.clone(), &roles));
            assert_eq!((planned, waited.len()), (steps, waits), "{wanted:?} {known:?} {roles:?}");
        }
        assert_eq!(next(None, None, &seen(has(&other), &[WORKER])), (vec![], vec![]), "theirs is left alone");
    }

    #[test]
    fn another_bundle_is_not_put_while_nodes_run_the_one_that_curators_have() {
        let wanted = Wanted { kubernetes: kubernetes(), removing: false, rotate: Vec::new() };
        let other = with(|k| k.bundle = "b".repeat(64));
        let mut has = Has { settings: told(other.settings()), ..Has::default() };
        let world = |has: &Has, runs: &str| {
            let mut seen = seen(Known::Has(has.clone()), &[WORKER]);
            seen.nodes[0].kubernetes = Some(OnNode { bundle: runs.to_owned(), ..OnNode::default() });
            next(Some(&wanted), None, &seen)
        };
        let (steps, waits) = world(&has, &other.bundle);
        assert_eq!(steps, []);
        assert!(waits[0].contains("1 of its nodes would change at once"), "{waits:?}");
        assert_eq!(world(&has, "").0, [Step::PutKubernetes], "nothing runs yet");
        has.assigned.insert("node-1".to_owned(), kubernetes().bundle);
        assert_eq!(world(&has, &other.bundle).0, [Step::PutKubernetes], "an upgrade has brought it there");
    }

    #[test]
    fn what_was_assigned_on_the_way_is_cleared_when_everybody_has_it() {
        let wanted = Wanted { kubernetes: kubernetes(), removing: false, rotate: Vec::new() };
        let assigned =
            [("node-1", "a"), ("node-2", "b")].map(|(node, bundle)| (node.to_owned(), bundle.repeat(64)));
        let has =
            Has { settings: told(kubernetes().settings()), assigned: assigned.into(), ..Has::default() };
        let steps = next(Some(&wanted), None, &seen(Known::Has(has), &[])).0;
        assert_eq!(steps, [Step::ClearBundle { node: "node-1".to_owned() }]);
    }

    #[test]
    fn node_is_well_when_all_of_it_is() {
        let component = |name: &str, state: &str, message: &str| Component {
            name: name.to_owned(),
            state: state.to_owned(),
            since: None,
            restarts: 0,
            message: message.to_owned(),
        };
        let well = OnNode {
            bundle: "a".repeat(64),
            components: vec![component("kubelet", "healthy", "")],
            ..OnNode::default()
        };
        assert_eq!(well.unwell(), None);
        let said = |node: OnNode| node.unwell().unwrap_or_default();
        assert_eq!(said(OnNode::default()), "it runs nothing of Kubernetes yet");
        assert_eq!(said(OnNode { waits: "it fetches".into(), ..OnNode::default() }), "it fetches");
        assert_eq!(said(OnNode { waits: "it drains".into(), ..well.clone() }), "it drains");
        let ill =
            vec![component("containerd", "healthy", ""), component("kubelet", "unhealthy", "no answer")];
        assert_eq!(said(OnNode { components: ill, ..well }), "kubelet is unhealthy: no answer");
    }

    #[test]
    fn keys_have_names() {
        for keys in Keys::ALL {
            assert_eq!(keys.as_str().parse::<Keys>().unwrap(), keys);
            assert_eq!(Keys::of_wire(keys.to_wire()), Some(keys));
        }
        assert!("ca".parse::<Keys>().is_err());
        assert_eq!(Keys::of_wire(wire::KubernetesKeys::Unspecified), None);
    }
}
