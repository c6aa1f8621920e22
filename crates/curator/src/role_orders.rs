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
    #[error("no role of {node} was changed: {roles} would be both given and taken")]
    AddedAndRemoved {
        /// The node of the order.
        node: NodeId,
        /// Names of the roles that are in both sets.
        roles: String,
    },
    /// The order adds roles to a node that is not up.
    #[error("no role of {node} was changed: it is {}, and only a node that is up is given roles", state.as_str())]
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
         the other; give or take both"
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
        "no role of {node} was changed: nobody can tell whose member {member:x} of etcd is; it is being removed, ask again"
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
mod tests {
    use curator_client::testing::{at, key, member as member_node, node_id, up};

    use super::*;
    use crate::membership::tests::{dead, learner, nodes, unstarted, voter};

    const C: &str = "consensus-member";
    const K: &str = "kubernetes-controller";
    const W: &str = "kubernetes-worker";

    fn roles(names: &[&str]) -> BTreeSet<NodeRole> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn order(give: &[&str], take: &[&str]) -> RoleOrder {
        RoleOrder { add: roles(give), remove: roles(take) }
    }

    fn declared() -> BTreeSet<DeclaredRole> {
        BTreeSet::from(["web".parse().unwrap()])
    }

    /// A node that has these roles.
    fn with(number: u8, names: &[&str]) -> Node {
        let mut node = if names.contains(&C) { member_node(number) } else { up(number) };
        node.roles.kubernetes_controller = names.contains(&K);
        node.roles.kubernetes_worker = names.contains(&W);
        node.roles.declared = if names.contains(&"web") { declared() } else { BTreeSet::new() };
        node
    }

    /// What etcd lists after the step.
    fn after(step: Option<&MemberChange>, number: u8, mut members: Vec<EtcdMember>) -> Vec<EtcdMember> {
        match step {
            None => {}
            Some(MemberChange::AddLearner { peer_url }) => {
                members.push(EtcdMember { peer_urls: vec![peer_url.clone()], ..unstarted(number) });
            }
            Some(MemberChange::RemoveMember { member }) => members.retain(|one| one.id != *member),
        }
        members
    }

    #[test]
    fn order_is_evaluated_by_the_resulting_roles() {
        let add = Some(MemberChange::AddLearner { peer_url: "https://10.0.0.3:7834".to_owned() });
        let remove = Some(MemberChange::RemoveMember { member: 3 });
        for (has, give, take, step, gets) in [
            (vec![], vec![W], vec![], None, vec![W]),
            (vec![], vec!["web", W], vec![], None, vec![W, "web"]),
            (vec![W], vec![], vec![W], None, vec![]),
            (vec![], vec![C], vec![], add.clone(), vec![C]),
            (vec![], vec![C, K], vec![], add.clone(), vec![C, K]),
            (vec![], vec![K, C, W], vec![], add, vec![C, K, W]),
            (vec![C], vec![K], vec![], None, vec![C, K]),
            (vec![C, K], vec![], vec![K], None, vec![C]),
            (vec![C, K], vec![], vec![C, K], remove.clone(), vec![]),
            (vec![C, K, W], vec!["web"], vec![C, K], remove.clone(), vec![W, "web"]),
            (vec![C], vec![], vec![C], remove, vec![]),
            // An order whose roles are already as it wants them is no error, and needs no step.
            (vec![C], vec![C], vec![], None, vec![C]),
            (vec![], vec![], vec![C, K, W, "web"], None, vec![]),
            (vec![W], vec![], vec![], None, vec![W]),
        ] {
            let node = with(3, &has);
            let known = nodes([member_node(1), member_node(2), node.clone()]);
            let mut members = vec![voter(1), voter(2)];
            members.extend(has.contains(&C).then(|| voter(3)));
            let text = format!("{has:?} give {give:?} take {take:?}");
            let plan =
                plan_role_change(&node, &order(&give, &take), &members, &known, &declared()).expect(&text);
            assert_eq!(plan.member_change, step, "{text}");
            let members = after(plan.member_change.as_ref(), 3, members);
            let written = plan.updated_record(&node, &members, &known).unwrap();
            assert_eq!(written.roles.names(), roles(&gets), "{text}");
            assert!(written.encode().is_ok());
        }
    }

    #[test]
    fn impossible_order_is_rejected_with_a_reason() {
        let three = || vec![voter(1), voter(2), voter(3)];
        for (node, give, take, members, text, code) in [
            (with(3, &[]), vec![W], vec![W], three(), "both given and taken", Code::InvalidArgument),
            (with(3, &[]), vec!["other"], vec![], three(), "not declared", Code::NotFound),
            (with(3, &[]), vec![K], vec![], vec![voter(1)], "the one needs", Code::FailedPrecondition),
            (with(3, &[C, K]), vec![], vec![C], three(), "the one needs", Code::FailedPrecondition),
            (with(3, &[C]), vec![K], vec![C], three(), "the one needs", Code::FailedPrecondition),
            (with(3, &[C]), vec![], vec![C], vec![voter(3)], "the last one", Code::FailedPrecondition),
            (
                with(3, &[C]),
                vec![],
                vec![C],
                vec![voter(1), dead(2), voter(3)],
                "would be left",
                Code::FailedPrecondition,
            ),
            (with(3, &[]), vec![C], vec![], vec![voter(1), learner(2)], "still learning", Code::Unavailable),
            (
                with(3, &[]),
                vec![C],
                vec![],
                vec![voter(1), EtcdMember { name: "stranger".to_owned(), ..voter(9) }],
                "whose member 9",
                Code::Unavailable,
            ),
            (
                Node { status: None, ..with(3, &[]) },
                vec![C],
                vec![],
                vec![voter(1)],
                "not reported its address",
                Code::FailedPrecondition,
            ),
        ] {
            let known = nodes([member_node(1), member_node(2), node.clone()]);
            let refusal =
                plan_role_change(&node, &order(&give, &take), &members, &known, &declared()).unwrap_err();
            assert!(refusal.to_string().contains(text), "{text}: {refusal}");
            assert_eq!(refusal.code(), code, "{refusal}");
        }
    }

