//! Decides when the authority of a cluster makes a statement, and what the statement contains.
//!
//! Nodes believe the newest statement that they have verified: it has the epoch, the trusted authorities and the
//! revoked certificates of curators. A node that has one follows nobody without a curator's certificate, for good.
//!
//! # The first statement
//!
//! It is made once the curator of *every* consensus member has shown a curator's certificate and knows the call
//! `Leader/GetStatement`. Curators of a release before statements do not, so nobody is locked out in the middle of
//! an update. All of them must have done so for an hour: nodes that have a statement refuse the curators of a release
//! before it, so an update that turns out to be bad is rolled back before. The hour begins again with each leader.
//!
//! A new cluster has its first statement among its first records ([`found_statement`]).
//!
//! # Later ones
//!
//! A statement is signed again when its content changes, and otherwise each hour, so that nodes can see that it is
//! fresh. Numbers grow by one. A restored cluster continues with the number of its snapshot under a higher epoch, and
//! the epoch is compared first. So no statement is ever lower than one that was signed before.
//!
//! # Revoked curators
//!
//! The list has the certificates of curators that have not ended and must not be believed any more: those that were
//! revoked, and all of a node that is revoked, unknown, out of the cluster, or no consensus member. They last a day, so
//! the list stays short. A certificate leaves it a little after its end: a node with a slow clock, as far as it accepts
//! the statement at all, still takes the certificate for valid.
//!
//! The certificates are read before the nodes: a node gets its role first and its certificate after it, and the other
//! order would list a certificate that was issued in between.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use curator_client::certificate::{Serial, Validity};
use curator_client::clock::MAX_CLOCK_DIFFERENCE;
use curator_client::node::NodeState;
use curator_client::node_id::NodeId;
use curator_client::peer_identity::Revocations;
use curator_client::pki::TrustAnchor;
use curator_client::statement::{STATEMENT_REFRESH, Statement};
use model::time::{Timestamp, after, between};
use uuid::Uuid;

use crate::credential::{CertificateKind, Credential, CredentialHolder};
use crate::membership::Nodes;

/// What a statement of the cluster is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StatementInputs<'a> {
    /// Id of the cluster.
    pub(crate) cluster: Uuid,
    /// How often the cluster was restored.
    pub(crate) epoch: u64,
    /// The authorities that nodes must trust; the first one signs.
    pub(crate) authorities: &'a [TrustAnchor],
    /// Certificates of curators that nodes must reject, and when they end.
    pub(crate) revoked: &'a BTreeMap<Serial, Timestamp>,
    /// Each consensus member, and whether its curator has shown that it knows statements. Only the first statement
    /// depends on it.
    pub(crate) curators_ready: &'a BTreeMap<NodeId, bool>,
    /// How much longer all of them must stay ready before the first statement.
    pub(crate) first_in: Duration,
}

/// What the leader must do about the statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StatementStep {
    /// Nothing: the present one is right and fresh.
    Keep,
    /// Wait for the curators of these nodes. Empty: no consensus member is known yet.
    WaitFor(BTreeSet<NodeId>),
    /// Wait for the time in which the update to statements can be rolled back.
    WaitForRollBack,
    /// Sign this one and store it.
    Sign(Statement),
}

/// Plans the next statement of a cluster; `current` is its newest one.
pub(crate) fn plan_statement(
    current: Option<&Statement>,
    inputs: &StatementInputs<'_>,
    now: Timestamp,
) -> StatementStep {
    let number = if let Some(current) = current {
        // A lower epoch than the signed one does not exist. If it did, no node would accept its statement.
        if current.epoch > inputs.epoch || !is_due(current, inputs, now) {
            return StatementStep::Keep;
        }
        current.number.saturating_add(1)
    } else {
        let members = inputs.curators_ready;
        let missing: BTreeSet<NodeId> =
            members.iter().filter(|(_, ready)| !**ready).map(|(node, _)| *node).collect();
        if members.is_empty() || !missing.is_empty() {
            return StatementStep::WaitFor(missing);
        }
        if !inputs.first_in.is_zero() {
            return StatementStep::WaitForRollBack;
        }
        1
    };
    StatementStep::Sign(Statement {
        cluster: inputs.cluster,
        epoch: inputs.epoch,
        number,
        issued_at: now,
        authorities: inputs.authorities.to_vec(),
        revoked: inputs.revoked.clone(),
    })
}

