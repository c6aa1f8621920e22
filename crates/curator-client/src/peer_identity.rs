//! Authentication: which node, owner or registrant a TLS peer is.
//!
//! TLS has proved that the peer holds the key of the certificate it showed, and nothing else. What that certificate
//! proves is decided here, each time, from the certificate, the cluster's authority, the revocations, and the time.
//!
//! * A certificate of our authority is that of a *node* if it is valid for servers and its two names are the id of its
//!   key. It is that of an *owner* if it is valid for clients alone and says so. A certificate that is neither is
//!   rejected, also that of an etcd member, which our authority signs for the connections between members alone.
//!   That of a curator is a node's here; servers that have to be curators are identified by
//!   [`curator_role`](crate::curator_role).
//! * A certificate that its own key signed proves nothing but that key: its peer *registers*.
//! * A certificate of another authority is rejected, rather than treated as no certificate: its peer means to talk to
//!   another cluster.
//!
//! Whether a node is still part of the cluster is in its record and not in its certificate; see
//! `check_credentials` of the crate `curator`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use model::time::Timestamp;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::certificate::{Serial, Validity, common_name, ed25519_key, is_signed_by};
use crate::node_id::{NodeId, PublicKey};
use crate::pki::{CURATOR_ORGANIZATION, OWNER_ORGANIZATION, TrustAnchor, is_owner_name};

/// The identity of a TLS peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A node of this cluster.
    Node {
        /// Node id, derived from the key.
        id: NodeId,
        /// The key that the peer proved.
        key: PublicKey,
        /// Serial number of its certificate.
        serial: Serial,
    },
    /// An owner of this cluster.
    Owner {
        /// Name of the owner, from the certificate.
        name: String,
        /// The key that the peer proved.
        key: PublicKey,
        /// Serial number of its certificate.
        serial: Serial,
    },
    /// A peer with a self-signed certificate, such as a machine that registers.
    Registering {
        /// The key that the peer proved.
        key: PublicKey,
    },
    /// A peer that showed no certificate.
    Unauthenticated,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node { id, .. } => write!(f, "node {id}"),
            Self::Owner { name, .. } => write!(f, "owner {name}"),
            Self::Registering { key } => write!(f, "a peer that proves key {key} alone"),
            Self::Unauthenticated => f.write_str("a peer without a certificate"),
        }
    }
}

/// Certificates that are rejected before they expire.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Revocations {
    /// Revoked serial numbers, with the expiry of each certificate.
    pub serials: BTreeMap<Serial, Timestamp>,
    /// Nodes whose certificates are all rejected, whenever they were issued.
    pub nodes: BTreeSet<NodeId>,
    /// Owner keys whose certificates are all rejected, whenever they were issued.
    pub owners: BTreeSet<PublicKey>,
}

/// Why a certificate is rejected. Each reason has the gRPC code UNAUTHENTICATED.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// The peer showed a chain; our authority signs peers directly.
    #[error("the peer presented {0} certificates; it must present only its own")]
    UnexpectedChain(usize),
    /// The certificate is malformed; the text describes the fault.
    #[error("the certificate is malformed: {0}")]
    Malformed(&'static str),
    /// Another authority signed the certificate.
    #[error(
        "the certificate is signed by {issuer:?}, and not by the authority of cluster {cluster}: is the address right?"
    )]
    OtherIssuer {
        /// The issuer that the certificate names.
        issuer: String,
        /// Id of this cluster.
        cluster: uuid::Uuid,
    },
    /// The certificate names our authority, which did not sign it.
    #[error("the certificate names the authority of cluster {0}, which did not sign it")]
    Forged(uuid::Uuid),
    /// The certificate is that of the authority itself.
    #[error("the certificate is that of the authority itself, which connects to nobody")]
    AuthorityItself,
    /// The certificate is not valid yet.
    #[error("the certificate is not valid before {0}: is one of the two clocks wrong?")]
    NotYetValid(Timestamp),
    /// The certificate has expired.
    #[error("the certificate expired at {0}: a node joins again with its key, an owner claims another one")]
    Expired(Timestamp),
    /// There is no authority that could have signed the certificate.
    #[error("nobody is identified: no authority of the cluster is trusted")]
    NoAuthority,
    /// This certificate was revoked.
    #[error("certificate {0} is revoked")]
    Revoked(Serial),
    /// All certificates of the node were revoked.
    #[error("the credentials of {0} are revoked")]
    NodeRevoked(NodeId),
    /// The owner key of the certificate was removed.
    #[error("key {0} was removed: every certificate for it is refused")]
    OwnerKeyRemoved(PublicKey),
    /// Our authority signed it, but it is neither a node's nor an owner's.
    #[error("certificate {serial} is neither that of a node nor that of an owner: {fault}")]
    UnknownKind {
        /// Serial number of the certificate.
        serial: Serial,
        /// What is wrong with the certificate.
        fault: &'static str,
    },
}

