//! A cluster as people see it: the same from the database and through the API.

use serde::{Deserialize, Serialize};

use crate::model::cluster::declared::{DeclarationView, ServiceView};
use crate::model::cluster::kubernetes::OnNode;
use crate::model::cluster::kubernetes_view::{KubernetesView, UpgradeView};
use crate::model::time::Timestamp;

/// How far a cluster has come that is not being restored.
#[must_use]
pub fn stage(deleting: bool, founded: bool, machines: usize, settled: bool) -> &'static str {
    match (deleting, founded, settled) {
        (true, ..) => "ending",
        (false, false, _) if machines == 0 => "waiting for machines",
        (false, false, _) => "founding",
        (false, true, false) => "changing",
        (false, true, true) => "settled",
    }
}

/// All that [`stage`] says, and what a cluster is in that is being restored.
pub const STAGES: [&str; 6] =
    ["waiting for machines", "founding", "changing", "settled", RESTORING, "ending"];
/// The stage of a cluster that is being restored and does not end.
pub const RESTORING: &str = "restoring";

/// A cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterView {
    /// Its name.
    pub name: String,
    /// UUID.
    pub id: String,
    /// `waiting for machines`, `founding`, `changing`, `settled`, `restoring` or `ending`.
    pub stage: String,
    /// Members of etcd that are wanted.
    pub control_plane: u32,
    /// Other nodes that are wanted.
    pub workers: u32,
    /// Which machines may be chosen.
    pub select: String,
    /// Roles of every worker.
    pub roles: Vec<String>,
    /// `automatic` or `manual`.
    pub approval: String,
    /// When it was asked for, and by whom.
    pub created_at: Timestamp,
    /// By whom.
    pub created_by: String,
    /// Who said that it is to end.
    pub deleting_by: Option<String>,
    /// Where its curators are.
    pub curators: Vec<String>,
    /// When its curators last answered.
    pub seen_at: Option<Timestamp>,
    /// Members of etcd that vote, and those that were reached.
    pub voters: Option<u32>,
    /// How many of them were reached.
    pub voters_reached: Option<u32>,
    /// When the last snapshot of it was taken.
    #[serde(default)]
    pub snapshot_at: Option<Timestamp>,
    /// How often it was restored from a snapshot, or is to have been.
    #[serde(default)]
    pub epoch: u64,
    /// When it was restored last.
    #[serde(default)]
    pub restored_at: Option<Timestamp>,
    /// From which snapshot it is being restored.
    #[serde(default)]
    pub restoring_from: Option<String>,
    /// As whom.
    #[serde(default)]
    pub restoring_by: Option<String>,
    /// Since when the shepherd's key for it is in force.
    #[serde(default)]
    pub key_since: Option<Timestamp>,
    /// Who wants that replaced.
    #[serde(default)]
    pub key_asked_by: Option<String>,
    /// Since when its curators refuse every key that the shepherd has for it.
    #[serde(default)]
    pub keys_refused_since: Option<Timestamp>,
    /// What it waits for as a whole.
    pub waits: Vec<String>,
    /// Its machines, in the order in which they were chosen.
    pub machines: Vec<ClusterMachineView>,
    /// Roles that were declared to it, in order of their names.
    #[serde(default)]
    pub declarations: Vec<DeclarationView>,
    /// What it is to run of Kubernetes.
    #[serde(default)]
    pub kubernetes: Option<KubernetesView>,
    /// The upgrade that is under way, or else the newest one.
    #[serde(default)]
    pub upgrade: Option<UpgradeView>,
}

