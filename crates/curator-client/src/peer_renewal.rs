//! Peer certificates for members of etcd that cannot connect to each other any more.
//!
//! Members renew their certificates through the leading curator, or beside their own etcd. Both need a quorum. When all
//! certificates have ended there is none, because each member rejects the others. So the shepherd signs for
//! them, with the authority in the newest snapshot of their cluster ([`renew_peer`]), and sends each member its
//! certificate with an order. The member compares what it receives ([`check_issued_certificate`]).
//!
//! A snapshot is older than the cluster. So it decides who gets nothing: a node that was no consensus member, or had
//! revoked credentials. A member that joined later gets its certificate from the leader, once the others have a
//! quorum.
//!
//! The certificate is for the key of the member, which stays on its disk, so the order is of no use to anybody else. Its
//! serial number is recorded as soon as etcd has a quorum. Before that, there is no etcd to record it in.

use etcd::key_space::REVOKED_NODES;
use model::humanize::absolute_time;
use model::time::Timestamp;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::authority_ring::AuthorityRing;
use crate::certificate::{IssuedCertificate, Serial, Validity, ed25519_key, is_signed_by};
use crate::cluster;
use crate::cluster_snapshot::{ClusterSnapshot, ClusterSnapshotError};
use crate::node::NodeState;
use crate::node_id::{NodeId, PublicKey};
use crate::pki::{PEER_LIFETIME, PkiError, TrustAnchor};
use crate::succession::find_path;

/// Why no peer certificate is signed from a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum PeerRenewalError {
    /// The snapshot cannot be used.
    #[error(transparent)]
    Snapshot(#[from] ClusterSnapshotError),
    /// The authority was replaced after the snapshot.
    #[error(
        "no certificate was signed: the newest snapshot of the cluster, of {taken_at}, has another authority than the \
         cluster, and its members would reject what that one signs; restore the cluster with: shepherdctl cluster restore"
    )]
    OtherAuthority {
        /// Time of the snapshot, for people.
        taken_at: String,
    },
    /// The node may have no peer certificate, as far as the snapshot shows.
    #[error("node {node} gets no certificate for etcd by the snapshot of {taken_at}: {reason}")]
    NotEntitled {
        /// Id of the node.
        node: NodeId,
        /// Time of the snapshot, for people.
        taken_at: String,
        /// What the snapshot has of the node.
        reason: &'static str,
    },
    /// The certificate could not be signed.
    #[error(transparent)]
    Pki(#[from] PkiError),
}

/// Signs a peer certificate for the consensus member with this key, with the authority in the snapshot.
///
/// `ca_certificate` is the certificate of the cluster's authority, which the members trust. `serial` is a random number.
pub fn renew_peer(
    snapshot: &ClusterSnapshot,
    ca_certificate: &[u8],
    key: &PublicKey,
    serial: Serial,
    now: Timestamp,
) -> Result<IssuedCertificate, PeerRenewalError> {
    let (_, authority) = snapshot.cluster_and_authority()?;
    let taken_at = || absolute_time(snapshot.taken_at);
    if !is_successor(snapshot, ca_certificate, authority.anchor())? {
        return Err(PeerRenewalError::OtherAuthority { taken_at: taken_at() });
    }
    let id = NodeId::from_key(key);
    let refused = |reason| PeerRenewalError::NotEntitled { node: id, taken_at: taken_at(), reason };
    let node = snapshot.nodes()?.into_iter().find(|node| node.key == *key);
    let node = node.ok_or_else(|| refused("the node is not in it"))?;
    if node.state != NodeState::Up {
        return Err(refused("the node is not up in it"));
    }
    let revocation = REVOKED_NODES.key(id).map_err(ClusterSnapshotError::from)?;
    if snapshot.records.contains_key(&revocation) {
        return Err(refused("the credentials of the node are revoked in it"));
    }
    if node.roles.consensus_member.is_none() {
        return Err(refused("the node is no consensus member in it"));
    }
    let address = node.status.map(|status| status.address);
    let address = address.ok_or_else(|| refused("the node has no address in it"))?;
    let validity = Validity::starting(now, PEER_LIFETIME);
    Ok(authority.issue_etcd_peer_certificate(key, address, serial, validity)?)
}

