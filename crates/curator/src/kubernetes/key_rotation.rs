//! Rotates a Kubernetes signing key: trust, sign, drop, without rejecting anybody.
//!
//! A rotation has three steps. Each step is one write and has a generation of its own:
//!
//! 1. The new key is *trusted* beside the old one, which continues to sign. Nothing signed by the new key exists yet.
//! 2. Once all nodes run with that generation, the new key *signs*. Nodes renew their certificates, and every component
//!    accepts both the old and the new ones.
//! 3. Once all nodes run with that generation, nothing signed by the old key is in use, and it is *dropped*.
//!
//! Nodes do not renew service-account tokens: pods have them, for an hour. So the old key stays trusted for longer than
//! that after the last API server has stopped signing with it. That moment is stored in the record as well.
//!
//! "All nodes" means those that are up and have a Kubernetes role. Only what a node reports about itself counts. A
//! silent node blocks the rotation until it reports, loses its roles, or is decommissioned; it is named to callers that
//! query the rotation. If a step were made without that node, what it shows to others would be rejected.
//!
//! A leader that is lost between two steps leaves the record of one step or of the other, and its successor continues
//! from there. The steps follow from that record, the nodes and the time alone.
//!
//! # Nodes of different generations
//!
//! Nodes are assigned a step one after the other ([`key_rollout`]). So for minutes some nodes run with a step and
//! others with the step before, and their components show each other what was signed for them. None of them is rejected
//! for that, for each of the six kinds of keys. The first node of each row is one step behind the
//! second:
//!
//! | first node | second node | the first accepts the second, because | the second accepts the first, because |
//! | --- | --- | --- | --- |
//! | the old key alone | *trusted* | the old key signs for both | the old key is still trusted |
//! | *trusted* | *signs* | it trusts the new key already | the old key is still trusted |
//! | *signs* | *dropped* | the new key signs for both | all that the first shows is signed by the new key |
//!
//! No two nodes are ever further apart than that. Each step is made once *all* nodes report that they run with the step
//! before, and a node reports the certificates and keys that its components were started with, never its assignment. A
//! new node begins with the current step, which is at most one step from that of any other node. A rotation of another
//! of the six kinds changes nothing of this, because no kind is trusted in place of another. So generations, which
//! count the steps of all six kinds, may be further apart than one.
//!
//! A node that is assigned an earlier step still requests certificates now and then, and they are signed by the key
//! that signs at present. That key is at most one step ahead of the node's assignment, so the table covers it too: a
//! node assigned *trusted* may show what the new key signed, once all nodes trust that key.

use std::time::Duration;

use curator_client::node::Node;
use curator_client::node_id::NodeId;
use model::cluster::kubernetes::KeyPurpose;
use model::time::{Timestamp, after};
use proto::curator::v1 as wire;

use crate::kubernetes::error::KubernetesError;
use crate::kubernetes::key_rollout::{self, NodeProgress};
use crate::kubernetes::keys::{KeyRing, KubernetesKeys};
use crate::kubernetes::signer::Signer;

/// How long the old key stays trusted for the tokens that it signed. Tokens are valid for an hour, pods request a few
/// seconds more, and clocks differ.
pub const TOKEN_OVERLAP: Duration = Duration::from_mins(70);

/// The step that a rotation is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationStage {
    /// The new key is trusted, and the old one signs.
    Trusted,
    /// The new key signs, and the old one is trusted.
    Signing,
}

impl RotationStage {
    /// The stage as a number of the API.
    #[must_use]
    pub const fn to_wire(self) -> wire::kubernetes_rotation::Stage {
        match self {
            Self::Trusted => wire::kubernetes_rotation::Stage::Trusted,
            Self::Signing => wire::kubernetes_rotation::Stage::Signing,
        }
    }

    /// The stage of a stored number; `None` if there is no such stage.
    #[must_use]
    pub fn from_wire(number: i32) -> Option<Self> {
        [Self::Trusted, Self::Signing].into_iter().find(|stage| i32::from(stage.to_wire()) == number)
    }
}

