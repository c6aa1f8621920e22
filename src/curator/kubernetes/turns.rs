//! Which node may be told of a new generation of authorities and keys: one controller after the other, then workers.
//!
//! A node that is told starts its components again. Were all controllers told at once, no API server would answer for a
//! while; so the next one is told when those before act on it with all components well, and every other controller is well
//! too, whatever it was told. One that is not well itself goes first: it has nothing to lose, and what it lacks may be what
//! it is told. Workers follow when all controllers act on it, up to [`WORKERS_AT_ONCE`] at a time, since one that starts a
//! kubelet again goes on with its pods.
//!
//! Whoever runs nothing yet is told at once, whichever turn it is: nobody relies on it, and it cannot begin with less.
//!
//! # What is kept
//!
//! Which generation a node may be told is written into its own record *before* it is told, and it is told by that record:
//! by every leader, after each loss of its connection, for as long as nothing newer stands there. It does not follow from
//! what nodes say: one whose components are being started again says that it acts on none, and a new leader could not know
//! whether it was told already. It would have to take back what was told or tell another one beside it. So a leader that
//! is lost between any two writes leaves the next one exactly what it knew itself.
//!
//! A record without one is that of a node that is new, or was written by a curator of a release before this. Those tell
//! everybody the newest at once, so it is told the newest.
//!
//! # Who holds it up
//!
//! A controller that was told and does not act on it, or one that is not well or not heard, holds up all others, because
//! another one that starts again beside it would be one too many. There is no end to that by itself: it is named
//! ([`held_by`]) to whoever asks. It is over when the node comes back, loses its roles, or is decommissioned: of nodes
//! that are not up or have no role of Kubernetes nothing is waited for, and what they were told is forgotten. A worker that
//! is not heard takes no other's place.

use crate::curator::health::Health;
use crate::curator::kubernetes::allotment::{Allotments, Told};
use crate::curator::membership::Nodes;
use crate::curator::node::{Node, State};
use crate::curator::node_id::NodeId;
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::service_status::Kind;

/// Most workers that start their components again at the same time.
pub const WORKERS_AT_ONCE: usize = 10;

/// A node, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'a> {
    /// Its record.
    pub node: &'a Node,
    /// What it may be told.
    pub told: Option<Told>,
    /// Whether it is heard.
    pub health: Health,
}

/// What the leader writes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// This node may be told the present generation.
    Tell(NodeId),
    /// This node is told nothing any more.
    Forget(NodeId),
}

/// Whether generations are something to this node.
#[must_use]
pub fn is_concerned(node: &Node) -> bool {
    node.state == State::Up && (node.roles.kubernetes_controller || node.roles.kubernetes_worker)
}

/// All nodes, in order of their ids.
pub fn standings<'a>(
    nodes: &'a Nodes,
    allotments: &Allotments,
    health: impl Fn(&Node) -> Health,
) -> Vec<Standing<'a>> {
    let standing = |node: &'a Node| Standing {
        node,
        told: allotments.get(&node.id).and_then(|has| has.told),
        health: health(node),
    };
    nodes.values().map(standing).collect()
}

impl Standing<'_> {
    fn said(&self) -> Option<&wire::KubernetesStatus> {
        self.node.status.as_ref()?.kubernetes.as_ref()
    }

    fn is_controller(&self) -> bool {
        is_concerned(self.node) && self.node.roles.kubernetes_controller
    }

    fn is_worker(&self) -> bool {
        is_concerned(self.node) && !self.node.roles.kubernetes_controller
    }

    /// Whether it is still told something before this generation.
    fn is_behind(&self, generation: u64) -> bool {
        self.told.is_none_or(|told| told.generation < generation)
    }

    /// Whether its components, all of them well, act on what it was told.
    fn acts(&self) -> bool {
        let (Some(told), Some(said)) = (self.told, self.said()) else { return false };
        said.generation >= told.generation
            && said.components.iter().all(|component| component.kind() == Kind::Healthy)
    }

    /// Whether another one may be started again beside it.
    fn is_well(&self) -> bool {
        matches!(self.health, Health::Healthy { .. }) && self.acts()
    }

    /// Whether it is starting again, or may be.
    fn is_at_it(&self) -> bool {
        !self.acts() && !matches!(self.health, Health::HeartbeatTimeout { .. })
    }
}