/// Whether the authority in the snapshot is the trusted one, or one that the successions in the snapshot lead to.
fn is_successor(
    snapshot: &ClusterSnapshot,
    ca_certificate: &[u8],
    signer: &TrustAnchor,
) -> Result<bool, PeerRenewalError> {
    let key = cluster::authority_record_key().map_err(ClusterSnapshotError::from)?;
    let record = snapshot.records.get(&key);
    let ring = record.map(|record| AuthorityRing::decode(&key, record)).transpose();
    let ring = ring.map_err(ClusterSnapshotError::from)?;
    let successors = ring.map(|ring| ring.successors).unwrap_or_default();
    let trusted = [TrustAnchor::parse(ca_certificate)?];
    Ok(find_path(&trusted, &successors, |found| found.certificate == signer.certificate).is_some())
}

/// Why a certificate that was received is not used, as a part of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableCertificate {
    /// It is no certificate, or bytes follow it.
    #[error("it cannot be parsed")]
    Unreadable,
    /// The authority of the cluster did not sign it.
    #[error("the authority of this cluster did not sign it")]
    OtherIssuer,
    /// It certifies another key.
    #[error("it is for the key of another node")]
    OtherKey,
    /// It has not begun, or it has ended.
    #[error("it is valid from {from} to {until}, and the clock of this machine shows {now}")]
    NotValid {
        /// Its first moment, for people.
        from: String,
        /// Its last moment, for people.
        until: String,
        /// The present time, for people.
        now: String,
    },
}

/// Checks that the authority signed this certificate for this key, and that it is valid at `now`. What it is for is not
/// checked here.
pub fn check_issued_certificate(
    certificate: &[u8],
    anchor: &TrustAnchor,
    key: &PublicKey,
    now: Timestamp,
) -> Result<(), UnusableCertificate> {
    let validity = check_certified_key(certificate, anchor, key)?;
    if !validity.contains(now) {
        let (from, until) = (absolute_time(validity.not_before), absolute_time(validity.not_after));
        return Err(UnusableCertificate::NotValid { from, until, now: absolute_time(now) });
    }
    Ok(())
}

