//! How a node comes into a cluster, and how it goes.
//!
//! ```text
//!             register          approve            commit          decommission
//! (no record) ────────▶  new  ────────▶ standby ────────▶   up   ────────────▶ decommissioned
//!                         │                │                 │ bypass                 │
//!                         └──── delete ────┴────── delete ───┴──────── delete ────────┴──▶ (no record)
//! ```
//!
//! The node that bootstraps a cluster begins as up. Every step may be asked for again: a node whose answer
//! was lost between any two of its steps asks for the same one with the same key, and hears what it would
//! have heard. What can never succeed is an error, and what only has to be waited for is an answer, so that
//! no node asks forever in vain.
//!
//! A node that is decommissioned stays in the records, because its key would be as good as new otherwise: its
//! certificates are refused, and so is registering again. A node that is deleted is unknown, which its
//! certificates are refused for as well; it may register again like any machine.

use std::net::IpAddr;

use tonic::Code;

use crate::curator::labels;
use crate::curator::membership::{Member, Nodes, QuorumRefusal};
use crate::curator::node::{Node, State, Status};
use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::roles::{self, Step};
use crate::curator::tickets::TicketId;
use crate::model::ids::MachineId;
use crate::model::label::Labels;
use crate::model::role;
use crate::model::time::Timestamp;

/// Why a node does not come, or does not go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Half of two keys is the same.
    #[error("{0} was not registered: another key has the same id. Make another key")]
    OtherKey(NodeId),
    /// A node changes no machine.
    #[error(
        "{node} was not registered: it is on machine {known} and says that it is on {offered}. Its key was copied: remove its state directory there"
    )]
    OtherMachine {
        /// Which.
        node: NodeId,
        /// What its record says.
        known: MachineId,
        /// What it says now.
        offered: MachineId,
    },
    /// The labels are none.
    #[error("{node} was not registered: {fault}")]
    Labels {
        /// Which.
        node: NodeId,
        /// What is wrong with them.
        fault: String,
    },
    /// It is out for ever.
    #[error(
        "{0} is decommissioned, and does not come back under this key. Let its machine register with a new one"
    )]
    Decommissioned(NodeId),
    /// It never came.
    #[error("{0} is unknown to this cluster: it has never registered, or was deleted. Register it first")]
    Unknown(NodeId),
    /// What is asked is for nodes that are up.
    #[error("{node} is {}, and this is for nodes that are up", state.as_str())]
    NotUp {
        /// Which.
        node: NodeId,
        /// Where it stands.
        state: State,
    },
    /// Its certificates are refused, and so it gets no more of them.
    #[error("the credentials of {0} are revoked. Let its machine register with a new key")]
    Revoked(NodeId),
    /// It runs no etcd.
    #[error("{0} is no consensus member, and gets no certificate for a member of etcd")]
    NoMember(NodeId),
    /// Nobody could tell where it is.
    #[error("{0} has said no address yet, at which its member of etcd could prove itself")]
    NoAddress(NodeId),
    /// It never was part of the cluster.
    #[error("{node} was not decommissioned: it is {}, so it never was part of the cluster. Delete it instead", state.as_str())]
    NeverUp {
        /// Which.
        node: NodeId,
        /// Where it stands.
        state: State,
    },
    /// Something still runs there.
    #[error("{node} was not decommissioned: it has roles ({roles}). Take them first")]
    HasRoles {
        /// Which.
        node: NodeId,
        /// Their names.
        roles: String,
    },
    /// Something still runs there.
    #[error(
        "{node} was not deleted: it has roles ({roles}). Take them first, or delete it with bypass_has_roles"
    )]
    DeleteHasRoles {
        /// Which.
        node: NodeId,
        /// Their names.
        roles: String,
    },
    /// It is part of the cluster.
    #[error(
        "{0} was not deleted: it is up. Decommission it first, or delete it with bypass_not_decommissioned"
    )]
    DeleteUp(NodeId),
    /// Too few members would be left.
    #[error("{node} was not deleted: {reason}")]
    Quorum {
        /// Which.
        node: NodeId,
        /// Why.
        reason: QuorumRefusal,
    },
}

