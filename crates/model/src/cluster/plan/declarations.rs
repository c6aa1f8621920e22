//! Reconcile declared roles: the curators get what they lack, and forget what was withdrawn.
//!
//! The curators get a declaration when they have a different one or have lost it. So no shepherd has to remember what
//! it sent. A role that was declared to the curators directly, and not in the BMDB, belongs to its author and is left
//! alone.

use crate::cluster::declaration::DesiredDeclaration;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::state::ObservedCluster;

/// The steps towards the desired declarations, and what they wait for (one sentence each).
#[must_use]
pub(super) fn plan_declarations(
    declared: &[DesiredDeclaration],
    seen: &ObservedCluster,
) -> (Vec<ClusterPlanStep>, Vec<String>) {
    let (mut steps, mut waits) = (Vec::new(), Vec::new());
    for DesiredDeclaration { role, digest, withdrawn } in declared {
        let role = role.clone();
        match (withdrawn, seen.declared_digests.get(&role)) {
            (false, Some(known)) if known == digest => {}
            (false, _) => steps.push(ClusterPlanStep::DeclareRole { role }),
            (true, None) => steps.push(ClusterPlanStep::DeleteDeclaration { role }),
            (true, Some(_)) => {
                let with = seen.nodes.iter().filter(|node| node.roles.contains(&role)).count();
                match with {
                    0 => steps.push(ClusterPlanStep::UndeclareRole { role }),
                    _ => {
                        waits
                            .push(format!("role {role} is withdrawn, and {with} of its nodes still have it"));
                    }
                }
            }
        }
    }
    (steps, waits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::node_address::NodeAddresses;
    use crate::cluster::state::{ClusterNode, NodeHealth, NodeState};

    fn declared(role: &str, digest: u8, withdrawn: bool) -> DesiredDeclaration {
        DesiredDeclaration { role: role.to_owned(), digest: [digest; 32], withdrawn }
    }

    fn observed(declared: &[(&str, u8)], node_has: &[&str]) -> ObservedCluster {
        let node = ClusterNode {
            id: "node-1".to_owned(),
            key: [1; 32],
            machine: None,
            state: NodeState::Up,
            roles: node_has.iter().map(|&role| role.to_owned()).collect(),
            health: NodeHealth::Healthy,
            services: Vec::new(),
            kubernetes: None,
            addresses: NodeAddresses::default(),
        };
        ObservedCluster {
            nodes: vec![node],
            declared_digests: declared
                .iter()
                .map(|(role, digest)| ((*role).to_owned(), [*digest; 32]))
                .collect(),
            ..ObservedCluster::default()
        }
    }

    #[test]
    fn curators_get_missing_roles_and_drop_unused_withdrawn_ones() {
        let role = || "web".to_owned();
        let reported = || vec![ClusterPlanStep::DeclareRole { role: role() }];
        for (wanted, has, node_has, steps, waits) in [
            (declared("web", 1, false), vec![], vec![], reported(), 0),
            (declared("web", 1, false), vec![("web", 1)], vec!["web"], vec![], 0),
            (declared("web", 1, false), vec![("web", 2)], vec!["web"], reported(), 0),
            (declared("web", 1, true), vec![("web", 1)], vec!["web"], vec![], 1),
            (
                declared("web", 1, true),
                vec![("web", 2)],
                vec![],
                vec![ClusterPlanStep::UndeclareRole { role: role() }],
                0,
            ),
            (
                declared("web", 1, true),
                vec![],
                vec![],
                vec![ClusterPlanStep::DeleteDeclaration { role: role() }],
                0,
            ),
        ] {
            let (planned, waited) =
                plan_declarations(std::slice::from_ref(&wanted), &observed(&has, &node_has));
            assert_eq!((planned, waited.len()), (steps, waits), "{wanted:?} {has:?} {node_has:?}");
        }
    }

    #[test]
    fn roles_declared_by_others_are_not_touched() {
        assert_eq!(plan_declarations(&[], &observed(&[("theirs", 1)], &[])), (vec![], vec![]));
    }
}
