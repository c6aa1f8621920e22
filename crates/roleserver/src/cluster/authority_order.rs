//! The shepherd's order to follow another authority of this node's cluster, after a theft of the former one's key.
//!
//! The order comes over the agent's callback connection. No authority of a cluster signs that one, so a thief with the
//! stolen key cannot give the order. Nothing that the former authority has signed is compared here.
//!
//! It has the new authority and a step ([`AuthorityStep`]). The machine stays what it was ordered to be: the stored
//! order only gets the number of this one. What the order demands is stored (`next_authority.json`) before anything is
//! done, and done by other parts: etcd's authorities follow by [`stored_authorities`](super::stored_authorities), its
//! restart by [`peer_restart`](super::peer_restart), the rest by `authority_switch`. The
//! report names the last step that was taken, as the files show it (`find_taken_step`).
//!
//! An order that is repeated is stored again, and changes nothing of what has been done.

use curator_client::node_id::PublicKey;
use curator_client::peer_authorities::find_issuer;
use curator_client::pki::{Authority, TrustAnchor};
use model::cluster::authority_theft::AuthorityStep;
use model::time::Timestamp;
use proto::agent::v1 as wire;

use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError, NextAuthority};
use crate::cluster::node_order::{NodeOrder, OrderKind, parse_statement};
use crate::cluster::peer_order::LocalPeer;
use crate::cluster::peer_restart::read_started_authorities;
use crate::cluster::stored_authorities::read_anchor;

/// What happens with the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorityOrderDecision {
    /// It is not newer than the stored one.
    Ignore,
    /// The new authority is not followed, for this reason.
    Reject(String),
    /// This node trusts the new authority alone already.
    Done,
    /// This has to be stored and carried out.
    Accept(NextAuthority),
}

/// Decides about an order of this number.
///
/// `stored` is the order that this machine has, `anchor` the authority that it trusts, and `member` its member of etcd.
#[must_use]
pub fn decide_authority_order(
    stored: Option<&NodeOrder>,
    anchor: Option<&TrustAnchor>,
    member: Option<&LocalPeer>,
    (generation, order): (i64, &wire::ReplaceAuthority),
    now: Timestamp,
) -> AuthorityOrderDecision {
    let rejected = |reason: &str| AuthorityOrderDecision::Reject(reason.to_owned());
    match stored {
        Some(stored) if generation <= stored.generation => return AuthorityOrderDecision::Ignore,
        Some(stored) if matches!(stored.what, OrderKind::Leave {}) => {
            return rejected("this machine leaves its cluster, so it follows no other authority");
        }
        Some(_) => {}
        None => return rejected("this machine has no order that makes it a node of a cluster"),
    }
    let Some(anchor) = anchor else {
        return rejected("this machine is no node of a cluster yet, so it trusts no authority");
    };
    match parse_order(anchor, member, order, now) {
        Ok(Some(next)) => AuthorityOrderDecision::Accept(next),
        Ok(None) => AuthorityOrderDecision::Done,
        Err(reason) => AuthorityOrderDecision::Reject(format!("the new authority is not followed: {reason}")),
    }
}

/// What has to be stored; `None` if the node trusts that authority already. The error is a part of a sentence.
fn parse_order(
    anchor: &TrustAnchor,
    member: Option<&LocalPeer>,
    order: &wire::ReplaceAuthority,
    now: Timestamp,
) -> Result<Option<NextAuthority>, String> {
    let step = AuthorityStep::from_wire(order.step);
    let step = step.ok_or("its step is not known to this release: update the role server")?;
    let next = TrustAnchor::parse(&order.ca_certificate).map_err(|error| error.to_string())?;
    if next.cluster != anchor.cluster {
        return Err(format!("it is that of cluster {}, and this is {}", next.cluster, anchor.cluster));
    }
    if next.certificate == anchor.certificate {
        return Ok(None);
    }
    if let Some(member) = member {
        check_member(member, &next, step, &order.peer_certificate, now)?;
    }
    let (private_key, owner_keys) = match step {
        // Without a member of etcd, there is nothing to put the key into.
        AuthorityStep::Install if member.is_some() => {
            Authority::load(&order.ca_certificate, &order.private_key).map_err(|error| error.to_string())?;
            for key in &order.owner_keys {
                PublicKey::from_slice(key)?;
            }
            if order.owner_keys.is_empty() {
                return Err("it names no owner, so nobody could give orders".to_owned());
            }
            (Some(hex::encode(&order.private_key)), order.owner_keys.iter().map(hex::encode).collect())
        }
        _ => (None, Vec::new()),
    };
    let statement = Some(hex::encode(&order.statement)).filter(|text| !text.is_empty());
    if let Some(statement) = &statement {
        parse_statement(statement, &next).map_err(|error| error.to_string())?;
    }
    Ok(Some(NextAuthority {
        step,
        ca_certificate: hex::encode(&order.ca_certificate),
        private_key,
        owner_keys,
        epoch: order.epoch,
        curators: order.curators.clone(),
        statement,
    }))
}

