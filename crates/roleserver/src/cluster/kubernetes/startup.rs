//! Decide which Kubernetes roles run on this node (pure).
//!
//! The decision follows from the node's roles and from the setup of the curator. For controllers it also depends on
//! whether etcd runs here, and for workers on whether their pods are drained before they stop.
//!
//! It is repeated whenever one of these changes, in any order. An unknown input delays what does not run yet, and stops
//! nothing that runs: a role server that starts finds its components running and knows no input at first.

use curator_client::node::NodeRoles;
use model::role_declaration::Sha256;
use supervisor::combine::CombinedInputs;
use supervisor::watch_cell::WatchCell;

use crate::cluster::kubernetes::setup::NodeSetup;
use crate::cluster::node_facts::{ControlPlane, NodeFacts};

/// What to do with the components of one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoleStartup {
    /// Stop all components. If the node has the role nevertheless, the sentence gives the reason.
    Off(Option<String>),
    /// Keep running components, but start none; the sentence gives the reason.
    Paused(String),
    /// Keep running components until the node is drained, but start none; the sentence gives the reason.
    Draining(String),
    /// Run all components of the role.
    On,
}

impl RoleStartup {
    /// Why the role does not run, or only what runs already, although the node has it.
    #[must_use]
    pub fn wait_reason(&self) -> Option<&str> {
        match self {
            Self::Off(why) => why.as_deref(),
            Self::Paused(why) | Self::Draining(why) => Some(why),
            Self::On => None,
        }
    }
}

/// Which Kubernetes roles run on this node.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesStartup {
    /// Startup of the controller role.
    pub controller: RoleStartup,
    /// Startup of the worker role.
    pub worker: RoleStartup,
    /// The setup that they run with; always `Some` if a role is `On`.
    pub setup: Option<NodeSetup>,
}

/// The result of draining this worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainState {
    /// Whether no pod has to be moved before the worker ends.
    pub is_drained: bool,
    /// The bundle that the worker may run with: the current one, or another one once the node is drained.
    pub allowed_bundle: Option<Sha256>,
    /// Whether every pod that has to be moved before the bundle changes was evicted.
    pub is_evicted: bool,
}

/// Inputs of the decision.
#[derive(Clone, Debug, Default)]
pub struct KubernetesInputs {
    /// Roles of the node; `None` while they are unknown.
    pub roles: Option<NodeRoles>,
    /// This node's control plane; `None` unless etcd and a curator run here.
    pub control_plane: Option<ControlPlane>,
    /// The setup of the curator; the outer `None` means that it is unknown, the inner that there is none.
    pub setup: Option<Option<NodeSetup>>,
    /// Whether no pod has to be moved before a worker ends; `None` while it is unknown.
    pub is_drained: Option<bool>,
}

/// Decides which roles run; `None` while the node's roles or its drain state are unknown.
#[must_use]
pub fn decide_startup(known: &KubernetesInputs) -> Option<KubernetesStartup> {
    let (roles, handed_over) = (known.roles.as_ref()?, known.is_drained?);
    let reported = |part: RoleStartup| match &known.setup {
        None => RoleStartup::Paused("no curator has sent this node's Kubernetes setup yet".to_owned()),
        Some(None) => {
            RoleStartup::Off(Some("the cluster has no Kubernetes, or nothing of it for this node".to_owned()))
        }
        Some(Some(_)) => part,
    };
    let controller = if !roles.kubernetes_controller {
        RoleStartup::Off(None)
    } else if roles.consensus_member.is_none() {
        // An API server cannot work without the etcd beside it.
        RoleStartup::Off(Some(
            "a controller needs etcd beside it, and this node is no consensus member".to_owned(),
        ))
    } else if known.control_plane.is_none() {
        reported(RoleStartup::Paused("etcd and the curator of this node do not run yet".to_owned()))
    } else {
        reported(RoleStartup::On)
    };
    let worker = if roles.kubernetes_worker { reported(RoleStartup::On) } else { RoleStartup::Off(None) };
    let has_range = known.setup.iter().flatten().all(|setup| !setup.pod_range().is_empty());
    let worker = match worker {
        RoleStartup::On if !has_range => RoleStartup::Paused(
            "no curator has given this node its part of the pods' addresses yet".to_owned(),
        ),
        RoleStartup::Off(_) if !handed_over => {
            RoleStartup::Draining("its pods are moved to other nodes before it stops".to_owned())
        }
        part => part,
    };
    Some(KubernetesStartup { controller, worker, setup: known.setup.clone().flatten() })
}

