//! The node lifecycle: register, approve, commit, decommission, delete.
//!
//! ```text
//!             register          approve            commit          decommission
//! (no record) ────────▶  new  ────────▶ standby ────────▶   up   ────────────▶ decommissioned
//!                         │                │                 │ bypass                 │
//!                         └──── delete ────┴────── delete ───┴──────── delete ────────┴──▶ (no record)
//! ```
//!
//! The node that bootstraps a cluster begins as up. Every step may be repeated: a node that lost the response to a step
//! repeats the request with the same key, and gets the response that was lost. A request that can never succeed is an
//! error, and one that only has to wait gets a normal response, so that no node repeats a hopeless request forever.
//!
//! A decommissioned node stays in the records, because otherwise its key would be as good as new. Its certificates are
//! rejected, and so is registering again. A deleted node is unknown, so its certificates are rejected as well; it may
//! register again like any machine.

use std::net::IpAddr;

use curator_client::node::{Node, NodeState, NodeStatus};
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::ticket_id::TicketId;
use model::ids::MachineId;
use model::label::Labels;
use model::node_role;
use model::time::Timestamp;
use tonic::Code;

use crate::membership::{EtcdMember, Nodes, QuorumError};
use crate::node_labels;
use crate::role_orders::{self, MemberChange};

/// Why a lifecycle step is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LifecycleError {
    /// Another key has the same first half, and so the same id.
    #[error("{0} was not registered: another key has the same id. Make another key")]
    IdCollision(NodeId),
    /// The record of the node names another machine; a node never moves.
    #[error(
        "{node} was not registered: it is on machine {recorded} and says that it is on {offered}. Its key was copied: remove its state directory there"
    )]
    OtherMachine {
        /// The node that registers.
        node: NodeId,
        /// The machine in the node's record.
        recorded: MachineId,
        /// The machine in the request.
        offered: MachineId,
    },
    /// The labels of the request are invalid.
    #[error("{node} was not registered: {fault}")]
    InvalidLabels {
        /// The node that registers.
        node: NodeId,
        /// What is wrong with the labels.
        fault: String,
    },
    /// The node is decommissioned, which is final.
    #[error(
        "{0} is decommissioned, and does not come back under this key. Let its machine register with a new one"
    )]
    Decommissioned(NodeId),
    /// The cluster has no record of the node.
    #[error("{0} is unknown to this cluster: it has never registered, or was deleted. Register it first")]
    Unknown(NodeId),
    /// The call is for nodes that are up.
    #[error("{node} is {}, and this is for nodes that are up", state.as_str())]
    NotUp {
        /// The node of the call.
        node: NodeId,
        /// The state that it is in.
        state: NodeState,
    },
    /// The node's certificates are revoked, so it gets no more of them.
    #[error("the credentials of {0} are revoked. Let its machine register with a new key")]
    Revoked(NodeId),
    /// The node runs no etcd member.
    #[error("{0} is no consensus member, and gets no certificate for a member of etcd")]
    NotConsensusMember(NodeId),
    /// The node has not reported an address for its etcd certificate.
    #[error("{0} has not reported an address yet, and the certificate of its etcd member has to contain one")]
    NoAddress(NodeId),
    /// The node never was up, so it cannot be decommissioned.
    #[error("{node} was not decommissioned: it is {}, so it never was part of the cluster. Delete it instead", state.as_str())]
    NeverUp {
        /// The node of the order.
        node: NodeId,
        /// The state that it is in.
        state: NodeState,
    },
    /// The node still has roles, and cannot be decommissioned.
    #[error("{node} was not decommissioned: it has roles ({roles}). Take them first")]
    HasRoles {
        /// The node of the order.
        node: NodeId,
        /// Names of the roles it has.
        roles: String,
    },
    /// The node still has roles, and cannot be deleted without a bypass.
    #[error(
        "{node} was not deleted: it has roles ({roles}). Take them first, or delete it with bypass_has_roles"
    )]
    DeleteHasRoles {
        /// The node of the order.
        node: NodeId,
        /// Names of the roles it has.
        roles: String,
    },
    /// The node is up, and cannot be deleted without a bypass.
    #[error(
        "{0} was not deleted: it is up. Decommission it first, or delete it with bypass_not_decommissioned"
    )]
    DeleteWhileUp(NodeId),
    /// Without the node's etcd member, too few would remain.
    #[error("{node} was not deleted: {reason}")]
    Quorum {
        /// The node of the order.
        node: NodeId,
        /// Why its member must not be removed.
        reason: QuorumError,
    },
}