impl Refusal {
    /// The code it is answered with.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::OtherKey(_) => Code::AlreadyExists,
            Self::Labels { .. } => Code::InvalidArgument,
            Self::Unknown(_) => Code::NotFound,
            _ => Code::FailedPrecondition,
        }
    }
}

/// A node as it is after a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// As it was; there is nothing to write.
    Unchanged(Node),
    /// To be written before anybody is answered.
    Changed(Node),
}

impl Outcome {
    /// The node, changed or not.
    #[must_use]
    pub const fn node(&self) -> &Node {
        match self {
            Self::Unchanged(node) | Self::Changed(node) => node,
        }
    }
}

/// What a machine says when it registers; its ticket has been redeemed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The key that the connection proved.
    pub key: PublicKey,
    /// The machine, if it says so.
    pub machine: Option<MachineId>,
    /// What is to be said of it.
    pub labels: Labels,
    /// The ticket it came with.
    pub ticket: TicketId,
}

/// Registers a machine as a node, or tells one that is registered where it stands.
///
/// The answer is made from the record in both cases, so a second one lacks nothing. Labels are those of the
/// first registration: people may have changed them since.
pub fn register(known: Option<&Node>, asked: &Registration, now: Timestamp) -> Result<Outcome, Refusal> {
    let id = NodeId::of(&asked.key);
    let Some(known) = known else {
        labels::check(&asked.labels).map_err(|fault| Refusal::Labels { node: id, fault })?;
        return Ok(Outcome::Changed(Node {
            machine: asked.machine,
            labels: asked.labels.clone(),
            ticket: Some(asked.ticket),
            ..Node::new(asked.key, State::New, now)
        }));
    };
    proves(known, &asked.key)?;
    if known.state == State::Decommissioned {
        return Err(Refusal::Decommissioned(id));
    }
    match (known.machine, asked.machine) {
        (Some(known), Some(offered)) if known != offered => {
            Err(Refusal::OtherMachine { node: id, known, offered })
        }
        // Only while nobody has approved it: what was approved is not changed by whoever was.
        (None, Some(machine)) if known.state == State::New => {
            Ok(Outcome::Changed(Node { machine: Some(machine), ..known.clone() }))
        }
        _ => Ok(Outcome::Unchanged(known.clone())),
    }
}

/// Approves a node; one that was approved before stays as it is.
pub fn approve(known: Option<&Node>, key: &PublicKey, now: Timestamp) -> Result<Outcome, Refusal> {
    let known = found(known, key)?;
    match known.state {
        State::New => Ok(moved(known, State::Standby, now)),
        State::Standby | State::Up => Ok(Outcome::Unchanged(known.clone())),
        State::Decommissioned => Err(Refusal::Decommissioned(known.id)),
    }
}

/// Makes an approved node part of the cluster; one that is part of it already stays so.
///
/// `revoked` is whether its credentials are refused. None when nobody has approved it yet: it asks again.
pub fn commit(
    known: Option<&Node>,
    key: &PublicKey,
    revoked: bool,
    now: Timestamp,
) -> Result<Option<Outcome>, Refusal> {
    let known = found(known, key)?;
    if revoked {
        return Err(Refusal::Revoked(known.id));
    }
    match known.state {
        State::New => Ok(None),
        State::Standby => Ok(Some(moved(known, State::Up, now))),
        State::Up => Ok(Some(Outcome::Unchanged(known.clone()))),
        State::Decommissioned => Err(Refusal::Decommissioned(known.id)),
    }
}

/// Whether a node may come back, or be given a new certificate.
pub fn join<'a>(known: Option<&'a Node>, key: &PublicKey, revoked: bool) -> Result<&'a Node, Refusal> {
    let known = found(known, key)?;
    match known.state {
        State::Decommissioned => Err(Refusal::Decommissioned(known.id)),
        _ if revoked => Err(Refusal::Revoked(known.id)),
        State::Up => Ok(known),
        state => Err(Refusal::NotUp { node: known.id, state }),
    }
}

