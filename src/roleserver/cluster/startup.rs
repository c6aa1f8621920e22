//! What of the control plane is to run on this node, and what becomes of what ran.
//!
//! It follows from founding, or else from roles and from having a way to the leader. What exactly a role says may change
//! as often as it likes without anything being started again, as long as it is about the same membership, and etcd has
//! begun with it. No I/O: `control_plane.rs` carries it out.

use crate::curator::node::{ConsensusMember, Roles};
use crate::roleserver::cluster::etcd::Begun;
use crate::roleserver::cluster::facts::{Connection, Facts, ToFound};
use crate::roleserver::cluster::files::Membership;
use crate::supervisor::reduce::Inputs;

/// What is to run, as far as it decides whether something is started again.
#[derive(Clone, Debug)]
pub enum Startup {
    /// Nothing.
    Nothing,
    /// The first member of a cluster that is being founded.
    Founding(ToFound),
    /// A member.
    Member(ConsensusMember, Connection),
}

/// What is known of this node.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// A cluster to be founded.
    pub to_found: Option<ToFound>,
    /// What it is to do.
    pub roles: Option<Roles>,
    /// Its way to the leader.
    pub connection: Option<Connection>,
}

/// Decides what is to run; nothing new is decided while too little is known.
#[must_use]
pub fn decide(known: &Known) -> Option<Startup> {
    if let Some(to_found) = &known.to_found {
        return Some(Startup::Founding(to_found.clone()));
    }
    let (roles, connection) = (known.roles.as_ref()?, known.connection.as_ref()?);
    Some(match &roles.consensus_member {
        None => Startup::Nothing,
        Some(role) => Startup::Member(role.clone(), connection.clone()),
    })
}

/// Whether what runs is what is to run: by its presence and the number of the membership, and by nothing else.
///
/// `running` is the number of the membership that runs; none when nothing does.
#[must_use]
pub fn is_as_it_should(running: Option<u64>, startup: &Startup) -> bool {
    match startup {
        Startup::Nothing => running.is_none(),
        // Whose founding is not over is not told its roles yet.
        Startup::Founding(_) => running.is_some(),
        Startup::Member(role, _) => running == Some(role.member),
    }
}

/// What to do with the membership that was carried out last, before this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inheritance {
    /// It is this one: go on with its data.
    GoOn,
    /// It is over: remove its data.
    Remove,
}

/// Decides about the membership that was carried out last, whose etcd has `begun` like that.
///
/// What etcd has begun as counts, and not what it was started for: a member that was removed and added again before etcd
/// had come to begin is begun as the one that etcd found under its address by then. And where etcd has not begun at all,
/// what it was to begin with may be old: nobody starts in a cluster who was told other members than there are.
#[must_use]
pub fn inherit(last: &Membership, begun: Begun, startup: &Startup) -> Inheritance {
    let member = match begun {
        Begun::As(member) => Some(member),
        Begun::Unknown => last.member,
        Begun::NotYet => None,
    };
    match startup {
        Startup::Founding(to_found) if last.new_cluster && last.epoch == to_found.founding.epoch() => {
            Inheritance::GoOn
        }
        Startup::Member(role, _) if member == Some(role.member) => Inheritance::GoOn,
        Startup::Nothing | Startup::Founding(_) | Startup::Member(..) => Inheritance::Remove,
    }
}

/// Whether what is beginning is to begin anew, because `next` is to run instead: another membership, or the same where
/// etcd has not begun and others are members by now.
#[must_use]
pub fn begins_anew(beginning: &Startup, begun: Begun, next: &Startup) -> bool {
    match (beginning, next) {
        // It is over when it says so itself.
        (Startup::Founding(_), _) => false,
        (Startup::Nothing, _) => !is_as_it_should(None, next),
        (Startup::Member(role, _), Startup::Member(other, _)) if role.member == other.member => {
            begun == Begun::NotYet && role.peers != other.peers
        }
        (Startup::Member(role, _), _) => !is_as_it_should(Some(role.member), next),
    }
}

