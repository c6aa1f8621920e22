//! Rolls a new key generation out to nodes: one controller at a time, then workers.
//!
//! A node that is assigned a new generation restarts its components. If all controllers restarted at once, no API
//! server would answer for a while. So the next controller is assigned the generation only when two things hold: the
//! controllers before it run with the generation, with all components healthy; and every other controller is healthy
//! too, whichever generation it is assigned. A single unhealthy controller goes first: it has nothing to lose, and the
//! new generation may be what it lacks. Workers follow when all controllers run with the generation, up to
//! `WORKERS_AT_ONCE` at a time, since the pods of a worker keep running while its kubelet restarts.
//!
//! A node that has no assigned generation yet is assigned the newest one at once, out of turn: nothing relies on that
//! node yet, and it cannot start its components with an older one.
//!
//! # What is stored
//!
//! The generation assigned to a node is written into the node's own record *before* the node gets it, and every leader
//! sends it from that record: after each lost connection, until the record has a newer one. The assignment cannot be
//! derived from what nodes report. A node whose components are restarting reports that it runs with none, so a new
//! leader could not know whether the node was assigned the new generation already. The leader would have to take the
//! assignment back, or assign the generation to another node at the same time. Because of the record, a leader that is
//! lost between any two writes leaves its successor exactly what it knew itself.
//!
//! A record without an assigned generation belongs to a new node, or was written by a curator of an earlier release.
//! Such curators send the newest generation to all nodes at once, so the node is assigned the newest one.
//!
//! # What blocks a rollout
//!
//! A controller blocks all other nodes while it does not run with its assigned generation, is unhealthy or has no
//! recent heartbeat, because one more controller that restarts at the same time would be one too many. The block has no
//! time limit; it is reported to callers that query the rotation ([`blocking_nodes`]). It ends when the node comes
//! back, loses its roles, or is decommissioned: a rollout does not wait for nodes that are not up or have no Kubernetes
//! role, and their assignment is removed. A worker without heartbeats does not count against `WORKERS_AT_ONCE`.

use curator_client::node::{Node, NodeState};
use curator_client::node_id::NodeId;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use proto::curator::v1::service_status::Kind;

use crate::kubernetes::node_allocation::{AssignedGeneration, NodeAllocations};
use crate::membership::Nodes;
use crate::node_health::NodeHealth;

/// Most workers that restart their components at the same time.
const WORKERS_AT_ONCE: usize = 10;

/// A node, its assigned generation and its health.
#[derive(Clone, Copy, Debug)]
pub struct NodeProgress<'a> {
    /// The node's record, with the status that it reported last.
    pub node: &'a Node,
    /// The generation assigned to it; `None` before the first assignment.
    pub assigned: Option<AssignedGeneration>,
    /// Its health from heartbeats, as this leader sees it.
    pub health: NodeHealth,
}

/// What the leader writes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutStep {
    /// Assign the current generation to this node.
    Assign(NodeId),
    /// Remove the assignment of this node, which takes part no longer.
    Clear(NodeId),
}

/// Whether key generations concern this node: it is up and has a Kubernetes role.
#[must_use]
pub fn takes_part(node: &Node) -> bool {
    node.state == NodeState::Up && (node.roles.kubernetes_controller || node.roles.kubernetes_worker)
}

/// The rollout progress of all nodes, in order of their ids.
pub fn node_progress<'a>(
    nodes: &'a Nodes,
    allotments: &NodeAllocations,
    health: impl Fn(&Node) -> NodeHealth,
) -> Vec<NodeProgress<'a>> {
    let standing = |node: &'a Node| NodeProgress {
        node,
        assigned: allotments.get(&node.id).and_then(|has| has.assigned),
        health: health(node),
    };
    nodes.values().map(standing).collect()
}

