//! What becomes of an order to give roles to a node, or to take them.
//!
//! An order names roles to give and roles to take, and is judged by what the node would have afterwards: so
//! taking Kubernetes controller and consensus member at once is one order, in whichever order they are named,
//! and so is giving both.
//!
//! It is carried out in two steps, because etcd's membership leads and roles follow: first the change of
//! membership, if one is needed, and once etcd has made it, the record. A leader that dies in between leaves
//! what `membership.rs` completes. Whoever asks again gets the same plan without the step that was made
//! already.
//!
//! Roles are *given* to nodes that are up alone: one that is not approved has nobody's trust, and one that is
//! decommissioned none any more. They are *taken* from any node.

use std::collections::BTreeSet;

use tonic::Code;

use crate::curator::membership::{self, Member, Nodes, QuorumRefusal, may_remove, owners, peer_url, role_of};
use crate::curator::node::{Node, Roles, State};
use crate::curator::node_id::NodeId;
use crate::model::role::{self, DeclaredRole, Role};

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Order {
    /// Roles that the node shall have.
    pub give: BTreeSet<Role>,
    /// Roles that it shall not have.
    pub take: BTreeSet<Role>,
}

/// A change of etcd's members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Add a member that has no vote yet.
    AddLearner {
        /// Where the others will reach it.
        peer_url: String,
    },
    /// Remove a member.
    Remove {
        /// Its number.
        member: u64,
    },
}

/// How an order is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What etcd is to do first.
    pub membership: Option<Step>,
    /// What the node has in the end.
    wanted: BTreeSet<Role>,
}

/// What is done next to carry out an order.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// etcd is to do this; once it has, its members are listed anew and what is next is asked again.
    Membership(Step),
    /// The record is to be so; with that the order is carried out.
    Record(Box<Node>),
}

/// Why an order is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It contradicts itself.
    #[error("no role of {node} was changed: {roles} would be both given and taken")]
    GivenAndTaken {
        /// Whose.
        node: NodeId,
        /// Which.
        roles: String,
    },
    /// The node may have no roles.
    #[error("no role of {node} was changed: it is {}, and only a node that is up is given roles", state.as_str())]
    NotUp {
        /// Whose.
        node: NodeId,
        /// Where it stands.
        state: State,
    },
    /// Nobody declared such a role.
    #[error("no role of {node} was changed: {role} is not declared; declare it first")]
    NotDeclared {
        /// Whose.
        node: NodeId,
        /// Which.
        role: DeclaredRole,
    },
    /// A Kubernetes controller without etcd.
    #[error(
        "no role of {node} was changed: it would be a kubernetes-controller and no consensus-member, and the one needs \
         the other; give or take both"
    )]
    ControllerWithoutConsensus {
        /// Whose.
        node: NodeId,
    },
    /// Nobody knows where it could be reached.
    #[error(
        "no role of {node} was changed: it has not reported its address yet, where other members would reach it"
    )]
    NoAddress {
        /// Whose.
        node: NodeId,
    },
    /// etcd takes one learner at a time.
    #[error(
        "no role of {node} was changed: member {learner:x} of etcd is still learning, and one learns at a time; ask again"
    )]
    AnotherLearner {
        /// Whose.
        node: NodeId,
        /// The member that learns.
        learner: u64,
    },
    /// A new member would have to be told of one that nobody can tell.
    #[error(
        "no role of {node} was changed: nobody can tell whose member {member:x} of etcd is; it is being removed, ask again"
    )]
    StrayMember {
        /// Whose.
        node: NodeId,
        /// The member.
        member: u64,
    },
    /// Too few members would be left.
    #[error("no role of {node} was changed: {reason}")]
    Quorum {
        /// Whose.
        node: NodeId,
        /// Why.
        reason: QuorumRefusal,
    },
    /// etcd did not do the step, or did it and another undid it.
    #[error(
        "the roles of {node} were not written: etcd's members are not as they would have to be; ask again"
    )]
    StepNotMade {
        /// Whose.
        node: NodeId,
    },
}