/// The address at which a node's member of etcd may prove itself to the others.
pub fn peer(known: Option<&Node>, key: &PublicKey, revoked: bool) -> Result<IpAddr, Refusal> {
    let known = join(known, key, revoked)?;
    if known.roles.consensus_member.is_none() {
        return Err(Refusal::NoMember(known.id));
    }
    known.status.as_ref().map(|status| status.address).ok_or(Refusal::NoAddress(known.id))
}

/// Takes what a node says of itself. What is the same but for its time is nothing new: it is durable already, and
/// everybody who watches would be told nothing.
pub fn report(known: Option<&Node>, id: NodeId, status: &Status) -> Result<Outcome, Refusal> {
    let known = known.ok_or(Refusal::Unknown(id))?;
    if known.state != State::Up {
        return Err(Refusal::NotUp { node: id, state: known.state });
    }
    let same = known
        .status
        .as_ref()
        .is_some_and(|before| *before == Status { reported_at: before.reported_at, ..status.clone() });
    if same {
        return Ok(Outcome::Unchanged(known.clone()));
    }
    Ok(Outcome::Changed(Node { status: Some(status.clone()), ..known.clone() }))
}

/// Whether the certificate of a node for this key is still good, whatever it says itself.
///
/// What is asked on every connection and of every call: a certificate lives longer than trust may.
pub fn credentials_hold(known: Option<&Node>, id: NodeId, key: &PublicKey) -> Result<(), Refusal> {
    let known = known.ok_or(Refusal::Unknown(id))?;
    proves(known, key)?;
    match known.state {
        State::Up => Ok(()),
        State::Decommissioned => Err(Refusal::Decommissioned(id)),
        state => Err(Refusal::NotUp { node: id, state }),
    }
}

/// Takes a node out of the cluster for ever; one that is out already stays so.
pub fn decommission(known: Option<&Node>, id: NodeId, now: Timestamp) -> Result<Outcome, Refusal> {
    let known = known.ok_or(Refusal::Unknown(id))?;
    match known.state {
        State::Decommissioned => Ok(Outcome::Unchanged(known.clone())),
        State::New | State::Standby => Err(Refusal::NeverUp { node: id, state: known.state }),
        State::Up if !known.roles.is_empty() => {
            Err(Refusal::HasRoles { node: id, roles: role::told(known.roles.names()) })
        }
        State::Up => Ok(moved(known, State::Decommissioned, now)),
    }
}

/// What a deletion may go past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Bypass {
    /// The node has roles.
    pub has_roles: bool,
    /// The node is up.
    pub not_decommissioned: bool,
}

/// Decides whether a node may be forgotten; what is returned is what etcd has to do first.
///
/// No bypass goes past the quorum: a member whose record is gone would still vote.
pub fn delete(
    known: Option<&Node>,
    id: NodeId,
    bypass: Bypass,
    members: &[Member],
    nodes: &Nodes,
) -> Result<Option<Step>, Refusal> {
    let known = known.ok_or(Refusal::Unknown(id))?;
    if !known.roles.is_empty() && !bypass.has_roles {
        return Err(Refusal::DeleteHasRoles { node: id, roles: role::told(known.roles.names()) });
    }
    if known.state == State::Up && !bypass.not_decommissioned {
        return Err(Refusal::DeleteUp(id));
    }
    roles::removal(&id, members, nodes).map_err(|reason| Refusal::Quorum { node: id, reason })
}

fn found<'a>(known: Option<&'a Node>, key: &PublicKey) -> Result<&'a Node, Refusal> {
    let known = known.ok_or_else(|| Refusal::Unknown(NodeId::of(key)))?;
    proves(known, key)?;
    Ok(known)
}

/// The id has half of the key; all of it has to be the same.
fn proves(known: &Node, key: &PublicKey) -> Result<(), Refusal> {
    if known.key == *key { Ok(()) } else { Err(Refusal::OtherKey(known.id)) }
}

