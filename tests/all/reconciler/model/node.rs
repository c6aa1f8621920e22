//! A machine: it reports its release, waits until its controller may start, and reconciles when it is elected.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use shepherd::etcd::election_view::{CandidateRole, ElectionView, encode_candidate};
use shepherd::etcd::guard::{
    LeaderGuard, WriteError, conditional_write_request, explain_failed_conditional_write,
    explain_failed_write, guarded_read_request, guarded_write_request,
};
use shepherd::etcd::key_space::{RECONCILER_LEADER, RECONCILER_STATUS};
use shepherd::reconciler::controller_releases::{ControllerReleases, ReleaseBlock, controller_release};
use shepherd::reconciler::gate::{GateWait, check_gate};
use shepherd::reconciler::leadership::{
    LeaderStep, Leadership, ReconcileTiming, StatusWrite, StoredStatus, WakeSource,
};
use shepherd::reconciler::program::Program;
use shepherd::reconciler::status::ReconcilerStatus;

use super::observer;
use super::world::{OBJECTS, World};
use crate::cluster_model::sim::OUTSIDE;

/// How long a lease lives without renewal.
const TTL: Duration = Duration::from_secs(10);
/// The interval between two polls for changes.
const LOOK: Duration = Duration::from_millis(200);
/// How long a request to Kubernetes may be under way.
const LATEST: u64 = 4000;

/// Starts a machine after a while. Its record has its former report until it reports again.
pub(crate) fn start(world: &World, machine: usize, after: Duration) {
    let process = world.sim.number();
    world.change().machines[machine].process = process;
    world.sim.spawn(process, {
        let world = world.clone();
        async move {
            world.sim.sleep(after + world.sim.between(50, 3000)).await;
            world.report(machine);
        }
    });
    world.sim.spawn(process, {
        let world = world.clone();
        async move {
            world.sim.sleep(after).await;
            begin_when_ready(&world, machine).await;
        }
    });
    world.sim.spawn(process, {
        let world = world.clone();
        async move {
            world.sim.sleep(after).await;
            reconcile(&world, machine).await;
        }
    });
}

/// Kills all processes of a machine.
pub(crate) fn kill(world: &World, machine: usize) {
    let process = {
        let mut state = world.change();
        state.machines[machine].serving = false;
        state.machines[machine].process
    };
    world.sim.kill(process);
}

async fn begin_when_ready(world: &World, machine: usize) {
    let (program, own) = (world.program(machine), World::key_of(machine));
    let mut last = None;
    loop {
        let recorded = world.get(&own).await.as_ref().and_then(controller_release);
        let status = world.get(RECONCILER_STATUS).await;
        let status = status.map(|record| ReconcilerStatus::decode(&record.value)).transpose();
        let status = status.as_ref().map(Option::as_ref).map_err(ToString::to_string);
        match check_gate(&program, recorded, status) {
            Ok(()) => break,
            Err(wait) if last.as_ref() == Some(&wait) => {}
            Err(wait) => {
                world.count(match wait {
                    GateWait::NotRecorded { .. } => "controllers that were not recorded",
                    GateWait::StatusUnreadable(_) => "controllers that could not read the status",
                    GateWait::NeverReconciled => "controllers that were the first",
                    GateWait::ReleaseTooOld { .. } => "controllers that were too old",
                    GateWait::ObjectsTooOld { .. } => "controllers that needed newer objects",
                });
                last = Some(wait);
            }
        }
        world.sim.sleep(LOOK).await;
    }
    world.change().machines[machine].serving = true;
    world.count("controllers that began");
    world.note(format_args!("machine {machine} begins to serve with {}", program.version));
    observer::judge_beginning(world, machine);
}

/// The key by which a machine leads, and until when its lease certainly lives.
#[derive(Default)]
struct Led {
    by: RefCell<Option<LeaderGuard>>,
    until: Cell<Duration>,
}

impl Led {
    fn by(&self, guard: &LeaderGuard, now: Duration) -> bool {
        self.by.borrow().as_ref() == Some(guard) && now < self.until.get()
    }
}