/// Checks that the authority signed this certificate for this key, whenever it is valid. Returns its validity.
pub fn check_certified_key(
    certificate: &[u8],
    anchor: &TrustAnchor,
    key: &PublicKey,
) -> Result<Validity, UnusableCertificate> {
    let unreadable = |_| UnusableCertificate::Unreadable;
    let (rest, parsed) = X509Certificate::from_der(certificate).map_err(unreadable)?;
    let validity = Validity::from_x509(&parsed).filter(|_| rest.is_empty());
    let validity = validity.ok_or(UnusableCertificate::Unreadable)?;
    if !is_signed_by(&parsed, &anchor.key) {
        return Err(UnusableCertificate::OtherIssuer);
    }
    if ed25519_key(&parsed) != Some(*key) {
        return Err(UnusableCertificate::OtherKey);
    }
    Ok(validity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority_ring::ReplacementStep;
    use crate::node::Node;
    use crate::pki::Authority;
    use crate::testing::{
        at, authority, authority_of, key, member, node_id, pkcs8, public, serial, snapshot, up, validity,
    };

    fn renew(snapshot: &ClusterSnapshot, number: u8) -> Result<IssuedCertificate, String> {
        let ca = authority(1).anchor().certificate.clone();
        renew_peer(snapshot, &ca, &key(number), serial(9), at(60)).map_err(|error| error.to_string())
    }

    #[test]
    fn consensus_member_of_the_snapshot_gets_a_certificate_of_its_authority() {
        let issued = renew(&snapshot(), 2).unwrap();
        let address = "10.0.0.2".parse().unwrap();
        let expected = Validity::starting(at(60), PEER_LIFETIME);
        let same = authority(1).issue_etcd_peer_certificate(&key(2), address, serial(9), expected).unwrap();
        assert_eq!(issued, same);
        let anchor = authority(1).anchor().clone();
        assert_eq!(check_issued_certificate(&issued.certificate, &anchor, &key(2), at(60)), Ok(()));
    }

    #[test]
    fn node_that_may_not_be_a_member_gets_no_certificate() {
        let put = |node: Node| {
            let mut snapshot = snapshot();
            snapshot.records.insert(Node::etcd_key(&node.id).unwrap(), node.encode().unwrap());
            snapshot
        };
        let mut revoked = snapshot();
        revoked.records.insert(REVOKED_NODES.key(node_id(2)).unwrap(), Vec::new());
        for (snapshot, number, reason) in [
            (snapshot(), 7, "is not in it"),
            (snapshot(), 3, "no consensus member"),
            (put(up(2)), 2, "no consensus member"),
            (put(Node { state: NodeState::Decommissioned, ..up(2) }), 2, "not up"),
            (revoked, 2, "are revoked"),
            (put(Node { status: None, ..member(2) }), 2, "no address"),
        ] {
            let error = renew(&snapshot, number).unwrap_err();
            assert!(error.contains(reason) && error.contains(&node_id(number).to_string()), "{error}");
        }
    }

    #[test]
    fn successor_of_the_trusted_authority_signs() {
        let mut later = snapshot();
        let begun = AuthorityRing::new(authority(1)).begin(authority_of(1, 5), at(1)).unwrap().unwrap();
        let signing = begun.apply_step(ReplacementStep::Sign, at(2)).unwrap();
        later.records.insert(cluster::authority_record_key().unwrap(), signing.encode());
        let issued = renew(&later, 2).unwrap();
        let new = authority_of(1, 5).anchor().clone();
        assert_eq!(check_issued_certificate(&issued.certificate, &new, &key(2), at(60)), Ok(()));
    }

    #[test]
    fn authority_that_was_replaced_since_signs_nothing() {
        let mut former = snapshot();
        // An authority of the same cluster, with another key.
        let cluster = authority(1).anchor().cluster;
        let long = Validity { not_before: at(-1000), not_after: at(1_000_000) };
        let other = Authority::create(cluster, &pkcs8(5), serial(5), long).unwrap();
        let stored = cluster::encode_authority(&other);
        former.records.insert(cluster::authority_record_key().unwrap(), stored);
        let error = renew(&former, 2).unwrap_err();
        assert!(error.contains("another authority") && error.contains("cluster restore"), "{error}");
    }

    #[test]
    fn certificate_of_another_key_authority_or_time_is_not_used() {
        let (own, other) = (authority(1), authority(2));
        let address = "10.0.0.7".parse().unwrap();
        let issue = |authority: &Authority, number| {
            let issued =
                authority.issue_etcd_peer_certificate(&public(number), address, serial(3), validity());
            issued.unwrap().certificate
        };
        let longer = [issue(&own, 7), vec![0]].concat();
        for (what, certificate, second, expected) in [
            ("its own", issue(&own, 7), 0, "Ok"),
            ("its own, at its end", issue(&own, 7), 1000, "Ok"),
            ("one that has ended", issue(&own, 7), 1001, "the clock of this machine"),
            ("one of tomorrow", issue(&own, 7), -1, "the clock of this machine"),
            ("that of another node", issue(&own, 8), 0, "another node"),
            ("one of another cluster", issue(&other, 7), 0, "did not sign it"),
            ("a longer one", longer, 0, "cannot be parsed"),
            ("nothing", Vec::new(), 0, "cannot be parsed"),
        ] {
            let checked = check_issued_certificate(&certificate, own.anchor(), &public(7), at(second));
            let text = checked.err().map_or_else(|| "Ok".to_owned(), |error| error.to_string());
            assert!(text.contains(expected), "{what}: {text}");
        }
    }
}