/// How much longer all curators must stay ready, if they have been since `since`; both times are of a monotonic clock.
#[must_use]
pub(crate) fn remaining_wait(since: Option<Duration>, now: Duration, wait: Duration) -> Duration {
    since.map_or(wait, |since| wait.saturating_sub(now.saturating_sub(since)))
}

/// The first statement of a new cluster.
#[must_use]
pub(crate) fn found_statement(authority: &TrustAnchor, now: Timestamp) -> Statement {
    Statement {
        cluster: authority.cluster,
        epoch: 0,
        number: 1,
        issued_at: now,
        authorities: vec![authority.clone()],
        revoked: BTreeMap::new(),
    }
}

/// Whether the statement has to be signed again: something changed, it is an hour old, or it is of the future.
fn is_due(current: &Statement, inputs: &StatementInputs<'_>, now: Timestamp) -> bool {
    // A certificate that has ended meanwhile is no change.
    let in_force = |revoked: &BTreeMap<Serial, Timestamp>| -> BTreeSet<Serial> {
        revoked.iter().filter(|(_, end)| now <= **end).map(|(serial, _)| *serial).collect()
    };
    current.epoch != inputs.epoch
        || current.authorities.as_slice() != inputs.authorities
        || in_force(&current.revoked) != in_force(inputs.revoked)
        || between(current.issued_at, now) >= STATEMENT_REFRESH
        || current.issued_at > after(now, MAX_CLOCK_DIFFERENCE)
}

/// Whether a certificate of this validity may still be taken for valid by a node that accepts statements of `now`.
#[must_use]
pub(crate) fn may_be_valid(validity: Validity, now: Timestamp) -> bool {
    now <= after(validity.not_after, MAX_CLOCK_DIFFERENCE)
}

/// The certificates of curators that may be valid at `now` and must be rejected, with the end of each.
///
/// `credentials` must have been read before `nodes` and `revocations`.
pub(crate) fn revoked_curators(
    credentials: &[Credential],
    nodes: &Nodes,
    revocations: &Revocations,
    now: Timestamp,
) -> BTreeMap<Serial, Timestamp> {
    let is_rejected = |credential: &Credential| {
        let CredentialHolder::Node(id) = &credential.holder else { return false };
        let is_member = nodes.get(id).is_some_and(|node| {
            node.key == credential.key && node.state == NodeState::Up && node.roles.consensus_member.is_some()
        });
        !is_member || revocations.nodes.contains(id) || revocations.serials.contains_key(&credential.serial)
    };
    credentials
        .iter()
        .filter(|credential| credential.kind == CertificateKind::Curator)
        .filter(|credential| may_be_valid(credential.validity, now) && is_rejected(credential))
        .map(|credential| (credential.serial, credential.validity.not_after))
        .collect()
}

#[cfg(test)]
mod tests {
    use curator_client::node::Node;
    use curator_client::testing::{at, authority, key, member, node_id, serial, up};

    use super::*;

    /// One hour in seconds.
    const HOUR: i64 = 3_600;

    fn statement(epoch: u64, number: u64, issued_at: i64, revoked: &[(u8, i64)]) -> Statement {
        let anchor = authority(1).anchor().clone();
        Statement {
            cluster: anchor.cluster,
            epoch,
            number,
            issued_at: at(issued_at),
            authorities: vec![anchor],
            revoked: serials(revoked),
        }
    }

    fn serials(revoked: &[(u8, i64)]) -> BTreeMap<Serial, Timestamp> {
        revoked.iter().map(|(number, end)| (serial(*number), at(*end))).collect()
    }

    fn curators(ready: &[(u8, bool)]) -> BTreeMap<NodeId, bool> {
        ready.iter().map(|(number, ready)| (node_id(*number), *ready)).collect()
    }

