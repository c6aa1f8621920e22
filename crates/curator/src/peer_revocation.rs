//! Decides which peer certificates etcd's members reject: those of memberships that have ended (pure).
//!
//! The certificate of an etcd member is valid for a month, and one of an earlier release as long as the authority. When
//! the membership ends, the serial number of each of its certificates gets on the list of revoked peers
//! ([`pki_revocation_list`](curator_client::pki_revocation_list)), so that a copy of its disk opens no port of the
//! remaining members.
//!
//! The former certificates of a member that renewed its own are not on the list: a new entry restarts every member, and
//! they are for the same key. They end by themselves, or with the membership.
//!
//! # The rule
//!
//! A wrong list costs the quorum: members would reject a member of theirs. So a serial number gets on the list only if
//! all of this shows that its membership has ended:
//!
//! * etcd lists no member of that number, and no record of a node names it.
//! * The node has no member and not the role, or it has another member for which a certificate is recorded. If the member
//!   of a node has no other certificate, it uses this one, also if the record has another number: etcd may have started as a
//!   later member of its node than the one that the certificate was issued for.
//!
//! A certificate without the number of its membership was recorded by a release before this list. It gets on the list
//! once its node has no member.
//!
//! A serial number stays on the list as long as its certificate is recorded, also if its node becomes a member again: a
//! node gets another certificate for each membership. No time is compared here: a leader with a fast clock would drop what
//! must stay. [`record_retention`](crate::record_retention) decides when the record of a certificate is deleted, at the
//! earliest a week after its end. [`register_peer_certificate`](crate::bootstrap::register_peer_certificate)
//! corrects the record of a member that runs.

use std::collections::{BTreeMap, BTreeSet};

use curator_client::certificate::Serial;
use curator_client::node_id::NodeId;

use crate::credential::{CertificateKind, Credential, CredentialHolder};
use crate::membership::{EtcdMember, Nodes, match_members_to_nodes};

/// The serial numbers on the next list. `former` are those on the present one.
///
/// The caller has accepted `members` and `nodes` for a comparison ([`plan_sync`](crate::membership::plan_sync)), and
/// has read `credentials` after both.
pub(crate) fn revoked_peer_serials(
    former: &BTreeSet<Serial>,
    credentials: &[Credential],
    members: &[EtcdMember],
    nodes: &Nodes,
) -> BTreeSet<Serial> {
    let owners = match_members_to_nodes(members, nodes);
    let recorded = nodes.values().filter_map(|node| node.roles.consensus_member.as_ref());
    let present: BTreeSet<u64> =
        members.iter().map(|member| member.id).chain(recorded.map(|role| role.member_id)).collect();
    let peers: Vec<_> = credentials
        .iter()
        .filter_map(|credential| match (credential.kind, &credential.holder) {
            (CertificateKind::EtcdPeer { member }, CredentialHolder::Node(node)) => {
                Some((credential.serial, *node, member))
            }
            _ => None,
        })
        .collect();
    let mut certified: BTreeMap<NodeId, BTreeSet<u64>> = BTreeMap::new();
    for (_, node, member) in &peers {
        certified.entry(*node).or_default().insert(*member);
    }
    let has_ended = |node: &NodeId, member: u64| {
        if present.contains(&member) {
            return false;
        }
        match owners.by_node.get(node) {
            None => nodes.get(node).is_none_or(|node| node.roles.consensus_member.is_none()),
            Some(current) => {
                member != 0 && certified.get(node).is_some_and(|members| members.contains(&current.id))
            }
        }
    };
    let revoked =
        peers.iter().filter(|(serial, node, member)| former.contains(serial) || has_ended(node, *member));
    revoked.map(|(serial, ..)| *serial).collect()
}

#[cfg(test)]
mod tests {
    use curator_client::certificate::Validity;
    use curator_client::node::{Node, NodeState};
    use curator_client::testing::{at, key, member as member_node, node_id, serial, up, validity};
    use proptest::collection::vec;

    use super::*;
    use crate::membership::tests::{dead, learner, nodes, unstarted, voter};

    /// The certificate with this serial number, for a membership of the node with this number.
    fn peer(number: u8, node: u8, member: u64) -> Credential {
        Credential {
            serial: serial(number),
            holder: CredentialHolder::Node(node_id(node)),
            key: key(node),
            validity: validity(),
            kind: CertificateKind::EtcdPeer { member },
        }
    }

    fn serials(numbers: &[u8]) -> BTreeSet<Serial> {
        numbers.iter().map(|number| serial(*number)).collect()
    }

    /// A member of this number that belongs to the node with the other number.
    fn member_of(id: u64, node: u8) -> EtcdMember {
        EtcdMember { id, ..voter(node) }
    }

    fn node_with_role(node: u8, member: u64) -> Node {
        let mut node = member_node(node);
        if let Some(role) = &mut node.roles.consensus_member {
            role.member_id = member;
        }
        node
    }

