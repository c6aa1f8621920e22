//! Which Kubernetes keys somebody else has, and how they are rotated because of that.
//!
//! The signing keys of Kubernetes lie in the cluster's etcd. So a former consensus member has them on its disk, and a thief
//! of the cluster's authority has read them. The key of clients makes its holder `system:masters` at every API server.
//!
//! The purposes of such keys are *exposed*. The record of the keys names them, so the mark survives every leader. It is
//! written by the same transaction that ends the membership, or that replaces the stolen authority.
//!
//! The leader begins to rotate the exposed keys once the authority of the cluster is no longer being replaced. The one
//! that is replaced opens etcd until its end, so new keys of Kubernetes could be read until then. All begin by one write,
//! which removes the marks. A purpose that is being rotated already stays exposed, because the disk may have both of its
//! keys, and begins again after its end. From then on, a rotation is like any other
//! ([`key_rotation`](crate::kubernetes::key_rotation)).
//!
//! Releases before this drop the mark if they lead and write the record.

use std::collections::BTreeSet;

use model::cluster::kubernetes::KeyPurpose;
use model::time::Timestamp;

use crate::kubernetes::error::KubernetesError;
use crate::kubernetes::keys::KubernetesKeys;
use crate::kubernetes::signer::Signer;

impl KubernetesKeys {
    /// The keys with every purpose exposed; `None` if that changes nothing.
    #[must_use]
    pub fn mark_exposed(&self) -> Option<Self> {
        let exposed: BTreeSet<KeyPurpose> = self.rings.keys().copied().collect();
        (exposed != self.exposed).then(|| Self { exposed, ..self.clone() })
    }

    /// The exposed purposes without a rotation under way: theirs can begin now.
    #[must_use]
    pub fn due_rotations(&self) -> Vec<KeyPurpose> {
        let is_idle =
            |which: &KeyPurpose| self.rings.get(which).is_some_and(|ring| ring.replacement.is_none());
        self.exposed.iter().copied().filter(is_idle).collect()
    }

    /// The keys with a rotation begun to each of these signers. Their purposes are exposed no longer.
    pub fn begin_due_rotations(
        &self,
        signers: Vec<(KeyPurpose, Signer)>,
        now: Timestamp,
    ) -> Result<Self, KubernetesError> {
        let mut keys = self.clone();
        for (which, signer) in signers {
            if let Some(mut begun) = keys.begin_rotation(which, signer, now)? {
                begun.exposed.remove(&which);
                keys = begun;
            }
        }
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use curator_client::testing::{at, up};
    use proto::curator::v1 as wire;

    use super::*;
    use crate::kubernetes::keys::tests::{keys, new_signer, replacing};

    const OVERLAP: Duration = Duration::from_secs(100);

    fn new_signers(purposes: &[KeyPurpose]) -> Vec<(KeyPurpose, Signer)> {
        purposes.iter().map(|&which| (which, new_signer(which, 2))).collect()
    }

    /// The keys after all steps that are possible for a worker that runs with each generation at once.
    fn settled(mut keys: KubernetesKeys) -> KubernetesKeys {
        for second in (0..10_000).step_by(50) {
            let mut worker = up(1);
            worker.roles.kubernetes_worker = true;
            worker.status.as_mut().unwrap().kubernetes =
                Some(wire::KubernetesStatus { generation: keys.generation, ..Default::default() });
            if let Some((_, _, next)) = keys.next_rotation_step(&&[worker], OVERLAP, at(second)) {
                keys = next;
            }
        }
        keys
    }

    #[test]
    fn every_exposed_key_is_rotated_once() {
        let marked = keys().mark_exposed().unwrap();
        assert_eq!(marked.mark_exposed(), None, "it is marked already");
        assert_eq!(marked.generation, keys().generation, "nodes get nothing else yet");
        let due = marked.due_rotations();
        assert_eq!(due, KeyPurpose::ALL);
        let begun = marked.begin_due_rotations(new_signers(&due), at(0)).unwrap();
        assert!(begun.exposed.is_empty() && begun.due_rotations().is_empty());
        let done = settled(begun);
        for which in KeyPurpose::ALL {
            let (former, ring) = (&marked.rings[&which], &done.rings[&which]);
            assert!(ring.replacement.is_none() && ring.signer != former.signer, "{which}");
        }
    }

    #[test]
    fn key_that_is_being_rotated_is_rotated_again_after_its_end() {
        let which = KeyPurpose::Clients;
        let marked = replacing(which).mark_exposed().unwrap();
        let due = marked.due_rotations();
        assert!(!due.contains(&which) && due.len() == KeyPurpose::ALL.len() - 1, "{due:?}");
        let begun = marked.begin_due_rotations(new_signers(&due), at(0)).unwrap();
        assert_eq!(begun.exposed.iter().copied().collect::<Vec<_>>(), [which]);
        assert!(begun.due_rotations().is_empty());
        assert_eq!(settled(begun).due_rotations(), [which]);
    }

    #[test]
    fn cluster_without_kubernetes_has_nothing_to_rotate() {
        let gone = keys().without_keys();
        assert_eq!((gone.mark_exposed(), gone.due_rotations()), (None, vec![]));
        let deleted = keys().mark_exposed().unwrap().without_keys();
        assert!(deleted.exposed.is_empty(), "the next Kubernetes has other keys");
    }
}