    #[test]
    fn roles_are_added_only_to_nodes_that_are_up_and_removed_from_any() {
        for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
            let node = Node::new(key(3), state, at(0));
            let known = nodes([member_node(1), node.clone()]);
            for role in [C, W, "web"] {
                let refusal = plan_role_change(&node, &order(&[role], &[]), &[voter(1)], &known, &declared());
                assert_eq!(refusal, Err(RoleOrderError::NotUp { node: node.id, state }), "{role}");
            }
            assert!(plan_role_change(&node, &order(&[], &[W]), &[voter(1)], &known, &declared()).is_ok());
        }
    }

    #[test]
    fn half_done_order_is_completed_by_repeating_it() {
        // The member was added, and the leader died before it wrote the record.
        let known = nodes([member_node(1), up(3)]);
        let members = [voter(1), unstarted(3)];
        let plan = plan_role_change(&up(3), &order(&[C], &[]), &members, &known, &declared()).unwrap();
        assert_eq!(plan.member_change, None);
        let role = plan.updated_record(&up(3), &members, &known).unwrap().roles.consensus_member.unwrap();
        assert_eq!(role.member_id, 3);
        assert_eq!(role.peers.into_keys().collect::<Vec<_>>(), [node_id(1)]);

        // The member was removed, and the record still has the role.
        let known = nodes([member_node(1), with(3, &[C, K])]);
        let plan =
            plan_role_change(&with(3, &[C, K]), &order(&[], &[C, K]), &[voter(1)], &known, &declared())
                .unwrap();
        assert_eq!(plan.member_change, None);
        assert!(plan.updated_record(&with(3, &[C, K]), &[voter(1)], &known).unwrap().roles.is_empty());
    }

    #[test]
    fn role_is_not_written_before_etcd_changed_its_members() {
        let known = nodes([member_node(1), member_node(2), with(3, &[])]);
        let members = [voter(1), voter(2)];
        let plan = plan_role_change(&up(3), &order(&[C], &[]), &members, &known, &declared()).unwrap();
        assert_eq!(
            plan.updated_record(&up(3), &members, &known),
            Err(RoleOrderError::MembersNotChanged { node: node_id(3) })
        );

        let known = nodes([member_node(1), member_node(2), with(3, &[C])]);
        let members = [voter(1), voter(2), voter(3)];
        let plan =
            plan_role_change(&with(3, &[C]), &order(&[], &[C]), &members, &known, &declared()).unwrap();
        let refusal = plan.updated_record(&with(3, &[C]), &members, &known).unwrap_err();
        assert_eq!(
            (refusal.code(), refusal),
            (Code::Unavailable, RoleOrderError::MembersNotChanged { node: node_id(3) })
        );
    }

    #[test]
    fn record_follows_only_once_membership_is_changed() {
        let node = with(3, &[C]);
        let known = nodes([member_node(1), member_node(2), node.clone()]);
        let members = [voter(1), voter(2), voter(3)];
        let plan = plan_role_change(&node, &order(&[], &[C]), &members, &known, &declared()).unwrap();
        let step = MemberChange::RemoveMember { member: 3 };
        assert_eq!(plan.next_step(false, &node, &members, &known), Ok(NextStep::ChangeMembers(step)));
        let Ok(NextStep::WriteRecord(written)) = plan.next_step(true, &node, &members[..2], &known) else {
            panic!("no record, though etcd has done its part")
        };
        assert!(written.roles.is_empty());
        // An order without a membership change is written at once.
        let plan = plan_role_change(&node, &order(&[W], &[]), &members, &known, &declared()).unwrap();
        assert!(matches!(plan.next_step(false, &node, &members, &known), Ok(NextStep::WriteRecord(_))));
    }

    #[test]
    fn order_may_remove_a_dead_member() {
        let known = nodes([member_node(1), member_node(2), with(3, &[C])]);
        let members = [voter(1), voter(2), dead(3)];
        let plan =
            plan_role_change(&with(3, &[C]), &order(&[], &[C]), &members, &known, &declared()).unwrap();
        assert_eq!(plan.member_change, Some(MemberChange::RemoveMember { member: 3 }));
    }

    #[test]
    fn order_about_other_roles_keeps_membership() {
        // etcd lost the member; the next sync removes the role, not an order that adds another role.
        let node = with(3, &[C, K]);
        let known = nodes([member_node(1), node.clone()]);
        let plan = plan_role_change(&node, &order(&[W], &[]), &[voter(1)], &known, &declared()).unwrap();
        assert_eq!(plan.member_change, None);
        assert_eq!(plan.updated_record(&node, &[voter(1)], &known).unwrap().roles.names(), roles(&[C, K, W]));
    }
}
