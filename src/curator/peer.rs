//! Who is at the other end of a connection.
//!
//! TLS has proved that the peer holds the key of the certificate it showed, and nothing else; what that
//! certificate is worth is decided here, each time, from the certificate, the cluster's authority, what was
//! revoked, and the time.
//!
//! * A certificate of our authority is that of a *node* if it is good for servers and its two names are the
//!   id that its key gives; of an *owner* if it is good for clients alone and says so. What is neither is
//!   refused: our authority signs nothing else.
//! * A certificate that its own key signed says nothing but that key: who *registers*.
//! * A certificate of anybody else is refused, rather than being worth nothing: whoever shows one means
//!   another cluster.
//!
//! Whether a node is still part of the cluster is in its record and not in its certificate; see
//! [`crate::curator::life_cycle::credentials_hold`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::pki::{
    Anchor, OWNER, Serial, Validity, common_name, ed25519_key, is_owner_name, is_signed_by,
};
use crate::model::time::Timestamp;

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A node of this cluster.
    Node {
        /// Its id.
        id: NodeId,
        /// Its key.
        key: PublicKey,
        /// Its certificate.
        serial: Serial,
    },
    /// An owner of this cluster.
    Owner {
        /// Who.
        name: String,
        /// The key.
        key: PublicKey,
        /// The certificate.
        serial: Serial,
    },
    /// Whoever holds a key.
    Registering {
        /// The key.
        key: PublicKey,
    },
    /// Nobody that was proved.
    Unauthenticated,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node { id, .. } => write!(f, "node {id}"),
            Self::Owner { name, .. } => write!(f, "owner {name}"),
            Self::Registering { key } => write!(f, "who proves key {key} alone"),
            Self::Unauthenticated => f.write_str("who proves nothing"),
        }
    }
}

/// Certificates that are refused before they end.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Revocations {
    /// By serial number, with the end of each.
    pub serials: BTreeMap<Serial, Timestamp>,
    /// All those of a node, whenever they were issued.
    pub nodes: BTreeSet<NodeId>,
    /// All those for an owner's key, whenever they were issued.
    pub owners: BTreeSet<PublicKey>,
}

impl Revocations {
    /// Those that still matter at `now`: what has ended is refused for that.
    #[must_use]
    pub fn in_force(mut self, now: Timestamp) -> Self {
        self.serials.retain(|_, until| now <= *until);
        self
    }
}

/// Why a certificate is worth nothing. Each is answered with UNAUTHENTICATED.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is nothing between our authority and who it signs for.
    #[error("{0} certificates were shown, and one is wanted: the peer's own")]
    Chain(usize),
    /// It is malformed.
    #[error("the certificate is malformed: {0}")]
    Malformed(&'static str),
    /// It is of another cluster.
    #[error(
        "the certificate is signed by {issuer:?}, and not by the authority of cluster {cluster}: is the address right?"
    )]
    OtherAuthority {
        /// Who signed it, as it says.
        issuer: String,
        /// Ours.
        cluster: uuid::Uuid,
    },
    /// Somebody says to be our authority.
    #[error("the certificate names the authority of cluster {0}, which did not sign it")]
    Forged(uuid::Uuid),
    /// Nobody connects as the authority.
    #[error("the certificate is that of the authority itself, which connects to nobody")]
    AuthorityItself,
    /// Its time has not come.
    #[error("the certificate is good from {0} on: is the clock of one of both wrong?")]
    NotYet(Timestamp),
    /// Its time is over.
    #[error("the certificate expired at {0}: a node joins again with its key, an owner claims another one")]
    Expired(Timestamp),
    /// It was revoked.
    #[error("certificate {0} is revoked")]
    Revoked(Serial),
    /// All those of its node were revoked.
    #[error("the credentials of {0} are revoked")]
    NodeRevoked(NodeId),
    /// The owner's key that it is for was removed.
    #[error("key {0} was removed: every certificate for it is refused")]
    OwnerRemoved(PublicKey),
    /// It is signed by our authority, and of no kind that it signs.
    #[error("certificate {serial} is neither that of a node nor that of an owner: {fault}")]
    NoKind {
        /// Which.
        serial: Serial,
        /// What is wrong with it.
        fault: &'static str,
    },
}