/// Checks that the member of etcd of this node can take the step.
fn check_member(
    member: &LocalPeer,
    next: &TrustAnchor,
    step: AuthorityStep,
    certificate: &[u8],
    now: Timestamp,
) -> Result<(), String> {
    match step {
        AuthorityStep::Accept => Ok(()),
        AuthorityStep::Show | AuthorityStep::Reject | AuthorityStep::Close | AuthorityStep::Install => {
            LocalPeer { authorities: vec![next.clone()], ..member.clone() }
                .check(certificate, now)
                .map_err(|reason| format!("the certificate for its member of etcd is not used: {reason}"))
        }
        // It missed the step before, for example because it was given up, and came back.
        AuthorityStep::Follow if member.authorities == std::slice::from_ref(next) => Ok(()),
        // It would be cut off from the others, with an etcd that trusts the former one.
        AuthorityStep::Follow => {
            Err("this machine runs a member of etcd, which takes other steps".to_owned())
        }
    }
}

/// Carries out an order of this number as far as files go. It is durable before it is reported: the new authority
/// first, then the certificate of the member, and then its number.
pub(super) fn carry_out_authority_order(
    files: &ClusterFiles,
    generation: i64,
    order: &wire::ReplaceAuthority,
    now: Timestamp,
) -> Result<AuthorityOrderDecision, ClusterFilesError> {
    let (stored, anchor, member) = (files.read_order()?, read_anchor(files)?, LocalPeer::read(files)?);
    let decision =
        decide_authority_order(stored.as_ref(), anchor.as_ref(), member.as_ref(), (generation, order), now);
    match &decision {
        AuthorityOrderDecision::Ignore | AuthorityOrderDecision::Reject(_) => return Ok(decision),
        AuthorityOrderDecision::Done => {
            // One of this authority is carried out to its end: the other files change after the credentials.
            let stored = files.read_next_authority()?.and_then(|next| next.anchor());
            if stored.is_none_or(|stored| stored.certificate != order.ca_certificate) {
                files.remove_next_authority()?;
            }
        }
        AuthorityOrderDecision::Accept(next) => {
            files.write_next_authority(next)?;
            if member.is_some() && !order.peer_certificate.is_empty() {
                etcd_member::replace_peer_certificate(files, &order.peer_certificate)?;
            }
        }
    }
    if let Some(stored) = stored {
        files.write_order(&NodeOrder { generation, ..stored })?;
    }
    Ok(decision)
}

/// The certificate of an authority that replaces a stolen one, and the last step that a node has taken.
type TakenStep = (Vec<u8>, Option<AuthorityStep>);

/// The authority that replaces a stolen one here, and the last step that this node has taken; `None` if none does. Later
/// steps show in the authority that the node trusts. `closed`: whether the curator of this node is stopped for it.
pub(super) fn find_taken_step(
    files: &ClusterFiles,
    closed: bool,
) -> Result<Option<TakenStep>, ClusterFilesError> {
    let next = files.read_next_authority()?.and_then(|next| Some((next.anchor()?, next.step)));
    let Some((next, step)) = next else { return Ok(None) };
    let taken = if files.read_membership()?.is_some() {
        let present = etcd_member::read_peer_certificate(files);
        let shows =
            present.is_some_and(|present| find_issuer(&present, std::slice::from_ref(&next)).is_some());
        last_step(&next.fingerprint(), &read_started_authorities(files)?, (shows, closed))
    } else {
        // Nothing here depends on what the members of etcd do.
        Some(AuthorityStep::Install)
    };
    Ok(Some((next.certificate, taken.map(|taken| taken.min(step)))))
}

