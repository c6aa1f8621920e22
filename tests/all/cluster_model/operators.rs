//! Disturbances: owners who order at random, and faults at random times.

use std::collections::BTreeSet;
use std::time::Duration;

use shepherd::curator::node_lifecycle::DeleteBypass;
use shepherd::curator::role_orders::RoleOrder;
use shepherd::curator::service::error::ServiceError;
use shepherd::curator::tickets::TicketSecret;
use shepherd::curator_client::node::NodeState as Life;
use shepherd::curator_client::node_id::NodeId;
use shepherd::model::node_role::{DeclaredRole, NodeRole};
use tonic::Code;

use super::invariants;
use super::node;
use super::service::as_owner;
use super::world::{Disk, MACHINES, StartupOrder, World};

/// The roles that operators have declared.
pub(crate) fn declared() -> BTreeSet<DeclaredRole> {
    "web".parse().into_iter().collect()
}

/// Makes the ticket that machines join with, as soon as a curator leads.
pub(crate) async fn make_ticket(world: World) {
    let secret = TicketSecret::new(world.sim.bytes());
    loop {
        let create =
            as_owner(&world, "Tickets/Create", None, async |leading| leading.create_ticket(&secret).await);
        if create.await.is_ok() {
            return world.change().secrets.push(secret);
        }
        world.sim.sleep(Duration::from_secs(1)).await;
    }
}

/// Gives orders until `end`, and repeats those that may succeed later.
pub(crate) async fn order(world: World, end: Duration) {
    while world.sim.now() < end {
        world.sim.sleep(world.sim.between(500, 5000)).await;
        match world.sim.below(100) {
            0..20 => approve(&world).await,
            20..70 => roles(&world).await,
            70..74 => decommission(&world).await,
            74..80 => delete(&world).await,
            _ => list(&world).await,
        }
    }
}

async fn patiently(world: &World, call: impl AsyncFn() -> Result<(), ServiceError>) {
    for _ in 0..4 {
        match call().await {
            Err(error) if error.code() == Code::Unavailable => {
                world.sim.sleep(world.sim.between(500, 2000)).await;
            }
            answer => {
                if let Err(error) = answer {
                    world.note(format_args!("refused: {error}"));
                }
                return;
            }
        }
    }
}

async fn approve(world: &World) {
    let at = world.sim.below(MACHINES);
    let Some(key) = world.look().machines[at].disk.key else { return };
    patiently(world, async || {
        as_owner(world, "Management/Approve", None, async |leading| leading.approve(key).await).await
    })
    .await;
}

/// A node that has a record.
fn anyone(world: &World) -> Option<NodeId> {
    let nodes = world.look().nodes();
    (!nodes.is_empty()).then(|| nodes[world.sim.below(nodes.len())].id)
}

async fn roles(world: &World) {
    let Some(id) = anyone(world) else { return };
    let (mut give, mut take) = (BTreeSet::new(), BTreeSet::new());
    match world.sim.below(10) {
        // Orders about consensus alone are seldom rejected, so that this role changes more often than by chance.
        0..2 => take.extend([NodeRole::ConsensusMember, NodeRole::KubernetesController]),
        2..4 => {
            give.insert(NodeRole::ConsensusMember);
        }
        _ => {
            for role in ["consensus-member", "kubernetes-controller", "kubernetes-worker", "web"] {
                let role: NodeRole = role.parse().unwrap_or(NodeRole::ConsensusMember);
                match world.sim.below(10) {
                    0..3 => {
                        give.insert(role);
                    }
                    3..5 => {
                        take.insert(role);
                    }
                    _ => {}
                }
            }
        }
    }
    // A contradictory order now and then.
    if world.sim.percent(2) {
        take.extend(give.iter().cloned());
    }
    let order = RoleOrder { add: give, remove: take };
    world.note(format_args!("ordered of {id}: {order:?}"));
    patiently(world, async || {
        let update = as_owner(world, "Management/UpdateRoles", Some(id), async |leading| {
            leading.update_roles(id, &order).await
        });
        update.await
    })
    .await;
}

async fn decommission(world: &World) {
    let Some(id) = anyone(world) else { return };
    patiently(world, async || {
        let call = as_owner(world, "Management/Decommission", Some(id), async |leading| {
            leading.decommission(id).await
        });
        call.await
    })
    .await;
}

async fn delete(world: &World) {
    let Some(id) = anyone(world) else { return };
    let bypass = DeleteBypass { has_roles: world.sim.percent(50), not_decommissioned: world.sim.percent(50) };
    delete_node(world, id, bypass).await;
}

async fn delete_node(world: &World, id: NodeId, bypass: DeleteBypass) {
    world.note(format_args!("{id} is to be deleted"));
    patiently(world, async || {
        let call =
            as_owner(world, "Management/Delete", Some(id), async |leading| leading.delete(id, bypass).await);
        call.await
    })
    .await;
}

/// Lists the nodes, and checks the health that is reported for each.
async fn list(world: &World) {
    let listed = as_owner(world, "Management/ListNodes", None, async |leading| {
        let stored = leading.nodes().await?;
        let now = world.sim.now();
        for node in stored.nodes.values() {
            let health = leading.heartbeats.borrow().node_health(node, now);
            world.demand(invariants::health_is_what_the_leader_can_know(&leading, node, health));
            world.count(match health {
                shepherd::curator::node_health::NodeHealth::Unknown => "nodes whose health is unknown",
                shepherd::curator::node_health::NodeHealth::HeartbeatTimeout { .. } => {
                    "nodes whose health is silent"
                }
                shepherd::curator::node_health::NodeHealth::Healthy { .. } => "nodes whose health is healthy",
            });
        }
        Ok(())
    });
    let _ = listed.await;
}