/// Decides who a peer is, by the certificates it showed and proved the key of.
pub fn identify(
    shown: &[impl AsRef<[u8]>],
    anchor: &Anchor,
    revocations: &Revocations,
    now: Timestamp,
) -> Result<Peer, Refusal> {
    let der = match shown {
        [] => return Ok(Peer::Unauthenticated),
        [one] => one.as_ref(),
        more => return Err(Refusal::Chain(more.len())),
    };
    let (rest, certificate) = X509Certificate::from_der(der)
        .map_err(|_| Refusal::Malformed("it is no X.509 certificate in DER"))?;
    if !rest.is_empty() {
        return Err(Refusal::Malformed("something stands behind it"));
    }
    let key = ed25519_key(&certificate).ok_or(Refusal::Malformed("its key is not of Ed25519"))?;
    if key == anchor.key {
        return Err(Refusal::AuthorityItself);
    }
    if is_signed_by(&certificate, &key) {
        // Nothing that it says was said by anybody else, so nothing of it is looked at.
        return Ok(Peer::Registering { key });
    }
    if !is_signed_by(&certificate, &anchor.key) {
        let ours = X509Certificate::from_der(&anchor.certificate)
            .is_ok_and(|(_, authority)| authority.subject() == certificate.issuer());
        let issuer = certificate.issuer().to_string().chars().take(200).collect();
        return Err(if ours {
            Refusal::Forged(anchor.cluster)
        } else {
            Refusal::OtherAuthority { issuer, cluster: anchor.cluster }
        });
    }
    let serial = Serial::from_certificate(certificate.raw_serial());
    let serial = serial.ok_or(Refusal::Malformed("its serial number is none of this cluster"))?;
    let validity = Validity::of(&certificate).ok_or(Refusal::Malformed("its time is out of range"))?;
    for validity in [validity, anchor.validity] {
        if now < validity.from {
            return Err(Refusal::NotYet(validity.from));
        }
        if now > validity.until {
            return Err(Refusal::Expired(validity.until));
        }
    }
    if revocations.serials.contains_key(&serial) {
        return Err(Refusal::Revoked(serial));
    }
    let peer = kind(&certificate, key, serial).map_err(|fault| Refusal::NoKind { serial, fault })?;
    match peer {
        Peer::Node { id, .. } if revocations.nodes.contains(&id) => Err(Refusal::NodeRevoked(id)),
        Peer::Owner { key, .. } if revocations.owners.contains(&key) => Err(Refusal::OwnerRemoved(key)),
        peer => Ok(peer),
    }
}