    fn plan(
        current: Option<&Statement>,
        epoch: u64,
        revoked: &[(u8, i64)],
        ready: &[(u8, bool)],
        now: i64,
    ) -> StatementStep {
        let anchor = authority(1).anchor().clone();
        let (revoked, ready) = (serials(revoked), curators(ready));
        let inputs = StatementInputs {
            cluster: anchor.cluster,
            epoch,
            authorities: &[anchor],
            revoked: &revoked,
            curators_ready: &ready,
            first_in: Duration::ZERO,
        };
        plan_statement(current, &inputs, at(now))
    }

    #[test]
    fn first_statement_waits_until_no_update_is_rolled_back() {
        let (anchor, second) = (authority(1).anchor().clone(), Duration::from_secs(1));
        let ready = curators(&[(1, true)]);
        let missing = curators(&[(1, false)]);
        let plan = |current: Option<&Statement>, curators_ready, first_in| {
            let authorities = std::slice::from_ref(&anchor);
            let revoked = &BTreeMap::new();
            let inputs = StatementInputs {
                cluster: anchor.cluster,
                epoch: 0,
                authorities,
                revoked,
                curators_ready,
                first_in,
            };
            plan_statement(current, &inputs, at(7))
        };
        assert_eq!(plan(None, &ready, second), StatementStep::WaitForRollBack);
        assert_eq!(plan(None, &missing, second), StatementStep::WaitFor([node_id(1)].into()));
        assert_eq!(plan(None, &ready, Duration::ZERO), StatementStep::Sign(statement(0, 1, 7, &[])));
        let old = statement(0, 1, -2 * HOUR, &[]);
        assert_eq!(plan(Some(&old), &ready, second), StatementStep::Sign(statement(0, 2, 7, &[])));
        assert_eq!(found_statement(&anchor, at(7)), statement(0, 1, 7, &[]));

        let hour = Duration::from_hours(1);
        for (since, now, expected) in [
            (None, hour * 9, hour),
            (Some(hour), hour, hour),
            (Some(hour), Duration::from_secs(7_199), second),
            (Some(hour), hour * 2, Duration::ZERO),
            (Some(hour), hour * 9, Duration::ZERO),
        ] {
            assert_eq!(remaining_wait(since, now, hour), expected, "{since:?} {now:?}");
        }
    }

    #[test]
    fn first_statement_waits_for_every_curator() {
        let wait = |numbers: &[u8]| StatementStep::WaitFor(numbers.iter().map(|one| node_id(*one)).collect());
        for (ready, expected) in [
            (vec![], wait(&[])),
            (vec![(1, false)], wait(&[1])),
            (vec![(1, true), (2, false), (3, false)], wait(&[2, 3])),
            (vec![(1, false), (2, true), (3, true)], wait(&[1])),
            (vec![(1, true)], StatementStep::Sign(statement(0, 1, 7, &[]))),
            (vec![(1, true), (2, true), (3, true)], StatementStep::Sign(statement(0, 1, 7, &[]))),
        ] {
            assert_eq!(plan(None, 0, &[], &ready, 7), expected, "{ready:?}");
        }
        // The first one has all that is revoked, and the epoch of a cluster that was restored before it.
        let first = plan(None, 4, &[(1, HOUR)], &[(1, true)], 7);
        assert_eq!(first, StatementStep::Sign(statement(4, 1, 7, &[(1, HOUR)])));
        // Once there is one, nobody is waited for.
        let current = statement(0, 1, 0, &[]);
        assert_eq!(plan(Some(&current), 0, &[], &[(1, false)], 7), StatementStep::Keep);
    }

