//! Decide whether the control plane runs, and whether existing etcd data is reused (pure).
//!
//! The decision follows from founding, or else from the node's roles and its connection to the leader. A change in the
//! details of a role restarts nothing as long as the membership stays the same and etcd has data of it.
//! `control_plane.rs` executes the decision.

use curator_client::node::{ConsensusMember, NodeRoles};
use supervisor::combine::CombinedInputs;

use crate::cluster::etcd_data::EtcdDataState;
use crate::cluster::files::EtcdMembership;
use crate::cluster::node_facts::{ClusterFounding, CuratorConnection, NodeFacts};

/// What the control plane should run as.
#[derive(Clone, Debug)]
pub enum ControlPlaneStartup {
    /// Neither etcd nor a curator.
    Nothing,
    /// The first member of a cluster that is being founded.
    Founding(ClusterFounding),
    /// A member of the cluster's etcd.
    Member(ConsensusMember, CuratorConnection),
}

/// Inputs of the decision.
#[derive(Clone, Debug, Default)]
pub struct ControlPlaneInputs {
    /// The cluster that this node is founding.
    pub founding: Option<ClusterFounding>,
    /// Roles of the node; `None` while they are unknown.
    pub roles: Option<NodeRoles>,
    /// Connection to the leader; `None` until this machine is a node.
    pub connection: Option<CuratorConnection>,
}

/// Decides what should run; `None` while too little is known, which changes nothing.
#[must_use]
pub fn decide_startup(known: &ControlPlaneInputs) -> Option<ControlPlaneStartup> {
    if let Some(to_found) = &known.founding {
        return Some(ControlPlaneStartup::Founding(to_found.clone()));
    }
    let (roles, connection) = (known.roles.as_ref()?, known.connection.as_ref()?);
    Some(match &roles.consensus_member {
        None => ControlPlaneStartup::Nothing,
        Some(role) => ControlPlaneStartup::Member(role.clone(), connection.clone()),
    })
}

/// Whether what runs is what should run. Only the member ID counts.
///
/// `running` is the ID of the member that runs; `None` if none does.
#[must_use]
pub fn matches_running(running: Option<u64>, startup: &ControlPlaneStartup) -> bool {
    match startup {
        ControlPlaneStartup::Nothing => running.is_none(),
        // While founding is not complete, the roles do not count yet.
        ControlPlaneStartup::Founding(_) => running.is_some(),
        ControlPlaneStartup::Member(role, _) => running == Some(role.member_id),
    }
}

/// What happens with the data of the last membership before another one starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdDataAction {
    /// It is the same membership: continue with its data.
    Reuse,
    /// The membership has ended: remove its data.
    Remove,
}

/// Decides about the data of the last membership. `begun` is the state of etcd's data.
///
/// What etcd started as counts, and not what it was launched for: if a member was removed and added again before etcd
/// started, etcd starts as the one that it then finds under its address. If etcd has no data, its arguments may be
/// outdated: etcd does not join a cluster with a list of members that differs from the current one.
#[must_use]
pub fn decide_etcd_data(
    last: &EtcdMembership,
    begun: EtcdDataState,
    startup: &ControlPlaneStartup,
) -> EtcdDataAction {
    let member = match begun {
        EtcdDataState::Member(member) => Some(member),
        EtcdDataState::Unknown => last.member,
        EtcdDataState::Empty => None,
    };
    match startup {
        ControlPlaneStartup::Founding(to_found)
            if last.new_cluster && last.epoch == to_found.founding.epoch() =>
        {
            EtcdDataAction::Reuse
        }
        ControlPlaneStartup::Member(role, _) if member == Some(role.member_id) => EtcdDataAction::Reuse,
        ControlPlaneStartup::Nothing | ControlPlaneStartup::Founding(_) | ControlPlaneStartup::Member(..) => {
            EtcdDataAction::Remove
        }
    }
}

/// Whether a start in progress has to be repeated because `next` should run: for another membership, or for the same
/// one if etcd has no data yet and the list of peers has changed.
#[must_use]
pub fn must_restart(
    beginning: &ControlPlaneStartup,
    begun: EtcdDataState,
    next: &ControlPlaneStartup,
) -> bool {
    match (beginning, next) {
        // Founding ends by itself.
        (ControlPlaneStartup::Founding(_), _) => false,
        (ControlPlaneStartup::Nothing, _) => !matches_running(None, next),
        (ControlPlaneStartup::Member(role, _), ControlPlaneStartup::Member(other, _))
            if role.member_id == other.member_id =>
        {
            begun == EtcdDataState::Empty && role.peers != other.peers
        }
        (ControlPlaneStartup::Member(role, _), _) => !matches_running(Some(role.member_id), next),
    }
}

