//! The shepherd's order to use another certificate for the etcd member of this node.
//!
//! Members cannot renew certificates that have all ended, because that needs a quorum. The shepherd then signs one
//! for each of them, with the authority in a snapshot of the cluster, and sends it with an order
//! ([`peer_renewal`](curator_client::peer_renewal)).
//!
//! The order changes nothing but the file of the certificate. The machine stays what it was ordered to be: the stored
//! order only gets the number of this one, so that the shepherd finds it in the report. The key stays, and so does the
//! list of revoked peers, which is at least as new as that of a snapshot. etcd reads the certificate for its next
//! connection, so nothing restarts.
//!
//! Two orders do no harm: a certificate that is valid now, and longer than the one in the order, stays. The clock of the
//! host decides what is valid, because etcd compares certificates with that one.

use std::net::IpAddr;

use curator::entitlement::{Entitlement, EntitlementError, check_certificate};
use curator_client::certificate::Validity;
use curator_client::node_id::PublicKey;
use curator_client::peer_authorities::find_issuer;
use curator_client::peer_renewal::{check_certified_key, check_issued_certificate};
use curator_client::pki::{AUTHORITY_LIFETIME, TrustAnchor};
use model::time::Timestamp;

use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::node_order::{NodeOrder, OrderKind};
use crate::cluster::peer_revocation::is_pair_revoked;
use crate::cluster::stored_authorities::{authorities_or_anchor, etcd_authorities};

/// The etcd member of this node, as its files show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPeer {
    /// The authorities of the cluster that its etcd accepts.
    pub authorities: Vec<TrustAnchor>,
    /// The key of the node, which its member uses.
    pub key: PublicKey,
    /// The address in the URL of the member.
    pub address: IpAddr,
}

impl LocalPeer {
    /// Reads the member of this node; `None` if it has none.
    pub fn read(files: &ClusterFiles) -> Result<Option<Self>, ClusterFilesError> {
        let key = files.read_key()?;
        let authorities = authorities_or_anchor(files)?;
        let authorities = authorities.map(|trusted| etcd_authorities(files, trusted)).transpose()?;
        let membership = files.read_membership()?;
        Ok(key.zip(authorities).zip(membership).map(|((key, authorities), membership)| Self {
            authorities,
            key: PublicKey(key.public_key()),
            address: membership.address,
        }))
    }

    /// Checks that other members accept this certificate as that of this one. The error is a part of a sentence.
    pub fn check(&self, certificate: &[u8], now: Timestamp) -> Result<(), String> {
        let anchor = self.find_issuer(certificate)?;
        check_issued_certificate(certificate, anchor, &self.key, now).map_err(|error| error.to_string())?;
        self.check_purpose(certificate)
    }

    /// The same, whenever it is valid: the clock of this node may be wrong.
    pub fn check_at_any_time(&self, certificate: &[u8]) -> Result<(), String> {
        let anchor = self.find_issuer(certificate)?;
        check_certified_key(certificate, anchor, &self.key).map_err(|error| error.to_string())?;
        self.check_purpose(certificate)
    }

    /// The authority that signed the certificate. If there is none, the first one, which then finds out why.
    fn find_issuer(&self, certificate: &[u8]) -> Result<&TrustAnchor, String> {
        let issuer = find_issuer(certificate, &self.authorities).or_else(|| self.authorities.first());
        issuer.ok_or_else(|| "no authority of the cluster is trusted here".to_owned())
    }

    /// Checks a pair for the start of etcd, whenever it is valid. One for a former address of this member is replaced soon.
    pub fn check_for_start(&self, certificate: &[u8]) -> Result<(), String> {
        let anchor = self.find_issuer(certificate)?;
        check_certified_key(certificate, anchor, &self.key).map_err(|error| error.to_string())?;
        if self.is_named_by(certificate) { self.check_purpose(certificate) } else { Ok(()) }
    }