impl LifecycleError {
    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::IdCollision(_) => Code::AlreadyExists,
            Self::InvalidLabels { .. } => Code::InvalidArgument,
            Self::Unknown(_) => Code::NotFound,
            _ => Code::FailedPrecondition,
        }
    }
}

/// The node after a step, and whether its record has to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeUpdate {
    /// The record did not change; there is nothing to write.
    Unchanged(Node),
    /// The record changed; it must be written before the response is sent.
    Changed(Node),
}

impl NodeUpdate {
    /// The node, changed or not.
    #[must_use]
    pub const fn node(&self) -> &Node {
        match self {
            Self::Unchanged(node) | Self::Changed(node) => node,
        }
    }
}

/// The registration of a machine; its ticket has been redeemed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRegistration {
    /// The key that the TLS connection proved.
    pub key: PublicKey,
    /// The machine, if the request names it.
    pub machine: Option<MachineId>,
    /// The labels of the new node.
    pub labels: Labels,
    /// The ticket that was redeemed.
    pub ticket: TicketId,
}

/// Registers a machine as a node, or returns the state of a node that is registered already.
///
/// In both cases the response is built from the record, so a repeated one lacks nothing. Labels are those of the first
/// registration, because operators may have changed them since.
pub fn register_node(
    known: Option<&Node>,
    registration: &NodeRegistration,
    now: Timestamp,
) -> Result<NodeUpdate, LifecycleError> {
    let id = NodeId::from_key(&registration.key);
    let Some(known) = known else {
        node_labels::validate_labels(&registration.labels)
            .map_err(|fault| LifecycleError::InvalidLabels { node: id, fault })?;
        return Ok(NodeUpdate::Changed(Node {
            machine: registration.machine,
            labels: registration.labels.clone(),
            ticket: Some(registration.ticket),
            ..Node::new(registration.key, NodeState::New, now)
        }));
    };
    check_key(known, &registration.key)?;
    if known.state == NodeState::Decommissioned {
        return Err(LifecycleError::Decommissioned(id));
    }
    match (known.machine, registration.machine) {
        (Some(known), Some(offered)) if known != offered => {
            Err(LifecycleError::OtherMachine { node: id, recorded: known, offered })
        }
        // Only before approval: a node must not change what was approved.
        (None, Some(machine)) if known.state == NodeState::New => {
            Ok(NodeUpdate::Changed(Node { machine: Some(machine), ..known.clone() }))
        }
        _ => Ok(NodeUpdate::Unchanged(known.clone())),
    }
}

/// Approves a node; a node that was approved before does not change.
pub fn approve_node(
    known: Option<&Node>,
    key: &PublicKey,
    now: Timestamp,
) -> Result<NodeUpdate, LifecycleError> {
    let known = find_by_key(known, key)?;
    match known.state {
        NodeState::New => Ok(with_state(known, NodeState::Standby, now)),
        NodeState::Standby | NodeState::Up => Ok(NodeUpdate::Unchanged(known.clone())),
        NodeState::Decommissioned => Err(LifecycleError::Decommissioned(known.id)),
    }
}

/// Makes an approved node part of the cluster; a node that is up already does not change.
///
/// `revoked`: whether the node's credentials are revoked. `None` if the node is not approved yet; it repeats the call
/// later.
pub fn commit_node(
    known: Option<&Node>,
    key: &PublicKey,
    revoked: bool,
    now: Timestamp,
) -> Result<Option<NodeUpdate>, LifecycleError> {
    let known = find_by_key(known, key)?;
    if revoked {
        return Err(LifecycleError::Revoked(known.id));
    }
    match known.state {
        NodeState::New => Ok(None),
        NodeState::Standby => Ok(Some(with_state(known, NodeState::Up, now))),
        NodeState::Up => Ok(Some(NodeUpdate::Unchanged(known.clone()))),
        NodeState::Decommissioned => Err(LifecycleError::Decommissioned(known.id)),
    }
}

/// Checks that a node may join again, or get a new certificate.
pub fn check_join<'a>(
    known: Option<&'a Node>,
    key: &PublicKey,
    revoked: bool,
) -> Result<&'a Node, LifecycleError> {
    let known = find_by_key(known, key)?;
    match known.state {
        NodeState::Decommissioned => Err(LifecycleError::Decommissioned(known.id)),
        _ if revoked => Err(LifecycleError::Revoked(known.id)),
        NodeState::Up => Ok(known),
        state => Err(LifecycleError::NotUp { node: known.id, state }),
    }
}

