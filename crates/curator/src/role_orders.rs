//! Plans orders that add roles to a node or remove them: etcd membership first, then the record.
//!
//! An order names roles to add and roles to remove, and is judged by the roles that the node would have afterwards. So
//! one order may remove Kubernetes controller and consensus member at once, in whichever sequence it names them, or add
//! both.
//!
//! An order is carried out in two steps, because etcd's membership changes first and roles follow: the membership
//! change, if one is needed, and once etcd has made it, the record. A leader that dies in between leaves a difference
//! that `membership.rs` resolves. A repeated order gets the same plan without the step that was already made.
//!
//! Roles are *added* only to nodes that are up: a node that is not approved is not trusted yet, and a decommissioned
//! one is not trusted any more. They are *removed* from any node.

use std::collections::BTreeSet;

use curator_client::node::{Node, NodeRoles, NodeState};
use curator_client::node_id::NodeId;
use model::node_role::{self, DeclaredRole, NodeRole};
use tonic::Code;

use crate::membership::{
    self, EtcdMember, Nodes, QuorumError, check_removal, consensus_role_for, match_members_to_nodes, peer_url,
};

/// An order to add and remove roles of one node.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RoleOrder {
    /// Roles to add to the node.
    pub add: BTreeSet<NodeRole>,
    /// Roles to remove from the node.
    pub remove: BTreeSet<NodeRole>,
}

/// A change of etcd's members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// Add a member that has no vote yet.
    AddLearner {
        /// Peer URL of the new member.
        peer_url: String,
    },
    /// Remove a member from etcd.
    RemoveMember {
        /// etcd's number of the member.
        member: u64,
    },
}

/// How an order is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleChangePlan {
    /// The change that etcd must make first, if any.
    pub member_change: Option<MemberChange>,
    /// The roles that the node has in the end.
    desired: BTreeSet<NodeRole>,
}

/// The next step of carrying out an order.
#[derive(Clone, Debug, PartialEq)]
pub enum NextStep {
    /// Change etcd's members; then list them again and call [`RoleChangePlan::next_step`] again.
    ChangeMembers(MemberChange),
    /// Write this record, which completes the order.
    WriteRecord(Box<Node>),
}

/// Why an order is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoleOrderError {
    /// The order adds and removes the same role.
    #[error("no role of {node} was changed: {roles} would be both added and removed")]
    AddedAndRemoved {
        /// The node of the order.
        node: NodeId,
        /// Names of the roles that are in both sets.
        roles: String,
    },
    /// The order adds roles to a node that is not up.
    #[error("no role of {node} was changed: it is {}, and only a node that is up gets roles", state.as_str())]
    NotUp {
        /// The node of the order.
        node: NodeId,
        /// The state that it is in.
        state: NodeState,
    },
    /// The order adds a role that nobody declared.
    #[error("no role of {node} was changed: {role} is not declared; declare it first")]
    NotDeclared {
        /// The node of the order.
        node: NodeId,
        /// The role that is not declared.
        role: DeclaredRole,
    },
    /// The node would be a Kubernetes controller without etcd.
    #[error(
        "no role of {node} was changed: it would be a kubernetes-controller and no consensus-member, and the one needs \
         the other; add or remove both"
    )]
    ControllerWithoutConsensus {
        /// The node of the order.
        node: NodeId,
    },
    /// The node has not reported its address yet.
    #[error(
        "no role of {node} was changed: it has not reported its address yet, where other members would reach it"
    )]
    NoAddress {
        /// The node of the order.
        node: NodeId,
    },
    /// Another learner exists, and etcd accepts one at a time.
    #[error(
        "no role of {node} was changed: member {learner:x} of etcd is still learning, and one learns at a time; ask again"
    )]
    AnotherLearner {
        /// The node of the order.
        node: NodeId,
        /// etcd's number of the present learner.
        learner: u64,
    },
    /// A member matches no node, so the new member's list of peers would have an unknown one.
    #[error(
        "no role of {node} was changed: member {member:x} of etcd belongs to no known node; it is being \
         removed, try again"
    )]
    StrayMember {
        /// The node of the order.
        node: NodeId,
        /// etcd's number of the stray member.
        member: u64,
    },
    /// Too few voting members would remain.
    #[error("no role of {node} was changed: {reason}")]
    Quorum {
        /// The node of the order.
        node: NodeId,
        /// Why its member must not be removed.
        reason: QuorumError,
    },
    /// etcd's members are not as the order needs them: the step was not made, or was undone by somebody else.
    #[error(
        "the roles of {node} were not written: etcd's members are not as they would have to be; ask again"
    )]
    MembersNotChanged {
        /// The node of the order.
        node: NodeId,
    },
}

impl RoleOrderError {
    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::AddedAndRemoved { .. } => Code::InvalidArgument,
            Self::NotDeclared { .. } => Code::NotFound,
            Self::NotUp { .. }
            | Self::ControllerWithoutConsensus { .. }
            | Self::NoAddress { .. }
            | Self::Quorum { .. } => Code::FailedPrecondition,
            Self::AnotherLearner { .. } | Self::StrayMember { .. } | Self::MembersNotChanged { .. } => {
                Code::Unavailable
            }
        }
    }
}

