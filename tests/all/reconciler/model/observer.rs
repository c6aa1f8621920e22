//! Invariants of the reconciler model, checked by an observer with complete knowledge.

use std::time::Duration;

use shepherd::etcd::guard::LeaderGuard;
use shepherd::etcd::key_space::{RECONCILER_LEADER, RECONCILER_STATUS};
use shepherd::reconciler::controller_releases::{ControllerRelease, ControllerReleases, controller_release};
use shepherd::reconciler::program::Program;
use shepherd::reconciler::status::{ReconcilerState as Doing, ReconcilerStatus};

use super::world::{State, World};
use crate::cluster_model::store::Done;

/// How long a program may take to notice that records have changed.
const SIGHT: Duration = Duration::from_secs(3);
/// How long a pass may continue under a status that was damaged meanwhile.
const ONE_PASS: Duration = Duration::from_secs(15);

/// Checks a write of the status, successful or not.
pub(crate) fn judge_write(world: &World, guard: &LeaderGuard, program: &Program, done: &Done) {
    let Some((_, before)) = done.before.iter().find(|(key, _)| key == RECONCILER_STATUS) else { return };
    let judged = {
        let mut state = world.change();
        // The writer knows what it has written if it receives the response. If not, it reads again.
        let read = state.read.insert(guard.key.clone(), done.revision);
        let replaced = before.as_ref().map_or(0, |pair| pair.written);
        let before = before.as_ref().and_then(|pair| ReconcilerStatus::decode(&pair.value).ok());
        let now = state.status();
        drop(state);
        let state = world.look();
        only_the_leader_writes(&state, guard)
            .and_then(|()| written_over_what_was_read(read, replaced))
            .and_then(|()| match &now {
                Ok(Some(now)) => raised_with_proof(&state, before.as_ref(), now)
                    .and_then(|()| done_is_what_was_done(&state, guard, program, now))
                    .map(|()| (before, now.clone())),
                other => Err(format!("a leader wrote a status that is {other:?}")),
            })
    };
    match judged {
        Err(violation) => world.demand(Err(violation)),
        Ok((before, now)) => {
            world.note(format_args!("{} by {}: {before:?} becomes {now:?}", guard.key, program.version));
            world.count("statuses written");
            if let Some(before) = before {
                if now.lowest_compatible > before.lowest_compatible && now.state == Doing::Working {
                    world.count("statuses that excluded more");
                }
                if now.version.release() < before.version.release() {
                    world.count("statuses that promised less");
                }
            }
            let judged = serving_machines_suit_the_status(&world.look(), &world.programs);
            world.demand(judged);
        }
    }
}

/// K4: only the holder of the lease writes.
fn only_the_leader_writes(state: &State, guard: &LeaderGuard) -> Result<(), String> {
    let mut keys = state.etcd.under(&RECONCILER_LEADER.range().start);
    keys.sort_by_key(|key| key.create_revision);
    match keys.first() {
        Some(first) if first.key == guard.key && first.create_revision == guard.create_revision => Ok(()),
        first => Err(format!("K4: {} wrote the status, and {first:?} leads", guard.key)),
    }
}

/// K4: the status is written only over the revision that was read.
fn written_over_what_was_read(read: Option<i64>, replaced: i64) -> Result<(), String> {
    if read == Some(replaced) {
        return Ok(());
    }
    Err(format!("K4: a status of revision {replaced} was written over by one who had read {read:?}"))
}

/// K2: the lowest compatible release is raised only with records that prove that no controller is older.
fn raised_with_proof(
    state: &State,
    before: Option<&ReconcilerStatus>,
    now: &ReconcilerStatus,
) -> Result<(), String> {
    // Without a status, no controller has started.
    if before.is_none_or(|before| now.lowest_compatible <= before.lowest_compatible) {
        return Ok(());
    }
    for record in state.nodes().records {
        match controller_release(&record) {
            None => {}
            Some(ControllerRelease::Known(release)) if release >= now.lowest_compatible => {}
            found => return Err(format!("K2: {now:?} excludes more, and {} is {found:?}", record.key)),
        }
    }
    Ok(())
}

