//! Identifies peers while a cluster replaces its authority, and certificates of two of them count.
//!
//! Both authorities have one name. So a certificate that one of them did not sign may be by the other one, and is
//! rejected only if none of them signed it. In all else, one authority decides as it would alone ([`identify_peer`]).

use model::time::Timestamp;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::certificate::is_signed_by;
use crate::peer_identity::{Peer, PeerError, Revocations, identify_peer};
use crate::pki::TrustAnchor;

/// Identifies a peer by a certificate of any of these authorities. With no authority, nobody is identified.
pub fn identify_peer_by_any(
    shown: &[impl AsRef<[u8]>],
    anchors: &[TrustAnchor],
    revocations: &Revocations,
    now: Timestamp,
) -> Result<Peer, PeerError> {
    let mut refused = PeerError::NoAuthority;
    for anchor in anchors {
        match identify_peer(shown, anchor, revocations, now) {
            // For the other authority, this is a key like any.
            Ok(Peer::Registering { key }) if anchors.iter().any(|anchor| anchor.key == key) => {
                return Err(PeerError::AuthorityItself);
            }
            Err(error @ (PeerError::OtherIssuer { .. } | PeerError::Forged(_))) => {
                if refused == PeerError::NoAuthority {
                    refused = error;
                }
            }
            decided => return decided,
        }
    }
    Err(refused)
}

/// The authority that signed a certificate of any kind; `None` if none of these did, or if it cannot be parsed.
#[must_use]
pub fn find_issuer<'a>(certificate: &[u8], anchors: &'a [TrustAnchor]) -> Option<&'a TrustAnchor> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    anchors.iter().find(|anchor| is_signed_by(&parsed, &anchor.key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_id::NodeId;
    use crate::pki::Authority;
    use crate::testing::{at, authority, authority_of, public, serial, validity};

    #[test]
    fn certificate_of_either_authority_identifies_its_holder() {
        /// The certificate, the authorities, the revocations, and who the peer is.
        type Case<'a> = (&'a str, &'a [u8], &'a [TrustAnchor], &'a Revocations, Result<Peer, PeerError>);
        let (old, new, elsewhere) = (authority(1), authority_of(1, 5), authority(2));
        let [a, b] = [&old, &new].map(|authority| authority.anchor().clone());
        let node = |authority: &Authority, number| {
            authority.issue_node_certificate(&public(7), serial(number), validity()).unwrap().certificate
        };
        let (by_old, by_new) = (node(&old, 3), node(&new, 4));
        let by_another = node(&elsewhere, 3);
        let (by_none, none) = (node(&authority_of(1, 6), 3), Revocations::default());
        let of_old = Revocations { serials: [(serial(3), at(1000))].into(), ..Revocations::default() };
        let peer = |number| {
            Ok(Peer::Node { id: NodeId::from_key(&public(7)), key: public(7), serial: serial(number) })
        };
        let both = [b.clone(), a.clone()];
        let only_new = [b.clone()];
        let forged = Err(PeerError::Forged(a.cluster));
        let cases: [Case<'_>; 9] = [
            ("by the old one", &by_old, &both, &none, peer(3)),
            ("by the new one", &by_new, &both, &none, peer(4)),
            ("the old one is retired", &by_old, &only_new, &none, forged.clone()),
            ("by a third one", &by_none, &both, &none, forged),
            ("revoked", &by_old, &both, &of_old, Err(PeerError::Revoked(serial(3)))),
            ("not revoked", &by_new, &both, &of_old, peer(4)),
            ("no authority", &by_old, &[], &none, Err(PeerError::NoAuthority)),
            ("the old one itself", &a.certificate, &both, &none, Err(PeerError::AuthorityItself)),
            ("the new one itself", &b.certificate, &both, &none, Err(PeerError::AuthorityItself)),
        ];
        for (what, shown, anchors, revocations, expected) in cases {
            assert_eq!(identify_peer_by_any(&[shown], anchors, revocations, at(1)), expected, "{what}");
        }
        let other = identify_peer_by_any(&[&by_another], &both, &none, at(1));
        assert!(matches!(other, Err(PeerError::OtherIssuer { .. })), "{other:?}");
        let nothing: [&[u8]; 0] = [];
        assert_eq!(identify_peer_by_any(&nothing, &both, &none, at(1)), Ok(Peer::Unauthenticated));
    }
}
