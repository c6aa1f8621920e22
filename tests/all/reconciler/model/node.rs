//! A machine: it says what it is, waits until its controller may begin, and reconciles when it is elected.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use shepherd::etcd::guard::{
    Guard, WriteError, guarded_read, guarded_write, guarded_write_while, why_not, why_not_while,
};
use shepherd::etcd::key_space::{RECONCILER_LEADER, RECONCILER_STATUS};
use shepherd::etcd::places::{Places, Standing, value_of};
use shepherd::reconciler::gate::{Wait, may_begin};
use shepherd::reconciler::leadership::{Leadership, Listens, Pace, Step, Stored, Write};
use shepherd::reconciler::nodes::{Blocked, Releases, controller};
use shepherd::reconciler::program::Program;
use shepherd::reconciler::status::Status;

use super::observer;
use super::world::{OBJECTS, World};
use crate::cluster_model::sim::OUTSIDE;

/// How long a lease lives without a sign of its owner.
const TTL: Duration = Duration::from_secs(10);
/// How often what changes is looked at.
const LOOK: Duration = Duration::from_millis(200);
/// How long a request to Kubernetes may be under way.
const LATEST: u64 = 4000;

/// Starts a machine after a while. Its record says what it said before, until it says something else.
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

/// Kills whatever runs there.
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
        let recorded = world.get(&own).await.as_ref().and_then(controller);
        let status = world.get(RECONCILER_STATUS).await;
        let status = status.map(|record| Status::decode(&record.value)).transpose();
        let status = status.as_ref().map(Option::as_ref).map_err(ToString::to_string);
        match may_begin(&program, recorded, status) {
            Ok(()) => break,
            Err(wait) if last.as_ref() == Some(&wait) => {}
            Err(wait) => {
                world.count(match wait {
                    Wait::NotRecorded { .. } => "controllers that were not recorded",
                    Wait::Unreadable(_) => "controllers that could not read the status",
                    Wait::NeverDone => "controllers that were the first",
                    Wait::TooOld { .. } => "controllers that were too old",
                    Wait::ObjectsTooOld { .. } => "controllers that needed newer objects",
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

/// The lock that a machine leads by, and until when its lease lives for certain.
#[derive(Default)]
struct Led {
    by: RefCell<Option<Guard>>,
    until: Cell<Duration>,
}

impl Led {
    fn by(&self, guard: &Guard, now: Duration) -> bool {
        self.by.borrow().as_ref() == Some(guard) && now < self.until.get()
    }
}

async fn reconcile(world: &World, machine: usize) {
    let program = world.program(machine);
    let led = Rc::new(Led::default());
    loop {
        world.sim.sleep(LOOK).await;
        match Releases::of(&program, &world.list_nodes().await).may_stand(&program) {
            Ok(()) => {
                let lease = stand(world, machine, &program, &led).await;
                // Whoever leads stops before anybody else can begin.
                *led.by.borrow_mut() = None;
                world.sim.step().await;
                world.change().etcd.revoke(lease);
            }
            Err(Blocked::Unknown(_)) => world.count("looks at unknown controllers"),
            Err(_) => {}
        }
    }
}

/// One round of the election; ends with the lease that it had.
async fn stand(world: &World, machine: usize, program: &Program, led: &Rc<Led>) -> i64 {
    let mut confirmed = world.sim.now();
    let lease = i64::try_from(world.sim.number()).unwrap_or(i64::MAX);
    world.sim.step().await;
    world.change().etcd.grant(lease, TTL, world.sim.now());
    let prefix = RECONCILER_LEADER.range().start;
    let key = format!("{prefix}{lease:x}");
    let create_revision = world.put(&key, Some(value_of(&format!("m{machine}"), TTL)), lease);
    let own = Guard { key, create_revision };
    let mut asked_last = confirmed;
    loop {
        world.sim.sleep(LOOK).await;
        let now = world.sim.now();
        if now >= confirmed + TTL {
            world.count("leases that were not confirmed in time");
            return lease;
        }
        if now >= asked_last + TTL / 3 {
            asked_last = now;
            world.sim.step().await;
            if !world.change().etcd.keep_alive(lease, world.sim.now()) {
                return lease;
            }
            confirmed = asked_last;
        }
        led.until.set(confirmed + TTL);
        if Releases::of(program, &world.list_nodes().await).may_stand(program).is_err() {
            return lease;
        }
        let keys = world.look().etcd.under(&prefix);
        if !keys.iter().any(|key| key.key == own.key) {
            return lease;
        }
        let mut places = Places::default();
        places.complete = true;
        for key in keys {
            places.put(key.key, &key.value, key.create_revision);
        }
        if matches!(places.standing(&own, true), Standing::Leader(_)) && led.by.borrow().is_none() {
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

/// What a leadership is carried out with. After every wait it is asked whether it still is one, as whoever drops the
/// future does.
struct Leader {
    world: World,
    machine: usize,
    program: Program,
    guard: Guard,
    led: Rc<Led>,
}

impl Leader {
    fn leads(&self) -> bool {
        self.led.by(&self.guard, self.world.sim.now())
    }

    async fn lead(&self) {
        let world = &self.world;
        let mut leadership = Leadership::begin(self.program.clone(), Pace::default());
        let (mut nodes, mut changes) = (world.look().nodes_since, world.look().changes_by_hand);
        while self.leads() {
            let now = world.sim.now();
            match leadership.next(now) {
                Step::Read => {
                    let Ok(asked) = guarded_read(&world.namespace, &self.guard, RECONCILER_STATUS) else {
                        return;
                    };
                    let Some(done) = world.transact(&asked, None).await else {
                        leadership.unanswered(world.sim.now());
                        continue;
                    };
                    if !done.succeeded {
                        return world.count("reads refused to a former leader");
                    }
                    let record = done.read.into_iter().next();
                    let revision = record.as_ref().map_or(0, |record| record.mod_revision);
                    world.change().read.insert(self.guard.key.clone(), revision);
                    let stored = record.map(|record| {
                        Status::decode(&record.value).map(|status| Stored { status, revision })
                    });
                    leadership.read(world.sim.now(), stored.transpose());
                }
                Step::Look => {
                    nodes = world.look().nodes_since;
                    let releases = Releases::of(&self.program, &world.list_nodes().await);
                    leadership.looked(world.sim.now(), &releases);
                    match leadership.blocked() {
                        Some(Blocked::Older { .. }) => world.count("waits for older controllers"),
                        Some(Blocked::Unknown(_)) => world.count("waits for unknown controllers"),
                        _ => {}
                    }
                }
                Step::Write(write) => {
                    if !self.write(&mut leadership, write).await {
                        return;
                    }
                }
                Step::Pass => {
                    changes = world.look().changes_by_hand;
                    observer::judge_pass(world, self.machine, &self.program);
                    world.count("passes");
                    let Some(succeeded) = self.pass().await else { return };
                    if succeeded {
                        world.change().passed.insert(self.guard.key.clone());
                    }
                    let random = world.sim.below(1000);
                    let random = f64::from(u32::try_from(random).unwrap_or_default()) / 1000.0;
                    leadership.passed(world.sim.now(), succeeded, random);
                }
                Step::Wait(until) => {
                    world.sim.sleep(until.saturating_sub(now).min(LOOK)).await;
                    let (nodes_now, changes_now) = (world.look().nodes_since, world.look().changes_by_hand);
                    match leadership.listens() {
                        Listens::ToNodes if nodes_now != nodes => leadership.nodes_changed(),
                        // A watch may be late, or not there.
                        Listens::ToObjects if changes_now != changes && world.sim.percent(10) => {
                            leadership.objects_changed();
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    /// Whether it still leads after it.
    async fn write(&self, leadership: &mut Leadership, write: Write) -> bool {
        let world = &self.world;
        let (changes, unchanged) = ([write.change()], write.unchanged());
        let asked = match &unchanged {
            None => guarded_write(&world.namespace, &self.guard, &changes),
            Some(unchanged) => guarded_write_while(&world.namespace, &self.guard, &changes, unchanged),
        };
        let Ok(asked) = asked else { return false };
        let Some(done) = world.transact(&asked, Some((&self.guard, &self.program))).await else {
            leadership.unanswered(world.sim.now());
            return true;
        };
        if done.succeeded {
            leadership.written(world.sim.now(), write.status, done.revision);
            return true;
        }
        let why = match &unchanged {
            None => why_not(&self.guard, &changes, &done.read),
            Some(unchanged) => why_not_while(&self.guard, &changes, unchanged, &done.read),
        };
        if matches!(why, WriteError::LostLeadership(_)) {
            world.count("writes refused to a former leader");
            return false;
        }
        world.count("writes refused because something changed");
        leadership.not_written();
        true
    }

    /// Compares all objects, and writes those that differ. `None` where it was dropped in the middle.
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
