//! How kubelets of an existing cluster get an authority of their own.
//!
//! Releases before this authority signed the serving certificates of kubelets with that of API servers. So the key of
//! a kubelet could serve as an API server: all clients of API servers would trust it, and send it their tokens.
//!
//! The change is a rotation ([`key_rotation`](crate::kubernetes::key_rotation)) from the key of API
//! servers. These first trust both for kubelets. Then kubelets get certificates of the new one, at once. Then API
//! servers trust the new one alone. The steps wait for every node, so no API server rejects a kubelet. What clients of
//! API servers trust does not change. A certificate that a kubelet had before is an API server's for them until it
//! expires, within a week, or until the authority of API servers is rotated as well.
//!
//! The leader begins once the cluster has a statement. That needs the present release on every consensus member, and
//! every controller is one, so each API server will apply the steps. Until then nothing of the new authority is
//! stored, also if Kubernetes is first configured meanwhile, and a roll-back has nothing to undo. After it, nodes
//! follow no curator of an earlier release anyway. Workers may run any release, because nothing on them verifies
//! kubelets. If the authority of API servers is being rotated, that ends first.
//!
//! The new ring is stored beside the others, in a field that an earlier release ignores, because such a release rejects
//! a record with a ring that it does not know. A snapshot from before the change, or from the middle of it, is restored
//! with what it has, and the leader continues from there.

use model::cluster::kubernetes::KeyPurpose;

use crate::kubernetes::keys::KubernetesKeys;

impl KubernetesKeys {
    /// Whether the authority of API servers signs for kubelets too, and may be replaced there now.
    #[must_use]
    pub fn shares_authority(&self) -> bool {
        let servers = self.rings.get(&KeyPurpose::Servers);
        servers.is_some_and(|ring| ring.replacement.is_none())
            && !self.rings.contains_key(&KeyPurpose::Kubelets)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use curator_client::node::Node;
    use curator_client::testing::{at, up};
    use proto::curator::v1 as wire;

    use super::*;
    use crate::kubernetes::key_rotation::RotationStep;
    use crate::kubernetes::keys::tests::{keys, new_signer};
    use crate::kubernetes::signer::Signer;

    const OVERLAP: Duration = Duration::from_secs(100);

    /// A worker with components of this generation.
    fn worker(generation: u64) -> Node {
        let mut node = up(1);
        node.roles.kubernetes_worker = true;
        node.status.as_mut().unwrap().kubernetes =
            Some(wire::KubernetesStatus { generation, ..Default::default() });
        node
    }

    /// What a cluster of a release with one authority for both goes through.
    #[test]
    fn kubelets_get_their_own_authority_and_no_api_server_rejects_one() {
        let which = KeyPurpose::Kubelets;
        let mut shared = keys();
        shared.rings.remove(&which);
        let old = shared.rings[&KeyPurpose::Servers].signer.clone();
        let new = new_signer(which, 2);
        let trusted = |keys: &KubernetesKeys, which: KeyPurpose| {
            let all = keys.authorities().into_iter().find(|authority| authority.keys() == which.to_wire());
            all.map(|authority| authority.trusted).unwrap_or_default()
        };
        let der = |signers: &[&Signer]| {
            signers.iter().map(|signer| signer.certificate().to_vec()).collect::<Vec<_>>()
        };
        let rotating = shared.begin_rotation(KeyPurpose::Servers, new_signer(which, 3), at(0));
        let rotating = rotating.unwrap().unwrap();
        assert!(!rotating.shares_authority(), "it has to wait");
        assert_eq!(rotating.begin_rotation(which, new.clone(), at(0)).unwrap(), None);

        assert!(shared.shares_authority());
        let begun = shared.begin_rotation(which, new.clone(), at(0)).unwrap().unwrap();
        assert!(!begun.shares_authority());
        assert_eq!((begun.generation, begun.key_ring(which).unwrap().signer.clone()), (2, old.clone()));
        assert_eq!(trusted(&begun, which), der(&[&old, &new]));
        let late = [worker(1)];
        assert_eq!(begun.next_rotation_step(&&late, OVERLAP, at(1)), None, "it would reject the new one");
        let acts = [worker(2)];
        let (_, step, signs) = begun.next_rotation_step(&&acts, OVERLAP, at(1)).unwrap();
        assert_eq!((step, trusted(&signs, which)), (RotationStep::Sign, der(&[&new, &old])));
        assert_eq!(signs.next_rotation_step(&&acts, OVERLAP, at(2)), None, "it has what the old one signed");
        let (_, step, done) = signs.next_rotation_step(&&[worker(3)], OVERLAP, at(2)).unwrap();
        assert_eq!((step, trusted(&done, which)), (RotationStep::DropOld, der(&[&new])));
        for keys in [&begun, &signs, &done] {
            assert_eq!(trusted(keys, KeyPurpose::Servers), der(&[&old]), "clients trust what they trusted");
        }
    }
}