impl NodeProgress<'_> {
    fn reported_status(&self) -> Option<&wire::KubernetesStatus> {
        self.node.status.as_ref()?.kubernetes.as_ref()
    }

    fn is_controller(&self) -> bool {
        takes_part(self.node) && self.node.roles.kubernetes_controller
    }

    fn is_worker(&self) -> bool {
        takes_part(self.node) && !self.node.roles.kubernetes_controller
    }

    /// Whether its assigned generation is missing or older than this one.
    fn is_behind(&self, generation: u64) -> bool {
        self.assigned.is_none_or(|assigned_generation| assigned_generation.generation < generation)
    }

    /// Whether its components run with the assigned generation or a later one, all of them healthy.
    fn has_applied(&self) -> bool {
        let (Some(generation), Some(status)) = (self.assigned, self.reported_status()) else { return false };
        status.generation >= generation.generation
            && status.components.iter().all(|component| component.kind() == Kind::Healthy)
    }

    /// Whether another controller may restart beside it.
    fn is_healthy(&self) -> bool {
        matches!(self.health, NodeHealth::Healthy { .. }) && self.has_applied()
    }

    /// Whether it is restarting, or may be.
    fn is_restarting(&self) -> bool {
        !self.has_applied() && !matches!(self.health, NodeHealth::HeartbeatTimeout { .. })
    }
}

