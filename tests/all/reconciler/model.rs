//! Reconcilers and controllers of several releases in a cluster in which everything but their decisions is simulated.
//!
//! There are four machines, three releases with different requirements in each run, and an operator who updates, rolls
//! back, kills, stops processes for longer than a lease lives, adds and removes the role, damages records, and changes
//! objects. Time is virtual and one seed is one run. An observer sees every write of the status, every pass, every
//! write of an object when it *arrives*, and every controller that starts. Its invariants are in [`observer`].
//!
//! All decisions are the product's own: `leadership::Leadership`, `controller_releases::{controller_release,
//! ControllerReleases}`, `gate::check_gate`, `status`; of etcd's election `election_view`, of its guard the
//! transactions themselves. The steps between them are connected as in `crates/reconciler/src/service.rs` and
//! `gate_wait.rs`, and anything may happen in between.
//!
//! Not simulated: a node that lost its role, and continues until it is notified; here it has ended before.
//! Requests arrive within four seconds, because no program can know of a longer delay.
//!
//! To run one seed alone: `SHEPHERD_RECONCILER_MODEL_SEED=7 cargo test --test all reconciler::model`.

mod node;
mod observer;
mod operator;
mod world;

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Result, bail};
use shepherd::reconciler::status::ReconcilerStatus;

use self::world::World;
use crate::cluster_model::sim::OUTSIDE;
use crate::harness::aloud::TestResult;
use crate::harness::seeds::{Counts, run_seeds};

/// How many runs there are.
const RUNS: u64 = 300;
/// Runs only this seed.
const SEED: &str = "SHEPHERD_RECONCILER_MODEL_SEED";
/// How long faults occur.
const DISTURBED: Duration = Duration::from_mins(6);
/// How long it may take until everything is done, once every machine is of one release and no more faults occur.
const SETTLING: Duration = Duration::from_mins(4);

/// What must have happened over all runs, and how often at least; otherwise they prove nothing.
const AT_LEAST: &[(&str, u64)] = &[
    ("leaderships", 2000),
    ("passes", 4000),
    ("objects written", 3000),
    ("objects that arrived late", 15),
    ("statuses written", 1200),
    ("statuses that excluded more", 120),
    ("statuses that promised less", 120),
    ("waits for older controllers", 2000),
    ("waits for unknown controllers", 40),
    ("writes refused because something changed", 10),
    ("answers lost", 100),
    ("leases ended by hand", 400),
    ("leases that were not confirmed in time", 250),
    ("controllers that began", 3000),
    ("controllers that were too old", 200),
    ("controllers that needed newer objects", 400),
    ("controllers that were not recorded", 3000),
    ("machines killed", 700),
    ("machines stopped", 900),
    ("releases changed", 2000),
    ("roles taken", 600),
    ("objects changed by hand", 1500),
    ("statuses damaged", 300),
    ("statuses deleted", 100),
    ("nodes damaged", 500),
];

/// The counts of one run.
fn run(seed: u64) -> Result<Counts> {
    let world = World::new(seed)?;
    for machine in 0..world::MACHINES {
        node::start(&world, machine, Duration::ZERO);
    }
    world.sim.spawn(OUTSIDE, operator::keep_etcd(world.clone()));
    world.sim.spawn(OUTSIDE, operator::disturb(world.clone(), DISTURBED));
    let until = |end: Duration| {
        while world.sim.run_next(end) {
            if let Some(first) = world.look().violations.first() {
                bail!("{}", format_failure(&world, seed, first));
            }
        }
        Ok(())
    };
    // Everything that was begun before the end has ended by then.
    until(DISTURBED + Duration::from_mins(1))?;
    let target = operator::settle(&world);
    let end = world.sim.now() + SETTLING;
    loop {
        until(world.sim.now() + Duration::from_secs(5))?;
        let left = list_inconsistencies(&world, target);
        if left.is_empty() && world.sim.now() + SETTLING / 4 > end {
            return Ok(world.look().counts.clone());
        }
        if world.sim.now() > end {
            bail!("{}", format_failure(&world, seed, &format!("there is still to be done: {left:?}")));
        }
    }
}

/// The errors in the final state.
fn list_inconsistencies(world: &World, target: usize) -> Vec<String> {
    let (state, program) = (world.look(), &world.programs[target]);
    let mut left = Vec::new();
    if state.status() != Ok(Some(ReconcilerStatus::completed_by(program))) {
        left.push(format!("the status is {:?}", state.status()));
    }
    if state.objects.iter().any(|object| *object != Some(target)) {
        left.push(format!("the objects are {:?}", state.objects));
    }
    for (at, machine) in state.machines.iter().enumerate() {
        if !machine.serving || machine.release != target {
            left.push(format!("machine {at} is {machine:?}"));
        }
    }
    left
}

fn format_failure(world: &World, seed: u64, wrong: &str) -> String {
    let mut text = format!("seed {seed} (alone: {SEED}={seed}): {wrong}\n");
    let state = world.look();
    for event in &state.trace {
        let _ = writeln!(text, "    {event}");
    }
    for program in world.programs.iter() {
        let _ = writeln!(
            text,
            "  {} needs objects of {} and breaks API servers below {}",
            program.version, program.needs_objects_of, program.breaks_api_servers_below
        );
    }
    let _ = writeln!(text, "  machines {:?}", state.machines);
    let _ = writeln!(text, "  objects {:?}, status {:?}", state.objects, state.status());
    text
}

#[tokio::test]
async fn whatever_comes_between_no_two_releases_fight_and_the_newest_prevails() -> TestResult {
    if let Ok(seed) = std::env::var(SEED) {
        let counts = run(seed.parse()?)?;
        crate::harness::aloud::aloud(&format!("{counts:#?}"));
        return Ok(());
    }
    run_seeds(RUNS, AT_LEAST, run)
}