    #[test]
    fn statement_is_signed_again_when_something_changed_or_after_an_hour() {
        let current = statement(2, 7, 0, &[(1, 2 * HOUR), (2, 60)]);
        let again =
            |epoch, revoked: &[(u8, i64)], now| StatementStep::Sign(statement(epoch, 8, now, revoked));
        let both: &[(u8, i64)] = &[(1, 2 * HOUR), (2, 60)];
        let first: &[(u8, i64)] = &[(1, 2 * HOUR)];
        let more: &[(u8, i64)] = &[(1, 2 * HOUR), (2, 60), (3, 90)];
        for (what, epoch, revoked, now, expected) in [
            ("nothing changed", 2, both, 1, StatementStep::Keep),
            ("a second before the hour", 2, both, HOUR - 1, StatementStep::Keep),
            ("an hour", 2, both, HOUR, again(2, both, HOUR)),
            ("one more is revoked", 2, more, 1, again(2, more, 1)),
            ("one is a curator again", 2, first, 1, again(2, first, 1)),
            ("a revoked one has ended", 2, first, 61, StatementStep::Keep),
            ("a restored cluster", 3, both, 1, again(3, both, 1)),
            ("a lower epoch", 1, both, HOUR, StatementStep::Keep),
            ("a clock that is a little slow", 2, both, -1_800, StatementStep::Keep),
            ("a statement of the future", 2, both, -1_801, again(2, both, -1_801)),
        ] {
            assert_eq!(plan(Some(&current), epoch, revoked, &[], now), expected, "{what}");
        }
        let foreign = authority(2).anchor().clone();
        let other = Statement { authorities: vec![foreign], ..statement(2, 7, 0, &[]) };
        assert_eq!(plan(Some(&other), 2, &[], &[], 1), again(2, &[], 1), "another authority signs now");
    }

    #[test]
    fn revoked_are_the_curators_that_are_none_any_more() {
        let credential = |number: u8, holder: u8, kind| Credential {
            serial: serial(number),
            holder: CredentialHolder::Node(node_id(holder)),
            key: key(holder),
            validity: Validity { not_before: at(0), not_after: at(100) },
            kind,
        };
        let curator = |holder| credential(9, holder, CertificateKind::Curator);
        let out = Node { state: NodeState::Decommissioned, ..up(3) };
        let nodes: Nodes = [member(1), up(2), out, member(5)].map(|node| (node.id, node)).into();
        let none = Revocations::default();
        let of_node = Revocations { nodes: [node_id(1)].into(), ..Revocations::default() };
        let of_serial = Revocations { serials: [(serial(9), at(100))].into(), ..Revocations::default() };
        let of_another = Revocations {
            serials: [(serial(8), at(100))].into(),
            nodes: [node_id(5)].into(),
            ..Revocations::default()
        };
        for (what, credential, revocations, now, listed) in [
            ("a consensus member", curator(1), &none, 1, false),
            ("another one is revoked", curator(1), &of_another, 1, false),
            ("its node is revoked", curator(1), &of_node, 1, true),
            ("its serial number is revoked", curator(1), &of_serial, 1, true),
            ("its node is no member", curator(2), &none, 1, true),
            ("its node is decommissioned", curator(3), &none, 1, true),
            ("its node is unknown", curator(4), &none, 1, true),
            ("another key", Credential { key: key(7), ..curator(1) }, &none, 1, true),
            ("it ends now", curator(2), &none, 100, true),
            ("it has ended, and not by a slow clock", curator(2), &none, 101, true),
            ("it ends now by the slowest clock", curator(2), &none, 1_900, true),
            ("it has ended by every clock", curator(2), &none, 1_901, false),
            ("a node's", credential(9, 2, CertificateKind::Node), &of_serial, 1, false),
            ("a peer's", credential(9, 2, CertificateKind::EtcdPeer { member: 7 }), &of_serial, 1, false),
        ] {
            let expected = if listed { serials(&[(9, 100)]) } else { BTreeMap::new() };
            assert_eq!(revoked_curators(&[credential], &nodes, revocations, at(now)), expected, "{what}");
        }
        // A renewal leaves the former certificate good until it ends: both are listed.
        let both = [credential(6, 2, CertificateKind::Curator), credential(7, 2, CertificateKind::Curator)];
        assert_eq!(revoked_curators(&both, &nodes, &none, at(1)), serials(&[(6, 100), (7, 100)]));
    }
}
