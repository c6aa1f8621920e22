//! The invariants of the model. Each is a function of the whole state, as an observer with complete knowledge sees it.
//!
//! Each returns the violation as a sentence. [`super`] lists which test shows which invariant.

use std::collections::BTreeSet;

use shepherd::curator::node_health::{HEARTBEAT_TIMEOUT, NodeHealth};
use shepherd::curator_client::node::{Node, NodeState as Life};
use shepherd::curator_client::node_id::NodeId;
use shepherd::etcd::guard::LeaderGuard;
use shepherd::etcd::key_space::{LEADER, NODES};
use shepherd::proto::curator::v1 as wire;
use shepherd::roleserver::cluster::files::EtcdMembership;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use shepherd::roleserver::cluster::startup::ControlPlaneStartup;

use super::curators::Leading;
use super::store::{Done, Pair};
use super::world::{Disk, State, World};

fn demand(holds: bool, reported: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(reported()) }
}

/// V1: a second member of etcd never begins beside one that still runs on the same machine.
pub(crate) fn one_etcd_at_a_time(state: &State, at: usize, next: &EtcdMembership) -> Result<(), String> {
    let running = state.machines[at].etcd.as_ref().map(|program| &program.membership.data);
    demand(running.is_none_or(|data| *data == next.data), || {
        format!("V1: machine {at} starts etcd on {} while it runs on {running:?}", next.data)
    })
}

/// V1: a second curator never starts beside one that still runs on the same machine.
pub(crate) fn one_curator_at_a_time(state: &State, at: usize) -> Result<(), String> {
    demand(state.machines[at].curator.is_none(), || format!("V1: machine {at} starts a second curator"))
}

/// V2 and V9: a control plane is restarted only if another membership, or none, should run. Other fields of the role
/// and other roles never restart it.
pub(crate) fn restarts_for_a_reason(
    running: Option<u64>,
    next: &ControlPlaneStartup,
    at: usize,
) -> Result<(), String> {
    let same = match next {
        ControlPlaneStartup::Nothing => running.is_none(),
        ControlPlaneStartup::Founding(_) => running.is_some(),
        ControlPlaneStartup::Member(role, _) => running == Some(role.member_id),
    };
    demand(!same, || format!("V2: machine {at} ends its control plane {running:?}, which is to run"))
}

/// V4: a machine that makes calls as a node can come back as that node: its certificate and its key are on its disk.
pub(crate) fn connection_is_durable(disk: &Disk, at: usize) -> Result<(), String> {
    demand(disk.credentials.is_some() && disk.key.is_some(), || {
        format!("V4: machine {at} acts as a node, and its certificate is not on its disk")
    })
}

/// V6 and I-d on the node: the etcd data of a membership is removed only when etcd has ended that membership. So lost
/// or outdated roles never cost a vote.
pub(crate) fn only_what_is_over_is_removed(
    state: &State,
    at: usize,
    last: &EtcdMembership,
) -> Result<(), String> {
    let member = state.machines[at].disk.etcd.get(&last.data).copied();
    demand(member.is_none_or(|member| state.etcd.member(member).is_none()), || {
        format!("V6: machine {at} removes the data of member {member:?}, which etcd still counts")
    })
}

/// V7: a report is complete: it has the address of the node, and whether its curator listens.
pub(crate) fn report_is_complete(state: &State, at: usize, status: &wire::NodeStatus) -> Result<(), String> {
    let machine = &state.machines[at];
    let port = if machine.curator.is_some() { u32::from(CURATOR_PORT) } else { 0 };
    demand(status.external_address == machine.address.to_string() && status.curator_port == port, || {
        format!("V7: machine {at} says {status:?}, and its curator listens on {port}")
    })
}