fn moved(node: &Node, state: State, now: Timestamp) -> Outcome {
    Outcome::Changed(Node { state, state_since: now, ..node.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::membership::tests::{dead, nodes, voter};
    use crate::curator::node::tests::{at, member, up};
    use crate::curator::node_id::tests::{key, node_id};

    #[test]
    fn report_of_a_node_is_taken_while_it_is_up_and_only_when_it_is_new() {
        let before = crate::curator::node::tests::up(3);
        let said = before.status.clone().unwrap();
        let later = Status { reported_at: at(60), ..said.clone() };
        assert_eq!(report(Some(&before), before.id, &later), Ok(Outcome::Unchanged(before.clone())));
        let moved = Status { address: "10.0.0.9".parse().unwrap(), ..later };
        let changed = report(Some(&before), before.id, &moved).unwrap();
        assert_eq!(changed, Outcome::Changed(Node { status: Some(moved.clone()), ..before.clone() }));
        assert_eq!(report(None, before.id, &moved), Err(Refusal::Unknown(before.id)));
        for state in [State::New, State::Standby, State::Decommissioned] {
            let refusal = report(Some(&node(state)), before.id, &moved);
            assert_eq!(refusal, Err(Refusal::NotUp { node: before.id, state }));
        }
    }

    const STATES: [State; 4] = [State::New, State::Standby, State::Up, State::Decommissioned];

    fn node(state: State) -> Node {
        Node::new(key(3), state, at(0))
    }

    fn machine(number: u8) -> MachineId {
        MachineId(uuid::Uuid::from_bytes([number; 16]))
    }

    fn registration() -> Registration {
        Registration {
            key: key(3),
            machine: Some(machine(1)),
            labels: Labels::from([("row".to_owned(), "7".to_owned())]),
            ticket: "0011223344556677".parse().unwrap(),
        }
    }

    /// A key whose first half is that of the node's.
    fn twin() -> PublicKey {
        let mut twin = key(3);
        twin.0[20] ^= 1;
        twin
    }

    #[test]
    fn node_comes_through_every_state_and_every_step_may_be_asked_for_again() {
        let now = at(1);
        let Outcome::Changed(new) = register(None, &registration(), now).unwrap() else {
            panic!("nothing to write")
        };
        assert_eq!((new.id, new.state, new.registered_at), (node_id(3), State::New, now));
        assert_eq!((new.machine, new.labels.len(), new.ticket.is_some()), (Some(machine(1)), 1, true));
        assert!(new.roles.is_empty());
        let again = register(Some(&new), &registration(), at(9)).unwrap();
        assert_eq!(again, Outcome::Unchanged(new.clone()));
        assert_eq!(commit(Some(&new), &key(3), false, now).unwrap(), None);

        let Outcome::Changed(standby) = approve(Some(&new), &key(3), at(2)).unwrap() else {
            panic!("not approved")
        };
        assert_eq!((standby.state, standby.state_since), (State::Standby, at(2)));
        assert_eq!(approve(Some(&standby), &key(3), at(9)).unwrap(), Outcome::Unchanged(standby.clone()));
        assert_eq!(register(Some(&standby), &registration(), at(9)).unwrap().node(), &standby);

        let Some(Outcome::Changed(up)) = commit(Some(&standby), &key(3), false, at(3)).unwrap() else {
            panic!("not taken in")
        };
        assert_eq!((up.state, up.state_since), (State::Up, at(3)));
        let lost_answer = commit(Some(&up), &key(3), false, at(9)).unwrap();
        assert_eq!(lost_answer, Some(Outcome::Unchanged(up.clone())));
        assert_eq!(register(Some(&up), &registration(), at(9)).unwrap().node(), &up);
        assert_eq!(approve(Some(&up), &key(3), at(9)).unwrap(), Outcome::Unchanged(up.clone()));
        assert_eq!(join(Some(&up), &key(3), false).unwrap(), &up);

        let Outcome::Changed(gone) = decommission(Some(&up), up.id, at(4)).unwrap() else {
            panic!("still there")
        };
        assert_eq!((gone.state, gone.state_since), (State::Decommissioned, at(4)));
        assert_eq!(decommission(Some(&gone), gone.id, at(9)).unwrap(), Outcome::Unchanged(gone.clone()));
        assert_eq!(delete(Some(&gone), gone.id, Bypass::default(), &[], &nodes([gone.clone()])), Ok(None));
    }

    #[test]
    fn decommissioned_node_is_refused_wherever_it_comes() {
        let gone = node(State::Decommissioned);
        let refusal = Refusal::Decommissioned(gone.id);
        assert_eq!(register(Some(&gone), &registration(), at(1)), Err(refusal.clone()));
        assert_eq!(approve(Some(&gone), &key(3), at(1)), Err(refusal.clone()));
        assert_eq!(commit(Some(&gone), &key(3), false, at(1)), Err(refusal.clone()));
        assert_eq!(join(Some(&gone), &key(3), false), Err(refusal.clone()));
        assert_eq!(credentials_hold(Some(&gone), gone.id, &key(3)), Err(refusal.clone()));
        assert_eq!(refusal.code(), Code::FailedPrecondition);
    }

    #[test]
    fn credentials_hold_for_a_node_that_is_up_and_for_its_own_key() {
        for state in STATES {
            let known = node(state);
            assert_eq!(
                credentials_hold(Some(&known), known.id, &key(3)).is_ok(),
                state == State::Up,
                "{state:?}"
            );
            assert_eq!(join(Some(&known), &key(3), false).is_ok(), state == State::Up, "{state:?}");
            let other = Refusal::OtherKey(known.id);
            assert_eq!(credentials_hold(Some(&known), known.id, &twin()), Err(other));
        }
        let unknown = Refusal::Unknown(node_id(3));
        assert_eq!(
            credentials_hold(None, node_id(3), &key(3)),
            Err(unknown.clone()),
            "a deleted node is unknown"
        );
        assert_eq!(unknown.code(), Code::NotFound);
    }

    #[test]
    fn revoked_node_is_given_no_certificate() {
        let refusal = Refusal::Revoked(node_id(3));
        for state in [State::Standby, State::Up] {
            assert_eq!(commit(Some(&node(state)), &key(3), true, at(1)), Err(refusal.clone()));
        }
        assert_eq!(join(Some(&node(State::Up)), &key(3), true), Err(refusal));
    }

    #[test]
    fn another_key_with_the_same_id_is_never_taken_for_the_node() {
        let known = node(State::Up);
        let refusal = Refusal::OtherKey(known.id);
        let asked = Registration { key: twin(), ..registration() };
        assert_eq!(register(Some(&known), &asked, at(1)), Err(refusal.clone()));
        assert_eq!(approve(Some(&known), &twin(), at(1)), Err(refusal.clone()));
        assert_eq!(commit(Some(&known), &twin(), false, at(1)), Err(refusal.clone()));
        assert_eq!(join(Some(&known), &twin(), false), Err(refusal.clone()));
        assert_eq!(refusal.code(), Code::AlreadyExists);
    }

    #[test]
    fn what_nobody_registered_is_not_found() {
        let refusal = Refusal::Unknown(node_id(3));
        assert_eq!(approve(None, &key(3), at(1)), Err(refusal.clone()));
        assert_eq!(commit(None, &key(3), false, at(1)), Err(refusal.clone()));
        assert_eq!(join(None, &key(3), false), Err(refusal.clone()));
        assert_eq!(decommission(None, node_id(3), at(1)), Err(refusal.clone()));
        assert_eq!(delete(None, node_id(3), Bypass::default(), &[], &Nodes::new()), Err(refusal));
    }

    #[test]
    fn machine_of_a_node_is_said_once() {
        let silent = Registration { machine: None, ..registration() };
        let other = Registration { machine: Some(machine(2)), ..registration() };
        let said = register(None, &registration(), at(1)).unwrap().node().clone();
        assert_eq!(register(Some(&said), &silent, at(2)).unwrap(), Outcome::Unchanged(said.clone()));
        let refusal = register(Some(&said), &other, at(2)).unwrap_err();
        let expected = Refusal::OtherMachine { node: said.id, known: machine(1), offered: machine(2) };
        assert_eq!(refusal, expected);
        let unsaid = register(None, &silent, at(1)).unwrap().node().clone();
        let later = register(Some(&unsaid), &other, at(2)).unwrap();
        assert!(matches!(&later, Outcome::Changed(node) if node.machine == Some(machine(2))));
        let approved = Node { machine: None, ..node(State::Standby) };
        assert_eq!(register(Some(&approved), &other, at(2)).unwrap(), Outcome::Unchanged(approved));
    }

    #[test]
    fn registration_with_labels_that_are_none_is_refused() {
        let labels = Labels::from([("-row".to_owned(), "7".to_owned())]);
        let refusal = register(None, &Registration { labels, ..registration() }, at(1)).unwrap_err();
        assert_eq!(refusal.code(), Code::InvalidArgument);
        assert!(refusal.to_string().contains("-row"), "{refusal}");
    }

    #[test]
    fn node_that_still_does_something_is_not_decommissioned() {
        let refusal = decommission(Some(&member(3)), node_id(3), at(1)).unwrap_err();
        assert_eq!(refusal, Refusal::HasRoles { node: node_id(3), roles: "consensus-member".to_owned() });
        for state in [State::New, State::Standby] {
            let refusal = decommission(Some(&node(state)), node_id(3), at(1)).unwrap_err();
            assert_eq!(refusal, Refusal::NeverUp { node: node_id(3), state });
        }
    }

    #[test]
    fn deletion_needs_a_bypass_for_each_thing_that_protects() {
        let both = Bypass { has_roles: true, not_decommissioned: true };
        let roles = Bypass { not_decommissioned: false, ..both };
        let not_decommissioned = Bypass { has_roles: false, ..both };
        let mut worker = up(3);
        worker.roles.kubernetes_worker = true;
        let refuses = |known: &Node, bypass, said: &str| {
            let refusal =
                delete(Some(known), known.id, bypass, &[voter(1)], &nodes([known.clone()])).unwrap_err();
            assert!(refusal.to_string().contains(said), "{refusal}");
            assert_eq!(refusal.code(), Code::FailedPrecondition);
        };
        let allows = |known: &Node, bypass| {
            assert_eq!(delete(Some(known), known.id, bypass, &[voter(1)], &nodes([known.clone()])), Ok(None));
        };
        refuses(&up(3), Bypass::default(), "bypass_not_decommissioned");
        refuses(&up(3), roles, "bypass_not_decommissioned");
        allows(&up(3), not_decommissioned);
        refuses(&worker, not_decommissioned, "kubernetes-worker");
        refuses(&worker, not_decommissioned, "bypass_has_roles");
        refuses(&worker, roles, "bypass_not_decommissioned");
        allows(&worker, both);
        for state in [State::New, State::Standby, State::Decommissioned] {
            allows(&node(state), Bypass::default());
        }
    }

    #[test]
    fn deleting_a_member_removes_it_from_etcd_first_and_never_below_a_quorum() {
        let both = Bypass { has_roles: true, not_decommissioned: true };
        let known = nodes([member(1), member(2), member(3)]);
        let step = delete(known.get(&node_id(3)), node_id(3), both, &[voter(1), voter(2), dead(3)], &known);
        assert_eq!(step, Ok(Some(Step::Remove { member: 3 })));
        let refusal =
            delete(known.get(&node_id(2)), node_id(2), both, &[voter(1), voter(2), dead(3)], &known);
        assert!(matches!(refusal, Err(Refusal::Quorum { .. })), "{refusal:?}");
        // One that is a member and whose record does not say so.
        let known = nodes([member(1), up(3)]);
        let step = delete(known.get(&node_id(3)), node_id(3), both, &[voter(1), voter(3)], &known);
        assert_eq!(step, Ok(Some(Step::Remove { member: 3 })));
    }
}