/// A rotation that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyReplacement {
    /// The key that is trusted beside the signing one: first the new key, later the old one.
    pub trusted: Signer,
    /// The step it is at.
    pub stage: RotationStage,
    /// When this stage began.
    pub since: Timestamp,
    /// The generation of this stage.
    pub generation: u64,
    /// When all nodes ran with this stage; set only for service-account keys, which then wait for old tokens to expire.
    pub settled_at: Option<Timestamp>,
}

/// What the leader does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationStep {
    /// Let the new key sign.
    Sign,
    /// Store that all nodes run with the stage, and since when.
    MarkSettled,
    /// Drop the old key, which ends the rotation.
    DropOld,
}

/// Nodes that take part and do not run with this generation yet, in order of their ids.
fn lagging_nodes<'a>(generation: u64, nodes: impl IntoIterator<Item = &'a Node>) -> Vec<NodeId> {
    let concerned = nodes.into_iter().filter(|node| key_rollout::takes_part(node));
    let late = concerned.filter(|node| {
        let kubernetes_status = node.status.as_ref().and_then(|status| status.kubernetes.as_ref());
        kubernetes_status.is_none_or(|kubernetes_status| kubernetes_status.generation < generation)
    });
    late.map(|node| node.id).collect()
}

/// Until when the old key stays trusted; `None` if it need not, or if that moment is not known yet.
fn overlap_end(which: KeyPurpose, replacement: &KeyReplacement, overlap: Duration) -> Option<Timestamp> {
    if which.is_authority() || replacement.stage != RotationStage::Signing {
        return None;
    }
    Some(after(replacement.settled_at?, overlap))
}

/// The step that is due, where the nodes `waits_for` do not run with this stage yet; `None` if the rotation has to
/// wait.
fn due_step(
    which: KeyPurpose,
    replacement: &KeyReplacement,
    waits_for: &[NodeId],
    overlap: Duration,
    now: Timestamp,
) -> Option<RotationStep> {
    if !waits_for.is_empty() {
        return None;
    }
    match (replacement.stage, replacement.settled_at) {
        (RotationStage::Trusted, _) => Some(RotationStep::Sign),
        (RotationStage::Signing, None) if !which.is_authority() => Some(RotationStep::MarkSettled),
        (RotationStage::Signing, _) => {
            let ended = overlap_end(which, replacement, overlap).is_none_or(|until| now >= until);
            ended.then_some(RotationStep::DropOld)
        }
    }
}

impl KubernetesKeys {
    /// The keys with a rotation begun; `None` if one is under way.
    pub fn begin_rotation(
        &self,
        which: KeyPurpose,
        new: Signer,
        now: Timestamp,
    ) -> Result<Option<Self>, KubernetesError> {
        let ring = self.key_ring(which)?;
        if ring.replacement.is_some() {
            return Ok(None);
        }
        let generation = self.generation + 1;
        let replacement = KeyReplacement {
            trusted: new,
            stage: RotationStage::Trusted,
            since: now,
            generation,
            settled_at: None,
        };
        Ok(Some(self.with_ring(
            which,
            KeyRing { signer: ring.signer.clone(), replacement: Some(replacement) },
            generation,
        )))
    }

    /// The keys after this step; `None` if no rotation of this kind is under way.
    #[must_use]
    pub fn apply_step(&self, which: KeyPurpose, step: RotationStep, now: Timestamp) -> Option<Self> {
        let ring = self.rings.get(&which)?;
        let replacement = ring.replacement.as_ref()?;
        let next = self.generation + 1;
        Some(match step {
            RotationStep::Sign => {
                let signs = replacement.trusted.clone();
                let trusted = ring.signer.clone();
                let replacement = KeyReplacement {
                    trusted,
                    stage: RotationStage::Signing,
                    since: now,
                    generation: next,
                    settled_at: None,
                };
                self.with_ring(which, KeyRing { signer: signs, replacement: Some(replacement) }, next)
            }
            // What nodes get does not change, so the generation stays.
            RotationStep::MarkSettled => {
                let replacement = KeyReplacement { settled_at: Some(now), ..replacement.clone() };
                self.with_ring(
                    which,
                    KeyRing { signer: ring.signer.clone(), replacement: Some(replacement) },
                    self.generation,
                )
            }
            RotationStep::DropOld => self.with_ring(which, KeyRing::new(ring.signer.clone()), next),
        })
    }