/// Identifies a peer by the certificates that it showed, and whose key it proved.
pub fn identify_peer(
    shown: &[impl AsRef<[u8]>],
    anchor: &TrustAnchor,
    revocations: &Revocations,
    now: Timestamp,
) -> Result<Peer, PeerError> {
    let der = match shown {
        [] => return Ok(Peer::Unauthenticated),
        [one] => one.as_ref(),
        more => return Err(PeerError::UnexpectedChain(more.len())),
    };
    let (rest, certificate) = X509Certificate::from_der(der)
        .map_err(|_| PeerError::Malformed("it is no X.509 certificate in DER"))?;
    if !rest.is_empty() {
        return Err(PeerError::Malformed("there are bytes after its end"));
    }
    let key = ed25519_key(&certificate).ok_or(PeerError::Malformed("its key is not of Ed25519"))?;
    if key == anchor.key {
        return Err(PeerError::AuthorityItself);
    }
    if is_signed_by(&certificate, &key) {
        // The certificate is self-signed, so nothing but its key counts.
        return Ok(Peer::Registering { key });
    }
    if !is_signed_by(&certificate, &anchor.key) {
        let ours = X509Certificate::from_der(&anchor.certificate)
            .is_ok_and(|(_, authority)| authority.subject() == certificate.issuer());
        let issuer = certificate.issuer().to_string().chars().take(200).collect();
        return Err(if ours {
            PeerError::Forged(anchor.cluster)
        } else {
            PeerError::OtherIssuer { issuer, cluster: anchor.cluster }
        });
    }
    let serial = Serial::from_certificate(certificate.raw_serial());
    let serial = serial.ok_or(PeerError::Malformed("its serial number is not one of this cluster"))?;
    let validity =
        Validity::from_x509(&certificate).ok_or(PeerError::Malformed("its time is out of range"))?;
    for validity in [validity, anchor.validity] {
        if now < validity.not_before {
            return Err(PeerError::NotYetValid(validity.not_before));
        }
        if now > validity.not_after {
            return Err(PeerError::Expired(validity.not_after));
        }
    }
    if revocations.serials.contains_key(&serial) {
        return Err(PeerError::Revoked(serial));
    }
    let peer = classify_certificate(&certificate, key, serial)
        .map_err(|fault| PeerError::UnknownKind { serial, fault })?;
    match peer {
        Peer::Node { id, .. } if revocations.nodes.contains(&id) => Err(PeerError::NodeRevoked(id)),
        Peer::Owner { key, .. } if revocations.owners.contains(&key) => Err(PeerError::OwnerKeyRemoved(key)),
        peer => Ok(peer),
    }
}

fn classify_certificate(
    certificate: &X509Certificate<'_>,
    key: PublicKey,
    serial: Serial,
) -> Result<Peer, &'static str> {
    if certificate.is_ca() {
        return Err("it may sign others");
    }
    let usage = certificate.extended_key_usage().map_err(|_| "its usage is malformed")?;
    let usage = usage.ok_or("it does not say what it is for")?.value;
    let name = common_name(certificate.subject()).ok_or("it has not one common name")?;
    let names = certificate.subject_alternative_name().map_err(|_| "its names are malformed")?;
    let names = names.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
    match (usage.server_auth, usage.client_auth) {
        (true, true) => {
            let [GeneralName::DNSName(dns)] = names else { return Err("it has not one DNS name") };
            let id: NodeId = name.parse().map_err(|_| "its common name is no node id")?;
            if *dns != name {
                return Err("its two names differ");
            }
            if NodeId::from_key(&key) != id {
                return Err("its name is not that of its key");
            }
            if certificate.subject().iter_organization().next().is_some() && !has_curators_role(certificate) {
                return Err("its organisation is unknown");
            }
            Ok(Peer::Node { id, key, serial })
        }
        (false, true) => {
            if !names.is_empty() {
                return Err("it has names of a server");
            }
            let mut organisations = certificate.subject().iter_organization();
            let organisation = (organisations.next(), organisations.next());
            let (Some(organisation), None) = organisation else { return Err("it names no holder") };
            if organisation.as_str() != Ok(OWNER_ORGANIZATION) || !is_owner_name(name) {
                return Err("it is not an owner's");
            }
            Ok(Peer::Owner { name: name.to_owned(), key, serial })
        }
        _ => Err("it is not for clients"),
    }
}

/// Whether the certificate, which was verified, has the role of a curator.
pub(super) fn is_for_curator(der: &[u8]) -> bool {
    X509Certificate::from_der(der).is_ok_and(|(_, certificate)| has_curators_role(&certificate))
}