impl Refusal {
    /// The code it is answered with.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::GivenAndTaken { .. } => Code::InvalidArgument,
            Self::NotDeclared { .. } => Code::NotFound,
            Self::NotUp { .. }
            | Self::ControllerWithoutConsensus { .. }
            | Self::NoAddress { .. }
            | Self::Quorum { .. } => Code::FailedPrecondition,
            Self::AnotherLearner { .. } | Self::StrayMember { .. } | Self::StepNotMade { .. } => {
                Code::Unavailable
            }
        }
    }
}

/// Decides on an order, by the members that etcd lists and the nodes as they were read after them.
pub fn evaluate(
    node: &Node,
    order: &Order,
    members: &[Member],
    nodes: &Nodes,
    declared: &BTreeSet<DeclaredRole>,
) -> Result<Plan, Refusal> {
    let id = node.id;
    let both: Vec<&Role> = order.give.intersection(&order.take).collect();
    if !both.is_empty() {
        return Err(Refusal::GivenAndTaken { node: id, roles: role::told(both) });
    }
    if !order.give.is_empty() && node.state != State::Up {
        return Err(Refusal::NotUp { node: id, state: node.state });
    }
    for role in &order.give {
        if let Role::Declared(role) = role
            && !declared.contains(role)
        {
            return Err(Refusal::NotDeclared { node: id, role: role.clone() });
        }
    }
    let wanted: BTreeSet<Role> = node.roles.names().union(&order.give).cloned().collect();
    let wanted: BTreeSet<Role> = wanted.difference(&order.take).cloned().collect();
    if wanted.contains(&Role::KubernetesController) && !wanted.contains(&Role::ConsensusMember) {
        return Err(Refusal::ControllerWithoutConsensus { node: id });
    }
    let membership = match (wanted.contains(&Role::ConsensusMember), order_is_about_consensus(order)) {
        (_, false) => None,
        (true, true) => addition(node, members, nodes)?,
        (false, true) => {
            removal(&id, members, nodes).map_err(|reason| Refusal::Quorum { node: id, reason })?
        }
    };
    Ok(Plan { membership, wanted })
}

/// An order about other roles leaves a member as it is, even one that etcd and the record disagree on.
fn order_is_about_consensus(order: &Order) -> bool {
    order.give.contains(&Role::ConsensusMember) || order.take.contains(&Role::ConsensusMember)
}

fn addition(node: &Node, members: &[Member], nodes: &Nodes) -> Result<Option<Step>, Refusal> {
    let owners = owners(members, nodes);
    if owners.of_node.contains_key(&node.id) {
        return Ok(None);
    }
    if let Some(stray) = owners.stray.first() {
        return Err(Refusal::StrayMember { node: node.id, member: stray.id });
    }
    if let Some(learner) = members.iter().find(|member| member.learner) {
        return Err(Refusal::AnotherLearner { node: node.id, learner: learner.id });
    }
    let status = node.status.as_ref().ok_or(Refusal::NoAddress { node: node.id })?;
    Ok(Some(Step::AddLearner { peer_url: peer_url(status.address) }))
}

/// The step that ends a node's membership; none when it is no member. Whoever deletes a node asks this as
/// well.
pub fn removal(node: &NodeId, members: &[Member], nodes: &Nodes) -> Result<Option<Step>, QuorumRefusal> {
    let Some(member) = membership::owners(members, nodes).of_node.get(node).map(|member| member.id) else {
        return Ok(None);
    };
    may_remove(members, member)?;
    Ok(Some(Step::Remove { member }))
}

impl Plan {
    /// What is done next: the step of membership unless it was `made`, and the record only then.
    ///
    /// `members` are those that etcd lists now.
    pub fn next(&self, made: bool, node: &Node, members: &[Member], nodes: &Nodes) -> Result<Next, Refusal> {
        match &self.membership {
            Some(step) if !made => Ok(Next::Membership(step.clone())),
            _ => self.record(node, members, nodes).map(|node| Next::Record(Box::new(node))),
        }
    }

