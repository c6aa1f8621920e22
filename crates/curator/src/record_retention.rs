//! Decides which records of certificates, revocations and tickets a leader deletes (pure).
//!
//! A deleted revocation lets in whom it kept out, and no later leader can restore it. A leader with a clock that is fast by
//! years would delete all of them. So nothing that rejects a certificate is deleted by the leader's clock alone: the clocks
//! of other consensus members must confirm it ([`is_confirmed`]). In a cluster of one member, or while only half of the
//! members can be reached, these records stay. A clock that is confirmed later deletes what has ended.
//!
//! What rejects a certificate:
//!
//! * The revocation of a certificate.
//! * The record of a peer certificate. The list of revoked peers has serial numbers only of recorded certificates.
//! * The record of a curator's certificate. The statement of the cluster lists the curators' certificates of revoked nodes.
//!
//! Other records only inform owners, or permit something. The leader's clock is enough for these, unless it is known to be
//! wrong.
//!
//! # Bounds
//!
//! Certificates of peers live a month and those of curators a day. So a member leaves about 800 records a year, of 250 bytes
//! each, as long as nothing confirms the clock, and each ended membership some 20 bytes per certificate on the list of
//! revoked peers. A node has at most 64 certificates of a kind at once, so the key of a member causes at most 64 records of
//! curators a day.

use std::time::Duration;

use model::time::{Timestamp, before};

use crate::clock_comparison::{find_wrong_clock, is_confirmed};
use crate::credential::{CertificateKind, Credential, Revocation};
use crate::tickets::Ticket;

/// How long records stay after their end. Tickets stay visible, and a leader with a clock some days fast forgets no
/// certificate that is still valid, nor that it is revoked.
const EXPIRED_RETENTION: Duration = Duration::from_hours(7 * 24);

/// What a leader may delete at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordRetention {
    /// Records that ended before this are deleted; `None` while the leader's clock is wrong.
    end: Option<Timestamp>,
    /// Whether other clocks confirm that of the leader.
    is_confirmed: bool,
}

impl RecordRetention {
    /// Decides by the leader's own time, the number of all consensus members, and how far the clocks of the others are
    /// ahead, in milliseconds, as far as they are known.
    #[must_use]
    pub(crate) fn decide(now: Timestamp, members: usize, offsets: &[i64]) -> Self {
        // A leader that is about to step down decides nothing by its clock.
        let is_wrong = find_wrong_clock(members, offsets).is_some();
        Self {
            end: (!is_wrong).then(|| before(now, EXPIRED_RETENTION)),
            is_confirmed: is_confirmed(members, offsets),
        }
    }

    /// Whether the record of a certificate is deleted.
    #[must_use]
    pub(crate) fn deletes_credential(&self, credential: &Credential) -> bool {
        let may_go = match credential.kind {
            CertificateKind::Node | CertificateKind::Owner => true,
            CertificateKind::Curator | CertificateKind::EtcdPeer { .. } => self.is_confirmed,
        };
        may_go && self.is_over(credential.validity.not_after)
    }

    /// Whether a revocation is deleted. Those of nodes and of owner keys have no end.
    #[must_use]
    pub(crate) fn deletes_revocation(&self, revocation: &Revocation) -> bool {
        match revocation {
            Revocation::Certificate(_, until) => self.is_confirmed && self.is_over(*until),
            Revocation::Node(_) | Revocation::Owner(_) => false,
        }
    }

    /// Whether a ticket is deleted.
    #[must_use]
    pub(crate) fn deletes_ticket(&self, ticket: &Ticket) -> bool {
        self.is_over(ticket.revoked_at.unwrap_or(ticket.expires_at).min(ticket.expires_at))
    }