/// What is written next, where this generation is the present one; `None` where it is to be waited, or all is done.
#[must_use]
pub fn next(generation: u64, all: &[Standing<'_>]) -> Option<Turn> {
    if let Some(gone) = all.iter().find(|one| one.told.is_some() && !is_concerned(one.node)) {
        return Some(Turn::Forget(gone.node.id));
    }
    if let Some(new) = all.iter().find(|one| one.told.is_none() && is_concerned(one.node)) {
        return Some(Turn::Tell(new.node.id));
    }
    let is_behind = |one: &&&Standing<'_>| one.is_behind(generation);
    let tell = |one: &Standing<'_>| Turn::Tell(one.node.id);
    let controllers: Vec<&Standing<'_>> = all.iter().filter(|one| one.is_controller()).collect();
    let unwell: Vec<&Standing<'_>> = controllers.iter().filter(|one| !one.is_well()).copied().collect();
    if controllers.iter().any(|one| one.is_behind(generation)) {
        let next = match unwell.as_slice() {
            [] => controllers.iter().find(is_behind),
            [alone] => Some(alone).filter(is_behind),
            _ => None,
        };
        return next.map(|one| tell(one));
    }
    if !unwell.is_empty() {
        return None;
    }
    let (behind, told): (Vec<&Standing<'_>>, Vec<&Standing<'_>>) =
        all.iter().filter(|one| one.is_worker()).partition(|one| one.is_behind(generation));
    let at_it = told.iter().filter(|one| one.is_at_it()).count();
    behind.first().filter(|_| at_it < WORKERS_AT_ONCE).map(|one| tell(one))
}

/// Nodes that are waited for now, in order of their ids: they were told the present generation and do not act on it, or
/// are controllers that are not well.
#[must_use]
pub fn held_by(generation: u64, all: &[Standing<'_>]) -> Vec<NodeId> {
    let holds = |one: &&Standing<'_>| {
        is_concerned(one.node)
            && (one.is_controller() && !one.is_well() || !one.is_behind(generation) && !one.acts())
    };
    all.iter().filter(holds).map(|one| one.node.id).collect()
}

/// When a node that is concerned was last told this generation or a later one.
#[must_use]
pub fn told_at(generation: u64, all: &[Standing<'_>]) -> Option<Timestamp> {
    let told = all.iter().filter(|one| is_concerned(one.node)).filter_map(|one| one.told);
    told.filter(|told| told.generation >= generation).map(|told| told.at).max()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::curator::node::tests::{at, member, up};
    use crate::curator::node_id::tests::node_id;

    const NOW: u64 = 5;
    const HEARD: Health = Health::Healthy { since_heartbeat: Duration::ZERO };
    const SILENT: Health = Health::HeartbeatTimeout { since_heartbeat: None };

    /// A node of one case: its number is its place.
    #[derive(Clone, Copy)]
    struct Is {
        controller: bool,
        /// Up, with its roles.
        concerned: bool,
        told: u64,
        /// What it says that it acts on.
        says: u64,
        /// A component that is not well.
        ill: bool,
        health: Health,
    }

    /// A controller or a worker by a word: what it was told, a dash, and what it says; `!` is an ill component, `?` one
    /// that this leader has not heard yet, `x` one that is silent, `-` before all one that is not concerned.
    fn is(word: &str) -> Is {
        let concerned = !word.starts_with('-');
        let word = word.trim_start_matches('-');
        let controller = word.starts_with('c');
        let ends = |mark| word.ends_with(mark);
        let health = if ends('x') {
            SILENT
        } else if ends('?') {
            Health::Unknown
        } else {
            HEARD
        };
        let (told, says) = word[1..].trim_end_matches(['!', '?', 'x']).split_once('-').unwrap();
        let number = |text: &str| text.parse().unwrap_or(0);
        Is { controller, concerned, told: number(told), says: number(says), ill: ends('!'), health }
    }

    fn nodes(words: &str) -> (Nodes, Vec<Is>) {
        let all: Vec<Is> = words.split_whitespace().map(is).collect();
        let mut nodes = Nodes::new();
        for (number, is) in (1..).zip(&all) {
            let mut node = if is.controller { member(number) } else { up(number) };
            if is.concerned {
                node.roles.kubernetes_controller = is.controller;
                node.roles.kubernetes_worker = !is.controller;
            }
            let kind = if is.ill { Kind::Unhealthy } else { Kind::Healthy };
            let component = wire::KubernetesComponentStatus { kind: kind.into(), ..Default::default() };
            node.status.as_mut().unwrap().kubernetes = Some(wire::KubernetesStatus {
                generation: is.says,
                components: vec![component],
                ..Default::default()
            });
            nodes.insert(node.id, node);
        }
        (nodes, all)
    }

    fn seen<T>(words: &str, see: impl Fn(&[Standing<'_>]) -> T) -> T {
        let (nodes, all) = nodes(words);
        let told = |is: &Is| {
            (is.told > 0).then(|| Told { generation: is.told, at: at(i64::try_from(is.told).unwrap()) })
        };
        let all: Vec<Standing<'_>> = (1..)
            .zip(&all)
            .map(|(number, is)| Standing {
                node: &nodes[&node_id(number)],
                told: told(is),
                health: is.health,
            })
            .collect();
        see(&all)
    }

    #[test]
    fn controllers_are_told_one_after_the_other_and_workers_after_them() {
        const TELL: fn(u8) -> Option<Turn> = |number| Some(Turn::Tell(node_id(number)));
        const FORGET: fn(u8) -> Option<Turn> = |number| Some(Turn::Forget(node_id(number)));
        for (words, expected) in [
            ("", None),
            ("c5-5 c5-5 c5-5 w5-5", None),
            // The first, and the next one only when that acts on it.
            ("c4-4 c4-4 c4-4 w4-4", TELL(1)),
            ("c5-4 c4-4 c4-4 w4-4", None),
            ("c5-0 c4-4 c4-4 w4-4", None),
            ("c5-5! c4-4 c4-4 w4-4", None),
            ("c5-5x c4-4 c4-4 w4-4", None),
            ("c5-5? c4-4 c4-4 w4-4", None),
            ("c5-5 c4-4 c4-4 w4-4", TELL(2)),
            ("c5-5 c5-0 c4-4 w4-4", None),
            ("c5-5 c5-5 c4-4 w4-4", TELL(3)),
            // All others must be well. One that is not is told itself, if it is the only one.
            ("c4-4 c4-0 c4-4", TELL(2)),
            ("c4-4 c4-4! c4-4", TELL(2)),
            ("c4-4 c4-4x c4-4", TELL(2)),
            ("c4-4 c4-4? c4-4?", None),
            ("c4-0 c4-4! c4-4", None),
            ("c5-0 c4-4! c4-4", None),
            ("c5-5 c5-5! c4-4", None),
            ("c4-0", TELL(1)),
            // Two steps at once: whoever is at the one before is told the newest, and nobody beside it.
            ("c4-0 c3-3 c3-3", TELL(1)),
            ("c4-4 c3-3 c3-3", TELL(1)),
            ("c5-5 c4-0 c3-3", TELL(2)),
            ("c5-5 c4-4 c3-0", TELL(3)),
            // Workers, several at a time, once all controllers act on it.
            ("c5-0 w4-4 w4-4", None),
            ("c5-5! w4-4 w4-4", None),
            ("c5-5 w4-4 w4-4", TELL(2)),
            ("c5-5 w5-0 w4-4", TELL(3)),
            ("c5-5 w4-0 w4-4!", TELL(2)),
            ("w4-4 w4-4", TELL(1)),
            ("c5-5 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w4-4 w4-4", TELL(11)),
            ("c5-5 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w5-0 w4-4", None),
            ("c5-5 w5-0 w5-0 w5-0 w5-0? w5-0 w5-0 w5-0 w5-0 w5-0 w5-4! w4-4", None),
            ("c5-5 w5-0 w5-0 w5-0 w5-0x w5-0 w5-0 w5-0 w5-0 w5-0 w5-5 w4-4", TELL(12)),
            // Whoever is new is told at once, and whoever left is forgotten and not waited for.
            ("c5-0 c4-4 c-0 w4-4", TELL(3)),
            ("c4-4 c4-4 w-0", TELL(3)),
            ("c5-5 -c5-0 c4-4", FORGET(2)),
            ("c5-5 -c-0 c4-4", TELL(3)),
            ("c5-5 -w4-0 w4-4", FORGET(2)),
        ] {
            assert_eq!(seen(words, |all| next(NOW, all)), expected, "{words}");
        }
    }

    #[test]
    fn whoever_holds_it_up_is_named() {
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
            assert_eq!(seen(words, |all| held_by(NOW, all)), expected, "{words}");
        }
    }

    #[test]
    fn last_word_is_that_of_whoever_was_told_last() {
        for (words, generation, expected) in [
            ("", 1, None),
            ("c4-4 w3-3 c-0", 5, None),
            ("c5-5 w6-6 c4-4", 5, Some(at(6))),
            ("c5-5 -w6-6 c4-4", 5, Some(at(5))),
        ] {
            assert_eq!(seen(words, |all| told_at(generation, all)), expected, "{words}");
        }
    }

    /// Whatever becomes of nodes on the way, and whoever leads: at no moment are two controllers told and not back, and in
    /// the end all act on the newest.
    #[test]
    fn no_two_controllers_are_away_at_once_until_all_act_on_it() {
        for seed in 0..200_u64 {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut draw = |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            let mut all = vec![is("c1-1"), is("c1-1"), is("c1-1"), is("w1-1"), is("w1-1")];
            let mut generation = 1;
            for step in 0..400 {
                if step < 300 && draw(40) == 0 {
                    generation += 1;
                }
                let words: Vec<String> = all
                    .iter()
                    .map(|one| format!("{}{}-{}", if one.controller { 'c' } else { 'w' }, one.told, one.says))
                    .collect();
                let turn = seen(&words.join(" "), |standings| next(generation, standings));
                if let Some(Turn::Tell(id)) = turn {
                    let place = (1..).zip(&mut all).find(|(number, _)| node_id(*number) == id);
                    let (_, one) = place.unwrap();
                    // It stops what runs, and says so.
                    (one.told, one.says) = (generation, 0);
                } else {
                    // One of those that were told comes back.
                    let place = usize::try_from(draw(5)).unwrap();
                    all[place].says = all[place].told;
                }
                let away = all.iter().filter(|one| one.controller && one.says == 0).count();
                assert!(away <= 1, "seed {seed}: {away} are away");
            }
            assert!(all.iter().all(|one| one.says == generation), "seed {seed}");
        }
    }
}
