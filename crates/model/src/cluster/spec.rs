//! Cluster spec and its validation.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::cluster::kubernetes::{CONTROLLER_ROLE, WORKER_ROLE, is_dns_label};
use crate::process::UnknownName;
use crate::selector::Selector;
use crate::selector::error::SelectorError;
use crate::selector::key::SelectorKey;

/// Longest name in characters: host names contain it.
const MAX_NAME_CHARS: usize = 63;
/// Permitted numbers of etcd members: an even number tolerates no more failures than the odd one before it.
pub const CONTROL_PLANE_SIZES: [u32; 4] = [1, 3, 5, 7];
/// Most workers of one cluster; the curator watches each of them.
pub const MAX_WORKERS: u32 = 5_000;
const MAX_ROLES: usize = 64;
/// Keys that a cluster's selector cannot have, because they change while a machine waits to be chosen. The cluster loop
/// itself requires a healthy machine that is in no cluster and is not held.
const REFUSED_KEYS: [SelectorKey; 3] = [SelectorKey::Phase, SelectorKey::Fact, SelectorKey::Cluster];

/// Who approves a machine's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JoinApproval {
    /// The shepherd approves exactly the key that the machine reported over its pinned agent channel.
    #[default]
    Automatic,
    /// A person approves each key.
    Manual,
}

impl JoinApproval {
    /// Both kinds of approval.
    pub const ALL: [Self; 2] = [Self::Automatic, Self::Manual];

    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Automatic => "automatic",
            Self::Manual => "manual",
        }
    }
}

impl FromStr for JoinApproval {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "kind of approval",
            name: name.to_owned(),
            known: "automatic, manual",
        })
    }
}

/// The part that a machine plays in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterPart {
    /// A member of etcd, with a curator.
    ControlPlane,
    /// A node with the roles of workers.
    Worker,
}

impl ClusterPart {
    /// Both parts; members of the control plane are chosen first.
    pub const ALL: [Self; 2] = [Self::ControlPlane, Self::Worker];

    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ControlPlane => "control-plane",
            Self::Worker => "worker",
        }
    }
}

impl fmt::Display for ClusterPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ClusterPart {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|part| part.as_str() == name).ok_or_else(|| UnknownName {
            what: "part of a cluster",
            name: name.to_owned(),
            known: "control-plane, worker",
        })
    }
}

/// Desired state of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterSpec {
    /// Name of the cluster, a DNS label.
    pub name: String,
    /// Number of etcd members.
    pub control_plane: u32,
    /// Number of nodes that are not members of etcd.
    pub workers: u32,
    /// Which machines may be chosen.
    pub selector: Selector,
    /// Roles of every worker, as they are declared to the cluster.
    pub roles: BTreeSet<String>,
    /// Who approves the keys of machines.
    pub approval: JoinApproval,
}

impl ClusterSpec {
    /// Validates the spec; the error is a sentence.
    pub fn validate(&self) -> Result<(), String> {
        check_cluster_name(&self.name)?;
        if !CONTROL_PLANE_SIZES.contains(&self.control_plane) {
            return Err(format!(
                "a control plane cannot have {} members: use 1, 3, 5 or 7, because an even number tolerates no \
                 more losses than the odd number below it",
                self.control_plane
            ));
        }
        if self.workers > MAX_WORKERS {
            return Err(format!(
                "{} workers are too many: a cluster has at most {MAX_WORKERS}",
                self.workers
            ));
        }
        if self.roles.len() > MAX_ROLES {
            return Err(format!("{} roles are too many: {MAX_ROLES} are enough", self.roles.len()));
        }
        for role in &self.roles {
            check_worker_role(role)?;
        }
        check_cluster_selector(&self.selector)
    }

    /// Returns the changed spec, validated; the error is a sentence.
    pub fn apply_change(&self, change: &ClusterSpecChange) -> Result<Self, String> {
        let mut changed = self.clone();
        changed.control_plane = change.control_plane.unwrap_or(self.control_plane);
        changed.workers = change.workers.unwrap_or(self.workers);
        changed.roles.extend(change.add_roles.iter().cloned());
        changed.roles.retain(|role| !change.remove_roles.contains(role));
        changed.validate().map(|()| changed)
    }

    /// Desired number of machines of a part.
    #[must_use]
    pub const fn desired_count(&self, part: ClusterPart) -> u32 {
        match part {
            ClusterPart::ControlPlane => self.control_plane,
            ClusterPart::Worker => self.workers,
        }
    }
}

/// A change of a cluster spec; absent fields stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSpecChange {
    /// New number of etcd members.
    pub control_plane: Option<u32>,
    /// New number of other nodes.
    pub workers: Option<u32>,
    /// Roles that workers get.
    pub add_roles: BTreeSet<String>,
    /// Roles that workers lose.
    pub remove_roles: BTreeSet<String>,
    /// Whether the authority of the cluster stays when members of the control plane leave by this change.
    pub keep_authority: bool,
}

