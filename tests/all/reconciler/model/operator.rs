//! Operators and accidents of the model.

use std::time::Duration;

use shepherd::etcd::key_space::{RECONCILER_LEADER, RECONCILER_STATUS};

use super::node;
use super::world::{MACHINES, OBJECTS, RELEASES, World};
use crate::cluster_model::sim::OUTSIDE;

/// Ends leases that are not renewed.
pub(crate) async fn keep_etcd(world: World) {
    loop {
        world.sim.sleep(Duration::from_millis(400)).await;
        let over = world.change().etcd.expire(world.sim.now());
        (0..over).for_each(|_| world.count("leases ended"));
    }
}

/// Acts every few seconds until the end. Most of the time a release is rolled out, machine by machine, or is rolled
/// back.
pub(crate) async fn disturb(world: World, end: Duration) {
    let mut target = world.sim.below(RELEASES);
    while world.sim.now() < end {
        world.sim.sleep(world.sim.between(1000, 15_000)).await;
        let machine = world.sim.below(MACHINES);
        match world.sim.below(100) {
            0..40 => {
                if world.sim.percent(20) {
                    target = world.sim.below(RELEASES);
                }
                become_release(&world, machine, target);
            }
            40..48 => {
                world.count("machines killed");
                world.note(format_args!("machine {machine} is killed"));
                node::kill(&world, machine);
                node::start(&world, machine, world.sim.between(500, 20_000));
            }
            48..58 => {
                world.count("machines stopped");
                let (process, time) =
                    (world.look().machines[machine].process, world.sim.between(3000, 25_000));
                world.note(format_args!("machine {machine} stands still for {time:?}"));
                world.sim.stop_for(process, time);
                world.change().machines[machine].went_on = world.sim.now() + time;
            }
            58..68 => change_role(&world, machine),
            68..84 => change_object(&world),
            84..88 => damage_status(&world),
            88..94 => end_lease(&world),
            _ => damage_node(&world, machine),
        }
    }
}

/// Installs another release on a machine.
fn become_release(world: &World, machine: usize, release: usize) {
    if world.look().machines[machine].release == release {
        return;
    }
    world.count("releases changed");
    world.note(format_args!("machine {machine} becomes {}", world.programs[release].version));
    node::kill(world, machine);
    world.change().machines[machine].release = release;
    node::start(world, machine, world.sim.between(500, 10_000));
}

/// Removes the role, or adds it again. The processes there have ended before the record changes.
fn change_role(world: &World, machine: usize) {
    let role = {
        let mut state = world.change();
        let machine = &mut state.machines[machine];
        machine.role = !machine.role;
        machine.role
    };
    node::kill(world, machine);
    if role {
        node::start(world, machine, Duration::ZERO);
    } else {
        world.count("roles taken");
        if world.sim.percent(30) {
            world.put(&World::key_of(machine), None, 0);
        } else {
            world.report(machine);
        }
    }
}

fn change_object(world: &World) {
    let object = world.sim.below(OBJECTS);
    world.count("objects changed by hand");
    world.note(format_args!("object {object} is changed by hand"));
    let mut state = world.change();
    state.objects[object] = None;
    state.changes_by_hand += 1;
}

/// Ends the lease of the leader, which does not notice.
fn end_lease(world: &World) {
    let mut keys = world.look().etcd.under(&RECONCILER_LEADER.range().start);
    keys.sort_by_key(|key| key.create_revision);
    if let Some(first) = keys.into_iter().next() {
        world.count("leases ended by hand");
        world.note(format_args!("the lease of {} is ended", first.key));
        world.put(&first.key, None, 0);
    }
}

fn damage_status(world: &World) {
    let Some(record) = world.look().etcd.record(RECONCILER_STATUS) else { return };
    if world.look().damaged.is_some() {
        return;
    }
    world.count("statuses damaged");
    world.note(format_args!("the status is damaged"));
    world.change().damaged = Some((world.sim.now(), record.value));
    world.put(RECONCILER_STATUS, Some(b"\xff\xff".to_vec()), 0);
    let time = world.sim.between(20_000, 50_000);
    world.sim.spawn(OUTSIDE, {
        let world = world.clone();
        async move {
            world.sim.sleep(time).await;
            let damaged = world.change().damaged.take();
            if let Some((_, value)) = damaged {
                world.note(format_args!("the status is repaired"));
                world.put(RECONCILER_STATUS, Some(value), 0);
            }
        }
    });
}

/// An unreadable record of a machine that continues its work.
fn damage_node(world: &World, machine: usize) {
    let key = World::key_of(machine);
    let Some(record) = world.look().etcd.record(&key) else { return };
    world.count("nodes damaged");
    world.note(format_args!("the record of machine {machine} is damaged"));
    let damaged = world.put(&key, Some(b"\xff\xff".to_vec()), 0);
    let time = world.sim.between(5000, 25_000);
    world.sim.spawn(OUTSIDE, {
        let world = world.clone();
        async move {
            world.sim.sleep(time).await;
            let now = world.look().etcd.record(&key);
            // The machine may have reported meanwhile.
            if now.is_some_and(|now| now.mod_revision == damaged) {
                world.note(format_args!("the record of machine {machine} is repaired"));
                world.put(&key, Some(record.value), 0);
            }
        }
    });
}

/// No more faults occur, and all machines become one release.
pub(crate) fn settle(world: &World) -> usize {
    let target = world.sim.below(RELEASES);
    world.sim.go_on();
    for machine in 0..MACHINES {
        if !world.look().machines[machine].role {
            change_role(world, machine);
        }
        become_release(world, machine, target);
        // A machine repeats its report if the record differs from it.
        world.sim.spawn(OUTSIDE, {
            let world = world.clone();
            async move {
                world.sim.sleep(world.sim.between(15_000, 20_000)).await;
                world.report(machine);
            }
        });
    }
    world.sim.spawn(OUTSIDE, {
        let world = world.clone();
        async move {
            world.sim.sleep(Duration::from_secs(100)).await;
            if world.sim.percent(50) {
                world.count("statuses deleted");
                world.note(format_args!("the status is deleted"));
                world.put(RECONCILER_STATUS, None, 0);
            }
            change_object(&world);
        }
    });
    target
}
