//! Cluster view for the API and `shepherdctl`.

use serde::{Deserialize, Serialize};

use crate::cluster::declaration::{DeclarationView, ServiceView};
use crate::cluster::kubernetes::NodeKubernetes;
use crate::cluster::kubernetes_view::{KubernetesView, UpgradeView};
use crate::time::Timestamp;

/// Stage of a cluster that is not being restored.
#[must_use]
pub fn cluster_stage(deleting: bool, founded: bool, machines: usize, settled: bool) -> &'static str {
    match (deleting, founded, settled) {
        (true, ..) => "deleting",
        (false, false, _) if machines == 0 => "waiting for machines",
        (false, false, _) => "founding",
        (false, true, false) => "changing",
        (false, true, true) => "converged",
    }
}

/// All results of [`cluster_stage`], and the stage of a cluster that is being restored.
pub const STAGES: [&str; 6] =
    ["waiting for machines", "founding", "changing", "converged", RESTORING_STAGE, "deleting"];
/// Stage of a cluster that is being restored and not deleted.
pub const RESTORING_STAGE: &str = "restoring";

/// A cluster as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterView {
    /// Name of the cluster.
    pub name: String,
    /// UUID of the cluster.
    pub id: String,
    /// Stage: `waiting for machines`, `founding`, `changing`, `converged`, `restoring` or `deleting`.
    pub stage: String,
    /// Desired number of etcd members.
    pub control_plane: u32,
    /// Desired number of other nodes.
    pub workers: u32,
    /// Which machines may be chosen, as text.
    pub selector: String,
    /// Roles of every worker.
    pub roles: Vec<String>,
    /// Approval of keys: `automatic` or `manual`.
    pub approval: String,
    /// When the cluster was requested.
    pub created_at: Timestamp,
    /// Operator who requested the cluster.
    pub created_by: String,
    /// Operator who requested its deletion; `None` if it stays.
    pub deletion_requested_by: Option<String>,
    /// `host:port` of its curators.
    pub curators: Vec<String>,
    /// When its curators last answered.
    pub observed_at: Option<Timestamp>,
    /// Number of voting members of etcd, by the last answer of the curators.
    pub voters: Option<u32>,
    /// How many of them were reached.
    pub voters_reached: Option<u32>,
    /// When its last snapshot was taken.
    #[serde(default)]
    pub snapshot_at: Option<Timestamp>,
    /// How often it was restored, including a pending restore.
    #[serde(default)]
    pub epoch: u64,
    /// When it was last restored.
    #[serde(default)]
    pub restored_at: Option<Timestamp>,
    /// The snapshot from which it is being restored.
    #[serde(default)]
    pub restoring_from: Option<String>,
    /// Operator who requested the pending restore.
    #[serde(default)]
    pub restore_requested_by: Option<String>,
    /// When the shepherd's current owner key became the current one.
    #[serde(default)]
    pub key_since: Option<Timestamp>,
    /// Operator who ordered a rotation of that key, if one is pending.
    #[serde(default)]
    pub key_rotation_requested_by: Option<String>,
    /// When its curators began to refuse every owner key of the shepherd.
    #[serde(default)]
    pub keys_rejected_since: Option<Timestamp>,
    /// What the cluster as a whole waits for.
    pub wait_reasons: Vec<String>,
    /// Its machines, in the order in which they were chosen.
    pub machines: Vec<ClusterMachineView>,
    /// Declared roles, ordered by name.
    #[serde(default)]
    pub declarations: Vec<DeclarationView>,
    /// Its Kubernetes: desired spec and observed status.
    #[serde(default)]
    pub kubernetes: Option<KubernetesView>,
    /// The upgrade that is under way, or else the newest one.
    #[serde(default)]
    pub upgrade: Option<UpgradeView>,
}

