//! What an operator asks a cluster to be.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::model::cluster::kubernetes::{CONTROLLER, WORKER};
use crate::model::cluster::selector::Selector;
use crate::model::process::UnknownName;

/// Longest name, in characters: it is part of names of hosts.
const LONGEST_NAME: usize = 63;
/// Numbers of members that etcd is run with: an even one bears no more losses than the odd one before it.
pub const CONTROL_PLANES: [u32; 4] = [1, 3, 5, 7];
/// Most workers; the curator watches each of them.
pub const MOST_WORKERS: u32 = 5_000;
const MOST_ROLES: usize = 64;

/// Who lets a machine's key into the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Approval {
    /// The shepherd: exactly the key that the machine reported over its pinned agent channel.
    #[default]
    Automatic,
    /// A person, one by one.
    Manual,
}

impl Approval {
    /// Both.
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

impl FromStr for Approval {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "kind of approval",
            name: name.to_owned(),
            known: "automatic, manual",
        })
    }
}

/// What a machine is for in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// A member of etcd, with a curator.
    ControlPlane,
    /// Runs the roles of workers.
    Worker,
}

impl Part {
    /// Both, the first one first.
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

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Part {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|part| part.as_str() == name).ok_or_else(|| UnknownName {
            what: "part of a cluster",
            name: name.to_owned(),
            known: "control-plane, worker",
        })
    }
}

/// What a cluster is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Its name.
    pub name: String,
    /// Members of etcd.
    pub control_plane: u32,
    /// Other nodes.
    pub workers: u32,
    /// Which machines may be chosen.
    pub selector: Selector,
    /// Roles of every worker, as they are declared to the cluster.
    pub roles: BTreeSet<String>,
    /// Who lets machines in.
    pub approval: Approval,
}

impl Spec {
    /// Checks it; the error is a sentence.
    pub fn check(&self) -> Result<(), String> {
        check_name(&self.name)?;
        if !CONTROL_PLANES.contains(&self.control_plane) {
            return Err(format!(
                "a control plane of {} cannot be: it has 1, 3, 5 or 7 members, because an even number bears no \
                 more losses than the odd one before it",
                self.control_plane
            ));
        }
        if self.workers > MOST_WORKERS {
            return Err(format!(
                "{} workers are too many: a cluster has at most {MOST_WORKERS}",
                self.workers
            ));
        }
        if self.roles.len() > MOST_ROLES {
            return Err(format!("{} roles are too many: {MOST_ROLES} are enough", self.roles.len()));
        }
        for role in &self.roles {
            check_role(role)?;
        }
        Ok(())
    }

    /// What it is with a change; the error is a sentence.
    pub fn with(&self, change: &Change) -> Result<Self, String> {
        let mut changed = self.clone();
        changed.control_plane = change.control_plane.unwrap_or(self.control_plane);
        changed.workers = change.workers.unwrap_or(self.workers);
        changed.roles.extend(change.give.iter().cloned());
        changed.roles.retain(|role| !change.take.contains(role));
        changed.check().map(|()| changed)
    }

    /// How many are wanted of a part.
    #[must_use]
    pub const fn wanted(&self, part: Part) -> u32 {
        match part {
            Part::ControlPlane => self.control_plane,
            Part::Worker => self.workers,
        }
    }
}

/// A change of what a cluster is to be; what is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Members of etcd.
    pub control_plane: Option<u32>,
    /// Other nodes.
    pub workers: Option<u32>,
    /// Roles of workers to give.
    pub give: BTreeSet<String>,
    /// Roles of workers to take.
    pub take: BTreeSet<String>,
}

/// Whether this can be a cluster's name; if not, a sentence.
pub fn check_name(name: &str) -> Result<(), String> {
    is_label(name).then_some(()).ok_or_else(|| {
        format!(
            "{name:?} is no name of a cluster: it has 1 to {LONGEST_NAME} lower-case letters, digits and dashes, and \
             begins and ends with a letter or a digit"
        )
    })
}

fn check_role(role: &str) -> Result<(), String> {
    if role == "consensus-member" {
        return Err(
            "consensus-member is given to the control plane by itself; say --control-plane N".to_owned()
        );
    }
    if role == CONTROLLER || role == WORKER {
        return Err(format!(
            "{role} is given by itself where a cluster has Kubernetes; say --kubernetes BUNDLE, or: shepherdctl cluster \
             kubernetes set"
        ));
    }
    is_label(role)
        .then_some(())
        .ok_or_else(|| format!("{role:?} is no role: it has 1 to 63 lower-case letters, digits and dashes"))
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    (1..=LONGEST_NAME).contains(&text.len())
        && text.chars().all(|c| inner(c) || c == '-')
        && text.starts_with(inner)
        && text.ends_with(inner)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn spec(control_plane: u32, workers: u32) -> Spec {
        Spec {
            name: "ams".to_owned(),
            control_plane,
            workers,
            selector: Selector::default(),
            roles: BTreeSet::new(),
            approval: Approval::Automatic,
        }
    }

    #[test]
    fn what_cannot_be_is_refused_in_words() {
        let roles = |roles: &[&str]| Spec {
            roles: roles.iter().map(|role| (*role).to_owned()).collect(),
            ..spec(3, 1)
        };
        for (asked, expected) in [
            (spec(3, 5), ""),
            (spec(1, 0), ""),
            (roles(&["web"]), ""),
            (spec(0, 5), "a control plane of 0 cannot be"),
            (spec(4, 5), "a control plane of 4 cannot be"),
            (spec(9, 5), "a control plane of 9 cannot be"),
            (spec(3, 5_001), "5001 workers are too many"),
            (roles(&["consensus-member"]), "consensus-member is given to the control plane by itself"),
            (roles(&["Web"]), "\"Web\" is no role"),
            (roles(&["kubernetes-worker"]), "kubernetes-worker is given by itself"),
            (Spec { name: "Ams".to_owned(), ..spec(3, 1) }, "\"Ams\" is no name of a cluster"),
            (Spec { name: String::new(), ..spec(3, 1) }, "\"\" is no name of a cluster"),
            (Spec { name: "-a".to_owned(), ..spec(3, 1) }, "\"-a\" is no name"),
        ] {
            let said = asked.check().err().unwrap_or_default();
            assert!(said.starts_with(expected) && said.is_empty() == expected.is_empty(), "{said}");
        }
    }
}