/// Checks a cluster's name; the error is a sentence.
pub fn check_cluster_name(name: &str) -> Result<(), String> {
    is_dns_label(name).then_some(()).ok_or_else(|| {
        format!(
            "{name:?} is not a valid name of a cluster: a name has 1 to {MAX_NAME_CHARS} lower-case \
             letters, digits and dashes, and begins and ends with a letter or a digit"
        )
    })
}

/// Checks the selector of a cluster's machines; the error is a sentence.
pub fn check_cluster_selector(selector: &Selector) -> Result<(), String> {
    selector.keys().find(|key| REFUSED_KEYS.contains(key)).map_or(Ok(()), |key| {
        Err(format!(
            "the selector of a cluster cannot have {}: a cluster always takes machines that are Ready or Installed, in no \
             cluster, and not held, quarantined or retiring; select by name, provider, location, hardware or label",
            key.as_str()
        ))
    })
}

/// Parses the selector of a cluster's machines; the error is a sentence.
pub fn parse_cluster_selector(text: &str) -> Result<Selector, String> {
    let selector: Selector = text.parse().map_err(|error: SelectorError| error.to_string())?;
    check_cluster_selector(&selector).map(|()| selector)
}

fn check_worker_role(role: &str) -> Result<(), String> {
    if role == "consensus-member" {
        return Err(
            "consensus-member is given to the control plane automatically; set its size with --control-plane N"
                .to_owned(),
        );
    }
    if role == CONTROLLER_ROLE || role == WORKER_ROLE {
        return Err(format!(
            "{role} is given automatically if a cluster has Kubernetes; give --kubernetes-bundle BUNDLE, or: \
             shepherdctl cluster kubernetes set"
        ));
    }
    is_dns_label(role).then_some(()).ok_or_else(|| {
        format!(
            "{role:?} is not a valid name of a role: it has 1 to 63 lower-case letters, \
                                digits and dashes"
        )
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn spec(control_plane: u32, workers: u32) -> ClusterSpec {
        ClusterSpec {
            name: "ams".to_owned(),
            control_plane,
            workers,
            selector: Selector::default(),
            roles: BTreeSet::new(),
            approval: JoinApproval::Automatic,
        }
    }

    #[test]
    fn selector_of_a_cluster_names_nothing_that_changes() {
        for (text, refused) in [
            ("", None),
            ("name=rack/u-*,provider=rack,location=ams*,manufacturer=Dell*,product=R640", None),
            ("label.row=7,memory>=64GiB,cpus>=32", None),
            ("location=ams*,phase=Ready", Some("cannot have phase")),
            ("fact!=hold", Some("cannot have fact")),
            ("cluster!=prod", Some("cannot have cluster")),
            ("phase=Redy", Some("is not a phase")),
        ] {
            let parsed = parse_cluster_selector(text);
            let message = parsed.as_ref().err().cloned().unwrap_or_default();
            assert_eq!(parsed.is_err(), refused.is_some(), "{text}: {message}");
            assert!(message.contains(refused.unwrap_or_default()), "{text}: {message}");
            if let Ok(selector) = text.parse() {
                let valid = ClusterSpec { selector, ..spec(3, 1) }.validate();
                assert_eq!(valid.is_err(), refused.is_some(), "{text}: {valid:?}");
            }
        }
    }

    #[test]
    fn invalid_specs_are_rejected_with_a_reason() {
        let roles = |roles: &[&str]| ClusterSpec {
            roles: roles.iter().map(|role| (*role).to_owned()).collect(),
            ..spec(3, 1)
        };
        for (cluster_spec, expected) in [
            (spec(3, 5), ""),
            (spec(1, 0), ""),
            (roles(&["web"]), ""),
            (spec(0, 5), "a control plane cannot have 0 members"),
            (spec(4, 5), "a control plane cannot have 4 members"),
            (spec(9, 5), "a control plane cannot have 9 members"),
            (spec(3, 5_001), "5001 workers are too many"),
            (roles(&["consensus-member"]), "consensus-member is given to the control plane automatically"),
            (roles(&["Web"]), "\"Web\" is not a valid name of a role"),
            (roles(&["kubernetes-worker"]), "kubernetes-worker is given automatically"),
            (
                ClusterSpec { name: "Ams".to_owned(), ..spec(3, 1) },
                "\"Ams\" is not a valid name of a cluster",
            ),
            (ClusterSpec { name: String::new(), ..spec(3, 1) }, "\"\" is not a valid name of a cluster"),
            (ClusterSpec { name: "-a".to_owned(), ..spec(3, 1) }, "\"-a\" is not a valid name of a cluster"),
        ] {
            let output = cluster_spec.validate().err().unwrap_or_default();
            assert!(output.starts_with(expected) && output.is_empty() == expected.is_empty(), "{output}");
        }
    }
}
