//! Reconcile Kubernetes: the curators get the desired spec, rotate keys, and delete Kubernetes at its end.
//!
//! The curators get the spec when they have a different one or have lost it, as with declared roles: no shepherd has to
//! remember what it sent. Which nodes run Kubernetes is decided with their other roles ([`roles`][super::roles]), and
//! which bundle a node runs during an upgrade by [`upgrade`][super::upgrade]. When Kubernetes is removed, workers lose
//! their roles before controllers do, so that the last API server stays for as long as it has clients.

use crate::cluster::kubernetes::{
    CONTROLLER_ROLE, CuratorKubernetes, DesiredKubernetes, KubernetesSpec, ObservedKubernetes, WORKER_ROLE,
    is_in_sync,
};
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::state::{ClusterNode, ObservedCluster};
use crate::cluster::upgrade::ClusterUpgrade;

/// The steps towards the desired Kubernetes, and what they wait for (one sentence each). Upgrades are planned by
/// [`super::upgrade`].
#[must_use]
pub(super) fn plan_kubernetes(
    wanted: Option<&DesiredKubernetes>,
    upgrade: Option<&ClusterUpgrade>,
    seen: &ObservedCluster,
) -> (Vec<ClusterPlanStep>, Vec<String>) {
    let (mut steps, mut waits) = (Vec::new(), Vec::new());
    let Some(wanted) = wanted else { return (steps, waits) };
    let has = match &seen.kubernetes {
        ObservedKubernetes::NotQueried => return (steps, waits),
        ObservedKubernetes::Unavailable(why) => {
            waits.push(format!("the Kubernetes settings of its curators are not known: {why}"));
            return (steps, waits);
        }
        ObservedKubernetes::Absent => None,
        ObservedKubernetes::Present(has) => Some(has),
    };
    if wanted.removing {
        let with = seen.nodes.iter().filter(|node| has_kubernetes_role(node.roles.iter())).count();
        match (has, with) {
            (None, _) => steps.push(ClusterPlanStep::DeleteKubernetesRecord),
            (Some(_), 0) => steps.push(ClusterPlanStep::DeleteKubernetes),
            (Some(_), with) => {
                waits.push(format!(
                    "Kubernetes is being removed, and {with} of its nodes still have its roles"
                ));
            }
        }
        return (steps, waits);
    }
    let Some(has) = has.filter(|has| is_in_sync(&wanted.spec, has)) else {
        match has.and_then(|has| bundle_change_objection(&wanted.spec, has, seen)) {
            Some(why) => waits.push(why),
            None => steps.push(ClusterPlanStep::PutKubernetes),
        }
        return (steps, waits);
    };
    for keys in &wanted.pending_rotations {
        steps.push(ClusterPlanStep::RotateKeys { keys: *keys });
    }
    for rotation in &has.rotations {
        if !rotation.waits_for.is_empty() {
            waits.push(format!(
                "{} of Kubernetes are replaced, and {} {} not act on it yet",
                rotation.keys,
                rotation.waits_for.join(", "),
                if rotation.waits_for.len() == 1 { "does" } else { "do" }
            ));
        }
    }
    if upgrade.is_none() {
        // Assignments of an upgrade that ended: this bundle is the cluster's now.
        let same = has.assigned_bundles.iter().filter(|(_, bundle)| **bundle == has.spec.bundle);
        steps.extend(same.map(|(node, _)| ClusterPlanStep::ClearBundle { node: node.clone() }));
    }
    (steps, waits)
}

/// Why the curators do not get another bundle than they have: nodes run the old one and would all change at once. This
/// happens after a restore of this database without the cluster, or of the cluster without this database.
fn bundle_change_objection(
    wanted: &KubernetesSpec,
    has: &CuratorKubernetes,
    seen: &ObservedCluster,
) -> Option<String> {
    let runs_other = |node: &&ClusterNode| {
        node.kubernetes.as_ref().is_some_and(|kubernetes| !kubernetes.bundle.is_empty())
            && has_kubernetes_role(node.roles.iter())
            && has.bundle_of(&node.id) != wanted.bundle
    };
    let others = seen.nodes.iter().filter(runs_other).count();
    let short = |digest: &str| digest.get(..16).unwrap_or(digest).to_owned();
    (has.spec.bundle != wanted.bundle && others > 0).then(|| {
        format!(
            "its curators have the bundle {}, and {} is wanted here; {others} of its nodes would change at once. \
             To change them one by one, run: shepherdctl cluster upgrade NAME --kubernetes-bundle BUNDLE",
            short(&has.spec.bundle),
            short(&wanted.bundle)
        )
    })
}

