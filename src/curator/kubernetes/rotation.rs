//! How what signs is replaced, without anybody being refused meanwhile.
//!
//! In three steps, each of which is one write and a generation of its own:
//!
//! 1. The new one is *trusted* beside the old one, which goes on signing. Nothing it signs is there yet.
//! 2. Once all nodes act on that, the new one *signs*. Nodes renew what they have, and everybody who is shown either
//!    believes it.
//! 3. Once all nodes act on that, nothing that the old one signed is in use, and it is *dropped*.
//!
//! Tokens of service accounts are not renewed by nodes: pods have them, for an hour. So the old key is trusted for longer
//! than that after the last API server has ceased to sign with it, and that moment is written down as well.
//!
//! All nodes are those that are up and have a role of Kubernetes. What one says of itself counts, and nothing else does:
//! one that is silent holds the replacement up until it speaks, or loses its roles, or is decommissioned, and is named to
//! whoever asks. A step made without it would be the end of what it shows to others.
//!
//! A leader that is lost between two steps leaves a record of one or of the other, and the next one goes on from there. The
//! steps follow from that record, the nodes and the time alone.
//!
//! # Nodes of different generations
//!
//! Nodes are told of a step one after the other ([`turns`]), so for minutes some act on a
//! step and others on the one before, and a component of either shows the other what was signed for it. Nobody is refused
//! for that, whichever of the five it is about:
//!
//! | step before | step | the former trusts what the latter shows | and the other way round |
//! | --- | --- | --- | --- |
//! | the old one, alone | *trusted* | the old one signs for both | the old one is trusted still |
//! | *trusted* | *signs* | it trusts the new one since it was trusted | the old one is trusted still |
//! | *signs* | *dropped* | the new one signs for both | all that it shows is signed by the new one |
//!
//! No two nodes are ever further apart than that: each step is made once *all* nodes say that they act on the one before,
//! and a node says so of the certificates and keys that its components were started with, never of what it was told. A node
//! that never was there begins with the present step, which is at most one from that of any other. What is under way for
//! another of the five changes nothing of this, for none of them is trusted in the place of another; so generations, which
//! count the steps of all five, may be further apart than one.
//!
//! A node that is told of a former step still asks for certificates now and then, and is given what signs at present. That
//! is at most one step further than what it was told, and so in the table as well: whoever was told *trusted* may show
//! what the new one signed, once all trust it.

use std::time::Duration;

use crate::curator::kubernetes::authority::Signer;
use crate::curator::kubernetes::keys::{Keys, Ring, Which};
use crate::curator::kubernetes::refusal::Refusal;
use crate::curator::kubernetes::turns::{self, Standing};
use crate::curator::node::Node;
use crate::curator::node_id::NodeId;
use crate::model::time::{Timestamp, after};
use crate::proto::curator::v1 as wire;

/// How long tokens that the old key signed are waited for: they are good for an hour, a few seconds more as pods ask for
/// them, and clocks differ.
pub const TOKEN_OVERLAP: Duration = Duration::from_mins(70);

/// How far a replacement is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The new one is trusted, and the old one signs.
    Trusted,
    /// The new one signs, and the old one is trusted.
    Signs,
}

impl Stage {
    /// As it is sent.
    #[must_use]
    pub const fn to_wire(self) -> wire::kubernetes_rotation::Stage {
        match self {
            Self::Trusted => wire::kubernetes_rotation::Stage::Trusted,
            Self::Signs => wire::kubernetes_rotation::Stage::Signs,
        }
    }

    /// Reads what was stored.
    #[must_use]
    pub fn from_wire(number: i32) -> Option<Self> {
        [Self::Trusted, Self::Signs].into_iter().find(|stage| i32::from(stage.to_wire()) == number)
    }
}

/// A replacement that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// What is trusted beside what signs: the new one first, and then the old one.
    pub trusted: Signer,
    /// How far it is.
    pub stage: Stage,
    /// Since when.
    pub since: Timestamp,
    /// The generation of this stage.
    pub generation: u64,
    /// When all nodes acted on it, where something else is waited for since.
    pub settled_at: Option<Timestamp>,
}

/// What the leader does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The new one signs.
    Sign,
    /// That all nodes act on it is written down.
    Settle,
    /// The old one is dropped, and all is done.
    Drop,
}