    /// Whether a certificate of a member names the address of this one. The other members refuse one that does not.
    #[must_use]
    pub fn is_named_by(&self, certificate: &[u8]) -> bool {
        let checked = check_certificate(certificate, &self.entitlement());
        !matches!(checked, Err(EntitlementError::Mismatch { part: "names", .. }))
    }

    /// What a certificate for this member has. How long it lasts is decided where it is signed.
    fn entitlement(&self) -> Entitlement {
        Entitlement { max_lifetime: AUTHORITY_LIFETIME, ..Entitlement::for_etcd_peer(self.address) }
    }

    fn check_purpose(&self, certificate: &[u8]) -> Result<(), String> {
        check_certificate(certificate, &self.entitlement()).map_err(|error| {
            tracing::warn!(%error, "a certificate for the etcd member of this node differs from what it should be");
            format!("it is not one for the member of etcd at {}", self.address)
        })
    }
}

/// What happens with the certificate of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerOrderDecision {
    /// The order is not newer than the stored one.
    Ignore,
    /// The certificate is not used, for this reason.
    Reject(String),
    /// The present certificate stays: it is valid for at least as long.
    Keep,
    /// It replaces the present one.
    Replace,
}

/// Decides about the certificate in an order of this number.
///
/// `stored` is the order that this machine has, and `member` its member of etcd. `present` is the present certificate,
/// unless that is revoked.
#[must_use]
pub fn decide_peer_order(
    stored: Option<&NodeOrder>,
    member: Option<&LocalPeer>,
    present: Option<&[u8]>,
    (generation, certificate): (i64, &[u8]),
    now: Timestamp,
) -> PeerOrderDecision {
    let rejected = |reason: &str| PeerOrderDecision::Reject(reason.to_owned());
    match stored {
        Some(stored) if generation <= stored.generation => return PeerOrderDecision::Ignore,
        Some(stored) if matches!(stored.what, OrderKind::Leave {}) => {
            return rejected("this machine leaves its cluster, so its member of etcd gets no certificate");
        }
        Some(_) => {}
        None => return rejected("this machine has no order that makes it a node of a cluster"),
    }
    let Some(member) = member else {
        return rejected("this machine runs no member of etcd, so it has no use for a certificate of one");
    };
    if let Err(reason) = member.check(certificate, now) {
        return PeerOrderDecision::Reject(format!(
            "the certificate for the etcd member of this machine is not used: {reason}"
        ));
    }
    let end = |certificate: &[u8]| Validity::from_der(certificate).map(|validity| validity.not_after);
    match present.filter(|present| member.check(present, now).is_ok()) {
        Some(present) if end(present) >= end(certificate) => PeerOrderDecision::Keep,
        _ => PeerOrderDecision::Replace,
    }
}