/// Combines the inputs of the decision.
#[must_use]
pub fn startup_inputs(facts: &NodeFacts) -> CombinedInputs<ControlPlaneInputs> {
    CombinedInputs::new(ControlPlaneInputs::default())
        .with(&facts.founding, |known: &mut ControlPlaneInputs, to_found| known.founding = to_found)
        .with(&facts.roles, |known: &mut ControlPlaneInputs, roles| known.roles = Some(roles))
        .with(&facts.connection, |known: &mut ControlPlaneInputs, connection| {
            known.connection = Some(connection);
        })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use curator_client::clock::Clock;
    use curator_client::tls::certified_key;

    use super::*;

    fn role(member: u64) -> ConsensusMember {
        ConsensusMember { member_id: member, peers: std::collections::BTreeMap::new() }
    }

    fn last(member: Option<u64>, new_cluster: bool) -> EtcdMembership {
        EtcdMembership {
            member,
            data: "x".to_owned(),
            address: Ipv4Addr::LOCALHOST.into(),
            initial_cluster: String::new(),
            new_cluster,
            epoch: 0,
        }
    }

    fn connection() -> CuratorConnection {
        use crate::cluster::node_facts::CurrentCertificate;
        let key = curator_client::identity::Identity::generate().unwrap();
        let authority = curator_client::testing::authority(1);
        let shown = CurrentCertificate::new(certified_key(key.certificate_der(), key.pkcs8()).unwrap());
        let clock = Clock::system();
        CuratorConnection {
            id: crate::cluster::node_facts::node_id_of_key(&key),
            anchor: authority.anchor().clone(),
            curators: crate::cluster::node_facts::curator_channel(
                authority.anchor(),
                &shown,
                &crate::cluster::files::ClusterFiles::in_state_directory(std::path::Path::new(
                    "/nonexistent",
                )),
                &clock,
            )
            .unwrap(),
            certificate: shown,
        }
    }

    #[test]
    fn nothing_is_decided_before_roles_and_the_connection_are_known() {
        let roles = |member: Option<u64>| {
            Some(NodeRoles { consensus_member: member.map(role), ..NodeRoles::default() })
        };
        let known = |roles, connection| ControlPlaneInputs { founding: None, roles, connection };
        assert!(decide_startup(&known(None, None)).is_none());
        assert!(decide_startup(&known(roles(Some(1)), None)).is_none());
        assert!(decide_startup(&known(None, Some(connection()))).is_none());
        assert!(matches!(
            decide_startup(&known(roles(None), Some(connection()))),
            Some(ControlPlaneStartup::Nothing)
        ));
        let member = decide_startup(&known(roles(Some(7)), Some(connection())));
        assert!(matches!(member, Some(ControlPlaneStartup::Member(role, _)) if role.member_id == 7));
    }

    #[test]
    fn only_another_membership_starts_the_control_plane_again() {
        let member = |number| ControlPlaneStartup::Member(role(number), connection());
        for (running, startup, as_it_should) in [
            (None, ControlPlaneStartup::Nothing, true),
            (Some(7), ControlPlaneStartup::Nothing, false),
            (None, member(7), false),
            (Some(7), member(7), true),
            (Some(7), member(8), false),
        ] {
            assert_eq!(matches_running(running, &startup), as_it_should, "{running:?} {startup:?}");
        }
        let mut with_peers = role(7);
        with_peers.peers.insert(curator_client::testing::node_id(2), "https://10.0.0.2:7834".to_owned());
        assert!(
            matches_running(Some(7), &ControlPlaneStartup::Member(with_peers, connection())),
            "that another one came is nothing"
        );
    }

    #[test]
    fn data_of_another_membership_is_never_used() {
        let member = |number| ControlPlaneStartup::Member(role(number), connection());
        for (last, begun, startup, expected) in [
            (last(Some(7), true), EtcdDataState::Member(7), member(7), EtcdDataAction::Reuse),
            (last(Some(7), false), EtcdDataState::Member(7), member(7), EtcdDataAction::Reuse),
            (last(Some(7), false), EtcdDataState::Unknown, member(7), EtcdDataAction::Reuse),
            (last(Some(7), false), EtcdDataState::Member(7), member(8), EtcdDataAction::Remove),
            (last(Some(7), false), EtcdDataState::Unknown, member(8), EtcdDataAction::Remove),
            (last(None, true), EtcdDataState::Unknown, member(8), EtcdDataAction::Remove),
            (
                last(Some(7), true),
                EtcdDataState::Member(7),
                ControlPlaneStartup::Nothing,
                EtcdDataAction::Remove,
            ),
            // Launched for a membership that has ended, and started as the next one.
            (last(Some(7), false), EtcdDataState::Member(8), member(8), EtcdDataAction::Reuse),
            (last(Some(7), false), EtcdDataState::Member(8), member(7), EtcdDataAction::Remove),
            // There is no data to lose, and the list of members may be outdated.
            (last(Some(7), false), EtcdDataState::Empty, member(7), EtcdDataAction::Remove),
        ] {
            assert_eq!(decide_etcd_data(&last, begun, &startup), expected, "{last:?} {begun:?} {startup:?}");
        }
    }

    #[test]
    fn start_is_repeated_with_other_peers_until_etcd_has_data() {
        let member = |number, peer: u8| {
            let peers = [(curator_client::testing::node_id(peer), "https://10.0.0.2:7834".to_owned())];
            ControlPlaneStartup::Member(
                ConsensusMember { member_id: number, peers: peers.into() },
                connection(),
            )
        };
        for (beginning, begun, next, expected) in [
            (member(7, 2), EtcdDataState::Empty, member(7, 2), false),
            (member(7, 2), EtcdDataState::Empty, member(7, 3), true),
            (member(7, 2), EtcdDataState::Member(7), member(7, 3), false),
            (member(7, 2), EtcdDataState::Unknown, member(7, 3), false),
            (member(7, 2), EtcdDataState::Member(7), member(8, 2), true),
            (member(7, 2), EtcdDataState::Member(7), ControlPlaneStartup::Nothing, true),
            (ControlPlaneStartup::Nothing, EtcdDataState::Empty, member(7, 2), true),
            (ControlPlaneStartup::Nothing, EtcdDataState::Empty, ControlPlaneStartup::Nothing, false),
        ] {
            assert_eq!(must_restart(&beginning, begun, &next), expected, "{beginning:?} {begun:?} {next:?}");
        }
    }
}
