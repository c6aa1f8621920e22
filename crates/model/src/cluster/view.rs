//! A cluster as people see it: its stage, its Kubernetes, and the membership of a machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cluster::kubernetes::{
    CuratorKubernetes, KubernetesKeyRotation, KubernetesSpec, NodeKubernetes, is_in_sync,
};

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

/// Kubernetes by the last answer of a cluster's curators, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KubernetesStatusView {
    /// Whether the curators have the desired spec.
    #[serde(rename = "told")]
    pub in_sync: bool,
    /// Bundles assigned to single nodes, by node id.
    #[serde(rename = "assigned")]
    pub assigned_bundles: BTreeMap<String, String>,
    /// Rotations of keys that are under way.
    pub rotations: Vec<KubernetesKeyRotation>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

impl KubernetesStatusView {
    /// The part of the curators' answer that is stored.
    #[must_use]
    pub fn new(wanted: &KubernetesSpec, has: &CuratorKubernetes) -> Self {
        Self {
            in_sync: is_in_sync(wanted, has),
            assigned_bundles: has.assigned_bundles.clone(),
            rotations: has.rotations.clone(),
            api_servers: has.api_servers.clone(),
        }
    }
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
    /// Problem that the machine itself reports; `None` if it reports none.
    pub report_error: Option<String>,
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
        // What it waits for may be that problem.
        let repeated = |error: &String| self.wait_reason.as_ref().is_some_and(|waits| waits.contains(error));
        if let Some(error) = self.report_error.as_ref().filter(|error| !repeated(error)) {
            text.push_str("; the machine reports: ");
            text.push_str(error);
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
                    health: text("healthy"),
                    report_error: text("etcd would end with the role server"),
                    ..worker.clone()
                },
                "it is a worker of cluster ams; its node is healthy to its curator; the machine reports: etcd would \
                 end with the role server",
            ),
            (
                ClusterMembership {
                    wait_reason: text("it cannot join: no route"),
                    report_error: text("no route"),
                    ..worker.clone()
                },
                "it is a worker of cluster ams; there it waits: it cannot join: no route",
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