fn has_curators_role(certificate: &X509Certificate<'_>) -> bool {
    let mut organisations = certificate.subject().iter_organization();
    let organisation = (organisations.next(), organisations.next());
    matches!(organisation, (Some(role), None) if role.as_str() == Ok(CURATOR_ORGANIZATION))
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
        Issuer, KeyPair, SanType, SerialNumber,
    };

    use super::*;
    use crate::testing::{at, authority, pkcs8, public, serial, validity};

    fn identified(certificate: &[u8], revocations: &Revocations, second: i64) -> Result<Peer, PeerError> {
        identify_peer(&[certificate], authority(1).anchor(), revocations, at(second))
    }

    fn identify_at_start(certificate: &[u8]) -> Result<Peer, PeerError> {
        identified(certificate, &Revocations::default(), 1)
    }

    fn node() -> Vec<u8> {
        authority(1).issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate
    }

    fn owner() -> Vec<u8> {
        authority(1).issue_owner_certificate("kim", &public(7), serial(4), validity()).unwrap().certificate
    }

    /// A certificate for key 7, signed by the authority's key, of a kind that our authority never signs.
    fn custom_certificate(change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
        let id = NodeId::from_key(&public(7)).to_string();
        let mut params = CertificateParams::new([id.clone()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, id);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let mut number = [5; 16];
        number[0] = 0x45;
        params.serial_number = Some(SerialNumber::from_slice(&number));
        change(&mut params);
        let issuer = Issuer::new(CertificateParams::default(), KeyPair::try_from(pkcs8(1)).unwrap());
        params.signed_by(&KeyPair::try_from(pkcs8(7)).unwrap(), &issuer).unwrap().der().to_vec()
    }

    fn self_signed() -> Vec<u8> {
        let params = CertificateParams::default();
        params.self_signed(&KeyPair::try_from(pkcs8(7)).unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn each_certificate_identifies_one_kind_of_peer() {
        let id = NodeId::from_key(&public(7));
        assert_eq!(identify_at_start(&node()), Ok(Peer::Node { id, key: public(7), serial: serial(3) }));
        let kim = Peer::Owner { name: "kim".to_owned(), key: public(7), serial: serial(4) };
        assert_eq!(identify_at_start(&owner()), Ok(kim));
        assert_eq!(identify_at_start(&self_signed()), Ok(Peer::Registering { key: public(7) }));
        let none: [&[u8]; 0] = [];
        let peer = identify_peer(&none, authority(1).anchor(), &Revocations::default(), at(1));
        assert_eq!(peer, Ok(Peer::Unauthenticated));
        assert!(
            matches!(identify_at_start(&custom_certificate(|_| {})), Ok(Peer::Node { .. })),
            "the odd ones below are odd in one thing"
        );
    }

    #[test]
    fn certificate_our_authority_would_not_sign_has_no_kind() {
        type Change = fn(&mut CertificateParams);
        let cases: [(Change, &str); 12] = [
            (|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained), "may sign others"),
            (|params| params.extended_key_usages.clear(), "does not say what it is for"),
            (
                |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth],
                "not for clients",
            ),
            (
                |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth],
                "names of a server",
            ),
            (|params| params.distinguished_name = DistinguishedName::new(), "one common name"),
            (|params| params.distinguished_name.push(DnType::CommonName, "kim"), "no node id"),
            (
                |params| {
                    params
                        .distinguished_name
                        .push(DnType::CommonName, NodeId::from_key(&public(8)).to_string());
                },
                "two names differ",
            ),
            (|params| params.subject_alt_names.clear(), "one DNS name"),
            (
                |params| params.subject_alt_names.push(SanType::DnsName("other".try_into().unwrap())),
                "one DNS name",
            ),
            (
                |params| {
                    let other = NodeId::from_key(&public(8)).to_string();
                    params.subject_alt_names = vec![SanType::DnsName(other.as_str().try_into().unwrap())];
                    params.distinguished_name.push(DnType::CommonName, other);
                },
                "not that of its key",
            ),
            (
                |params| {
                    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
                    params.subject_alt_names.clear();
                    params.distinguished_name.push(DnType::OrganizationName, "guest");
                },
                "not an owner's",
            ),
            (
                |params| params.distinguished_name.push(DnType::OrganizationName, "guest"),
                "organisation is unknown",
            ),
        ];
        for (change, text) in cases {
            let refusal = identify_at_start(&custom_certificate(change)).unwrap_err();
            assert!(matches!(refusal, PeerError::UnknownKind { .. }), "{text}: {refusal}");
            assert!(refusal.to_string().contains(text), "{text}: {refusal}");
        }
    }

    #[test]
    fn certificate_is_valid_from_its_first_to_its_last_second() {
        for (second, expected) in [
            (-1, Err(PeerError::NotYetValid(at(0)))),
            (0, Ok(())),
            (1000, Ok(())),
            (1001, Err(PeerError::Expired(at(1000)))),
        ] {
            let verdict = identified(&node(), &Revocations::default(), second).map(drop);
            assert_eq!(verdict, expected, "{second}");
        }
        let own = identified(&self_signed(), &Revocations::default(), 100_000_000);
        assert!(own.is_ok(), "a key does not expire");
    }

    #[test]
    fn certificate_is_invalid_after_its_authority_expires() {
        let mut anchor = authority(1).anchor().clone();
        anchor.validity.not_after = at(5);
        let refusal = identify_peer(&[node()], &anchor, &Revocations::default(), at(6)).unwrap_err();
        assert_eq!(refusal, PeerError::Expired(at(5)));
    }

    #[test]
    fn certificate_of_another_cluster_is_refused_by_name() {
        let other =
            authority(2).issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate;
        let refusal = identify_at_start(&other).unwrap_err();
        assert!(
            matches!(&refusal, PeerError::OtherIssuer { issuer, .. } if issuer.contains("02020202")),
            "{refusal}"
        );
        assert!(refusal.to_string().contains("01010101"), "{refusal}");
        assert_eq!(identify_at_start(&authority(1).anchor().certificate), Err(PeerError::AuthorityItself));
        assert!(
            matches!(identify_at_start(&authority(2).anchor().certificate), Ok(Peer::Registering { .. })),
            "a key like any"
        );
    }

    #[test]
    fn forged_certificate_is_refused() {
        let mut forged = node();
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(identify_at_start(&forged), Err(PeerError::Forged(authority(1).anchor().cluster)));
        let mut longer = node();
        longer.push(0);
        assert!(matches!(identify_at_start(&longer), Err(PeerError::Malformed(_))));
        assert!(matches!(identify_at_start(b"x"), Err(PeerError::Malformed(_))));
        let refusal = identify_peer(&[node(), node()], authority(1).anchor(), &Revocations::default(), at(1));
        assert_eq!(refusal, Err(PeerError::UnexpectedChain(2)));
        let ecdsa = CertificateParams::default().self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert!(matches!(identify_at_start(ecdsa.der()), Err(PeerError::Malformed(_))));
    }

    #[test]
    fn changing_any_byte_changes_or_invalidates_a_certificate() {
        let good = node();
        for place in 0..good.len() {
            let mut changed = good.clone();
            changed[place] ^= 1;
            let peer = identify_at_start(&changed);
            // The certificate has the name of the algorithm twice, and only one of them is signed. A reader may use
            // either.
            assert!(peer.is_err() || peer == identify_at_start(&good), "byte {place}: {peer:?}");
        }
    }

    #[test]
    fn revoked_certificates_and_those_of_revoked_nodes_are_rejected() {
        let by_serial =
            Revocations { serials: BTreeMap::from([(serial(3), at(1000))]), ..Default::default() };
        assert_eq!(identified(&node(), &by_serial, 1), Err(PeerError::Revoked(serial(3))));
        assert!(identified(&owner(), &by_serial, 1).is_ok());
        let renewed =
            authority(1).issue_node_certificate(&public(7), serial(9), validity()).unwrap().certificate;
        assert!(identified(&renewed, &by_serial, 1).is_ok());

        let id = NodeId::from_key(&public(7));
        let by_node = Revocations { nodes: BTreeSet::from([id]), ..Default::default() };
        assert_eq!(identified(&node(), &by_node, 1), Err(PeerError::NodeRevoked(id)));
        assert_eq!(identified(&renewed, &by_node, 1), Err(PeerError::NodeRevoked(id)));
        assert!(identified(&owner(), &by_node, 1).is_ok(), "an owner with the same key is no node");
    }

    #[test]
    fn certificates_for_a_removed_owner_key_are_rejected() {
        let removed = Revocations { owners: BTreeSet::from([public(7)]), ..Default::default() };
        assert_eq!(identified(&owner(), &removed, 1), Err(PeerError::OwnerKeyRemoved(public(7))));
        let later = authority(1)
            .issue_owner_certificate("lee", &public(7), serial(9), validity())
            .unwrap()
            .certificate;
        assert_eq!(identified(&later, &removed, 1), Err(PeerError::OwnerKeyRemoved(public(7))));
        let others = authority(1)
            .issue_owner_certificate("kim", &public(8), serial(4), validity())
            .unwrap()
            .certificate;
        assert!(identified(&others, &removed, 1).is_ok());
        assert!(identified(&node(), &removed, 1).is_ok(), "a node with the same key is no owner");
    }
}