/// A machine of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterMachineView {
    /// UUID.
    pub machine: String,
    /// Its provider's name for it.
    pub name: String,
    /// `control-plane` or `worker`.
    pub part: String,
    /// Where it stands.
    pub location: Option<String>,
    /// Where it is in its life as a machine.
    pub phase: String,
    /// Its node, once it is one.
    pub node: Option<String>,
    /// `new`, `standby`, `up` or `decommissioned`, as the curator said.
    pub state: Option<String>,
    /// `healthy`, `silent` or `unknown`, as the curator said.
    pub health: Option<String>,
    /// Its roles.
    pub roles: Vec<String>,
    /// Why it leaves, if it does.
    pub leaving: Option<String>,
    /// What it waits for.
    pub waits: Option<String>,
    /// What it runs of operators' roles.
    #[serde(default)]
    pub services: Vec<ServiceView>,
    /// What it runs of Kubernetes.
    #[serde(default)]
    pub kubernetes: Option<OnNode>,
}

/// What a machine is in its cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartOfCluster {
    /// The cluster's name.
    pub name: String,
    /// `control-plane` or `worker`.
    pub part: String,
    /// Why it leaves, if it does.
    pub leaving: Option<String>,
    /// What it waits for.
    pub waits: Option<String>,
    /// How its node does, as the curator said.
    pub health: Option<String>,
    /// What it runs of Kubernetes, as it said.
    pub kubernetes: Option<OnNode>,
}

impl PartOfCluster {
    /// What bears on the machine, a part of a sentence without its end.
    #[must_use]
    pub fn note(&self) -> String {
        let mut said = format!("it is of the {} of cluster {}", self.part, self.name);
        if self.part == "worker" {
            said = format!("it is a worker of cluster {}", self.name);
        }
        if let Some(why) = &self.leaving {
            said.push_str(", and leaves it: ");
            said.push_str(why);
        }
        match (&self.waits, &self.health) {
            (Some(waits), _) => {
                said.push_str("; there it waits: ");
                said.push_str(waits);
            }
            (None, Some(health)) => {
                said.push_str("; its node is ");
                said.push_str(health);
                said.push_str(" to its curator");
            }
            (None, None) => {}
        }
        match self.kubernetes.as_ref().map(|kubernetes| (&kubernetes.version, kubernetes.unwell())) {
            Some((version, None)) => {
                said.push_str("; Kubernetes ");
                said.push_str(version);
                said.push_str(" is well on it");
            }
            Some((_, Some(why))) => {
                said.push_str("; Kubernetes is not well on it: ");
                said.push_str(&why);
            }
            None => {}
        }
        said
    }
}

impl ClusterView {
    /// How many of its machines are nodes that are heard.
    #[must_use]
    pub fn healthy(&self) -> usize {
        self.machines.iter().filter(|machine| machine.health.as_deref() == Some("healthy")).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_tells_what_a_machine_waits_for() {
        let worker =
            PartOfCluster { name: "ams".to_owned(), part: "worker".to_owned(), ..Default::default() };
        let text = |text: &str| Some(text.to_owned());
        for (part, expected) in [
            (worker.clone(), "it is a worker of cluster ams"),
            (
                PartOfCluster { health: text("healthy"), ..worker.clone() },
                "it is a worker of cluster ams; its node is healthy to its curator",
            ),
            (
                PartOfCluster {
                    part: "control-plane".to_owned(),
                    waits: text("it learns"),
                    ..worker.clone()
                },
                "it is of the control-plane of cluster ams; there it waits: it learns",
            ),
            (
                PartOfCluster {
                    kubernetes: Some(OnNode {
                        waits: "it fetches the bundle".to_owned(),
                        ..OnNode::default()
                    }),
                    ..worker.clone()
                },
                "it is a worker of cluster ams; Kubernetes is not well on it: it fetches the bundle",
            ),
            (
                PartOfCluster { leaving: text("it is being retired"), ..worker },
                "it is a worker of cluster ams, and leaves it: it is being retired",
            ),
        ] {
            assert_eq!(part.note(), expected);
        }
    }

    #[test]
    fn stage_tells_the_most_important() {
        for (deleting, founded, machines, settled, expected) in [
            (true, true, 3, true, "ending"),
            (false, false, 0, false, "waiting for machines"),
            (false, false, 3, false, "founding"),
            (false, true, 3, false, "changing"),
            (false, true, 3, true, "settled"),
        ] {
            assert_eq!(stage(deleting, founded, machines, settled), expected);
        }
    }
}