    fn with_ring(&self, which: KeyPurpose, ring: KeyRing, generation: u64) -> Self {
        let (mut rings, mut former) = (self.rings.clone(), self.former.clone());
        rings.insert(which, ring);
        if generation != self.generation {
            former.push(self.trust_bundle());
        }
        Self { generation, rings, former, exposed: self.exposed.clone() }
    }

    /// Rotations under way, as the API shows them, in order of the numbers of their kinds.
    #[must_use]
    pub fn describe_rotations(
        &self,
        all: &[NodeProgress<'_>],
        overlap: Duration,
    ) -> Vec<wire::KubernetesRotation> {
        let held_by = key_rollout::blocking_nodes(self.generation, all);
        let ids = |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect();
        let rotations = self.rings.iter().filter_map(|(which, ring)| {
            let replacement = ring.replacement.as_ref()?;
            let waits_for = lagging_nodes(replacement.generation, all.iter().map(|standing| standing.node));
            let notified_at = key_rollout::last_assigned_at(replacement.generation, all);
            Some(wire::KubernetesRotation {
                keys: which.to_wire().into(),
                stage: replacement.stage.to_wire().into(),
                since_ms: replacement.since.timestamp_millis(),
                blocked_by: if waits_for.is_empty() { Vec::new() } else { ids(&held_by) },
                waits_for: ids(&waits_for),
                until_ms: overlap_end(*which, replacement, overlap)
                    .map_or(0, |until| until.timestamp_millis()),
                notified_at_ms: notified_at.map_or(0, |at| at.timestamp_millis()),
            })
        });
        rotations.collect()
    }

    /// The next step of any rotation, and the keys after it; `None` if all wait, or there is none.
    #[must_use]
    pub fn next_rotation_step<'a>(
        &self,
        nodes: &(impl IntoIterator<Item = &'a Node> + Clone),
        overlap: Duration,
        now: Timestamp,
    ) -> Option<(KeyPurpose, RotationStep, Self)> {
        self.rings.iter().find_map(|(which, ring)| {
            let replacement = ring.replacement.as_ref()?;
            let waits_for = lagging_nodes(replacement.generation, nodes.clone());
            let step = due_step(*which, replacement, &waits_for, overlap, now)?;
            Some((*which, step, self.apply_step(*which, step, now)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use curator_client::node::NodeState;
    use curator_client::testing::{at, member, node_id, up};

    use super::*;
    use crate::kubernetes::keys::tests::{keys, new_signer};
    use crate::kubernetes::node_allocation::AssignedGeneration;
    use crate::node_health::NodeHealth;

    const OVERLAP: Duration = Duration::from_secs(100);

    /// A worker that reports this generation.
    fn worker(number: u8, says: Option<u64>) -> Node {
        let mut node = up(number);
        node.roles.kubernetes_worker = true;
        report_generation(&mut node, says);
        node
    }

    fn report_generation(node: &mut Node, generation: Option<u64>) {
        let status = node.status.as_mut().unwrap();
        status.kubernetes =
            generation.map(|generation| wire::KubernetesStatus { generation, ..Default::default() });
    }

    /// The progress of these nodes, all assigned the first generation.
    fn progress_of(nodes: &[Node]) -> Vec<NodeProgress<'_>> {
        let generation = Some(AssignedGeneration { generation: 1, assigned_at: at(0) });
        nodes
            .iter()
            .map(|node| NodeProgress { node, assigned: generation, health: NodeHealth::Unknown })
            .collect()
    }

    #[test]
    fn rotation_waits_only_for_nodes_that_are_up_and_have_a_role() {
        let mut controller = member(2);
        controller.roles.kubernetes_controller = true;
        report_generation(&mut controller, Some(5));
        let silent = Node { status: None, ..worker(3, None) };
        let mut gone = worker(4, None);
        (gone.state, gone.roles) = (NodeState::Decommissioned, curator_client::node::NodeRoles::default());
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
        let late = |generation| lagging_nodes(generation, &nodes);
        assert_eq!(late(6), [1, 2, 3, 6].map(node_id));
        assert_eq!(late(5), [1, 3, 6].map(node_id));
        assert_eq!(late(4), [3, 6].map(node_id));
        assert_eq!(late(1), [3, 6].map(node_id));
    }

    #[test]
    fn rotation_advances_when_no_node_lags() {
        let replacement = |stage, settled_at: Option<i64>| KeyReplacement {
            trusted: new_signer(KeyPurpose::Etcd, 2),
            stage,
            since: at(0),
            generation: 2,
            settled_at: settled_at.map(at),
        };
        for (which, stage, settled, late, now, expected) in [
            (KeyPurpose::Servers, RotationStage::Trusted, None, true, 1_000_000, None),
            (KeyPurpose::Servers, RotationStage::Trusted, None, false, 0, Some(RotationStep::Sign)),
            (KeyPurpose::Clients, RotationStage::Signing, None, true, 1_000_000, None),
            (KeyPurpose::Clients, RotationStage::Signing, None, false, 0, Some(RotationStep::DropOld)),
            (KeyPurpose::ServiceAccounts, RotationStage::Trusted, None, false, 0, Some(RotationStep::Sign)),
            (KeyPurpose::ServiceAccounts, RotationStage::Signing, None, true, 1_000_000, None),
            (
                KeyPurpose::ServiceAccounts,
                RotationStage::Signing,
                None,
                false,
                1_000_000,
                Some(RotationStep::MarkSettled),
            ),
            (KeyPurpose::ServiceAccounts, RotationStage::Signing, Some(10), false, 109, None),
            (
                KeyPurpose::ServiceAccounts,
                RotationStage::Signing,
                Some(10),
                false,
                110,
                Some(RotationStep::DropOld),
            ),
            (KeyPurpose::ServiceAccounts, RotationStage::Signing, Some(10), true, 1_000_000, None),
        ] {
            let waits_for: &[NodeId] = if late { &[node_id(1)] } else { &[] };
            let step = due_step(which, &replacement(stage, settled), waits_for, OVERLAP, at(now));
            assert_eq!(step, expected, "{which} {stage:?} {settled:?} {late} {now}");
        }
    }

    /// Each stage, for each kind of key: what signs, what is trusted, and who would be rejected.
    #[test]
    fn no_component_is_rejected_during_a_rotation() {
        for which in KeyPurpose::ALL {
            let first = keys();
            let old = first.rings[&which].signer.clone();
            let new = new_signer(which, 2);
            let mut now = first.begin_rotation(which, new.clone(), at(0)).unwrap().unwrap();
            assert_eq!(
                now.begin_rotation(which, new_signer(which, 3), at(1)).unwrap(),
                None,
                "one is under way"
            );
            let trusted = |keys: &KubernetesKeys| {
                let ring = &keys.rings[&which];
                (
                    ring.signer.clone(),
                    ring.replacement.as_ref().map(|replacement| replacement.trusted.clone()),
                )
            };
            assert_eq!(trusted(&now), (old.clone(), Some(new.clone())));
            let mut seen = vec![(now.generation, trusted(&now))];
            for second in 1..400 {
                // A node runs with its assigned generation a while later.
                let acts =
                    [worker(1, seen.get(seen.len().saturating_sub(2)).map(|(generation, _)| *generation))];
                let late = now.next_rotation_step(&&acts, OVERLAP, at(second));
                let acts = [worker(1, Some(now.generation))];
                let in_time = now.next_rotation_step(&&acts, OVERLAP, at(second));
                let step = if second % 3 == 0 { in_time } else { late };
                let Some((of, _, after)) = step else { continue };
                assert_eq!(of, which);
                if after.generation != now.generation {
                    assert_eq!(after.generation, now.generation + 1);
                    // A node of the generation before trusts what this one signs with, and the other way round.
                    let (before, is) = (trusted(&now), trusted(&after));
                    assert!(is.0 == before.0 || before.1.as_ref() == Some(&is.0), "{which}");
                    assert!(before.0 == is.0 || is.1.as_ref() == Some(&before.0), "{which}");
                    seen.push((after.generation, is));
                }
                now = after;
            }
            assert_eq!(trusted(&now), (new, None), "{which} is done");
            assert_eq!(now.generation, first.generation + 3);
            let others = |keys: &KubernetesKeys| {
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
    fn two_rotations_proceed_independently() {
        let mut now = keys()
            .begin_rotation(KeyPurpose::Clients, new_signer(KeyPurpose::Clients, 2), at(0))
            .unwrap()
            .unwrap();
        now = now
            .begin_rotation(KeyPurpose::Servers, new_signer(KeyPurpose::Servers, 2), at(0))
            .unwrap()
            .unwrap();
        assert_eq!(now.generation, 3);
        // The worker runs with the first stage, not with the second.
        let nodes = [worker(1, Some(2))];
        let (which, step, after) = now.next_rotation_step(&&nodes, OVERLAP, at(1)).unwrap();
        assert_eq!((which, step), (KeyPurpose::Clients, RotationStep::Sign));
        let rotations = after.describe_rotations(&progress_of(&nodes), OVERLAP);
        assert_eq!(rotations.iter().map(|rotation| rotation.waits_for.len()).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(after.next_rotation_step(&&nodes, OVERLAP, at(2)), None);
    }

    #[test]
    fn rotation_reports_lagging_nodes_and_overlap_end() {
        let which = KeyPurpose::ServiceAccounts;
        let begun = keys().begin_rotation(which, new_signer(which, 2), at(0)).unwrap().unwrap();
        let late = [worker(1, Some(1))];
        let rotations = begun.describe_rotations(&progress_of(&late), OVERLAP);
        assert_eq!(rotations.len(), 1);
        assert_eq!(rotations[0].waits_for, [node_id(1).to_string()]);
        assert_eq!(
            (rotations[0].blocked_by.len(), rotations[0].notified_at_ms),
            (0, 0),
            "it may be notified next"
        );
        let mut is_notified = progress_of(&late);
        is_notified[0].assigned = Some(AssignedGeneration { generation: 2, assigned_at: at(1) });
        let rotations = begun.describe_rotations(&is_notified, OVERLAP);
        assert_eq!(rotations[0].blocked_by, rotations[0].waits_for);
        assert_eq!(rotations[0].notified_at_ms, at(1).timestamp_millis());
        assert_eq!(
            (rotations[0].stage(), rotations[0].until_ms),
            (wire::kubernetes_rotation::Stage::Trusted, 0)
        );
        let signs = begun.apply_step(which, RotationStep::Sign, at(5)).unwrap();
        let settled = signs.apply_step(which, RotationStep::MarkSettled, at(7)).unwrap();
        let acts = [worker(1, Some(3))];
        let rotations = settled.describe_rotations(&progress_of(&acts), OVERLAP);
        assert_eq!(
            (rotations[0].since_ms, rotations[0].until_ms),
            (at(5).timestamp_millis(), at(107).timestamp_millis())
        );
        assert!(rotations[0].waits_for.is_empty());
        assert!(keys().without_keys().begin_rotation(which, new_signer(which, 2), at(0)).is_err());
    }
}