/// A machine of a cluster as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterMachineView {
    /// UUID of the machine.
    pub machine: String,
    /// The provider's name for it.
    pub name: String,
    /// Part in the cluster: `control-plane` or `worker`.
    pub part: String,
    /// Location of the machine; `None` if unknown.
    pub location: Option<String>,
    /// Phase of the machine.
    pub phase: String,
    /// ID of its node; `None` while it is not a node.
    pub node: Option<String>,
    /// State of the node by its curator: `new`, `standby`, `up` or `decommissioned`.
    pub state: Option<String>,
    /// Health of the node by its curator: `healthy`, `silent` or `unknown`.
    pub health: Option<String>,
    /// Roles of its node.
    pub roles: Vec<String>,
    /// Why it leaves; `None` if it stays.
    pub leave_reason: Option<String>,
    /// What it waits for; `None` if it waits for nothing.
    pub wait_reason: Option<String>,
    /// Services of operators' roles on it.
    #[serde(default)]
    pub services: Vec<ServiceView>,
    /// Kubernetes on it, from its node's last report.
    #[serde(default)]
    pub kubernetes: Option<NodeKubernetes>,
}

/// Membership of a machine in its cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterMembership {
    /// Name of the cluster.
    pub name: String,
    /// Part: `control-plane` or `worker`.
    pub part: String,
    /// Why the machine leaves; `None` if it stays.
    pub leave_reason: Option<String>,
    /// What it waits for; `None` if it waits for nothing.
    pub wait_reason: Option<String>,
    /// Health of its node by the curator.
    pub health: Option<String>,
    /// Kubernetes on it, from its node's last report.
    pub kubernetes: Option<NodeKubernetes>,
}

impl ClusterMembership {
    /// Describes the membership, as a part of a sentence without its end.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut text = format!("it is of the {} of cluster {}", self.part, self.name);
        if self.part == "worker" {
            text = format!("it is a worker of cluster {}", self.name);
        }
        if let Some(why) = &self.leave_reason {
            text.push_str(", and leaves it: ");
            text.push_str(why);
        }
        match (&self.wait_reason, &self.health) {
            (Some(waits), _) => {
                text.push_str("; there it waits: ");
                text.push_str(waits);
            }
            (None, Some(health)) => {
                text.push_str("; its node is ");
                text.push_str(health);
                text.push_str(" to its curator");
            }
            (None, None) => {}
        }
        match self.kubernetes.as_ref().map(|kubernetes| (&kubernetes.version, kubernetes.unhealthy_reason()))
        {
            Some((version, None)) => {
                text.push_str("; Kubernetes ");
                text.push_str(version);
                text.push_str(" is well on it");
            }
            Some((_, Some(why))) => {
                text.push_str("; Kubernetes is not well on it: ");
                text.push_str(&why);
            }
            None => {}
        }
        text
    }
}

impl ClusterView {
    /// How many of its machines are healthy nodes.
    #[must_use]
    pub fn healthy_nodes(&self) -> usize {
        self.machines.iter().filter(|machine| machine.health.as_deref() == Some("healthy")).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_says_what_a_machine_waits_for() {
        let worker =
            ClusterMembership { name: "ams".to_owned(), part: "worker".to_owned(), ..Default::default() };
        let text = |text: &str| Some(text.to_owned());
        for (part, expected) in [
            (worker.clone(), "it is a worker of cluster ams"),
            (
                ClusterMembership { health: text("healthy"), ..worker.clone() },
                "it is a worker of cluster ams; its node is healthy to its curator",
            ),
            (
                ClusterMembership {
                    part: "control-plane".to_owned(),
                    wait_reason: text("it learns"),
                    ..worker.clone()
                },
                "it is of the control-plane of cluster ams; there it waits: it learns",
            ),
            (
                ClusterMembership {
                    kubernetes: Some(NodeKubernetes {
                        wait_reason: "it fetches the bundle".to_owned(),
                        ..NodeKubernetes::default()
                    }),
                    ..worker.clone()
                },
                "it is a worker of cluster ams; Kubernetes is not well on it: it fetches the bundle",
            ),
            (
                ClusterMembership { leave_reason: text("it is being retired"), ..worker },
                "it is a worker of cluster ams, and leaves it: it is being retired",
            ),
        ] {
            assert_eq!(part.describe(), expected);
        }
    }

    #[test]
    fn stage_shows_the_most_important_state() {
        for (deleting, founded, machines, settled, expected) in [
            (true, true, 3, true, "deleting"),
            (false, false, 0, false, "waiting for machines"),
            (false, false, 3, false, "founding"),
            (false, true, 3, false, "changing"),
            (false, true, 3, true, "converged"),
        ] {
            assert_eq!(cluster_stage(deleting, founded, machines, settled), expected);
        }
    }
}