async fn reconcile(world: &World, machine: usize) {
    let program = world.program(machine);
    let led = Rc::new(Led::default());
    loop {
        world.sim.sleep(LOOK).await;
        match ControllerReleases::from_listing(&program, &world.list_nodes().await).check_candidacy(&program)
        {
            Ok(()) => {
                let lease = stand(world, machine, &program, &led).await;
                // The leader stops before any other node can begin.
                *led.by.borrow_mut() = None;
                world.sim.step().await;
                world.change().etcd.revoke(lease);
            }
            Err(ReleaseBlock::Unknown(_)) => world.count("looks at unknown controllers"),
            Err(_) => {}
        }
    }
}

/// One round of the election. It ends with its lease.
async fn stand(world: &World, machine: usize, program: &Program, led: &Rc<Led>) -> i64 {
    let mut confirmed = world.sim.now();
    let lease = i64::try_from(world.sim.number()).unwrap_or(i64::MAX);
    world.sim.step().await;
    world.change().etcd.grant(lease, TTL, world.sim.now());
    let prefix = RECONCILER_LEADER.range().start;
    let key = format!("{prefix}{lease:x}");
    let create_revision = world.put(&key, Some(encode_candidate(&format!("m{machine}"), TTL)), lease);
    let own = LeaderGuard { key, create_revision };
    let mut requested_last = confirmed;
    loop {
        world.sim.sleep(LOOK).await;
        let now = world.sim.now();
        if now >= confirmed + TTL {
            world.count("leases that were not confirmed in time");
            return lease;
        }
        if now >= requested_last + TTL / 3 {
            requested_last = now;
            world.sim.step().await;
            if !world.change().etcd.keep_alive(lease, world.sim.now()) {
                return lease;
            }
            confirmed = requested_last;
        }
        led.until.set(confirmed + TTL);
        if ControllerReleases::from_listing(program, &world.list_nodes().await)
            .check_candidacy(program)
            .is_err()
        {
            return lease;
        }
        let keys = world.look().etcd.under(&prefix);
        if !keys.iter().any(|key| key.key == own.key) {
            return lease;
        }
        let mut places = ElectionView::default();
        places.is_complete = true;
        for key in keys {
            places.put_key(key.key, &key.value, key.create_revision);
        }
        if matches!(places.candidate_role(&own, true), CandidateRole::Leader(_)) && led.by.borrow().is_none()
        {
            *led.by.borrow_mut() = Some(own.clone());
            world.count("leaderships");
            world.note(format_args!("machine {machine} leads with {} by {}", program.version, own.key));
            let process = world.look().machines[machine].process;
            let leader = Leader {
                world: world.clone(),
                machine,
                program: program.clone(),
                guard: own.clone(),
                led: led.clone(),
            };
            world.sim.spawn(process, async move { leader.lead().await });
        }
    }
}

/// The context of one leadership. After every wait it checks whether it still leads, as a caller that drops the future
/// does.
struct Leader {
    world: World,
    machine: usize,
    program: Program,
    guard: LeaderGuard,
    led: Rc<Led>,
}

impl Leader {
    fn leads(&self) -> bool {
        self.led.by(&self.guard, self.world.sim.now())
    }