/// V10 and V11, for every write.
pub(crate) fn judge_write(world: &World, machine: usize, guard: Option<&LeaderGuard>, done: &Done) {
    if !done.succeeded {
        return;
    }
    let mut judged = Vec::new();
    {
        let state = world.look();
        for (key, before) in &done.before {
            let Ok(id) = NODES.id_of(key) else { continue };
            let decode = |pair: &Pair| Node::decode(key, &pair.value);
            let (before, after) = (before.as_ref().map(decode), state.etcd.pairs.get(key).map(decode));
            let (Ok(before), Ok(after)) = (before.transpose(), after.transpose()) else {
                judged.push(Err(format!("V11: the record of {id} cannot be read")));
                continue;
            };
            judged.push(life_cycle_is_kept(before.as_ref(), after.as_ref()));
            judged.push(roles_are_of_nodes_that_are_up(after.as_ref()));
            judged.push(membership_goes_first(&state, before.as_ref(), after.as_ref()));
            // The very first record is written before any leader can exist.
            if before.is_some() || guard.is_some() {
                judged.push(only_the_leader_writes(&state, machine, guard));
            }
        }
    }
    for judged in judged {
        world.demand(judged);
    }
}

/// V10: a record is written only under the election key with the lowest create revision of all that exist at that
/// moment.
fn only_the_leader_writes(state: &State, machine: usize, guard: Option<&LeaderGuard>) -> Result<(), String> {
    let keys = state.etcd.under(&LEADER.range().start);
    let first = keys.iter().min_by_key(|key| key.create_revision).map(|key| (&key.key, key.create_revision));
    let by = guard.map(|guard| (&guard.key, guard.create_revision));
    demand(by.is_some() && by == first, || {
        format!("V10: machine {machine} wrote a record by {by:?}, and {first:?} leads")
    })
}

/// V11: the lifecycle of a node is that of 4F.
fn life_cycle_is_kept(before: Option<&Node>, after: Option<&Node>) -> Result<(), String> {
    let step = (before.map(|node| node.state), after.map(|node| node.state));
    let kept = match step {
        // The founding node: no node exists yet that could approve it.
        (None, Some(Life::Up)) => after.is_some_and(|node| node.ticket.is_none()),
        (Some(before), Some(after)) if before == after => true,
        (_, None)
        | (None, Some(Life::New))
        | (Some(Life::New), Some(Life::Standby))
        | (Some(Life::Standby), Some(Life::Up))
        | (Some(Life::Up), Some(Life::Decommissioned)) => true,
        _ => false,
    };
    let key = before.zip(after).is_none_or(|(before, after)| before.key == after.key);
    demand(kept && key, || format!("V11: a node went from {:?} to {:?}", step.0, step.1))
}

/// V11, I-a: a Kubernetes controller is a consensus member; and only nodes that are up have roles.
fn roles_are_of_nodes_that_are_up(after: Option<&Node>) -> Result<(), String> {
    let Some(node) = after else { return Ok(()) };
    let roles = &node.roles;
    let holds = (!roles.kubernetes_controller || roles.consensus_member.is_some())
        && (node.state == Life::Up || roles.is_empty());
    demand(holds, || format!("V11 (I-a): {} is {:?} and has {:?}", node.id, node.state, roles.names()))
}

/// V11, I-d: the role of a member is removed, or its record deleted, only when etcd no longer counts the member.
fn membership_goes_first(state: &State, before: Option<&Node>, after: Option<&Node>) -> Result<(), String> {
    let role =
        |node: Option<&Node>| node.and_then(|node| node.roles.consensus_member.as_ref()).map(|r| r.member_id);
    let (Some(node), Some(was)) = (before, role(before)) else { return Ok(()) };
    let left = role(after) != Some(was) && state.etcd.member(was).is_some();
    demand(!left, || {
        format!("V11 (I-d): {} loses the role of member {was}, which etcd still counts", node.id)
    })
}

/// V11, I-b: a voting member is removed only if the remaining voters keep a quorum: more than half of them were alive
/// and within the caller's reach when the caller listed the members.
pub(crate) fn removal_leaves_a_living_quorum(
    state: &State,
    machine: usize,
    member: u64,
) -> Result<(), String> {
    if !state.etcd.voters().any(|voter| voter.id == member) {
        return Ok(());
    }
    let there = state.listed.get(&machine).cloned().unwrap_or_default();
    let left: Vec<_> = state.etcd.voters().filter(|voter| voter.id != member).collect();
    let alive = left.iter().filter(|voter| there.contains(&voter.id) && !voter.name.is_empty()).count();
    demand(alive > left.len() / 2, || {
        format!(
            "V11 (I-b): member {member} was removed, and of the {} that are left {alive} live",
            left.len()
        )
    })
}