fn kind(certificate: &X509Certificate<'_>, key: PublicKey, serial: Serial) -> Result<Peer, &'static str> {
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
            if NodeId::of(&key) != id {
                return Err("its name is not that of its key");
            }
            Ok(Peer::Node { id, key, serial })
        }
        (false, true) => {
            if !names.is_empty() {
                return Err("it has names of a server");
            }
            let mut organisations = certificate.subject().iter_organization();
            let organisation = (organisations.next(), organisations.next());
            let (Some(organisation), None) = organisation else { return Err("it does not say whose it is") };
            if organisation.as_str() != Ok(OWNER) || !is_owner_name(name) {
                return Err("it is not an owner's");
            }
            Ok(Peer::Owner { name: name.to_owned(), key, serial })
        }
        _ => Err("it is not for clients"),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
        Issuer, KeyPair, SanType, SerialNumber,
    };

    use super::*;
    use crate::curator::node::tests::at;
    use crate::curator::pki::tests::{authority, pkcs8, public, serial, validity};

    fn identified(certificate: &[u8], revocations: &Revocations, second: i64) -> Result<Peer, Refusal> {
        identify(&[certificate], authority(1).anchor(), revocations, at(second))
    }

    fn judged(certificate: &[u8]) -> Result<Peer, Refusal> {
        identified(certificate, &Revocations::default(), 1)
    }

    fn node() -> Vec<u8> {
        authority(1).issue_node(&public(7), serial(3), validity()).unwrap().certificate
    }

    fn owner() -> Vec<u8> {
        authority(1).issue_owner("kim", &public(7), serial(4), validity()).unwrap().certificate
    }

    /// A certificate of the key 7 that the authority's key signed, as our authority would sign none.
    fn odd(change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
        let id = NodeId::of(&public(7)).to_string();
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
    fn each_certificate_is_that_of_one_kind() {
        let id = NodeId::of(&public(7));
        assert_eq!(judged(&node()), Ok(Peer::Node { id, key: public(7), serial: serial(3) }));
        let kim = Peer::Owner { name: "kim".to_owned(), key: public(7), serial: serial(4) };
        assert_eq!(judged(&owner()), Ok(kim));
        assert_eq!(judged(&self_signed()), Ok(Peer::Registering { key: public(7) }));
        let none: [&[u8]; 0] = [];
        let peer = identify(&none, authority(1).anchor(), &Revocations::default(), at(1));
        assert_eq!(peer, Ok(Peer::Unauthenticated));
        assert!(
            matches!(judged(&odd(|_| {})), Ok(Peer::Node { .. })),
            "the odd ones below are odd in one thing"
        );
    }

    #[test]
    fn certificate_that_our_authority_would_not_sign_is_of_no_kind() {
        type Change = fn(&mut CertificateParams);
        let cases: [(Change, &str); 11] = [
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
                    params.distinguished_name.push(DnType::CommonName, NodeId::of(&public(8)).to_string());
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
                    let other = NodeId::of(&public(8)).to_string();
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
        ];
        for (change, said) in cases {
            let refusal = judged(&odd(change)).unwrap_err();
            assert!(matches!(refusal, Refusal::NoKind { .. }), "{said}: {refusal}");
            assert!(refusal.to_string().contains(said), "{said}: {refusal}");
        }
    }

    #[test]
    fn certificate_is_good_from_its_first_second_to_its_last() {
        for (second, expected) in [
            (-1, Err(Refusal::NotYet(at(0)))),
            (0, Ok(())),
            (1000, Ok(())),
            (1001, Err(Refusal::Expired(at(1000)))),
        ] {
            let verdict = identified(&node(), &Revocations::default(), second).map(drop);
            assert_eq!(verdict, expected, "{second}");
        }
        let own = identified(&self_signed(), &Revocations::default(), 100_000_000);
        assert!(own.is_ok(), "a key does not expire");
    }

    #[test]
    fn nothing_is_good_after_its_authority() {
        let mut anchor = authority(1).anchor().clone();
        anchor.validity.until = at(5);
        let refusal = identify(&[node()], &anchor, &Revocations::default(), at(6)).unwrap_err();
        assert_eq!(refusal, Refusal::Expired(at(5)));
    }

    #[test]
    fn certificate_of_another_cluster_is_refused_by_name() {
        let other = authority(2).issue_node(&public(7), serial(3), validity()).unwrap().certificate;
        let refusal = judged(&other).unwrap_err();
        assert!(
            matches!(&refusal, Refusal::OtherAuthority { issuer, .. } if issuer.contains("02020202")),
            "{refusal}"
        );
        assert!(refusal.to_string().contains("01010101"), "{refusal}");
        assert_eq!(judged(&authority(1).anchor().certificate), Err(Refusal::AuthorityItself));
        assert!(
            matches!(judged(&authority(2).anchor().certificate), Ok(Peer::Registering { .. })),
            "a key like any"
        );
    }

    #[test]
    fn forged_certificate_is_refused() {
        let mut forged = node();
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(judged(&forged), Err(Refusal::Forged(authority(1).anchor().cluster)));
        let mut longer = node();
        longer.push(0);
        assert!(matches!(judged(&longer), Err(Refusal::Malformed(_))));
        assert!(matches!(judged(b"x"), Err(Refusal::Malformed(_))));
        let refusal = identify(&[node(), node()], authority(1).anchor(), &Revocations::default(), at(1));
        assert_eq!(refusal, Err(Refusal::Chain(2)));
        let ecdsa = CertificateParams::default().self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert!(matches!(judged(ecdsa.der()), Err(Refusal::Malformed(_))));
    }

    #[test]
    fn every_changed_byte_makes_a_certificate_another_or_none() {
        let good = node();
        for place in 0..good.len() {
            let mut changed = good.clone();
            changed[place] ^= 1;
            let peer = judged(&changed);
            // The algorithm's name stands twice, and only one of both is signed; whatever is read says the same.
            assert!(peer.is_err() || peer == judged(&good), "byte {place}: {peer:?}");
        }
    }

    #[test]
    fn revoked_certificate_is_refused_and_so_is_every_one_of_a_revoked_node() {
        let by_serial =
            Revocations { serials: BTreeMap::from([(serial(3), at(1000))]), ..Default::default() };
        assert_eq!(identified(&node(), &by_serial, 1), Err(Refusal::Revoked(serial(3))));
        assert!(identified(&owner(), &by_serial, 1).is_ok());
        let renewed = authority(1).issue_node(&public(7), serial(9), validity()).unwrap().certificate;
        assert!(identified(&renewed, &by_serial, 1).is_ok());

        let id = NodeId::of(&public(7));
        let by_node = Revocations { nodes: BTreeSet::from([id]), ..Default::default() };
        assert_eq!(identified(&node(), &by_node, 1), Err(Refusal::NodeRevoked(id)));
        assert_eq!(identified(&renewed, &by_node, 1), Err(Refusal::NodeRevoked(id)));
        assert!(identified(&owner(), &by_node, 1).is_ok(), "an owner with the same key is no node");
    }

    #[test]
    fn every_certificate_for_a_removed_owners_key_is_refused() {
        let removed = Revocations { owners: BTreeSet::from([public(7)]), ..Default::default() };
        assert_eq!(identified(&owner(), &removed, 1), Err(Refusal::OwnerRemoved(public(7))));
        let later = authority(1).issue_owner("lee", &public(7), serial(9), validity()).unwrap().certificate;
        assert_eq!(identified(&later, &removed, 1), Err(Refusal::OwnerRemoved(public(7))));
        let others = authority(1).issue_owner("kim", &public(8), serial(4), validity()).unwrap().certificate;
        assert!(identified(&others, &removed, 1).is_ok());
        assert!(identified(&node(), &removed, 1).is_ok(), "a node with the same key is no owner");
    }

    #[test]
    fn revocation_is_forgotten_only_when_the_certificate_has_ended() {
        let revocations =
            Revocations { serials: BTreeMap::from([(serial(3), at(1000))]), ..Default::default() };
        assert_eq!(revocations.clone().in_force(at(1000)), revocations);
        let later = revocations.in_force(at(1001));
        assert!(later.serials.is_empty());
        assert_eq!(identified(&node(), &later, 1001), Err(Refusal::Expired(at(1000))));
    }
}