    async fn lead(&self) {
        let world = &self.world;
        let mut leadership = Leadership::new(self.program.clone(), ReconcileTiming::default());
        let (mut nodes, mut changes) = (world.look().nodes_since, world.look().changes_by_hand);
        while self.leads() {
            let now = world.sim.now();
            match leadership.next_step(now) {
                LeaderStep::ReadStatus => {
                    let Ok(request) = guarded_read_request(&world.namespace, &self.guard, RECONCILER_STATUS)
                    else {
                        return;
                    };
                    let Some(done) = world.transact(&request, None).await else {
                        leadership.on_etcd_error(world.sim.now());
                        continue;
                    };
                    if !done.succeeded {
                        return world.count("reads refused to a former leader");
                    }
                    let record = done.read.into_iter().next();
                    let revision = record.as_ref().map_or(0, |record| record.mod_revision);
                    world.change().read.insert(self.guard.key.clone(), revision);
                    let stored = record.map(|record| {
                        ReconcilerStatus::decode(&record.value)
                            .map(|status| StoredStatus { status, revision })
                    });
                    leadership.on_status_read(world.sim.now(), stored.transpose());
                }
                LeaderStep::ReadReleases => {
                    nodes = world.look().nodes_since;
                    let releases = ControllerReleases::from_listing(&self.program, &world.list_nodes().await);
                    leadership.on_releases_read(world.sim.now(), &releases);
                    match leadership.blocked() {
                        Some(ReleaseBlock::Older { .. }) => world.count("waits for older controllers"),
                        Some(ReleaseBlock::Unknown(_)) => world.count("waits for unknown controllers"),
                        _ => {}
                    }
                }
                LeaderStep::WriteStatus(write) => {
                    if !self.write(&mut leadership, write).await {
                        return;
                    }
                }
                LeaderStep::Reconcile => {
                    changes = world.look().changes_by_hand;
                    observer::judge_pass(world, self.machine, &self.program);
                    world.count("passes");
                    let Some(succeeded) = self.pass().await else { return };
                    if succeeded {
                        world.change().passed.insert(self.guard.key.clone());
                    }
                    let random = world.sim.below(1000);
                    let random = f64::from(u32::try_from(random).unwrap_or_default()) / 1000.0;
                    leadership.on_pass_finished(world.sim.now(), succeeded, random);
                }
                LeaderStep::Wait(until) => {
                    world.sim.sleep(until.saturating_sub(now).min(LOOK)).await;
                    let (nodes_now, changes_now) = (world.look().nodes_since, world.look().changes_by_hand);
                    match leadership.wake_source() {
                        WakeSource::NodeChanges if nodes_now != nodes => leadership.on_nodes_changed(),
                        // A watch may be late, or missing.
                        WakeSource::ObjectChanges if changes_now != changes && world.sim.percent(10) => {
                            leadership.on_objects_changed();
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    /// Writes the status. Returns whether it still leads after it.
    async fn write(&self, leadership: &mut Leadership, write: StatusWrite) -> bool {
        let world = &self.world;
        let (changes, unchanged) = ([write.to_change()], write.unchanged_keys());
        let result = match &unchanged {
            None => guarded_write_request(&world.namespace, &self.guard, &changes),
            Some(unchanged) => conditional_write_request(&world.namespace, &self.guard, &changes, unchanged),
        };
        let Ok(request) = result else { return false };
        let Some(done) = world.transact(&request, Some((&self.guard, &self.program))).await else {
            leadership.on_etcd_error(world.sim.now());
            return true;
        };
        if done.succeeded {
            leadership.on_status_written(world.sim.now(), write.status, done.revision);
            return true;
        }
        let why = match &unchanged {
            None => explain_failed_write(&self.guard, &changes, &done.read),
            Some(unchanged) => explain_failed_conditional_write(&self.guard, &changes, unchanged, &done.read),
        };
        if matches!(why, WriteError::LostLeadership(_)) {
            world.count("writes refused to a former leader");
            return false;
        }
        world.count("writes refused because something changed");
        leadership.on_write_conflict();
        true
    }

    /// Compares all objects, and writes those that differ. `None` if it was dropped in the middle.
    async fn pass(&self) -> Option<bool> {
        let world = &self.world;
        let own = world.programs.iter().position(|program| *program == self.program)?;
        for object in 0..OBJECTS {
            world.sim.step().await;
            if !self.leads() {
                return None;
            }
            if world.look().objects[object] == Some(own) {
                continue;
            }
            if world.sim.percent(5) {
                return Some(false);
            }
            let first = world.look().status() == Ok(None);
            let arrived = Rc::new(Cell::new(false));
            let under_way = if world.sim.percent(20) { LATEST } else { 50 };
            let arrives = world.sim.between(1, under_way);
            world.sim.spawn(OUTSIDE, {
                let (world, program, arrived) = (world.clone(), self.program.clone(), arrived.clone());
                let (led, guard) = (self.led.clone(), self.guard.clone());
                async move {
                    world.sim.sleep(arrives).await;
                    if !led.by(&guard, world.sim.now()) {
                        world.count("objects that arrived late");
                    }
                    world.change().objects[object] = Some(own);
                    world.note(format_args!("object {object} becomes that of {}", program.version));
                    world.count("objects written");
                    observer::judge_arrival(&world, &program, first);
                    arrived.set(true);
                }
            });
            while !arrived.get() {
                world.sim.sleep(Duration::from_millis(20)).await;
                if !self.leads() {
                    return None;
                }
            }
        }
        Some(true)
    }
}
