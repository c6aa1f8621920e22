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

use curator_client::node::{Node, NodeState};
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::node_status::NodeStatus;
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
    /// The node runs no etcd member and no curator.
    #[error("{0} is no consensus member, and gets no certificate for a member of etcd or a curator")]
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

/// Assigns an address to a node, in place of any other one; `None` leaves the node as it is.
#[must_use]
pub fn assign_address(update: NodeUpdate, address: Option<IpAddr>) -> NodeUpdate {
    let is_assigned = update.node().assigned_address == address;
    match address {
        Some(address) if !is_assigned => {
            NodeUpdate::Changed(Node { assigned_address: Some(address), ..update.node().clone() })
        }
        _ => update,
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

/// Checks that a node may get a certificate for its curator, or for its etcd member: both run on consensus members
/// alone.
pub fn check_curator<'a>(
    known: Option<&'a Node>,
    key: &PublicKey,
    revoked: bool,
) -> Result<&'a Node, LifecycleError> {
    let known = check_join(known, key, revoked)?;
    if known.roles.consensus_member.is_none() {
        return Err(LifecycleError::NotConsensusMember(known.id));
    }
    Ok(known)
}

/// The address for the certificate that a node's etcd member shows to the others.
pub fn etcd_peer_address(
    known: Option<&Node>,
    key: &PublicKey,
    revoked: bool,
) -> Result<IpAddr, LifecycleError> {
    let known = check_curator(known, key, revoked)?;
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
/// This is checked for every call that needs a certificate, because a certificate may outlive the trust in its holder.
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
mod tests;