/// Plans an order, with the members that etcd lists and the nodes as they were read after them.
pub fn plan_role_change(
    node: &Node,
    order: &RoleOrder,
    members: &[EtcdMember],
    nodes: &Nodes,
    declared: &BTreeSet<DeclaredRole>,
) -> Result<RoleChangePlan, RoleOrderError> {
    let id = node.id;
    let both: Vec<&NodeRole> = order.add.intersection(&order.remove).collect();
    if !both.is_empty() {
        return Err(RoleOrderError::AddedAndRemoved { node: id, roles: node_role::join_names(both) });
    }
    if !order.add.is_empty() && node.state != NodeState::Up {
        return Err(RoleOrderError::NotUp { node: id, state: node.state });
    }
    for role in &order.add {
        if let NodeRole::Declared(role) = role
            && !declared.contains(role)
        {
            return Err(RoleOrderError::NotDeclared { node: id, role: role.clone() });
        }
    }
    let wanted: BTreeSet<NodeRole> = node.roles.names().union(&order.add).cloned().collect();
    let wanted: BTreeSet<NodeRole> = wanted.difference(&order.remove).cloned().collect();
    if wanted.contains(&NodeRole::KubernetesController) && !wanted.contains(&NodeRole::ConsensusMember) {
        return Err(RoleOrderError::ControllerWithoutConsensus { node: id });
    }
    let membership = match (wanted.contains(&NodeRole::ConsensusMember), affects_consensus(order)) {
        (_, false) => None,
        (true, true) => plan_member_addition(node, members, nodes)?,
        (false, true) => plan_member_removal(&id, members, nodes)
            .map_err(|reason| RoleOrderError::Quorum { node: id, reason })?,
    };
    Ok(RoleChangePlan { member_change: membership, desired: wanted })
}

/// An order about other roles keeps membership as it is, even where etcd and the record disagree.
fn affects_consensus(order: &RoleOrder) -> bool {
    order.add.contains(&NodeRole::ConsensusMember) || order.remove.contains(&NodeRole::ConsensusMember)
}

fn plan_member_addition(
    node: &Node,
    members: &[EtcdMember],
    nodes: &Nodes,
) -> Result<Option<MemberChange>, RoleOrderError> {
    let owners = match_members_to_nodes(members, nodes);
    if owners.by_node.contains_key(&node.id) {
        return Ok(None);
    }
    if let Some(stray) = owners.stray.first() {
        return Err(RoleOrderError::StrayMember { node: node.id, member: stray.id });
    }
    if let Some(learner) = members.iter().find(|member| member.learner) {
        return Err(RoleOrderError::AnotherLearner { node: node.id, learner: learner.id });
    }
    let status = node.status.as_ref().ok_or(RoleOrderError::NoAddress { node: node.id })?;
    Ok(Some(MemberChange::AddLearner { peer_url: peer_url(status.address) }))
}

/// The step that ends a node's membership; `None` if it is no member. Deleting a node uses it as well.
pub fn plan_member_removal(
    node: &NodeId,
    members: &[EtcdMember],
    nodes: &Nodes,
) -> Result<Option<MemberChange>, QuorumError> {
    let Some(member) =
        membership::match_members_to_nodes(members, nodes).by_node.get(node).map(|member| member.id)
    else {
        return Ok(None);
    };
    check_removal(members, member)?;
    Ok(Some(MemberChange::RemoveMember { member }))
}

impl RoleChangePlan {
    /// The next step: the membership change unless it was `made`, and the record only after that.
    ///
    /// `members` are those that etcd lists now.
    pub fn next_step(
        &self,
        made: bool,
        node: &Node,
        members: &[EtcdMember],
        nodes: &Nodes,
    ) -> Result<NextStep, RoleOrderError> {
        match &self.member_change {
            Some(step) if !made => Ok(NextStep::ChangeMembers(step.clone())),
            _ => self.updated_record(node, members, nodes).map(|node| NextStep::WriteRecord(Box::new(node))),
        }
    }

    /// The record to write, from the members that etcd lists once the membership change is made.
    ///
    /// The list counts, and not that the change returned success: the role contains the number of the membership.
    pub fn updated_record(
        &self,
        node: &Node,
        members: &[EtcdMember],
        nodes: &Nodes,
    ) -> Result<Node, RoleOrderError> {
        let owners = match_members_to_nodes(members, nodes);
        let listed = owners.by_node.get(&node.id);
        let not_made = RoleOrderError::MembersNotChanged { node: node.id };
        let was = node.roles.consensus_member.clone();
        let consensus_member = match (self.desired.contains(&NodeRole::ConsensusMember), listed) {
            (true, Some(member)) => Some(consensus_role_for(&node.id, member, &owners)),
            // The order is about other roles; the next sync corrects membership.
            (true, None) if self.member_change.is_none() && was.is_some() => was,
            (false, Some(_)) if self.member_change.is_none() && was.is_none() => None,
            (false, None) => None,
            (true, None) | (false, Some(_)) => return Err(not_made),
        };
        let declared = self.desired.iter().filter_map(|role| match role {
            NodeRole::Declared(name) => Some(name.clone()),
            _ => None,
        });
        let roles = NodeRoles {
            consensus_member,
            kubernetes_controller: self.desired.contains(&NodeRole::KubernetesController),
            kubernetes_worker: self.desired.contains(&NodeRole::KubernetesWorker),
            declared: declared.collect(),
        };
        Ok(Node { roles, ..node.clone() })
    }
}

#[cfg(test)]
mod tests;