/// Combines the inputs of the decision.
#[must_use]
pub fn startup_inputs(facts: &NodeFacts, handed: &WatchCell<DrainState>) -> CombinedInputs<KubernetesInputs> {
    CombinedInputs::new(KubernetesInputs::default())
        .with(&facts.roles, |known: &mut KubernetesInputs, roles| known.roles = Some(roles))
        .with(&facts.control_plane, |known: &mut KubernetesInputs, control_plane| {
            known.control_plane = control_plane;
        })
        .with(&facts.setup, |known: &mut KubernetesInputs, setup| known.setup = Some(setup))
        .with(handed, |known: &mut KubernetesInputs, handed| known.is_drained = Some(handed.is_drained))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use curator_client::node::ConsensusMember;

    use super::*;
    use crate::cluster::kubernetes::setup::tests::{setup, wire_setup};

    fn roles(member: bool, controller: bool, worker: bool) -> NodeRoles {
        let consensus_member = member.then(|| ConsensusMember { member_id: 7, peers: BTreeMap::new() });
        NodeRoles {
            consensus_member,
            kubernetes_controller: controller,
            kubernetes_worker: worker,
            ..NodeRoles::default()
        }
    }

    /// A name for each startup: stopped, stopped with a reason, paused, draining or running.
    fn state_name(part: &RoleStartup) -> &'static str {
        match part {
            RoleStartup::Off(None) => "off",
            RoleStartup::Off(Some(_)) => "off with reason",
            RoleStartup::Paused(_) => "held",
            RoleStartup::Draining(_) => "leaving",
            RoleStartup::On => "on",
        }
    }

    #[test]
    fn nothing_is_decided_before_roles_are_known() {
        let known = KubernetesInputs {
            setup: Some(None),
            control_plane: Some(ControlPlane { port: 1 }),
            is_drained: Some(true),
            ..KubernetesInputs::default()
        };
        assert_eq!(decide_startup(&known), None);
        // Nor while the drain state is unknown.
        let known = KubernetesInputs { roles: Some(NodeRoles::default()), is_drained: None, ..known };
        assert_eq!(decide_startup(&known), None);
    }

    #[test]
    fn roles_run_when_inputs_exist_and_unknown_inputs_stop_nothing() {
        let there = Some(ControlPlane { port: 7835 });
        let own = Some(Some(setup()));
        for (roles, control_plane, setup, controller, worker) in [
            (roles(true, false, false), there, own.clone(), "off", "off"),
            (roles(true, true, true), there, own.clone(), "on", "on"),
            (roles(true, true, false), there, own.clone(), "on", "off"),
            // Waiting for etcd is no failure, and stops no component of an earlier run.
            (roles(true, true, true), None, own.clone(), "held", "on"),
            (roles(true, true, true), there, None, "held", "held"),
            (roles(true, true, true), None, None, "held", "held"),
            // An empty setup differs from an unknown one.
            (roles(true, true, true), there, Some(None), "off with reason", "off with reason"),
            (roles(true, true, true), None, Some(None), "off with reason", "off with reason"),
            // The node is no consensus member any more.
            (roles(false, true, true), there, own.clone(), "off with reason", "on"),
            (roles(false, true, false), None, own.clone(), "off with reason", "off"),
            (roles(false, false, true), None, own.clone(), "off", "on"),
            (roles(false, false, false), None, None, "off", "off"),
        ] {
            let known = KubernetesInputs {
                roles: Some(roles.clone()),
                control_plane,
                setup: setup.clone(),
                is_drained: Some(true),
            };
            let decided = decide_startup(&known).unwrap();
            let words = (state_name(&decided.controller), state_name(&decided.worker));
            assert_eq!(words, (controller, worker), "{roles:?} {control_plane:?} {}", setup.is_some());
        }
    }

    #[test]
    fn worker_stops_once_drained_and_starts_once_it_has_a_pod_range() {
        let decided = |worker, setup: Option<Option<NodeSetup>>, handed_over| {
            let roles = Some(roles(false, false, worker));
            let known = KubernetesInputs {
                roles,
                setup,
                is_drained: Some(handed_over),
                ..KubernetesInputs::default()
            };
            state_name(&decide_startup(&known).unwrap().worker)
        };
        let own = Some(Some(setup()));
        assert_eq!(decided(true, own.clone(), false), "on");
        assert_eq!(decided(false, own.clone(), false), "leaving");
        assert_eq!(decided(false, own, true), "off");
        // The cluster has no Kubernetes any more, and the worker still drains first.
        assert_eq!(decided(true, Some(None), false), "leaving");
        assert_eq!(decided(true, Some(None), true), "off with reason");
        assert_eq!(decided(true, None, false), "held");
        let mut lacking = wire_setup();
        lacking.pod_range.clear();
        assert_eq!(decided(true, Some(Some(NodeSetup::new(lacking).unwrap())), true), "held");
    }

    #[tokio::test]
    async fn result_does_not_depend_on_the_order_of_inputs() {
        let steps: [fn(&NodeFacts); 3] = [
            |facts| facts.roles.set(roles(true, true, false)),
            |facts| facts.control_plane.set(Some(ControlPlane { port: 7835 })),
            |facts| facts.setup.set(Some(setup())),
        ];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let (facts, handed) = (NodeFacts::default(), WatchCell::new());
            handed.set(DrainState { is_drained: true, ..DrainState::default() });
            let mut inputs = startup_inputs(&facts, &handed);
            let mut last = None;
            for (number, step) in order.iter().enumerate() {
                steps[*step](&facts);
                last = decide_startup(&inputs.next().await);
                let on = last.as_ref().is_some_and(|startup| startup.controller == RoleStartup::On);
                assert_eq!(on, number == 2, "{order:?} after {number}");
            }
            assert_eq!(last.unwrap().setup, Some(setup()));
            // A replaced control plane is noticed, and running components continue meanwhile.
            facts.control_plane.set(None);
            assert_eq!(state_name(&decide_startup(&inputs.next().await).unwrap().controller), "held");
        }
    }
}