/// The address for the certificate that a node's etcd member shows to the others.
pub fn etcd_peer_address(
    known: Option<&Node>,
    key: &PublicKey,
    revoked: bool,
) -> Result<IpAddr, LifecycleError> {
    let known = check_join(known, key, revoked)?;
    if known.roles.consensus_member.is_none() {
        return Err(LifecycleError::NotConsensusMember(known.id));
    }
    known.status.as_ref().map(|status| status.address).ok_or(LifecycleError::NoAddress(known.id))
}

/// Applies a status report. A report that differs in nothing but its time changes nothing: the status is durable
/// already, and watchers would get an event without news.
pub fn apply_status_report(
    known: Option<&Node>,
    id: NodeId,
    status: &NodeStatus,
) -> Result<NodeUpdate, LifecycleError> {
    let known = known.ok_or(LifecycleError::Unknown(id))?;
    if known.state != NodeState::Up {
        return Err(LifecycleError::NotUp { node: id, state: known.state });
    }
    let same = known
        .status
        .as_ref()
        .is_some_and(|before| *before == NodeStatus { reported_at: before.reported_at, ..status.clone() });
    if same {
        return Ok(NodeUpdate::Unchanged(known.clone()));
    }
    Ok(NodeUpdate::Changed(Node { status: Some(status.clone()), ..known.clone() }))
}

/// Checks that the certificate of a node for this key is still accepted, whatever the certificate contains.
///
/// This is checked on every connection and for every call, because a certificate may outlive the trust in its holder.
pub fn check_credentials(known: Option<&Node>, id: NodeId, key: &PublicKey) -> Result<(), LifecycleError> {
    let known = known.ok_or(LifecycleError::Unknown(id))?;
    check_key(known, key)?;
    match known.state {
        NodeState::Up => Ok(()),
        NodeState::Decommissioned => Err(LifecycleError::Decommissioned(id)),
        state => Err(LifecycleError::NotUp { node: id, state }),
    }
}

/// Takes a node out of the cluster permanently; a decommissioned node does not change.
pub fn decommission_node(
    known: Option<&Node>,
    id: NodeId,
    now: Timestamp,
) -> Result<NodeUpdate, LifecycleError> {
    let known = known.ok_or(LifecycleError::Unknown(id))?;
    match known.state {
        NodeState::Decommissioned => Ok(NodeUpdate::Unchanged(known.clone())),
        NodeState::New | NodeState::Standby => Err(LifecycleError::NeverUp { node: id, state: known.state }),
        NodeState::Up if !known.roles.is_empty() => {
            Err(LifecycleError::HasRoles { node: id, roles: node_role::join_names(known.roles.names()) })
        }
        NodeState::Up => Ok(with_state(known, NodeState::Decommissioned, now)),
    }
}

/// The checks that a deletion skips.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DeleteBypass {
    /// Delete the node although it has roles.
    pub has_roles: bool,
    /// Delete the node although it is up.
    pub not_decommissioned: bool,
}

/// Decides whether a node may be deleted; returns the membership change that etcd must make first, if any.
///
/// No bypass skips the quorum check: a member whose record is gone would still vote.
pub fn plan_node_deletion(
    known: Option<&Node>,
    id: NodeId,
    bypass: DeleteBypass,
    members: &[EtcdMember],
    nodes: &Nodes,
) -> Result<Option<MemberChange>, LifecycleError> {
    let known = known.ok_or(LifecycleError::Unknown(id))?;
    if !known.roles.is_empty() && !bypass.has_roles {
        return Err(LifecycleError::DeleteHasRoles {
            node: id,
            roles: node_role::join_names(known.roles.names()),
        });
    }
    if known.state == NodeState::Up && !bypass.not_decommissioned {
        return Err(LifecycleError::DeleteWhileUp(id));
    }
    role_orders::plan_member_removal(&id, members, nodes)
        .map_err(|reason| LifecycleError::Quorum { node: id, reason })
}

fn find_by_key<'a>(known: Option<&'a Node>, key: &PublicKey) -> Result<&'a Node, LifecycleError> {
    let known = known.ok_or_else(|| LifecycleError::Unknown(NodeId::from_key(key)))?;
    check_key(known, key)?;
    Ok(known)
}