/// Starts a machine, unless it runs.
fn power_on(world: &World, at: usize) {
    world.machine(at, |machine| machine.power = true);
    if world.look().machines[at].role_server.is_none() {
        node::start(world, at);
    }
}

fn power_off(world: &World, at: usize) {
    node::crash(world, at);
    world.machine(at, |machine| (machine.power, machine.etcd) = (false, None));
}

/// Gives the machine another disk, with an order to join on it.
fn another_disk(world: &World, at: usize) {
    power_off(world, at);
    world.machine(at, |machine| machine.disk = Disk { order: Some(StartupOrder::Join), ..Disk::default() });
}

fn heal(world: &World) {
    for at in 0..MACHINES {
        world.machine(at, |machine| machine.part = 0);
    }
}

/// Causes faults until `end`. Then everything works again.
pub(crate) async fn disturb(world: World, end: Duration) {
    while world.sim.now() < end {
        world.sim.sleep(world.sim.between(1000, 12_000)).await;
        let at = world.sim.below(MACHINES);
        match world.sim.below(100) {
            0..25 => {
                world.count("role servers killed");
                world.note(format_args!("machine {at}: its role server is killed"));
                node::crash(&world, at);
                let world = world.clone();
                super::service::outside(&world.clone(), async move {
                    world.sim.sleep(world.sim.between(200, 6000)).await;
                    if world.look().machines[at].power {
                        power_on(&world, at);
                    }
                });
            }
            25..45 => {
                world.count("power cuts");
                world.note(format_args!("machine {at}: its power is cut"));
                power_off(&world, at);
                back_later(&world, at);
            }
            45..65 => {
                world.count("partitions");
                for at in 0..MACHINES {
                    let part = world.sim.below(2);
                    world.machine(at, |machine| machine.part = part);
                }
                let parts: Vec<usize> = world.look().machines.iter().map(|machine| machine.part).collect();
                world.note(format_args!("the network is cut into {parts:?}"));
                let world = world.clone();
                super::service::outside(&world.clone(), async move {
                    world.sim.sleep(world.sim.between(3000, 30_000)).await;
                    heal(&world);
                    world.note(format_args!("the network is whole"));
                });
            }
            65..80 => {
                let curator = world.look().machines[at].curator.as_ref().map(|curator| curator.process);
                let role_server = world.look().machines[at].role_server;
                let time = world.sim.between(5000, 25_000);
                world.note(format_args!("machine {at}: its role server stands still for {time:?}"));
                for process in curator.into_iter().chain(role_server) {
                    world.count("processes stopped");
                    world.sim.stop_for(process, time);
                }
            }
            80..88 => {
                let used = world.look().machines[at].disk.key.is_some();
                let lose = used && world.changing.get() == 0 && world.look().can_lose_disk(at);
                if lose {
                    world.count("disks lost");
                    world.note(format_args!("machine {at}: its disk is lost"));
                    another_disk(&world, at);
                    back_later(&world, at);
                }
            }
            88..95 => {
                world.count("roles damaged on a disk");
                node::crash(&world, at);
                world.machine(at, |machine| machine.disk.roles = None);
                back_later(&world, at);
            }
            95..97 => {
                world.count("leaps of the clock");
                world.note(format_args!("40 days go by at once"));
                world.change().leap += Duration::from_hours(40 * 24);
            }
            _ => {
                world.count("power cuts of all");
                world.note(format_args!("the power of all machines is cut"));
                for at in 0..MACHINES {
                    power_off(&world, at);
                    back_later(&world, at);
                }
            }
        }
    }
    world.note(format_args!("everything works again"));
    heal(&world);
    world.sim.go_on();
    for at in 0..MACHINES {
        power_on(&world, at);
    }
}

fn back_later(world: &World, at: usize) {
    let world = world.clone();
    super::service::outside(&world.clone(), async move {
        world.sim.sleep(world.sim.between(1000, 20_000)).await;
        power_on(&world, at);
    });
}

/// An owner who wants all machines in the cluster: machines that are out get another disk, machines that request to
/// join are approved, and a node without a machine is deleted.
pub(crate) async fn tidy(world: World) {
    make_ticket(world.clone()).await;
    loop {
        world.sim.sleep(Duration::from_secs(2)).await;
        let nodes = world.look().nodes();
        for at in 0..MACHINES {
            let (id, enrolled) = {
                let machine = &world.look().machines[at];
                (machine.id(), machine.disk.credentials.is_some())
            };
            let record = nodes.iter().find(|node| Some(node.id) == id);
            match record.map(|node| node.state) {
                Some(Life::New) => approve_key(&world, at).await,
                Some(Life::Decommissioned) => {
                    another_disk(&world, at);
                    power_on(&world, at);
                }
                None if enrolled && !world.look().etcd.members.is_empty() => {
                    another_disk(&world, at);
                    power_on(&world, at);
                }
                None | Some(Life::Standby | Life::Up) => {}
            }
        }
        let machines: BTreeSet<NodeId> =
            world.look().machines.iter().filter_map(super::world::Machine::id).collect();
        for node in nodes.iter().filter(|node| !machines.contains(&node.id)) {
            delete_node(&world, node.id, DeleteBypass { has_roles: true, not_decommissioned: true }).await;
        }
    }
}

async fn approve_key(world: &World, at: usize) {
    let Some(key) = world.look().machines[at].disk.key else { return };
    let call = as_owner(world, "Management/Approve", None, async |leading| leading.approve(key).await);
    let _ = call.await;
}