/// What the leader writes next if this is the current generation; `None` if it has to wait, or if all is done.
#[must_use]
pub fn next_rollout_step(generation: u64, all: &[NodeProgress<'_>]) -> Option<RolloutStep> {
    if let Some(gone) = all.iter().find(|one| one.assigned.is_some() && !takes_part(one.node)) {
        return Some(RolloutStep::Clear(gone.node.id));
    }
    if let Some(new) = all.iter().find(|one| one.assigned.is_none() && takes_part(one.node)) {
        return Some(RolloutStep::Assign(new.node.id));
    }
    let is_behind = |one: &&&NodeProgress<'_>| one.is_behind(generation);
    let assign = |one: &NodeProgress<'_>| RolloutStep::Assign(one.node.id);
    let controllers: Vec<&NodeProgress<'_>> = all.iter().filter(|one| one.is_controller()).collect();
    let unwell: Vec<&NodeProgress<'_>> =
        controllers.iter().filter(|one| !one.is_healthy()).copied().collect();
    if controllers.iter().any(|one| one.is_behind(generation)) {
        let next = match unwell.as_slice() {
            [] => controllers.iter().find(is_behind),
            [alone] => Some(alone).filter(is_behind),
            _ => None,
        };
        return next.map(|one| assign(one));
    }
    if !unwell.is_empty() {
        return None;
    }
    let (behind, progresses): (Vec<&NodeProgress<'_>>, Vec<&NodeProgress<'_>>) =
        all.iter().filter(|one| one.is_worker()).partition(|one| one.is_behind(generation));
    let at_it = progresses.iter().filter(|one| one.is_restarting()).count();
    behind.first().filter(|_| at_it < WORKERS_AT_ONCE).map(|one| assign(one))
}

/// Nodes that the rollout waits for now, in order of their ids: they are assigned the current generation and do not run
/// with it, or they are controllers that are not healthy.
#[must_use]
pub fn blocking_nodes(generation: u64, all: &[NodeProgress<'_>]) -> Vec<NodeId> {
    let holds = |one: &&NodeProgress<'_>| {
        takes_part(one.node)
            && (one.is_controller() && !one.is_healthy() || !one.is_behind(generation) && !one.has_applied())
    };
    all.iter().filter(holds).map(|one| one.node.id).collect()
}

/// When a node that takes part was last assigned this generation or a later one.
#[must_use]
pub fn last_assigned_at(generation: u64, all: &[NodeProgress<'_>]) -> Option<Timestamp> {
    let reports = all.iter().filter(|one| takes_part(one.node)).filter_map(|one| one.assigned);
    reports
        .filter(|assigned_generation| assigned_generation.generation >= generation)
        .map(|assigned_generation| assigned_generation.assigned_at)
        .max()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use curator_client::testing::{at, member, node_id, up};

    use super::*;

    const NOW: u64 = 5;
    const HEALTHY: NodeHealth = NodeHealth::Healthy { since_heartbeat: Duration::ZERO };
    const SILENT: NodeHealth = NodeHealth::HeartbeatTimeout { since_heartbeat: None };

    /// A node of one test case; its number is its position.
    #[derive(Clone, Copy)]
    struct NodeCase {
        controller: bool,
        /// Whether the node is up and has its roles.
        takes_part: bool,
        assigned: u64,
        /// The generation that it reports to run with.
        reported: u64,
        /// Whether a component is not healthy.
        unhealthy: bool,
        health: NodeHealth,
    }

    /// Parses a node of a test case: `c` (controller) or `w` (worker), the assigned generation, a dash, the reported
    /// one. The suffix `!` means an unhealthy component, `?` no heartbeat yet at this leader, `x` a heartbeat timeout.
    /// The prefix `-` means that the node does not take part.
    fn parse_case(word: &str) -> NodeCase {
        let concerned = !word.starts_with('-');
        let word = word.trim_start_matches('-');
        let controller = word.starts_with('c');
        let ends = |mark| word.ends_with(mark);
        let health = if ends('x') {
            SILENT
        } else if ends('?') {
            NodeHealth::Unknown
        } else {
            HEALTHY
        };
        let (message, says) = word[1..].trim_end_matches(['!', '?', 'x']).split_once('-').unwrap();
        let number = |text: &str| text.parse().unwrap_or(0);
        NodeCase {
            controller,
            takes_part: concerned,
            assigned: number(message),
            reported: number(says),
            unhealthy: ends('!'),
            health,
        }
    }

    fn nodes(words: &str) -> (Nodes, Vec<NodeCase>) {
        let all: Vec<NodeCase> = words.split_whitespace().map(parse_case).collect();
        let mut nodes = Nodes::new();
        for (number, is) in (1..).zip(&all) {
            let mut node = if is.controller { member(number) } else { up(number) };
            if is.takes_part {
                node.roles.kubernetes_controller = is.controller;
                node.roles.kubernetes_worker = !is.controller;
            }
            let kind = if is.unhealthy { Kind::Unhealthy } else { Kind::Healthy };
            let component = wire::KubernetesComponentStatus { kind: kind.into(), ..Default::default() };
            node.status.as_mut().unwrap().kubernetes = Some(wire::KubernetesStatus {
                generation: is.reported,
                components: vec![component],
                ..Default::default()
            });
            nodes.insert(node.id, node);
        }
        (nodes, all)
    }

    fn with_progress<T>(words: &str, see: impl Fn(&[NodeProgress<'_>]) -> T) -> T {
        let (nodes, all) = nodes(words);
        let reported = |is: &NodeCase| {
            (is.assigned > 0).then(|| AssignedGeneration {
                generation: is.assigned,
                assigned_at: at(i64::try_from(is.assigned).unwrap()),
            })
        };
        let all: Vec<NodeProgress<'_>> = (1..)
            .zip(&all)
            .map(|(number, is)| NodeProgress {
                node: &nodes[&node_id(number)],
                assigned: reported(is),
                health: is.health,
            })
            .collect();
        see(&all)
    }

    #[test]
    fn controllers_are_rolled_out_one_by_one_then_workers() {
        const ASSIGN: fn(u8) -> Option<RolloutStep> = |number| Some(RolloutStep::Assign(node_id(number)));
        const CLEAR: fn(u8) -> Option<RolloutStep> = |number| Some(RolloutStep::Clear(node_id(number)));
        for (words, expected) in [
            ("", None),
            ("c5-5 c5-5 c5-5 w5-5", None),
            // The first controller; the next one only when the first one runs with the generation.
            ("c4-4 c4-4 c4-4 w4-4", ASSIGN(1)),
            ("c5-4 c4-4 c4-4 w4-4", None),
            ("c5-0 c4-4 c4-4 w4-4", None),
            ("c5-5! c4-4 c4-4 w4-4", None),
            ("c5-5x c4-4 c4-4 w4-4", None),
            ("c5-5? c4-4 c4-4 w4-4", None),
            ("c5-5 c4-4 c4-4 w4-4", ASSIGN(2)),
            ("c5-5 c5-0 c4-4 w4-4", None),
            ("c5-5 c5-5 c4-4 w4-4", ASSIGN(3)),
            // All others must be healthy. An unhealthy controller is assigned the generation if it is the only
            // unhealthy one.
            ("c4-4 c4-0 c4-4", ASSIGN(2)),
            ("c4-4 c4-4! c4-4", ASSIGN(2)),
            ("c4-4 c4-4x c4-4", ASSIGN(2)),
            ("c4-4 c4-4? c4-4?", None),
            ("c4-0 c4-4! c4-4", None),
            ("c5-0 c4-4! c4-4", None),
            ("c5-5 c5-5! c4-4", None),
            ("c4-0", ASSIGN(1)),
            // Two steps at once: a controller at the step before is assigned the newest generation, and no other one
            // beside it.
            ("c4-0 c3-3 c3-3", ASSIGN(1)),
            ("c4-4 c3-3 c3-3", ASSIGN(1)),
            ("c5-5 c4-0 c3-3", ASSIGN(2)),
            ("c5-5 c4-4 c3-0", ASSIGN(3)),
            // Workers, several at a time, once all controllers run with the generation.
            ("c5-0 w4-4 w4-4", None),
            ("c5-5! w4-4 w4-4", None),
            ("c5-5 w4-4 w4-4", ASSIGN(2)),
            ("c5-5 w5-0 w4-4", ASSIGN(3)),
            ("c5-5 w4-0 w4-4!", ASSIGN(2)),
            ("w4-4 w4-4", ASSIGN(1)),
            ("c5-5 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w4-4 w4-4", ASSIGN(11)),
            ("c5-5 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w4-4", None),
            ("c5-5 w5-0 w5-0 w5-0 w5-0? w5-0 w5-0 w5-0 w5-0 w5-0 w5-4! w4-4", None),
            ("c5-5 w5-0 w5-0 w5-0 w5-0x w5-0 w5-0 w5-0 w5-0 w5-0 w5-5 w4-4", ASSIGN(12)),
            // A new node is assigned the generation at once. A node that left loses its assignment, and the rollout
            // does not wait for it.
            ("c5-0 c4-4 c-0 w4-4", ASSIGN(3)),
            ("c4-4 c4-4 w-0", ASSIGN(3)),
            ("c5-5 -c5-0 c4-4", CLEAR(2)),
            ("c5-5 -c-0 c4-4", ASSIGN(3)),
            ("c5-5 -w4-0 w4-4", CLEAR(2)),
        ] {
            assert_eq!(with_progress(words, |all| next_rollout_step(NOW, all)), expected, "{words}");
        }
    }

    #[test]
    fn blocking_nodes_are_named() {
        for (words, expected) in [
            ("c5-5 c5-5 w5-5", &[][..]),
            ("c4-4 c4-4 w4-4", &[]),
            ("c5-4 c4-4 w4-4", &[1]),
            ("c5-5 c4-4x c4-4! w4-4", &[2, 3]),
            ("c5-5 c5-5x w5-5", &[2]),
            ("c5-5 w5-0 w5-0x w4-0 w4-4", &[2, 3]),
            ("c5-5 -c5-0 -w5-0 w4-4", &[]),
        ] {
            let expected: Vec<NodeId> = expected.iter().map(|number| node_id(*number)).collect();
            assert_eq!(with_progress(words, |all| blocking_nodes(NOW, all)), expected, "{words}");
        }
    }

    #[test]
    fn last_assignment_is_the_newest_one() {
        for (words, generation, expected) in [
            ("", 1, None),
            ("c4-4 w3-3 c-0", 5, None),
            ("c5-5 w6-6 c4-4", 5, Some(at(6))),
            ("c5-5 -w6-6 c4-4", 5, Some(at(5))),
        ] {
            assert_eq!(with_progress(words, |all| last_assigned_at(generation, all)), expected, "{words}");
        }
    }

    /// Whatever happens to nodes on the way, and whichever curator leads: at no moment do two controllers restart, and
    /// in the end all nodes run with the newest generation.
    #[test]
    fn at_most_one_controller_restarts_at_a_time() {
        for seed in 0..200_u64 {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut draw = |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            let mut all = vec![
                parse_case("c1-1"),
                parse_case("c1-1"),
                parse_case("c1-1"),
                parse_case("w1-1"),
                parse_case("w1-1"),
            ];
            let mut generation = 1;
            for step in 0..400 {
                if step < 300 && draw(40) == 0 {
                    generation += 1;
                }
                let words: Vec<String> = all
                    .iter()
                    .map(|one| {
                        format!("{}{}-{}", if one.controller { 'c' } else { 'w' }, one.assigned, one.reported)
                    })
                    .collect();
                let turn =
                    with_progress(&words.join(" "), |standings| next_rollout_step(generation, standings));
                if let Some(RolloutStep::Assign(id)) = turn {
                    let place = (1..).zip(&mut all).find(|(number, _)| node_id(*number) == id);
                    let (_, one) = place.unwrap();
                    // It stops its components and reports that.
                    (one.assigned, one.reported) = (generation, 0);
                } else {
                    // A node that restarts comes back.
                    let place = usize::try_from(draw(5)).unwrap();
                    all[place].reported = all[place].assigned;
                }
                let away = all.iter().filter(|one| one.controller && one.reported == 0).count();
                assert!(away <= 1, "seed {seed}: {away} are away");
            }
            assert!(all.iter().all(|one| one.reported == generation), "seed {seed}");
        }
    }
}