    fn is_over(&self, ended: Timestamp) -> bool {
        self.end.is_some_and(|end| ended < end)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use curator_client::certificate::Validity;
    use curator_client::testing::{at, key, member as member_node, node_id, serial};

    use super::*;
    use crate::credential::CredentialHolder;
    use crate::membership::tests::{nodes, voter};
    use crate::peer_revocation::revoked_peer_serials;
    use crate::tickets::{TicketRequest, TicketSecret};

    /// Ten years in seconds.
    const TEN_YEARS: i64 = 3_650 * 86_400;
    /// How far the right clocks of others are ahead of one that is ten years fast, in milliseconds.
    const BEHIND: i64 = -TEN_YEARS * 1_000;

    fn credential(kind: CertificateKind) -> Credential {
        Credential {
            serial: serial(2),
            holder: CredentialHolder::Node(node_id(2)),
            key: key(2),
            validity: Validity { not_before: at(-9), not_after: at(100) },
            kind,
        }
    }

    #[test]
    fn no_revocation_ends_by_a_clock_that_nobody_confirms() {
        let (peer, curator) = (credential(CertificateKind::EtcdPeer { member: 2 }), CertificateKind::Curator);
        let revocation = Revocation::Certificate(serial(2), at(100));
        let listed = BTreeSet::from([serial(2)]);
        for (what, members, offsets, ends) in [
            ("one member that is ten years fast", 1, vec![], false),
            ("the leader of two is ten years fast", 2, vec![BEHIND], false),
            ("the other of two does not answer", 2, vec![], false),
            ("the leader of three is ten years fast and one is off", 3, vec![BEHIND], false),
            ("both others are off", 3, vec![], false),
            ("the leader of three is ten years fast", 3, vec![BEHIND, BEHIND], false),
            ("all of two agree", 2, vec![0], true),
            ("two of three agree and one is off", 3, vec![0], true),
            ("two of three agree and one is slow", 3, vec![0, BEHIND], true),
            ("all of three agree", 3, vec![0, 0], true),
        ] {
            let retention = RecordRetention::decide(at(TEN_YEARS), members, &offsets);
            assert_eq!(retention.deletes_revocation(&revocation), ends, "{what}");
            assert_eq!(retention.deletes_credential(&credential(curator)), ends, "{what}");
            let recorded: Vec<Credential> =
                [peer.clone()].into_iter().filter(|peer| !retention.deletes_credential(peer)).collect();
            let next = revoked_peer_serials(&listed, &recorded, &[voter(1)], &nodes([member_node(1)]));
            assert_eq!(next.is_empty(), ends, "{what}: the list of revoked peers");
            for forever in [Revocation::Node(node_id(2)), Revocation::Owner(key(2))] {
                assert!(!retention.deletes_revocation(&forever), "{what}: {forever:?}");
            }
        }
    }

    #[test]
    fn records_stay_for_a_week_after_their_end() {
        let week = 7 * 86_400;
        let revocation = Revocation::Certificate(serial(2), at(100));
        for (second, ends) in [(100, false), (100 + week, false), (101 + week, true)] {
            let retention = RecordRetention::decide(at(second), 3, &[0, 0]);
            assert_eq!(retention.deletes_revocation(&revocation), ends, "{second}");
            // The records of nodes alone need no other clock.
            let alone = RecordRetention::decide(at(second), 1, &[]);
            assert_eq!(alone.deletes_credential(&credential(CertificateKind::Node)), ends, "{second}");
            let wrong = RecordRetention::decide(at(second), 3, &[BEHIND, BEHIND]);
            assert!(!wrong.deletes_credential(&credential(CertificateKind::Node)), "{second}");
        }
    }

    #[test]
    fn ticket_stays_for_a_week_after_it_was_revoked_or_has_expired() {
        let request = TicketRequest {
            created_by: "kim".to_owned(),
            lifetime: Duration::from_secs(100),
            uses: None,
            purpose: String::new(),
        };
        let issued = Ticket::new(&TicketSecret::new([7; 32]), request, at(0)).unwrap();
        let week = 7 * 86_400;
        for (revoked_at, ended) in [(None, 100), (Some(at(40)), 40), (Some(at(150)), 100)] {
            let mut ticket = issued.clone();
            ticket.revoked_at = revoked_at;
            for (second, ends) in [(ended, false), (ended + week, false), (ended + week + 1, true)] {
                // Tickets need no other clock.
                let alone = RecordRetention::decide(at(second), 1, &[]);
                assert_eq!(alone.deletes_ticket(&ticket), ends, "{revoked_at:?} {second}");
            }
            let wrong = RecordRetention::decide(at(ended + week + 1), 3, &[BEHIND, BEHIND]);
            assert!(!wrong.deletes_ticket(&ticket), "{revoked_at:?}");
        }
    }
}