/// Nodes that do not act on this generation, of those that must: in order of their ids.
pub fn waits_for<'a>(generation: u64, nodes: impl IntoIterator<Item = &'a Node>) -> Vec<NodeId> {
    let concerned = nodes.into_iter().filter(|node| turns::is_concerned(node));
    let late = concerned.filter(|node| {
        let said = node.status.as_ref().and_then(|status| status.kubernetes.as_ref());
        said.is_none_or(|said| said.generation < generation)
    });
    late.map(|node| node.id).collect()
}

/// Until when the old one is waited for; `None` where it is not, or nobody can say yet.
#[must_use]
pub fn until(which: Which, replacement: &Replacement, overlap: Duration) -> Option<Timestamp> {
    if which.is_authority() || replacement.stage != Stage::Signs {
        return None;
    }
    Some(after(replacement.settled_at?, overlap))
}

/// What is next, where the nodes in `waits_for` do not act on this stage; `None` where it is to be waited.
#[must_use]
pub fn next(
    which: Which,
    replacement: &Replacement,
    waits_for: &[NodeId],
    overlap: Duration,
    now: Timestamp,
) -> Option<Step> {
    if !waits_for.is_empty() {
        return None;
    }
    match (replacement.stage, replacement.settled_at) {
        (Stage::Trusted, _) => Some(Step::Sign),
        (Stage::Signs, None) if !which.is_authority() => Some(Step::Settle),
        (Stage::Signs, _) => {
            let ended = until(which, replacement, overlap).is_none_or(|until| now >= until);
            ended.then_some(Step::Drop)
        }
    }
}

impl Keys {
    /// The keys with a replacement begun; `None` where one is under way.
    pub fn begin(&self, which: Which, new: Signer, now: Timestamp) -> Result<Option<Self>, Refusal> {
        let ring = self.ring(which)?;
        if ring.replacement.is_some() {
            return Ok(None);
        }
        let generation = self.generation + 1;
        let replacement =
            Replacement { trusted: new, stage: Stage::Trusted, since: now, generation, settled_at: None };
        Ok(Some(self.with(
            which,
            Ring { signs: ring.signs.clone(), replacement: Some(replacement) },
            generation,
        )))
    }

    /// The keys after this step; `None` where there is nothing to make it with.
    #[must_use]
    pub fn after(&self, which: Which, step: Step, now: Timestamp) -> Option<Self> {
        let ring = self.rings.get(&which)?;
        let replacement = ring.replacement.as_ref()?;
        let next = self.generation + 1;
        Some(match step {
            Step::Sign => {
                let signs = replacement.trusted.clone();
                let trusted = ring.signs.clone();
                let replacement = Replacement {
                    trusted,
                    stage: Stage::Signs,
                    since: now,
                    generation: next,
                    settled_at: None,
                };
                self.with(which, Ring { signs, replacement: Some(replacement) }, next)
            }
            // Nothing that a node is told is different.
            Step::Settle => {
                let replacement = Replacement { settled_at: Some(now), ..replacement.clone() };
                self.with(
                    which,
                    Ring { signs: ring.signs.clone(), replacement: Some(replacement) },
                    self.generation,
                )
            }
            Step::Drop => self.with(which, Ring::of(ring.signs.clone()), next),
        })
    }

    fn with(&self, which: Which, ring: Ring, generation: u64) -> Self {
        let (mut rings, mut former) = (self.rings.clone(), self.former.clone());
        rings.insert(which, ring);
        if generation != self.generation {
            former.push(self.edition());
        }
        Self { generation, rings, former }
    }