/// The id has half of the key; the whole key must be the same.
fn check_key(known: &Node, key: &PublicKey) -> Result<(), LifecycleError> {
    if known.key == *key { Ok(()) } else { Err(LifecycleError::IdCollision(known.id)) }
}

fn with_state(node: &Node, state: NodeState, now: Timestamp) -> NodeUpdate {
    NodeUpdate::Changed(Node { state, state_since: now, ..node.clone() })
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{at, key, member, node_id, up};

    use super::*;
    use crate::membership::tests::{dead, nodes, voter};

    #[test]
    fn status_report_is_accepted_while_up_and_only_when_changed() {
        let before = curator_client::testing::up(3);
        let status = before.status.clone().unwrap();
        let later = NodeStatus { reported_at: at(60), ..status.clone() };
        assert_eq!(
            apply_status_report(Some(&before), before.id, &later),
            Ok(NodeUpdate::Unchanged(before.clone()))
        );
        let moved = NodeStatus { address: "10.0.0.9".parse().unwrap(), ..later };
        let changed = apply_status_report(Some(&before), before.id, &moved).unwrap();
        assert_eq!(changed, NodeUpdate::Changed(Node { status: Some(moved.clone()), ..before.clone() }));
        assert_eq!(apply_status_report(None, before.id, &moved), Err(LifecycleError::Unknown(before.id)));
        for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
            let refusal = apply_status_report(Some(&node(state)), before.id, &moved);
            assert_eq!(refusal, Err(LifecycleError::NotUp { node: before.id, state }));
        }
    }

    const STATES: [NodeState; 4] =
        [NodeState::New, NodeState::Standby, NodeState::Up, NodeState::Decommissioned];

    fn node(state: NodeState) -> Node {
        Node::new(key(3), state, at(0))
    }

    fn machine(number: u8) -> MachineId {
        MachineId(uuid::Uuid::from_bytes([number; 16]))
    }

    fn registration() -> NodeRegistration {
        NodeRegistration {
            key: key(3),
            machine: Some(machine(1)),
            labels: Labels::from([("row".to_owned(), "7".to_owned())]),
            ticket: "0011223344556677".parse().unwrap(),
        }
    }

    /// A key with the same first half as the node's.
    fn colliding_key() -> PublicKey {
        let mut twin = key(3);
        twin.0[20] ^= 1;
        twin
    }

    #[test]
    fn every_lifecycle_step_is_idempotent() {
        let now = at(1);
        let NodeUpdate::Changed(new) = register_node(None, &registration(), now).unwrap() else {
            panic!("nothing to write")
        };
        assert_eq!((new.id, new.state, new.registered_at), (node_id(3), NodeState::New, now));
        assert_eq!((new.machine, new.labels.len(), new.ticket.is_some()), (Some(machine(1)), 1, true));
        assert!(new.roles.is_empty());
        let again = register_node(Some(&new), &registration(), at(9)).unwrap();
        assert_eq!(again, NodeUpdate::Unchanged(new.clone()));
        assert_eq!(commit_node(Some(&new), &key(3), false, now).unwrap(), None);

        let NodeUpdate::Changed(standby) = approve_node(Some(&new), &key(3), at(2)).unwrap() else {
            panic!("not approved")
        };
        assert_eq!((standby.state, standby.state_since), (NodeState::Standby, at(2)));
        assert_eq!(
            approve_node(Some(&standby), &key(3), at(9)).unwrap(),
            NodeUpdate::Unchanged(standby.clone())
        );
        assert_eq!(register_node(Some(&standby), &registration(), at(9)).unwrap().node(), &standby);

        let Some(NodeUpdate::Changed(up)) = commit_node(Some(&standby), &key(3), false, at(3)).unwrap()
        else {
            panic!("not taken in")
        };
        assert_eq!((up.state, up.state_since), (NodeState::Up, at(3)));
        let lost_answer = commit_node(Some(&up), &key(3), false, at(9)).unwrap();
        assert_eq!(lost_answer, Some(NodeUpdate::Unchanged(up.clone())));
        assert_eq!(register_node(Some(&up), &registration(), at(9)).unwrap().node(), &up);
        assert_eq!(approve_node(Some(&up), &key(3), at(9)).unwrap(), NodeUpdate::Unchanged(up.clone()));
        assert_eq!(check_join(Some(&up), &key(3), false).unwrap(), &up);

        let NodeUpdate::Changed(gone) = decommission_node(Some(&up), up.id, at(4)).unwrap() else {
            panic!("still there")
        };
        assert_eq!((gone.state, gone.state_since), (NodeState::Decommissioned, at(4)));
        assert_eq!(
            decommission_node(Some(&gone), gone.id, at(9)).unwrap(),
            NodeUpdate::Unchanged(gone.clone())
        );
        assert_eq!(
            plan_node_deletion(Some(&gone), gone.id, DeleteBypass::default(), &[], &nodes([gone.clone()])),
            Ok(None)
        );
    }

    #[test]
    fn decommissioned_node_is_rejected_everywhere() {
        let gone = node(NodeState::Decommissioned);
        let refusal = LifecycleError::Decommissioned(gone.id);
        assert_eq!(register_node(Some(&gone), &registration(), at(1)), Err(refusal.clone()));
        assert_eq!(approve_node(Some(&gone), &key(3), at(1)), Err(refusal.clone()));
        assert_eq!(commit_node(Some(&gone), &key(3), false, at(1)), Err(refusal.clone()));
        assert_eq!(check_join(Some(&gone), &key(3), false), Err(refusal.clone()));
        assert_eq!(check_credentials(Some(&gone), gone.id, &key(3)), Err(refusal.clone()));
        assert_eq!(refusal.code(), Code::FailedPrecondition);
    }

    #[test]
    fn credentials_are_valid_for_a_node_that_is_up_and_its_own_key() {
        for state in STATES {
            let known = node(state);
            assert_eq!(
                check_credentials(Some(&known), known.id, &key(3)).is_ok(),
                state == NodeState::Up,
                "{state:?}"
            );
            assert_eq!(check_join(Some(&known), &key(3), false).is_ok(), state == NodeState::Up, "{state:?}");
            let other = LifecycleError::IdCollision(known.id);
            assert_eq!(check_credentials(Some(&known), known.id, &colliding_key()), Err(other));
        }
        let unknown = LifecycleError::Unknown(node_id(3));
        assert_eq!(
            check_credentials(None, node_id(3), &key(3)),
            Err(unknown.clone()),
            "a deleted node is unknown"
        );
        assert_eq!(unknown.code(), Code::NotFound);
    }

    #[test]
    fn revoked_node_is_given_no_certificate() {
        let refusal = LifecycleError::Revoked(node_id(3));
        for state in [NodeState::Standby, NodeState::Up] {
            assert_eq!(commit_node(Some(&node(state)), &key(3), true, at(1)), Err(refusal.clone()));
        }
        assert_eq!(check_join(Some(&node(NodeState::Up)), &key(3), true), Err(refusal));
    }

    #[test]
    fn key_with_a_colliding_id_is_rejected() {
        let known = node(NodeState::Up);
        let refusal = LifecycleError::IdCollision(known.id);
        let registration = NodeRegistration { key: colliding_key(), ..registration() };
        assert_eq!(register_node(Some(&known), &registration, at(1)), Err(refusal.clone()));
        assert_eq!(approve_node(Some(&known), &colliding_key(), at(1)), Err(refusal.clone()));
        assert_eq!(commit_node(Some(&known), &colliding_key(), false, at(1)), Err(refusal.clone()));
        assert_eq!(check_join(Some(&known), &colliding_key(), false), Err(refusal.clone()));
        assert_eq!(refusal.code(), Code::AlreadyExists);
    }

    #[test]
    fn unregistered_node_is_not_found() {
        let refusal = LifecycleError::Unknown(node_id(3));
        assert_eq!(approve_node(None, &key(3), at(1)), Err(refusal.clone()));
        assert_eq!(commit_node(None, &key(3), false, at(1)), Err(refusal.clone()));
        assert_eq!(check_join(None, &key(3), false), Err(refusal.clone()));
        assert_eq!(decommission_node(None, node_id(3), at(1)), Err(refusal.clone()));
        assert_eq!(
            plan_node_deletion(None, node_id(3), DeleteBypass::default(), &[], &Nodes::new()),
            Err(refusal)
        );
    }

    #[test]
    fn machine_of_a_node_is_set_once() {
        let silent = NodeRegistration { machine: None, ..registration() };
        let other = NodeRegistration { machine: Some(machine(2)), ..registration() };
        let reported = register_node(None, &registration(), at(1)).unwrap().node().clone();
        assert_eq!(
            register_node(Some(&reported), &silent, at(2)).unwrap(),
            NodeUpdate::Unchanged(reported.clone())
        );
        let refusal = register_node(Some(&reported), &other, at(2)).unwrap_err();
        let expected =
            LifecycleError::OtherMachine { node: reported.id, recorded: machine(1), offered: machine(2) };
        assert_eq!(refusal, expected);
        let unsaid = register_node(None, &silent, at(1)).unwrap().node().clone();
        let later = register_node(Some(&unsaid), &other, at(2)).unwrap();
        assert!(matches!(&later, NodeUpdate::Changed(node) if node.machine == Some(machine(2))));
        let approved = Node { machine: None, ..node(NodeState::Standby) };
        assert_eq!(register_node(Some(&approved), &other, at(2)).unwrap(), NodeUpdate::Unchanged(approved));
    }

    #[test]
    fn registration_with_invalid_labels_is_rejected() {
        let labels = Labels::from([("-row".to_owned(), "7".to_owned())]);
        let refusal = register_node(None, &NodeRegistration { labels, ..registration() }, at(1)).unwrap_err();
        assert_eq!(refusal.code(), Code::InvalidArgument);
        assert!(refusal.to_string().contains("-row"), "{refusal}");
    }

    #[test]
    fn node_with_roles_is_not_decommissioned() {
        let refusal = decommission_node(Some(&member(3)), node_id(3), at(1)).unwrap_err();
        assert_eq!(
            refusal,
            LifecycleError::HasRoles { node: node_id(3), roles: "consensus-member".to_owned() }
        );
        for state in [NodeState::New, NodeState::Standby] {
            let refusal = decommission_node(Some(&node(state)), node_id(3), at(1)).unwrap_err();
            assert_eq!(refusal, LifecycleError::NeverUp { node: node_id(3), state });
        }
    }

    #[test]
    fn deletion_needs_a_bypass_for_each_safeguard() {
        let both = DeleteBypass { has_roles: true, not_decommissioned: true };
        let roles = DeleteBypass { not_decommissioned: false, ..both };
        let not_decommissioned = DeleteBypass { has_roles: false, ..both };
        let mut worker = up(3);
        worker.roles.kubernetes_worker = true;
        let refuses = |known: &Node, bypass, text: &str| {
            let refusal =
                plan_node_deletion(Some(known), known.id, bypass, &[voter(1)], &nodes([known.clone()]))
                    .unwrap_err();
            assert!(refusal.to_string().contains(text), "{refusal}");
            assert_eq!(refusal.code(), Code::FailedPrecondition);
        };
        let allows = |known: &Node, bypass| {
            assert_eq!(
                plan_node_deletion(Some(known), known.id, bypass, &[voter(1)], &nodes([known.clone()])),
                Ok(None)
            );
        };
        refuses(&up(3), DeleteBypass::default(), "bypass_not_decommissioned");
        refuses(&up(3), roles, "bypass_not_decommissioned");
        allows(&up(3), not_decommissioned);
        refuses(&worker, not_decommissioned, "kubernetes-worker");
        refuses(&worker, not_decommissioned, "bypass_has_roles");
        refuses(&worker, roles, "bypass_not_decommissioned");
        allows(&worker, both);
        for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
            allows(&node(state), DeleteBypass::default());
        }
    }

    #[test]
    fn deleting_a_member_removes_it_from_etcd_first_and_keeps_quorum() {
        let both = DeleteBypass { has_roles: true, not_decommissioned: true };
        let known = nodes([member(1), member(2), member(3)]);
        let step = plan_node_deletion(
            known.get(&node_id(3)),
            node_id(3),
            both,
            &[voter(1), voter(2), dead(3)],
            &known,
        );
        assert_eq!(step, Ok(Some(MemberChange::RemoveMember { member: 3 })));
        let refusal = plan_node_deletion(
            known.get(&node_id(2)),
            node_id(2),
            both,
            &[voter(1), voter(2), dead(3)],
            &known,
        );
        assert!(matches!(refusal, Err(LifecycleError::Quorum { .. })), "{refusal:?}");
        // An etcd member whose record lacks the role.
        let known = nodes([member(1), up(3)]);
        let step =
            plan_node_deletion(known.get(&node_id(3)), node_id(3), both, &[voter(1), voter(3)], &known);
        assert_eq!(step, Ok(Some(MemberChange::RemoveMember { member: 3 })));
    }
}
