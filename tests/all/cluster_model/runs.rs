//! The runs: one per seed.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Result, bail};

use super::asking_etcd::keep_etcd_running;
use super::fixture::Fixture;
use super::invariants::what_is_still_to_be_done;
use super::node;
use super::operators::{disturb, make_ticket, order, tidy};
use super::sim::OUTSIDE;
use super::world::{MACHINES, World};
use crate::harness::aloud::TestResult;
use crate::harness::seeds::{Counts, run_seeds};

/// How many runs there are.
const RUNS: u64 = 200;
/// Runs only this seed.
const SEED: &str = "SHEPHERD_CLUSTER_MODEL_SEED";
/// How long faults occur.
const DISTURBED: Duration = Duration::from_mins(2);
/// How long it may take after that until nothing is left to be done.
const SETTLING: Duration = Duration::from_mins(5);
/// How long nothing may be left to be done then.
const SETTLED: Duration = Duration::from_secs(15);

/// What must have happened over all runs, and how often at least; otherwise they prove nothing.
const AT_LEAST: &[(&str, u64)] = &[
    ("leaderships", 400),
    ("role servers killed", 400),
    ("power cuts", 300),
    ("power cuts of all", 50),
    ("partitions", 300),
    ("processes stopped", 300),
    ("disks lost", 100),
    ("roles damaged on a disk", 100),
    ("leaps of the clock", 30),
    ("machines that became nodes", 500),
    ("nodes deleted", 300),
    ("roles changed", 1000),
    ("roles taken up", 1000),
    ("members removed", 100),
    ("votes given", 200),
    ("removals refused for the quorum", 200),
    ("disagreements settled", 80),
    ("control planes begun", 1000),
    ("control planes ended", 300),
    ("data of a membership removed", 400),
    ("calls refused", 4000),
    ("answers of a leader lost", 300),
    ("answers of etcd lost", 70),
    ("writes refused to a former leader", 80),
    ("writes refused because a record changed", 500),
    ("leases ended", 500),
    ("certificates renewed beside etcd", 50),
    ("nodes that came back by their key alone", 40),
    ("nodes whose health is unknown", 3000),
    ("nodes whose health is silent", 400),
    ("nodes whose health is healthy", 4000),
];

/// The counts of one run.
fn run(seed: u64, fixture: &'static Fixture) -> Result<Counts> {
    let world = World::new(seed, fixture)?;
    world.sim.spawn(OUTSIDE, keep_etcd_running(world.clone()));
    world.sim.spawn(OUTSIDE, make_ticket(world.clone()));
    for at in 0..MACHINES {
        node::start(&world, at);
    }
    for _ in 0..3 {
        world.sim.spawn(OUTSIDE, order(world.clone(), DISTURBED));
    }
    world.sim.spawn(OUTSIDE, disturb(world.clone(), DISTURBED));
    let until = |end: Duration| {
        while world.sim.run_next(end) {
            if !world.look().violations.is_empty() {
                bail!("{}", format_failure(&world, seed, &world.look().violations.clone()));
            }
        }
        Ok(())
    };
    // Everything that was begun before the end of the faults has ended by then.
    until(DISTURBED + Duration::from_secs(32))?;
    world.sim.spawn(OUTSIDE, tidy(world.clone()));
    let mut quiet = Duration::ZERO;
    let mut left = Vec::new();
    while quiet < SETTLED {
        let now = world.sim.now();
        if now > DISTURBED + SETTLING {
            left.insert(0, format!("after {SETTLING:?} without any fault there is still to be done:"));
            bail!("{}", format_failure(&world, seed, &left));
        }
        until(now + Duration::from_secs(1))?;
        left = what_is_still_to_be_done(&world.look());
        left.extend(unhealthy(&world));
        quiet = if left.is_empty() { quiet + Duration::from_secs(1) } else { Duration::ZERO };
    }
    let counts = world.look().counts.clone();
    Ok(counts)
}

/// The nodes that the leader does not call healthy. Also checks that there is one leader and that the others know it.
fn unhealthy(world: &World) -> Vec<String> {
    use shepherd::curator::node_health::NodeHealth;
    use shepherd::etcd::election_view::CandidateRole;
    let state = world.look();
    let curators: Vec<_> = state.machines.iter().filter_map(|machine| machine.curator.clone()).collect();
    let leading: Vec<_> = curators.iter().filter_map(|curator| curator.leading.borrow().clone()).collect();
    let [leader] = &leading[..] else { return vec![format!("{} curators lead", leading.len())] };
    let mut left = Vec::new();
    for curator in &curators {
        if *curator.standing.borrow() == CandidateRole::Unknown {
            left.push(format!("the curator of {} does not know who leads", curator.own));
        }
    }
    for node in state.nodes() {
        let health = leader.heartbeats.borrow().node_health(&node, world.sim.now());
        if !matches!(health, NodeHealth::Healthy { .. }) {
            left.push(format!("the health of {} is {health:?}", node.id));
        }
    }
    left
}

fn format_failure(world: &World, seed: u64, wrong: &[String]) -> String {
    let mut text = format!("seed {seed} (alone: {SEED}={seed}): {}\n", wrong.join("\n  "));
    for event in &world.look().trace {
        let _ = writeln!(text, "    {event}");
    }
    for (at, machine) in world.look().machines.iter().enumerate() {
        let (facts, disk) = (&machine.facts, &machine.disk);
        let _ = writeln!(
            text,
            "  machine {at}: {:?}, power {}, part {}, runs {:?} as {:?}, settled {}, kept {:?} {:?}, etcd {:?}",
            machine.id(),
            machine.power,
            machine.part,
            facts.running,
            machine.member(),
            facts.settled,
            disk.membership,
            disk.roles,
            disk.etcd,
        );
    }
    for node in world.look().nodes() {
        let _ = writeln!(text, "  {} is {:?} with {:?}", node.id, node.state, node.roles);
    }
    let _ = writeln!(text, "  members: {:?}", world.look().etcd.members);
    text
}

#[tokio::test]
async fn whatever_comes_between_every_invariant_holds_and_the_cluster_settles() -> TestResult {
    let fixture: &'static Fixture = Box::leak(Box::new(Fixture::new()?));
    if let Ok(seed) = std::env::var(SEED) {
        let counts = run(seed.parse()?, fixture)?;
        crate::harness::aloud::aloud(&format!("{counts:#?}"));
        return Ok(());
    }
    run_seeds(RUNS, AT_LEAST, |seed| run(seed, fixture))
}