/// The last step that a member of etcd has taken: by the authorities that it was started with, and by whether it shows a
/// certificate of the new one, and whether the curator beside it is stopped.
fn last_step(next: &[u8], started: &[Vec<u8>], (shows, closed): (bool, bool)) -> Option<AuthorityStep> {
    let accepts = started.iter().any(|one| one == next);
    match (accepts, shows, started.len()) {
        (false, ..) => None,
        (true, false, _) => Some(AuthorityStep::Accept),
        (true, true, 1) if closed => Some(AuthorityStep::Close),
        (true, true, 1) => Some(AuthorityStep::Reject),
        (true, true, _) => Some(AuthorityStep::Show),
    }
}

/// Whether the curator of this node has to be stopped: from this step on until the node trusts the new authority alone.
#[must_use]
pub(super) fn must_be_closed(next: Option<&NextAuthority>) -> bool {
    next.is_some_and(|next| next.step.stops_curators())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use curator_client::testing::{at, authority, authority_of, public, serial, statement, validity};
    use prost::Message as _;
    use uuid::Uuid;

    use super::*;
    use crate::cluster::files::Credentials;
    use crate::cluster::files::tests::{files, next_authority};

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

    fn member() -> LocalPeer {
        LocalPeer {
            authorities: vec![authority(1).anchor().clone()],
            key: public(7),
            address: "10.0.0.1".parse().unwrap(),
        }
    }

    /// A certificate by that authority for the etcd member of this node.
    fn peer_certificate(key: u8) -> Vec<u8> {
        let address = "10.0.0.1".parse().unwrap();
        let issued =
            authority_of(1, key).issue_etcd_peer_certificate(&public(7), address, serial(3), validity());
        issued.unwrap().certificate
    }

    fn order(step: AuthorityStep) -> wire::ReplaceAuthority {
        let installs = step == AuthorityStep::Install;
        wire::ReplaceAuthority {
            step: step.to_wire().into(),
            ca_certificate: authority_of(1, 5).anchor().certificate.clone(),
            peer_certificate: peer_certificate(5),
            private_key: if installs { authority_of(1, 5).pkcs8().to_vec() } else { Vec::new() },
            owner_keys: if installs { vec![vec![7; 32]] } else { Vec::new() },
            epoch: 2,
            ..wire::ReplaceAuthority::default()
        }
    }

    #[test]
    fn order_is_accepted_once_by_the_node_that_it_is_about() {
        fn decide(
            stored: Option<&NodeOrder>,
            anchor: Option<&TrustAnchor>,
            member: Option<&LocalPeer>,
            generation: i64,
            order: &wire::ReplaceAuthority,
        ) -> AuthorityOrderDecision {
            decide_authority_order(stored, anchor, member, (generation, order), at(1))
        }

        let (node, leaving) = (stored(3, founding()), stored(3, OrderKind::Leave {}));
        let (anchor, next) = (authority(1).anchor().clone(), authority_of(1, 5).anchor().clone());
        let own = member();
        for step in [
            AuthorityStep::Accept,
            AuthorityStep::Show,
            AuthorityStep::Reject,
            AuthorityStep::Close,
            AuthorityStep::Install,
        ] {
            let sent = order(step);
            let decided = decide(Some(&node), Some(&anchor), Some(&own), 4, &sent);
            let AuthorityOrderDecision::Accept(stored) = decided else { panic!("{step}: {decided:?}") };
            assert_eq!((stored.step, stored.epoch, stored.anchor()), (step, 2, Some(next.clone())));
            assert_eq!(stored.private_key.is_some(), step == AuthorityStep::Install, "{step}");
            let again = decide(Some(&node), Some(&next), Some(&own), 4, &sent);
            assert_eq!(again, AuthorityOrderDecision::Done, "{step}");
            assert_eq!(
                decide(Some(&node), Some(&anchor), Some(&own), 3, &sent),
                AuthorityOrderDecision::Ignore
            );
        }
        let follow = order(AuthorityStep::Follow);
        let rejects = LocalPeer { authorities: vec![next.clone()], ..own.clone() };
        for member in [None, Some(&rejects)] {
            let decided = decide(Some(&node), Some(&anchor), member, 4, &follow);
            assert!(matches!(decided, AuthorityOrderDecision::Accept(_)), "{member:?}: {decided:?}");
        }
        let installs = order(AuthorityStep::Install);
        let decided = decide(Some(&node), Some(&anchor), None, 4, &installs);
        let AuthorityOrderDecision::Accept(accepted) = decided else { panic!("{decided:?}") };
        assert_eq!((accepted.private_key, accepted.owner_keys), (None, Vec::new()), "it has no etcd");

        let show = order(AuthorityStep::Show);
        let by_thief = wire::ReplaceAuthority { peer_certificate: peer_certificate(1), ..show.clone() };
        let elsewhere = wire::ReplaceAuthority {
            ca_certificate: authority(2).anchor().certificate.clone(),
            ..show.clone()
        };
        let keyless = wire::ReplaceAuthority {
            private_key: authority(1).pkcs8().to_vec(),
            ..order(AuthorityStep::Install)
        };
        let ownerless = wire::ReplaceAuthority { owner_keys: Vec::new(), ..order(AuthorityStep::Install) };
        let later = wire::ReplaceAuthority { step: 99, ..show.clone() };
        let signed = statement(2, 9).sign(&authority(1)).unwrap().to_wire().encode_to_vec();
        let stated = wire::ReplaceAuthority { statement: signed, ..show.clone() };
        for (stored, anchor, member, sent, reason) in [
            (None, Some(&anchor), Some(&own), &show, "has no order"),
            (Some(&leaving), Some(&anchor), Some(&own), &show, "leaves its cluster"),
            (Some(&node), None, Some(&own), &show, "is no node"),
            (Some(&node), Some(&anchor), Some(&own), &by_thief, "did not sign it"),
            (Some(&node), Some(&anchor), Some(&own), &elsewhere, "it is that of cluster"),
            (Some(&node), Some(&anchor), Some(&own), &keyless, "not followed: "),
            (Some(&node), Some(&anchor), Some(&own), &ownerless, "names no owner"),
            (Some(&node), Some(&anchor), Some(&own), &later, "not known to this release"),
            (Some(&node), Some(&anchor), Some(&own), &stated, "not trusted"),
            (Some(&node), Some(&anchor), Some(&own), &follow, "runs a member of etcd"),
        ] {
            let decided = decide(stored, anchor, member, 4, sent);
            let AuthorityOrderDecision::Reject(why) = decided else { panic!("{reason}: {decided:?}") };
            assert!(why.contains(reason) && !why.contains(". "), "{reason}: {why}");
        }
    }

    #[test]
    fn order_of_this_authority_stays_until_it_is_carried_out_to_its_end() {
        let (_directory, files) = files();
        let ca_certificate = hex::encode(&authority_of(1, 5).anchor().certificate);
        files.write_credentials(&Credentials { certificate: String::new(), ca_certificate }).unwrap();
        for (generation, key, stays) in [(4, 5, true), (5, 6, false)] {
            files.write_order(&stored(3, founding())).unwrap();
            let present = NextAuthority { epoch: 2, ..next_authority(AuthorityStep::Follow, key) };
            files.write_next_authority(&present).unwrap();
            let decided =
                carry_out_authority_order(&files, generation, &order(AuthorityStep::Follow), at(1)).unwrap();
            assert_eq!(decided, AuthorityOrderDecision::Done);
            assert_eq!(files.read_next_authority().unwrap().is_some(), stays, "{key}");
            assert_eq!(files.read_order().unwrap().unwrap().generation, generation);
        }
    }

    #[test]
    fn step_that_is_taken_follows_from_what_etcd_was_started_with_and_shows() {
        let new = vec![5; 32];
        let both = [vec![1; 32], new.clone()];
        for (started, shows, expected) in [
            (&both[..1], false, None),
            (&both[..1], true, None),
            (&both[..], false, Some(AuthorityStep::Accept)),
            (&both[..], true, Some(AuthorityStep::Show)),
            (&both[1..], true, Some(AuthorityStep::Reject)),
            (&both[1..], false, Some(AuthorityStep::Accept)),
            (&both[..0], true, None),
        ] {
            assert_eq!(last_step(&new, started, (shows, false)), expected, "{started:?} {shows}");
            // A curator that is stopped says nothing of the steps before.
            let closed =
                if expected == Some(AuthorityStep::Reject) { Some(AuthorityStep::Close) } else { expected };
            assert_eq!(last_step(&new, started, (shows, true)), closed, "{started:?} {shows}");
        }
    }
}