/// Carries out an order with a certificate for the etcd member of this node. The order is durable before it is reported:
/// first the certificate is, and then its number.
pub(super) fn carry_out_peer_order(
    files: &ClusterFiles,
    generation: i64,
    certificate: &[u8],
    now: Timestamp,
) -> Result<PeerOrderDecision, ClusterFilesError> {
    let (stored, member) = (files.read_order()?, LocalPeer::read(files)?);
    let present = etcd_member::read_peer_certificate(files).filter(|_| !is_pair_revoked(files));
    let order = (generation, certificate);
    let decision = decide_peer_order(stored.as_ref(), member.as_ref(), present.as_deref(), order, now);
    if decision == PeerOrderDecision::Replace {
        etcd_member::replace_peer_certificate(files, certificate)?;
    }
    if let (PeerOrderDecision::Replace | PeerOrderDecision::Keep, Some(stored)) = (&decision, stored) {
        files.write_order(&NodeOrder { generation, ..stored })?;
    }
    Ok(decision)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use curator_client::testing::{at, authority, public, serial};
    use model::time::after;
    use uuid::Uuid;

    use super::*;

    fn stored(generation: i64, what: OrderKind) -> NodeOrder {
        NodeOrder { generation, what, machine: None, labels: BTreeMap::new(), address: None }
    }

    fn founding() -> OrderKind {
        OrderKind::Found {
            cluster: Uuid::from_u128(7),
            name: "ams".to_owned(),
            owner_keys: vec!["07".repeat(32)],
            snapshot: None,
            image: None,
            revocations: BTreeMap::new(),
            epoch: 0,
        }
    }

    /// A certificate of the cluster with this number, for the key of this number, that ends in so many hours.
    fn issue(cluster: u8, key: u8, address: &str, hours: u64) -> Vec<u8> {
        let validity = Validity { not_before: at(0), not_after: after(at(0), Duration::from_hours(hours)) };
        let address = address.parse().unwrap();
        let issued =
            authority(cluster).issue_etcd_peer_certificate(&public(key), address, serial(3), validity);
        issued.unwrap().certificate
    }

    #[test]
    fn certificate_is_taken_once_and_only_by_its_member() {
        let member = LocalPeer {
            authorities: vec![authority(1).anchor().clone()],
            key: public(7),
            address: "10.0.0.1".parse().unwrap(),
        };
        let own = |hours| issue(1, 7, "10.0.0.1", hours);
        let node = authority(1).issue_node_certificate(
            &public(7),
            serial(4),
            Validity { not_before: at(0), not_after: at(7200) },
        );
        let of_node = node.unwrap().certificate;
        assert!(member.is_named_by(&own(2)) && !member.is_named_by(&issue(1, 7, "10.0.0.2", 2)));
        let (order, leaving) = (stored(3, founding()), stored(3, OrderKind::Leave {}));
        let now = at(3600);
        let (replace, keep) = (PeerOrderDecision::Replace, PeerOrderDecision::Keep);
        for (what, generation, certificate, present, expected) in [
            ("none before", 4, own(2), None, replace.clone()),
            ("one that ends earlier", 4, own(3), Some(own(2)), replace.clone()),
            ("one of another node", 4, own(2), Some(issue(1, 8, "10.0.0.1", 9)), replace.clone()),
            ("one of another address", 4, own(2), Some(issue(1, 7, "10.0.0.2", 9)), replace.clone()),
            ("a damaged one", 4, own(2), Some(vec![1, 2, 3]), replace),
            ("one that ends later", 4, own(2), Some(own(3)), keep.clone()),
            ("the same", 4, own(2), Some(own(2)), keep),
            ("an order of before", 3, own(2), None, PeerOrderDecision::Ignore),
        ] {
            let order = decide_peer_order(
                Some(&order),
                Some(&member),
                present.as_deref(),
                (generation, &certificate),
                now,
            );
            assert_eq!(order, expected, "{what}");
        }
        for (order, member, certificate, reason) in [
            (None, Some(&member), own(2), "has no order"),
            (Some(&leaving), Some(&member), own(2), "leaves its cluster"),
            (Some(&order), None, own(2), "runs no member of etcd"),
            (Some(&order), Some(&member), issue(1, 8, "10.0.0.1", 2), "key of another node"),
            (Some(&order), Some(&member), issue(2, 7, "10.0.0.1", 2), "did not sign it"),
            (Some(&order), Some(&member), issue(1, 7, "10.0.0.2", 2), "the member of etcd at 10.0.0.1"),
            (Some(&order), Some(&member), of_node, "the member of etcd at 10.0.0.1"),
            (Some(&order), Some(&member), issue(1, 7, "10.0.0.1", 1), "the clock of this machine"),
            (Some(&order), Some(&member), vec![7], "cannot be parsed"),
        ] {
            let decided = decide_peer_order(order, member, None, (4, &certificate), at(3601));
            let PeerOrderDecision::Reject(why) = decided else { panic!("{reason}: {decided:?}") };
            assert!(why.contains(reason), "{reason}: {why}");
        }
    }
}