    /// The record to write, by the members that etcd lists once the step is made.
    ///
    /// What the list says counts, and not that the step was answered with success: the role carries the
    /// number of the membership.
    pub fn record(&self, node: &Node, members: &[Member], nodes: &Nodes) -> Result<Node, Refusal> {
        let owners = owners(members, nodes);
        let listed = owners.of_node.get(&node.id);
        let not_made = Refusal::StepNotMade { node: node.id };
        let was = node.roles.consensus_member.clone();
        let consensus_member = match (self.wanted.contains(&Role::ConsensusMember), listed) {
            (true, Some(member)) => Some(role_of(&node.id, member, &owners)),
            // The order is about something else, and membership is for the next tick to settle.
            (true, None) if self.membership.is_none() && was.is_some() => was,
            (false, Some(_)) if self.membership.is_none() && was.is_none() => None,
            (false, None) => None,
            (true, None) | (false, Some(_)) => return Err(not_made),
        };
        let declared = self.wanted.iter().filter_map(|role| match role {
            Role::Declared(name) => Some(name.clone()),
            _ => None,
        });
        let roles = Roles {
            consensus_member,
            kubernetes_controller: self.wanted.contains(&Role::KubernetesController),
            kubernetes_worker: self.wanted.contains(&Role::KubernetesWorker),
            declared: declared.collect(),
        };
        Ok(Node { roles, ..node.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::membership::tests::{dead, learner, nodes, unstarted, voter};
    use crate::curator::node::tests::{at, member as member_node, up};
    use crate::curator::node_id::tests::{key, node_id};

    const C: &str = "consensus-member";
    const K: &str = "kubernetes-controller";
    const W: &str = "kubernetes-worker";

    fn roles(names: &[&str]) -> BTreeSet<Role> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn order(give: &[&str], take: &[&str]) -> Order {
        Order { give: roles(give), take: roles(take) }
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
    fn after(step: Option<&Step>, number: u8, mut members: Vec<Member>) -> Vec<Member> {
        match step {
            None => {}
            Some(Step::AddLearner { peer_url }) => {
                members.push(Member { peer_urls: vec![peer_url.clone()], ..unstarted(number) });
            }
            Some(Step::Remove { member }) => members.retain(|one| one.id != *member),
        }
        members
    }

    #[test]
    fn order_is_judged_by_what_the_node_would_have() {
        let add = Some(Step::AddLearner { peer_url: "https://10.0.0.3:7834".to_owned() });
        let remove = Some(Step::Remove { member: 3 });
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
            // What is so already is no fault, and no step.
            (vec![C], vec![C], vec![], None, vec![C]),
            (vec![], vec![], vec![C, K, W, "web"], None, vec![]),
            (vec![W], vec![], vec![], None, vec![W]),
        ] {
            let node = with(3, &has);
            let known = nodes([member_node(1), member_node(2), node.clone()]);
            let mut members = vec![voter(1), voter(2)];
            members.extend(has.contains(&C).then(|| voter(3)));
            let told = format!("{has:?} give {give:?} take {take:?}");
            let plan = evaluate(&node, &order(&give, &take), &members, &known, &declared()).expect(&told);
            assert_eq!(plan.membership, step, "{told}");
            let members = after(plan.membership.as_ref(), 3, members);
            let written = plan.record(&node, &members, &known).unwrap();
            assert_eq!(written.roles.names(), roles(&gets), "{told}");
            assert!(written.encode().is_ok());
        }
    }

    #[test]
    fn order_that_cannot_be_is_refused_with_a_sentence() {
        let three = || vec![voter(1), voter(2), voter(3)];
        for (node, give, take, members, said, code) in [
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
                vec![voter(1), Member { name: "stranger".to_owned(), ..voter(9) }],
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
            let refusal = evaluate(&node, &order(&give, &take), &members, &known, &declared()).unwrap_err();
            assert!(refusal.to_string().contains(said), "{said}: {refusal}");
            assert_eq!(refusal.code(), code, "{refusal}");
        }
    }

    #[test]
    fn roles_are_given_to_nodes_that_are_up_alone_and_taken_from_any() {
        for state in [State::New, State::Standby, State::Decommissioned] {
            let node = Node::new(key(3), state, at(0));
            let known = nodes([member_node(1), node.clone()]);
            for role in [C, W, "web"] {
                let refusal = evaluate(&node, &order(&[role], &[]), &[voter(1)], &known, &declared());
                assert_eq!(refusal, Err(Refusal::NotUp { node: node.id, state }), "{role}");
            }
            assert!(evaluate(&node, &order(&[], &[W]), &[voter(1)], &known, &declared()).is_ok());
        }
    }

    #[test]
    fn order_that_was_half_done_is_completed_by_asking_again() {
        // The member was added, and the leader died before it wrote the record.
        let known = nodes([member_node(1), up(3)]);
        let members = [voter(1), unstarted(3)];
        let plan = evaluate(&up(3), &order(&[C], &[]), &members, &known, &declared()).unwrap();
        assert_eq!(plan.membership, None);
        let role = plan.record(&up(3), &members, &known).unwrap().roles.consensus_member.unwrap();
        assert_eq!(role.member, 3);
        assert_eq!(role.peers.into_keys().collect::<Vec<_>>(), [node_id(1)]);

        // The member was removed, and the record still has the role.
        let known = nodes([member_node(1), with(3, &[C, K])]);
        let plan =
            evaluate(&with(3, &[C, K]), &order(&[], &[C, K]), &[voter(1)], &known, &declared()).unwrap();
        assert_eq!(plan.membership, None);
        assert!(plan.record(&with(3, &[C, K]), &[voter(1)], &known).unwrap().roles.is_empty());
    }

    #[test]
    fn role_is_not_written_before_etcd_has_done_its_part() {
        let known = nodes([member_node(1), member_node(2), with(3, &[])]);
        let members = [voter(1), voter(2)];
        let plan = evaluate(&up(3), &order(&[C], &[]), &members, &known, &declared()).unwrap();
        assert_eq!(plan.record(&up(3), &members, &known), Err(Refusal::StepNotMade { node: node_id(3) }));

        let known = nodes([member_node(1), member_node(2), with(3, &[C])]);
        let members = [voter(1), voter(2), voter(3)];
        let plan = evaluate(&with(3, &[C]), &order(&[], &[C]), &members, &known, &declared()).unwrap();
        let refusal = plan.record(&with(3, &[C]), &members, &known).unwrap_err();
        assert_eq!((refusal.code(), refusal), (Code::Unavailable, Refusal::StepNotMade { node: node_id(3) }));
    }

    #[test]
    fn record_follows_only_once_membership_is_changed() {
        let node = with(3, &[C]);
        let known = nodes([member_node(1), member_node(2), node.clone()]);
        let members = [voter(1), voter(2), voter(3)];
        let plan = evaluate(&node, &order(&[], &[C]), &members, &known, &declared()).unwrap();
        let step = Step::Remove { member: 3 };
        assert_eq!(plan.next(false, &node, &members, &known), Ok(Next::Membership(step)));
        let Ok(Next::Record(written)) = plan.next(true, &node, &members[..2], &known) else {
            panic!("no record, though etcd has done its part")
        };
        assert!(written.roles.is_empty());
        // What needs no step is written at once.
        let plan = evaluate(&node, &order(&[W], &[]), &members, &known, &declared()).unwrap();
        assert!(matches!(plan.next(false, &node, &members, &known), Ok(Next::Record(_))));
    }

    #[test]
    fn removal_of_a_dead_member_is_what_an_order_may_ask() {
        let known = nodes([member_node(1), member_node(2), with(3, &[C])]);
        let members = [voter(1), voter(2), dead(3)];
        let plan = evaluate(&with(3, &[C]), &order(&[], &[C]), &members, &known, &declared()).unwrap();
        assert_eq!(plan.membership, Some(Step::Remove { member: 3 }));
    }

    #[test]
    fn order_about_other_roles_leaves_membership_alone() {
        // etcd lost the member; the next tick takes the role, not whoever gives another one.
        let node = with(3, &[C, K]);
        let known = nodes([member_node(1), node.clone()]);
        let plan = evaluate(&node, &order(&[W], &[]), &[voter(1)], &known, &declared()).unwrap();
        assert_eq!(plan.membership, None);
        assert_eq!(plan.record(&node, &[voter(1)], &known).unwrap().roles.names(), roles(&[C, K, W]));
    }
}