/// What it follows from, together.
#[must_use]
pub fn inputs(facts: &Facts) -> Inputs<Known> {
    Inputs::new(Known::default())
        .with(&facts.to_found, |known: &mut Known, to_found| known.to_found = to_found)
        .with(&facts.roles, |known: &mut Known, roles| known.roles = Some(roles))
        .with(&facts.connection, |known: &mut Known, connection| known.connection = Some(connection))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::curator::clock::Clock;
    use crate::curator::tls::certified;

    fn role(member: u64) -> ConsensusMember {
        ConsensusMember { member, peers: std::collections::BTreeMap::new() }
    }

    fn last(member: Option<u64>, new_cluster: bool) -> Membership {
        Membership {
            member,
            data: "x".to_owned(),
            address: Ipv4Addr::LOCALHOST.into(),
            initial_cluster: String::new(),
            new_cluster,
            epoch: 0,
        }
    }

    fn connection() -> Connection {
        use crate::roleserver::cluster::facts::Shown;
        let key = crate::curator::identity::Identity::generate().unwrap();
        let authority = crate::curator::pki::tests::authority(1);
        let shown = Shown::new(certified(key.certificate_der(), key.pkcs8()).unwrap());
        let clock = Clock::host();
        Connection {
            id: crate::roleserver::cluster::facts::id_of(&key),
            anchor: authority.anchor().clone(),
            curators: crate::roleserver::cluster::facts::way(
                authority.anchor(),
                &shown,
                &crate::roleserver::cluster::files::Files::of(std::path::Path::new("/nonexistent")),
                &clock,
            )
            .unwrap(),
            shown,
        }
    }

    #[test]
    fn nothing_is_decided_before_roles_and_the_way_are_known() {
        let roles =
            |member: Option<u64>| Some(Roles { consensus_member: member.map(role), ..Roles::default() });
        let known = |roles, connection| Known { to_found: None, roles, connection };
        assert!(decide(&known(None, None)).is_none());
        assert!(decide(&known(roles(Some(1)), None)).is_none());
        assert!(decide(&known(None, Some(connection()))).is_none());
        assert!(matches!(decide(&known(roles(None), Some(connection()))), Some(Startup::Nothing)));
        let member = decide(&known(roles(Some(7)), Some(connection())));
        assert!(matches!(member, Some(Startup::Member(role, _)) if role.member == 7));
    }

    #[test]
    fn only_another_membership_starts_the_control_plane_again() {
        let member = |number| Startup::Member(role(number), connection());
        for (running, startup, as_it_should) in [
            (None, Startup::Nothing, true),
            (Some(7), Startup::Nothing, false),
            (None, member(7), false),
            (Some(7), member(7), true),
            (Some(7), member(8), false),
        ] {
            assert_eq!(is_as_it_should(running, &startup), as_it_should, "{running:?} {startup:?}");
        }
        let mut with_peers = role(7);
        with_peers
            .peers
            .insert(crate::curator::node_id::tests::node_id(2), "https://10.0.0.2:7834".to_owned());
        assert!(
            is_as_it_should(Some(7), &Startup::Member(with_peers, connection())),
            "that another one came is nothing"
        );
    }

    #[test]
    fn data_of_another_membership_is_never_started() {
        let member = |number| Startup::Member(role(number), connection());
        for (last, begun, startup, expected) in [
            (last(Some(7), true), Begun::As(7), member(7), Inheritance::GoOn),
            (last(Some(7), false), Begun::As(7), member(7), Inheritance::GoOn),
            (last(Some(7), false), Begun::Unknown, member(7), Inheritance::GoOn),
            (last(Some(7), false), Begun::As(7), member(8), Inheritance::Remove),
            (last(Some(7), false), Begun::Unknown, member(8), Inheritance::Remove),
            (last(None, true), Begun::Unknown, member(8), Inheritance::Remove),
            (last(Some(7), true), Begun::As(7), Startup::Nothing, Inheritance::Remove),
            // Started for a membership that is over, and begun as the next one.
            (last(Some(7), false), Begun::As(8), member(8), Inheritance::GoOn),
            (last(Some(7), false), Begun::As(8), member(7), Inheritance::Remove),
            // There is nothing to lose, and what it would begin with may be old.
            (last(Some(7), false), Begun::NotYet, member(7), Inheritance::Remove),
        ] {
            assert_eq!(inherit(&last, begun, &startup), expected, "{last:?} {begun:?} {startup:?}");
        }
    }

    #[test]
    fn what_is_beginning_begins_anew_with_other_peers_and_what_has_begun_does_not() {
        let member = |number, peer: u8| {
            let peers = [(crate::curator::node_id::tests::node_id(peer), "https://10.0.0.2:7834".to_owned())];
            Startup::Member(ConsensusMember { member: number, peers: peers.into() }, connection())
        };
        for (beginning, begun, next, expected) in [
            (member(7, 2), Begun::NotYet, member(7, 2), false),
            (member(7, 2), Begun::NotYet, member(7, 3), true),
            (member(7, 2), Begun::As(7), member(7, 3), false),
            (member(7, 2), Begun::Unknown, member(7, 3), false),
            (member(7, 2), Begun::As(7), member(8, 2), true),
            (member(7, 2), Begun::As(7), Startup::Nothing, true),
            (Startup::Nothing, Begun::NotYet, member(7, 2), true),
            (Startup::Nothing, Begun::NotYet, Startup::Nothing, false),
        ] {
            assert_eq!(begins_anew(&beginning, begun, &next), expected, "{beginning:?} {begun:?} {next:?}");
        }
    }
}