    /// Replacements that are under way, as people see them, in order of their numbers.
    #[must_use]
    pub fn rotations(&self, all: &[Standing<'_>], overlap: Duration) -> Vec<wire::KubernetesRotation> {
        let held_by = turns::held_by(self.generation, all);
        let ids = |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect();
        let rotations = self.rings.iter().filter_map(|(which, ring)| {
            let replacement = ring.replacement.as_ref()?;
            let waits_for = waits_for(replacement.generation, all.iter().map(|standing| standing.node));
            let told_at = turns::told_at(replacement.generation, all);
            Some(wire::KubernetesRotation {
                which: which.to_wire().into(),
                stage: replacement.stage.to_wire().into(),
                since_ms: replacement.since.timestamp_millis(),
                held_by: if waits_for.is_empty() { Vec::new() } else { ids(&held_by) },
                waits_for: ids(&waits_for),
                until_ms: until(*which, replacement, overlap).map_or(0, |until| until.timestamp_millis()),
                told_at_ms: told_at.map_or(0, |at| at.timestamp_millis()),
            })
        });
        rotations.collect()
    }

    /// The next step of any replacement, and the keys after it; `None` where all wait, or there is none.
    #[must_use]
    pub fn next<'a>(
        &self,
        nodes: &(impl IntoIterator<Item = &'a Node> + Clone),
        overlap: Duration,
        now: Timestamp,
    ) -> Option<(Which, Step, Self)> {
        self.rings.iter().find_map(|(which, ring)| {
            let replacement = ring.replacement.as_ref()?;
            let waits_for = waits_for(replacement.generation, nodes.clone());
            let step = next(*which, replacement, &waits_for, overlap, now)?;
            Some((*which, step, self.after(*which, step, now)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::health::Health;
    use crate::curator::kubernetes::allotment::Told;
    use crate::curator::kubernetes::keys::tests::{keys, new_signer};
    use crate::curator::node::State;
    use crate::curator::node::tests::{at, member, up};
    use crate::curator::node_id::tests::node_id;

    const OVERLAP: Duration = Duration::from_secs(100);

    /// A worker that says this generation.
    fn worker(number: u8, says: Option<u64>) -> Node {
        let mut node = up(number);
        node.roles.kubernetes_worker = true;
        said(&mut node, says);
        node
    }

    fn said(node: &mut Node, generation: Option<u64>) {
        let status = node.status.as_mut().unwrap();
        status.kubernetes =
            generation.map(|generation| wire::KubernetesStatus { generation, ..Default::default() });
    }

    /// These nodes, told of the first generation.
    fn standing(nodes: &[Node]) -> Vec<Standing<'_>> {
        let told = Some(Told { generation: 1, at: at(0) });
        nodes.iter().map(|node| Standing { node, told, health: Health::Unknown }).collect()
    }

    #[test]
    fn nodes_that_are_up_and_have_a_role_are_waited_for_and_no_others() {
        let mut controller = member(2);
        controller.roles.kubernetes_controller = true;
        said(&mut controller, Some(5));
        let silent = Node { status: None, ..worker(3, None) };
        let mut gone = worker(4, None);
        (gone.state, gone.roles) = (State::Decommissioned, crate::curator::node::Roles::default());
        let without_a_role = up(5);
        let nodes = [
            worker(1, Some(4)),
            controller,
            silent,
            gone,
            without_a_role,
            worker(6, None),
            worker(7, Some(9)),
        ];
        let late = |generation| waits_for(generation, &nodes);
        assert_eq!(late(6), [1, 2, 3, 6].map(node_id));
        assert_eq!(late(5), [1, 3, 6].map(node_id));
        assert_eq!(late(4), [3, 6].map(node_id));
        assert_eq!(late(1), [3, 6].map(node_id));
    }

    #[test]
    fn step_is_made_when_nobody_is_waited_for() {
        let replacement = |stage, settled_at: Option<i64>| Replacement {
            trusted: new_signer(Which::Etcd, 2),
            stage,
            since: at(0),
            generation: 2,
            settled_at: settled_at.map(at),
        };
        for (which, stage, settled, late, now, expected) in [
            (Which::Servers, Stage::Trusted, None, true, 1_000_000, None),
            (Which::Servers, Stage::Trusted, None, false, 0, Some(Step::Sign)),
            (Which::Clients, Stage::Signs, None, true, 1_000_000, None),
            (Which::Clients, Stage::Signs, None, false, 0, Some(Step::Drop)),
            (Which::ServiceAccounts, Stage::Trusted, None, false, 0, Some(Step::Sign)),
            (Which::ServiceAccounts, Stage::Signs, None, true, 1_000_000, None),
            (Which::ServiceAccounts, Stage::Signs, None, false, 1_000_000, Some(Step::Settle)),
            (Which::ServiceAccounts, Stage::Signs, Some(10), false, 109, None),
            (Which::ServiceAccounts, Stage::Signs, Some(10), false, 110, Some(Step::Drop)),
            (Which::ServiceAccounts, Stage::Signs, Some(10), true, 1_000_000, None),
        ] {
            let waits_for: &[NodeId] = if late { &[node_id(1)] } else { &[] };
            let step = next(which, &replacement(stage, settled), waits_for, OVERLAP, at(now));
            assert_eq!(step, expected, "{which} {stage:?} {settled:?} {late} {now}");
        }
    }

    /// Every state on the way, for each kind: what signs, what is trusted, and who would be refused.
    #[test]
    fn nobody_is_refused_on_the_way() {
        for which in Which::ALL {
            let first = keys();
            let old = first.rings[&which].signs.clone();
            let new = new_signer(which, 2);
            let mut now = first.begin(which, new.clone(), at(0)).unwrap().unwrap();
            assert_eq!(now.begin(which, new_signer(which, 3), at(1)).unwrap(), None, "one is under way");
            let trusted = |keys: &Keys| {
                let ring = &keys.rings[&which];
                (ring.signs.clone(), ring.replacement.as_ref().map(|replacement| replacement.trusted.clone()))
            };
            assert_eq!(trusted(&now), (old.clone(), Some(new.clone())));
            let mut seen = vec![(now.generation, trusted(&now))];
            for second in 1..400 {
                // A node acts on what it is told a while later.
                let acts =
                    [worker(1, seen.get(seen.len().saturating_sub(2)).map(|(generation, _)| *generation))];
                let late = now.next(&&acts, OVERLAP, at(second));
                let acts = [worker(1, Some(now.generation))];
                let in_time = now.next(&&acts, OVERLAP, at(second));
                let step = if second % 3 == 0 { in_time } else { late };
                let Some((of, _, after)) = step else { continue };
                assert_eq!(of, which);
                if after.generation != now.generation {
                    assert_eq!(after.generation, now.generation + 1);
                    // Whoever acts on the generation before believes what this one signs with, and the other way round.
                    let (before, is) = (trusted(&now), trusted(&after));
                    assert!(is.0 == before.0 || before.1.as_ref() == Some(&is.0), "{which}");
                    assert!(before.0 == is.0 || is.1.as_ref() == Some(&before.0), "{which}");
                    seen.push((after.generation, is));
                }
                now = after;
            }
            assert_eq!(trusted(&now), (new, None), "{which} is done");
            assert_eq!(now.generation, first.generation + 3);
            let others = |keys: &Keys| {
                keys.rings
                    .iter()
                    .filter(|(other, _)| **other != which)
                    .map(|(_, ring)| ring.clone())
                    .collect::<Vec<_>>()
            };
            assert_eq!(others(&now), others(&first), "the others are as they were");
        }
    }

    #[test]
    fn two_replacements_go_on_beside_each_other() {
        let mut now = keys().begin(Which::Clients, new_signer(Which::Clients, 2), at(0)).unwrap().unwrap();
        now = now.begin(Which::Servers, new_signer(Which::Servers, 2), at(0)).unwrap().unwrap();
        assert_eq!(now.generation, 3);
        // It acts on the first, not on the second.
        let nodes = [worker(1, Some(2))];
        let (which, step, after) = now.next(&&nodes, OVERLAP, at(1)).unwrap();
        assert_eq!((which, step), (Which::Clients, Step::Sign));
        let told = after.rotations(&standing(&nodes), OVERLAP);
        assert_eq!(told.iter().map(|told| told.waits_for.len()).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(after.next(&&nodes, OVERLAP, at(2)), None);
    }

    #[test]
    fn replacement_says_whom_it_waits_for_and_until_when() {
        let which = Which::ServiceAccounts;
        let begun = keys().begin(which, new_signer(which, 2), at(0)).unwrap().unwrap();
        let late = [worker(1, Some(1))];
        let told = begun.rotations(&standing(&late), OVERLAP);
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].waits_for, [node_id(1).to_string()]);
        assert_eq!((told[0].held_by.len(), told[0].told_at_ms), (0, 0), "it may be told next");
        let mut is_told = standing(&late);
        is_told[0].told = Some(Told { generation: 2, at: at(1) });
        let told = begun.rotations(&is_told, OVERLAP);
        assert_eq!(told[0].held_by, told[0].waits_for);
        assert_eq!(told[0].told_at_ms, at(1).timestamp_millis());
        assert_eq!((told[0].stage(), told[0].until_ms), (wire::kubernetes_rotation::Stage::Trusted, 0));
        let signs = begun.after(which, Step::Sign, at(5)).unwrap();
        let settled = signs.after(which, Step::Settle, at(7)).unwrap();
        let acts = [worker(1, Some(3))];
        let told = settled.rotations(&standing(&acts), OVERLAP);
        assert_eq!(
            (told[0].since_ms, told[0].until_ms),
            (at(5).timestamp_millis(), at(107).timestamp_millis())
        );
        assert!(told[0].waits_for.is_empty());
        assert!(keys().forgotten().begin(which, new_signer(which, 2), at(0)).is_err());
    }
}