/// V11, I-b: as long as no disk is lost that the quorum needed, no order and no tick costs the cluster its quorum.
pub(crate) fn voters_keep_a_quorum(state: &State) -> Result<(), String> {
    let kept: BTreeSet<u64> =
        state.machines.iter().flat_map(|machine| machine.disk.etcd.values().copied()).collect();
    let voters: Vec<u64> = state.etcd.voters().map(|voter| voter.id).collect();
    let there = voters.iter().filter(|voter| kept.contains(voter)).count();
    demand(voters.is_empty() || there > voters.len() / 2, || {
        format!("V11 (I-b): of the voters {voters:?} only {there} have what etcd keeps")
    })
}

/// V13: the health that a leader reports for a node follows from what the leader can know.
pub(crate) fn health_is_what_the_leader_can_know(
    leading: &Leading,
    node: &Node,
    health: NodeHealth,
) -> Result<(), String> {
    let state = leading.world.look();
    let now = leading.world.sim.now();
    let duration = state
        .last_heartbeats
        .get(&(leading.guard.create_revision, node.id))
        .map(|at| now.saturating_sub(*at));
    let listening = now.saturating_sub(leading.since);
    let right = match (node.state, duration, health) {
        (Life::Up, Some(duration), NodeHealth::Healthy { .. }) => duration <= HEARTBEAT_TIMEOUT,
        (Life::Up, Some(duration), NodeHealth::HeartbeatTimeout { .. }) => duration > HEARTBEAT_TIMEOUT,
        (Life::Up, None, NodeHealth::HeartbeatTimeout { .. }) => listening >= HEARTBEAT_TIMEOUT,
        (Life::Up, None, NodeHealth::Unknown) => listening < HEARTBEAT_TIMEOUT,
        (Life::Up, _, _) => false,
        (_, _, health) => health == NodeHealth::Unknown,
    };
    demand(right, || {
        format!(
            "V13: the health of {} ({:?}) is {health:?}; its last heartbeat came {duration:?} ago, and the leader \
             has listened for {listening:?}",
            node.id, node.state
        )
    })
}

/// V3, and I-c of V11: what remains to be done once everything works again; nothing, in the end.
pub(crate) fn what_is_still_to_be_done(state: &State) -> Vec<String> {
    let mut left = Vec::new();
    let nodes = state.nodes();
    let mut found: BTreeSet<NodeId> = BTreeSet::new();
    for (at, machine) in state.machines.iter().enumerate() {
        let Some(node) = machine.id().and_then(|id| nodes.iter().find(|node| node.id == id)) else {
            left.push(format!("machine {at} is no node"));
            continue;
        };
        found.insert(node.id);
        let wanted = node.roles.consensus_member.as_ref().map(|role| role.member_id);
        let facts = &machine.facts;
        if node.state != Life::Up || !facts.connection {
            left.push(format!("machine {at} is {:?}, connected: {}", node.state, facts.connection));
        }
        if facts.roles.as_ref() != Some(&node.roles) || machine.disk.roles.as_ref() != Some(&node.roles) {
            left.push(format!("machine {at} does not do what its record says"));
        }
        if !facts.settled || facts.running != wanted || machine.member() != wanted {
            left.push(format!(
                "machine {at} runs member {:?} (settled: {}) and is to run {wanted:?}",
                machine.member(),
                facts.settled
            ));
        }
        let listens = machine.curator.is_some().then_some(CURATOR_PORT);
        let status = node.status.as_ref();
        if status.is_none_or(|status| status.address != machine.address || status.curator_port != listens) {
            left.push(format!("the record of machine {at} has an old status"));
        }
    }
    left.extend(
        nodes
            .iter()
            .filter(|node| !found.contains(&node.id))
            .map(|node| format!("{} has a record and no machine", node.id)),
    );
    for member in &state.etcd.members {
        let has = |node: &&Node| {
            node.roles.consensus_member.as_ref().is_some_and(|role| role.member_id == member.id)
                && node.id.to_string() == member.name
        };
        if member.learner || !nodes.iter().any(|node| has(&node)) {
            left.push(format!("member {member:?} has no vote, or no node"));
        }
    }
    left
}