fn has_kubernetes_role<'r>(mut roles: impl Iterator<Item = &'r String>) -> bool {
    roles.any(|role| role == CONTROLLER_ROLE || role == WORKER_ROLE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::tests::{kubernetes, kubernetes_with};
    use crate::cluster::kubernetes::{KeyPurpose, NodeKubernetes, spec_from_settings};
    use crate::cluster::node_address::NodeAddresses;
    use crate::cluster::state::{NodeHealth, NodeState};

    fn observed(known: ObservedKubernetes, roles: &[&str]) -> ObservedCluster {
        let node = ClusterNode {
            id: "node-1".to_owned(),
            key: [1; 32],
            machine: None,
            state: NodeState::Up,
            roles: roles.iter().map(|&role| role.to_owned()).collect(),
            health: NodeHealth::Healthy,
            services: Vec::new(),
            kubernetes: None,
            addresses: NodeAddresses::default(),
        };
        ObservedCluster { nodes: vec![node], kubernetes: known, ..ObservedCluster::default() }
    }

    #[test]
    fn curators_get_the_spec_and_drop_what_no_node_runs() {
        let has = |kubernetes: &KubernetesSpec| {
            ObservedKubernetes::Present(CuratorKubernetes {
                spec: spec_from_settings(kubernetes.to_settings()),
                ..CuratorKubernetes::default()
            })
        };
        let other = kubernetes_with(|k| k.bundle = "b".repeat(64));
        let wanted = |removing, rotate: &[KeyPurpose]| DesiredKubernetes {
            spec: kubernetes(),
            removing,
            pending_rotations: rotate.to_vec(),
        };
        for (wanted, known, roles, steps, waits) in [
            (wanted(false, &[]), ObservedKubernetes::Absent, vec![], vec![ClusterPlanStep::PutKubernetes], 0),
            (wanted(false, &[]), has(&other), vec![WORKER_ROLE], vec![ClusterPlanStep::PutKubernetes], 0),
            (wanted(false, &[]), has(&kubernetes()), vec![WORKER_ROLE], vec![], 0),
            (wanted(false, &[]), ObservedKubernetes::Unavailable("busy".into()), vec![], vec![], 1),
            (wanted(true, &[]), ObservedKubernetes::Unavailable("busy".into()), vec![], vec![], 1),
            (wanted(false, &[]), ObservedKubernetes::NotQueried, vec![], vec![], 0),
            (
                wanted(false, &[KeyPurpose::Etcd]),
                has(&kubernetes()),
                vec![],
                vec![ClusterPlanStep::RotateKeys { keys: KeyPurpose::Etcd }],
                0,
            ),
            // Not before the curators have Kubernetes: there is nothing to replace.
            (
                wanted(false, &[KeyPurpose::Etcd]),
                ObservedKubernetes::Absent,
                vec![],
                vec![ClusterPlanStep::PutKubernetes],
                0,
            ),
            (wanted(true, &[]), has(&kubernetes()), vec![WORKER_ROLE], vec![], 1),
            (wanted(true, &[]), has(&kubernetes()), vec![CONTROLLER_ROLE], vec![], 1),
            (wanted(true, &[]), has(&kubernetes()), vec!["web"], vec![ClusterPlanStep::DeleteKubernetes], 0),
            (
                wanted(true, &[]),
                ObservedKubernetes::Absent,
                vec![],
                vec![ClusterPlanStep::DeleteKubernetesRecord],
                0,
            ),
        ] {
            let (planned, waited) = plan_kubernetes(Some(&wanted), None, &observed(known.clone(), &roles));
            assert_eq!((planned, waited.len()), (steps, waits), "{wanted:?} {known:?} {roles:?}");
        }
        assert_eq!(
            plan_kubernetes(None, None, &observed(has(&other), &[WORKER_ROLE])),
            (vec![], vec![]),
            "theirs is left alone"
        );
    }

    #[test]
    fn other_bundle_is_not_sent_while_nodes_run_the_curators_one() {
        let wanted = DesiredKubernetes { spec: kubernetes(), removing: false, pending_rotations: Vec::new() };
        let other = kubernetes_with(|k| k.bundle = "b".repeat(64));
        let mut has = CuratorKubernetes {
            spec: spec_from_settings(other.to_settings()),
            ..CuratorKubernetes::default()
        };
        let world = |has: &CuratorKubernetes, runs: &str| {
            let mut seen = observed(ObservedKubernetes::Present(has.clone()), &[WORKER_ROLE]);
            seen.nodes[0].kubernetes =
                Some(NodeKubernetes { bundle: runs.to_owned(), ..NodeKubernetes::default() });
            plan_kubernetes(Some(&wanted), None, &seen)
        };
        let (steps, waits) = world(&has, &other.bundle);
        assert_eq!(steps, []);
        assert!(waits[0].contains("1 of its nodes would change at once"), "{waits:?}");
        assert_eq!(world(&has, "").0, [ClusterPlanStep::PutKubernetes], "nothing runs yet");
        has.assigned_bundles.insert("node-1".to_owned(), kubernetes().bundle);
        assert_eq!(
            world(&has, &other.bundle).0,
            [ClusterPlanStep::PutKubernetes],
            "an upgrade has brought it there"
        );
    }

    #[test]
    fn assigned_bundles_are_cleared_once_all_nodes_have_them() {
        let wanted = DesiredKubernetes { spec: kubernetes(), removing: false, pending_rotations: Vec::new() };
        let assigned =
            [("node-1", "a"), ("node-2", "b")].map(|(node, bundle)| (node.to_owned(), bundle.repeat(64)));
        let has = CuratorKubernetes {
            spec: spec_from_settings(kubernetes().to_settings()),
            assigned_bundles: assigned.into(),
            ..CuratorKubernetes::default()
        };
        let steps = plan_kubernetes(Some(&wanted), None, &observed(ObservedKubernetes::Present(has), &[])).0;
        assert_eq!(steps, [ClusterPlanStep::ClearBundle { node: "node-1".to_owned() }]);
    }
}