    #[test]
    fn serials_of_ended_memberships_are_listed() {
        let decommissioned = |number| Node { state: NodeState::Decommissioned, ..up(number) };
        let ended =
            Credential { validity: Validity { not_before: at(-9), not_after: at(0) }, ..peer(2, 2, 2) };
        let of_node = Credential { kind: CertificateKind::Node, ..peer(2, 2, 2) };
        let known = || nodes([member_node(1), up(2)]);
        for (why, credentials, members, nodes, expected) in [
            ("both are members", vec![peer(2, 2, 2)], vec![voter(1), voter(2)], known(), &[][..]),
            ("it is unreachable", vec![peer(2, 2, 2)], vec![voter(1), dead(2)], known(), &[][..]),
            ("it has not started", vec![peer(2, 2, 2)], vec![voter(1), unstarted(2)], known(), &[][..]),
            ("it was removed", vec![peer(1, 1, 1), peer(2, 2, 2)], vec![voter(1)], known(), &[2][..]),
            (
                "its number is unrecorded",
                vec![peer(1, 1, 0), peer(2, 2, 0)],
                vec![voter(1)],
                known(),
                &[2][..],
            ),
            ("its record is gone", vec![peer(2, 2, 2)], vec![voter(1)], nodes([member_node(1)]), &[2][..]),
            (
                "its node is gone for good",
                vec![peer(2, 2, 2)],
                vec![voter(1)],
                nodes([member_node(1), decommissioned(2)]),
                &[2][..],
            ),
            (
                "its record is late, and no number was recorded",
                vec![peer(2, 2, 0)],
                vec![voter(1)],
                nodes([member_node(1), member_node(2)]),
                &[][..],
            ),
            (
                "its record is late",
                vec![peer(2, 2, 2)],
                vec![voter(1)],
                nodes([member_node(1), member_node(2)]),
                &[][..],
            ),
            (
                "it is a member again, with another certificate",
                vec![peer(2, 2, 2), peer(3, 2, 7)],
                vec![voter(1), member_of(7, 2)],
                nodes([member_node(1), node_with_role(2, 7)]),
                &[2][..],
            ),
            (
                "it started as a later member than the one it was certified for",
                vec![peer(2, 2, 2)],
                vec![voter(1), member_of(7, 2)],
                nodes([member_node(1), node_with_role(2, 7)]),
                &[][..],
            ),
            (
                "it is a member, and no number was recorded",
                vec![peer(2, 2, 0), peer(3, 2, 7)],
                vec![voter(1), member_of(7, 2)],
                nodes([member_node(1), node_with_role(2, 7)]),
                &[][..],
            ),
            ("its certificate has ended", vec![ended], vec![voter(1)], known(), &[2][..]),
            ("it is that of a node", vec![of_node], vec![voter(1)], known(), &[][..]),
        ] {
            let listed = revoked_peer_serials(&BTreeSet::new(), &credentials, &members, &nodes);
            assert_eq!(listed, serials(expected), "{why}");
        }
    }

    #[test]
    fn what_was_listed_stays_as_long_as_it_is_recorded() {
        let credentials = [peer(2, 2, 2), peer(3, 2, 7)];
        let members = [voter(1), member_of(7, 2)];
        let known = nodes([member_node(1), node_with_role(2, 7)]);
        // Even if its node is a member again, and even if this is its present certificate.
        let listed = revoked_peer_serials(&serials(&[2, 3]), &credentials, &members, &known);
        assert_eq!(listed, serials(&[2, 3]));
        let listed = revoked_peer_serials(&serials(&[2, 9]), &credentials, &members, &known);
        assert_eq!(listed, serials(&[2]), "the record of a certificate outlasts it");
    }

    proptest::proptest! {
        #[test]
        fn no_serial_of_a_listed_member_is_ever_added(
            kinds in vec((0..5_u8, 0..4_u8, 0..3_u64), 4),
            certificates in vec((1..6_u8, 0..3_u64), 0..12),
        ) {
            // A membership of node n has the number n, n + 10 or n + 20.
            let id = |node: u8, round: u64| u64::from(node) + 10 * round;
            let mut members = vec![voter(1)];
            let mut known = nodes([member_node(1)]);
            for (number, (kind, record, round)) in (2_u8..).zip(kinds) {
                let present = |member: EtcdMember| EtcdMember { id: id(number, round), ..member };
                members.extend(match kind {
                    1 => Some(present(voter(number))),
                    2 => Some(present(learner(number))),
                    3 => Some(present(unstarted(number))),
                    4 => Some(present(dead(number))),
                    _ => None,
                });
                let record = match record {
                    1 => Some(up(number)),
                    2 => Some(node_with_role(number, id(number, round))),
                    3 => Some(node_with_role(number, id(number, 0))),
                    _ => None,
                };
                known.extend(record.map(|node| (node.id, node)));
            }
            let credentials: Vec<Credential> = (10_u8..)
                .zip(certificates)
                .map(|(number, (node, round))| peer(number, node, id(node, round)))
                .collect();
            let listed = revoked_peer_serials(&BTreeSet::new(), &credentials, &members, &known);
            let owners = match_members_to_nodes(&members, &known);
            for credential in credentials.iter().filter(|credential| listed.contains(&credential.serial)) {
                let CertificateKind::EtcdPeer { member } = credential.kind else { continue };
                proptest::prop_assert!(members.iter().all(|one| one.id != member), "{credential:?}");
                // A member of the same node still has a certificate that is not on the list.
                let CredentialHolder::Node(node) = &credential.holder else { continue };
                if let Some(current) = owners.by_node.get(node) {
                    let of_current = CertificateKind::EtcdPeer { member: current.id };
                    let remaining = credentials.iter().any(|other| {
                        other.holder == credential.holder
                            && other.kind == of_current
                            && !listed.contains(&other.serial)
                    });
                    proptest::prop_assert!(remaining, "{credential:?}");
                }
            }
        }
    }
}