/// K6: the status is done only if the objects were reconciled.
fn done_is_what_was_done(
    state: &State,
    guard: &LeaderGuard,
    program: &Program,
    now: &ReconcilerStatus,
) -> Result<(), String> {
    if now.state == Doing::Done
        && (*now != ReconcilerStatus::completed_by(program) || !state.passed.contains(&guard.key))
    {
        return Err(format!("K6: {} wrote {now:?}, and has not done it", program.version));
    }
    Ok(())
}

/// K1 at the start, and K2 from then on.
fn serving_machines_suit_the_status(state: &State, programs: &[Program]) -> Result<(), String> {
    let Ok(Some(status)) = state.status() else { return Ok(()) };
    for (at, machine) in state.machines.iter().enumerate().filter(|(_, machine)| machine.serving) {
        let program = &programs[machine.release];
        if program.release() < status.lowest_compatible || status.version.release() < program.needs_objects_of
        {
            return Err(format!(
                "K1, K2: machine {at} serves with {}, and the status is {status:?}",
                program.version
            ));
        }
    }
    Ok(())
}

/// K1: a controller starts.
pub(crate) fn judge_beginning(world: &World, machine: usize) {
    let judged = {
        let state = world.look();
        match state.status() {
            Ok(Some(_)) => serving_machines_suit_the_status(&state, &world.programs),
            // The status existed when it was read.
            Err(_) if state.damaged.as_ref().is_some_and(|(at, _)| world.sim.now() < *at + SIGHT) => Ok(()),
            other => Err(format!("K1: machine {machine} begins, and the status is {other:?}")),
        }
    };
    world.demand(judged);
}

/// K3 and K5: a leader is about to compare objects, and to change those that differ.
pub(crate) fn judge_pass(world: &World, machine: usize, program: &Program) {
    let judged = {
        let state = world.look();
        // Not by `may_stand`, which is under test.
        let seen = ControllerReleases::from_listing(program, &state.nodes());
        let newest = seen.highest == program.release() && seen.unknown.is_empty();
        let in_time = world.sim.now() <= state.nodes_since.max(state.machines[machine].went_on) + SIGHT;
        if newest || in_time {
            holds_before_and_after(world, &state, program)
        } else {
            Err(format!("K5: {} reconciles, and the controllers are {seen:?}", program.version))
        }
    };
    world.demand(judged);
}

/// K3: there is no status, or the status promises no more than is true both before and after.
fn holds_before_and_after(world: &World, state: &State, program: &Program) -> Result<(), String> {
    match state.status() {
        Ok(None) => Ok(()),
        Ok(Some(status))
            if status.lowest_compatible >= program.breaks_api_servers_below
                && status.version.release() <= program.release() =>
        {
            Ok(())
        }
        Err(_) if state.damaged.as_ref().is_some_and(|(at, _)| world.sim.now() < *at + ONE_PASS) => Ok(()),
        other => Err(format!("K3: {} changes objects, and the status is {other:?}", program.version)),
    }
}

/// K3: checks a write of an object that takes effect, even long after it was sent and from a former leader. `first`
/// means that it was sent when there was no status yet: no controller waits for such a write.
pub(crate) fn judge_arrival(world: &World, program: &Program, first: bool) {
    if first {
        return;
    }
    let judged = {
        let state = world.look();
        holds_before_and_after(world, &state, program).and_then(|()| {
            for (at, machine) in state.machines.iter().enumerate().filter(|(_, machine)| machine.serving) {
                let serving = &world.programs[machine.release];
                if serving.release() < program.breaks_api_servers_below
                    || program.release() < serving.needs_objects_of
                {
                    let (one, other) = (&program.version, &serving.version);
                    return Err(format!(
                        "K3: an object becomes that of {one} while machine {at} serves with {other}"
                    ));
                }
            }
            Ok(())
        })
    };
    world.demand(judged);
}
