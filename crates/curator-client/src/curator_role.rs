//! The role in a certificate: whether a node runs a curator.
//!
//! Only a node that is a consensus member gets a curator's certificate. A client that requires one follows no other
//! node: what that node answers does not matter. The certificate is checked like any other of a node ([`peer_identity`][]), and in
//! addition has exactly one organisation, that of curators.
//!
//! The roles concern servers alone. A client that shows a curator's certificate is the node of that certificate.
//!
//! While a cluster replaces its authority, it has two of them with one name. So a certificate that one of them did not
//! sign may be by the other one.
//!
//! [`peer_identity`]: crate::peer_identity

use model::time::Timestamp;

use crate::certificate::Serial;
use crate::node_id::NodeId;
use crate::peer_identity::{Peer, PeerError, Revocations, identify_peer, is_for_curator};
use crate::pki::TrustAnchor;

/// Why a server is not accepted as a curator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CuratorError {
    /// The certificate is rejected for every use.
    #[error(transparent)]
    Certificate(#[from] PeerError),
    /// The certificate is good, and not that of a node; the text names its holder.
    #[error("the other end is {0}, and a curator of the cluster was expected")]
    NotANode(String),
    /// The certificate is that of a node, and not that of a curator.
    #[error("the other end is node {0}, which has no curator's certificate: only a consensus member leads")]
    NotACurator(NodeId),
    /// The certificate or the credentials of its node are revoked.
    #[error(
        "the other end is a curator, and its credentials are revoked: certificate {serial} of node {node}"
    )]
    Revoked {
        /// The node of the curator.
        node: NodeId,
        /// Serial number of the certificate.
        serial: Serial,
    },
    /// There is no authority that could have signed the certificate.
    #[error("no curator is accepted: no authority of the cluster is trusted")]
    NoAuthority,
}

/// Identifies the curator that showed these certificates and proved their key, by any of these authorities.
pub fn identify_curator(
    shown: &[impl AsRef<[u8]>],
    anchors: &[TrustAnchor],
    revocations: &Revocations,
    now: Timestamp,
) -> Result<NodeId, CuratorError> {
    // The revocations come last: by then the error can name the node.
    let none = Revocations::default();
    let mut refused = CuratorError::NoAuthority;
    for anchor in anchors {
        match identify_peer(shown, anchor, &none, now) {
            Ok(Peer::Node { id, serial, .. }) => {
                if !shown.iter().all(|certificate| is_for_curator(certificate.as_ref())) {
                    return Err(CuratorError::NotACurator(id));
                }
                if revocations.serials.contains_key(&serial) || revocations.nodes.contains(&id) {
                    return Err(CuratorError::Revoked { node: id, serial });
                }
                return Ok(id);
            }
            Ok(other) => return Err(CuratorError::NotANode(other.to_string())),
            Err(error @ (PeerError::OtherIssuer { .. } | PeerError::Forged(_))) => {
                if refused == CuratorError::NoAuthority {
                    refused = error.into();
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(refused)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::pki::Authority;
    use crate::testing::{at, authority, pkcs8, public, serial, validity};

    fn curators(authority: &Authority) -> Vec<u8> {
        authority.issue_curator_certificate(&public(7), serial(3), validity()).unwrap().certificate
    }

    fn nodes() -> Vec<u8> {
        authority(1).issue_node_certificate(&public(7), serial(4), validity()).unwrap().certificate
    }

    fn identify(certificate: &[u8], anchors: &[TrustAnchor]) -> Result<NodeId, CuratorError> {
        identify_curator(&[certificate], anchors, &Revocations::default(), at(1))
    }

    /// What is shown, the authorities, what is revoked, the time in seconds, and the answer.
    type Case<'c> = (&'c [u8], &'c [TrustAnchor], &'c Revocations, i64, &'c str);

    #[test]
    fn curators_certificate_is_a_nodes_to_a_curator_and_a_curators_to_a_client() {
        let (authority, id) = (authority(1), NodeId::from_key(&public(7)));
        let certificate = curators(&authority);
        let peer = identify_peer(&[&certificate], authority.anchor(), &Revocations::default(), at(1));
        assert_eq!(peer, Ok(Peer::Node { id, key: public(7), serial: serial(3) }));
        let anchors = [authority.anchor().clone()];
        assert_eq!(identify(&certificate, &anchors), Ok(id));
        assert_eq!(identify(&nodes(), &anchors), Err(CuratorError::NotACurator(id)));
    }

    #[test]
    fn second_authority_is_tried() {
        let id = NodeId::from_key(&public(7));
        // Another key under the same name, as while an authority is replaced.
        let (old, other_cluster) = (authority(1), authority(3));
        let next = Authority::create(
            old.anchor().cluster,
            &pkcs8(2),
            serial(9),
            crate::certificate::Validity { not_before: at(-1000), not_after: at(1_000_000) },
        )
        .unwrap();
        let both = [old.anchor().clone(), next.anchor().clone()];
        for authority in [&old, &next] {
            assert_eq!(identify(&curators(authority), &both), Ok(id));
        }
        let forged = CuratorError::Certificate(PeerError::Forged(old.anchor().cluster));
        assert_eq!(identify(&curators(&next), &both[..1]), Err(forged));
        let refusal = identify(&curators(&other_cluster), &both).unwrap_err();
        assert!(matches!(refusal, CuratorError::Certificate(PeerError::OtherIssuer { .. })), "{refusal}");
    }

    #[test]
    fn each_refusal_is_one_sentence() {
        let (authority, id) = (authority(1), NodeId::from_key(&public(7)));
        let anchors = [authority.anchor().clone()];
        let owner = authority.issue_owner_certificate("kim", &public(7), serial(5), validity()).unwrap();
        let by_serial =
            Revocations { serials: BTreeMap::from([(serial(3), at(1000))]), ..Default::default() };
        let by_node = Revocations { nodes: BTreeSet::from([id]), ..Default::default() };
        let nothing = Revocations::default();
        let curators = curators(&authority);
        let ten_years = 10 * 365 * 86_400;
        let cases: [Case<'_>; 9] = [
            (&nodes(), &anchors, &nothing, 1, "has no curator's certificate: only a consensus member leads"),
            (&owner.certificate, &anchors, &nothing, 1, "the other end is owner kim"),
            (&curators, &anchors, &by_serial, 1, "revoked: certificate"),
            (&curators, &anchors, &by_node, 1, "revoked: certificate"),
            (&curators, &anchors, &nothing, 1001, "expired at"),
            (&curators, &anchors, &nothing, -1, "is not valid before"),
            (&curators, &anchors, &nothing, ten_years, "expired at"),
            (&curators, &anchors, &nothing, -ten_years, "is not valid before"),
            (&curators, &[], &nothing, 1, "no authority of the cluster is trusted"),
        ];
        for (certificate, anchors, revocations, second, text) in cases {
            let refusal = identify_curator(&[certificate], anchors, revocations, at(second)).unwrap_err();
            assert!(refusal.to_string().contains(text), "{text}: {refusal}");
        }
        let renewed = authority.issue_curator_certificate(&public(7), serial(6), validity()).unwrap();
        assert_eq!(identify_curator(&[renewed.certificate], &anchors, &by_serial, at(1)), Ok(id));
        let chain = [curators.clone(), curators];
        let refusal = identify_curator(&chain, &anchors, &nothing, at(1));
        assert_eq!(refusal, Err(CuratorError::Certificate(PeerError::UnexpectedChain(2))));
    }
}
