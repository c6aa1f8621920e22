//! What a count of the whole fleet says, and when one is due.
//!
//! Once a minute somebody counts; what a machine counts for is decided here, from one line about it
//! ([`SeenMachine`]), so that a line can be judged without a database. Machines are counted one after the other and
//! not at one moment: nothing has to be held still for it, and a fleet that changes meanwhile is counted about right.
//!
//! A sample is stored as it stands here, so fields are only ever added: a release before this one reads it too, and
//! this one a sample of that one.
//!
//! # What is bounded
//!
//! Phases, processes and facts are lists of ours; what only a newer release knows counts as [`OTHER`]. Locations are
//! words of providers: the places with the most machines keep theirs ([`MOST_PLACES`]), the rest of a provider's
//! machines stand under [`OTHER`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::brake::ALL;
use crate::model::cluster::disturb::FRESH;
use crate::model::cluster::view::STAGES;
use crate::model::facts::Installation;
use crate::model::phase::Phase;
use crate::model::policy::Policy;
use crate::model::process::Process;
use crate::model::time::{Timestamp, after, between};

#[cfg(test)]
mod tests;

/// Name of what has none of ours.
pub const OTHER: &str = "other";
/// Places of a provider's machines that are told apart.
pub const MOST_PLACES: usize = 100;
/// Longest name of a place, in characters.
const LONGEST_PLACE: usize = 60;
/// Upper bounds of ages of heartbeats, in seconds; what is older stands behind the last.
pub const AGE_BOUNDS: [f64; 11] = [1.0, 5.0, 15.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0];
/// Facts by which machines are counted beside their phases.
pub const FACTS: [&str; 8] = [
    PROVIDED,
    AGENT_STARTED,
    HEARTBEATING,
    INSTALLATION_PENDING,
    INSTALLATION_COMPLETE,
    HELD,
    HARDWARE_KNOWN,
    NO_PROVIDER,
];
const PROVIDED: &str = "provided";
const AGENT_STARTED: &str = "agent-started";
const HEARTBEATING: &str = "heartbeating";
const INSTALLATION_PENDING: &str = "installation-pending";
const INSTALLATION_COMPLETE: &str = "installation-complete";
const HELD: &str = "held";
const HARDWARE_KNOWN: &str = "hardware-known";
const NO_PROVIDER: &str = "without-provider";
/// Stages of clusters, in the order of [`STAGES`], as labels say them.
pub const CLUSTER_STAGES: [&str; 6] =
    ["waiting-for-machines", "founding", "changing", "settled", "restoring", "ending"];
/// What becomes of upgrades of clusters that are under way.
pub const UPGRADES: [&str; 2] = ["going", "paused"];
/// Kinds of brakes.
pub const BRAKES: [&str; 2] = ["creation", "recovery"];
/// A minute, in milliseconds.
const MINUTE_MS: i64 = 60_000;

/// The minute that a moment lies in.
#[must_use]
pub fn minute_of(at: Timestamp) -> Timestamp {
    let within = at.timestamp_millis().rem_euclid(MINUTE_MS);
    let minute = Timestamp::from_timestamp_millis(at.timestamp_millis() - within);
    minute.unwrap_or(at)
}

/// Whether the fleet is to be counted now, when the newest sample is that of the minute `latest`.
#[must_use]
pub fn is_due(latest: Option<Timestamp>, now: Timestamp) -> bool {
    latest.is_none_or(|latest| latest < minute_of(now))
}

/// A lane of a machine, as it was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenLane {
    /// What it is due for, by name.
    pub process: Option<String>,
    /// When.
    pub ready_at: Option<Timestamp>,
    /// Whether that is a timer, which a heartbeat may have moved since.
    pub timer: bool,
    /// Whether somebody works on it.
    pub leased: bool,
}

/// A machine, as it was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenMachine {
    /// When.
    pub at: Timestamp,
    /// Its indexed phase, by name.
    pub phase: String,
    /// Since when.
    pub phase_since: Timestamp,
    /// When something else happens if what it waits for does not.
    pub deadline: Option<Timestamp>,
    /// Both lanes.
    pub lanes: Vec<SeenLane>,
    /// Processes that failed and wait, by name.
    pub backoffs: Vec<String>,
    /// Its provider.
    pub provider: Option<String>,
    /// Where it stands, in the provider's words.
    pub location: Option<String>,
    /// Whether it has an agent.
    pub agent_started: bool,
    /// When that reported last.
    pub heartbeat_at: Option<Timestamp>,
    /// Whether an installation was asked for, and what became of it.
    pub installation: Installation,
    /// Whether an operator holds it.
    pub held: bool,
    /// Bytes of memory and processors' threads, by its hardware report.
    pub hardware: Option<(i64, i64)>,
}

/// Machines in a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InPhase {
    /// How many.
    pub machines: u64,
    /// Since when the one is in it that has been for longest, in seconds.
    pub oldest_seconds: f64,
    /// Those whose deadline has passed.
    pub over_deadline: u64,
}

/// Work that could be done now and nobody does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Waiting {
    /// Machines.
    pub machines: u64,
    /// How long the one has waited that has for longest, in seconds.
    pub oldest_seconds: f64,
}

/// What stands at one place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// Whose machines.
    pub provider: String,
    /// Where, in the provider's words; empty where it tells none.
    pub location: String,
    /// How many.
    pub machines: u64,
    /// Their memory, as far as they have told.
    pub memory_bytes: i64,
    /// Their threads, as far as they have told.
    pub cpu_threads: i64,
}

/// A cluster, as it was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenCluster {
    /// When.
    pub at: Timestamp,
    /// What it goes through: one of [`STAGES`].
    pub stage: &'static str,
    /// Whether its control plane is there, and nobody has ended it.
    pub lives: bool,
    /// When its curators answered last.
    pub seen_at: Option<Timestamp>,
    /// When its last snapshot was taken.
    pub snapshot_at: Option<Timestamp>,
    /// What it runs of Kubernetes, if it is to.
    pub kubernetes: Option<SeenKubernetes>,
    /// Whether its upgrade stands still, if one is under way.
    pub upgrade_paused: Option<bool>,
}

/// Kubernetes of a cluster, as it was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenKubernetes {
    /// Components on its nodes that are not well.
    pub unwell: u64,
    /// Nodes that do not act on the step of a replacement of keys that is under way: of the one that waits for most.
    pub behind: u64,
}

/// What clusters go through.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Clusters {
    /// How many are in each stage.
    pub stages: BTreeMap<String, u64>,
    /// Those whose curators should answer, and have not for longer than their answers count.
    pub unheard: u64,
    /// How old the last snapshot is of that cluster whose last one is the oldest, in seconds.
    pub oldest_snapshot_seconds: f64,
    /// Those that are to run Kubernetes.
    pub kubernetes: u64,
    /// Components of that on their nodes that are not well.
    pub components_unwell: u64,
    /// Nodes that do not act yet on a step of a replacement of keys.
    pub nodes_behind: u64,
    /// Upgrades under way that go on.
    pub upgrades_going: u64,
    /// Upgrades under way that stand still.
    pub upgrades_paused: u64,
}

/// A brake that is on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BrakeOn {
    /// What it holds.
    pub kind: String,
    /// Of which provider, or of [`ALL`].
    pub scope: String,
}

/// How old last heartbeats are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ages {
    /// Machines by the first of [`AGE_BOUNDS`] that is not exceeded; one more for those beyond all.
    pub counts: Vec<u64>,
    /// All ages together.
    pub sum_seconds: f64,
}

/// A count of the fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetSample {
    /// Machines by phase.
    pub phases: BTreeMap<String, InPhase>,
    /// Machines by fact.
    pub facts: BTreeMap<String, u64>,
    /// Work that waits for a worker, by process.
    pub due: BTreeMap<String, Waiting>,
    /// Machines that wait after a failure, by process.
    pub backoffs: BTreeMap<String, u64>,
    /// Work under way, by process.
    pub work: BTreeMap<String, u64>,
    /// How old the last heartbeats are of machines that have an agent.
    pub heartbeat_ages: Ages,
    /// Machines and their hardware by place.
    pub places: Vec<Place>,
    /// Brakes that are on.
    pub brakes: Vec<BrakeOn>,
    /// Clusters.
    pub clusters: Clusters,
}

/// A count under way.
#[derive(Clone, Debug)]
pub struct Tally {
    policy: Policy,
    sample: FleetSample,
    places: BTreeMap<(String, String), Place>,
}

impl Tally {
    /// Nothing counted yet: every name of ours is there, at zero.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let mut sample = FleetSample::default();
        for phase in Phase::ALL {
            sample.phases.insert(phase.to_string(), InPhase::default());
        }
        for fact in FACTS {
            sample.facts.insert(fact.to_owned(), 0);
        }
        for process in Process::ALL {
            sample.due.insert(process.to_string(), Waiting::default());
            sample.backoffs.insert(process.to_string(), 0);
            sample.work.insert(process.to_string(), 0);
        }
        for stage in STAGES {
            sample.clusters.stages.insert(stage_label(stage), 0);
        }
        sample.heartbeat_ages.counts = vec![0; AGE_BOUNDS.len() + 1];
        Self { policy, sample, places: BTreeMap::new() }
    }

    /// Counts a machine.
    pub fn add(&mut self, machine: &SeenMachine) {
        let now = machine.at;
        let phase = self.sample.phases.entry(known_phase(&machine.phase)).or_default();
        phase.machines += 1;
        phase.oldest_seconds = phase.oldest_seconds.max(between(machine.phase_since, now).as_secs_f64());
        phase.over_deadline += u64::from(machine.deadline.is_some_and(|deadline| deadline < now));
        for lane in &machine.lanes {
            self.add_lane(lane, now);
        }
        for process in &machine.backoffs {
            *self.sample.backoffs.entry(known_process(process)).or_default() += 1;
        }
        // What is retired is only a record: its last heartbeat grows older for ever, and nobody is to mind.
        if machine.phase != Phase::Retired.as_str() {
            self.add_facts(machine);
            self.add_place(machine);
        }
    }

    /// Counts a cluster.
    pub fn add_cluster(&mut self, cluster: &SeenCluster) {
        let clusters = &mut self.sample.clusters;
        *clusters.stages.entry(stage_label(cluster.stage)).or_default() += 1;
        if !cluster.lives {
            return;
        }
        if let Some(kubernetes) = cluster.kubernetes {
            clusters.kubernetes += 1;
            clusters.components_unwell += kubernetes.unwell;
            clusters.nodes_behind += kubernetes.behind;
        }
        clusters.upgrades_going += u64::from(cluster.upgrade_paused == Some(false));
        clusters.upgrades_paused += u64::from(cluster.upgrade_paused == Some(true));
        clusters.unheard += u64::from(cluster.seen_at.is_none_or(|seen| between(seen, cluster.at) > FRESH));
        if let Some(taken) = cluster.snapshot_at {
            let age = between(taken, cluster.at).as_secs_f64();
            clusters.oldest_snapshot_seconds = clusters.oldest_snapshot_seconds.max(age);
        }
    }

    /// A timer that came due is looked at before anybody may claim it, and nearly always moved.
    fn add_lane(&mut self, lane: &SeenLane, now: Timestamp) {
        let (Some(process), Some(ready_at)) = (&lane.process, lane.ready_at) else { return };
        if lane.leased || lane.timer || ready_at > now {
            return;
        }
        let waiting = self.sample.due.entry(known_process(process)).or_default();
        waiting.machines += 1;
        waiting.oldest_seconds = waiting.oldest_seconds.max(between(ready_at, now).as_secs_f64());
    }

    fn add_facts(&mut self, machine: &SeenMachine) {
        let limit = self.policy.recovery_silence_timeout.0;
        let heard = machine.heartbeat_at.filter(|_| machine.agent_started);
        let heartbeating = heard.is_some_and(|at| after(at, limit) > machine.at);
        for (fact, holds) in [
            (PROVIDED, machine.provider.is_some()),
            (NO_PROVIDER, machine.provider.is_none()),
            (AGENT_STARTED, machine.agent_started),
            (HEARTBEATING, heartbeating),
            (INSTALLATION_PENDING, machine.installation == Installation::Pending),
            (INSTALLATION_COMPLETE, machine.installation == Installation::Succeeded),
            (HELD, machine.held),
            (HARDWARE_KNOWN, machine.hardware.is_some()),
        ] {
            *self.sample.facts.entry(fact.to_owned()).or_default() += u64::from(holds);
        }
        if let Some(at) = heard {
            let age = between(at, machine.at).as_secs_f64();
            let bucket = AGE_BOUNDS.iter().position(|bound| age <= *bound).unwrap_or(AGE_BOUNDS.len());
            let ages = &mut self.sample.heartbeat_ages;
            ages.counts[bucket] += 1;
            ages.sum_seconds += age;
        }
    }

    fn add_place(&mut self, machine: &SeenMachine) {
        let Some(provider) = machine.provider.clone() else { return };
        let location = machine.location.as_deref().map(readable_place).unwrap_or_default();
        let place = self.places.entry((provider.clone(), location.clone())).or_insert_with(|| Place {
            provider,
            location,
            ..Place::default()
        });
        let (memory, threads) = machine.hardware.unwrap_or_default();
        place.machines += 1;
        place.memory_bytes = place.memory_bytes.saturating_add(memory.max(0));
        place.cpu_threads = place.cpu_threads.saturating_add(threads.max(0));
    }

    /// What was counted, with what is under way and which brakes are on.
    #[must_use]
    pub fn finish(mut self, work: Vec<(String, u64)>, mut brakes: Vec<BrakeOn>) -> FleetSample {
        for (process, count) in work {
            *self.sample.work.entry(known_process(&process)).or_default() += count;
        }
        brakes.retain(|brake| BRAKES.contains(&brake.kind.as_str()));
        brakes.sort();
        brakes.dedup();
        self.sample.brakes = brakes;
        self.sample.places = bounded(self.places.into_values().collect());
        self.sample
    }
}

impl FleetSample {
    /// What a brake may be on for: every provider that has machines or a brake, and all of them.
    #[must_use]
    pub fn scopes(&self) -> Vec<String> {
        let of_places = self.places.iter().map(|place| place.provider.clone());
        let of_brakes = self.brakes.iter().map(|brake| brake.scope.clone());
        let mut scopes: Vec<String> = of_places.chain(of_brakes).chain([ALL.to_owned()]).collect();
        scopes.sort_unstable();
        scopes.dedup();
        scopes
    }
}

/// A stage of a cluster as a label says it.
fn stage_label(stage: &str) -> String {
    let known = STAGES.iter().position(|known| *known == stage);
    known.map_or(OTHER, |known| CLUSTER_STAGES[known]).to_owned()
}

fn known_phase(name: &str) -> String {
    name.parse::<Phase>().map_or_else(|_| OTHER.to_owned(), |phase| phase.to_string())
}

fn known_process(name: &str) -> String {
    name.parse::<Process>().map_or_else(|_| OTHER.to_owned(), |process| process.to_string())
}

/// A provider's word for a place, as it can be shown: without control characters, and not too long.
fn readable_place(location: &str) -> String {
    location.chars().filter(|c| !c.is_control()).take(LONGEST_PLACE).collect()
}

/// The places with the most machines, and one more for each provider that has more of them.
fn bounded(mut places: Vec<Place>) -> Vec<Place> {
    places
        .sort_by(|a, b| (b.machines, &a.provider, &a.location).cmp(&(a.machines, &b.provider, &b.location)));
    let mut rest: BTreeMap<String, Place> = BTreeMap::new();
    for place in places.split_off(places.len().min(MOST_PLACES)) {
        let sum = rest.entry(place.provider.clone()).or_insert_with(|| Place {
            provider: place.provider.clone(),
            location: OTHER.to_owned(),
            ..Place::default()
        });
        sum.machines += place.machines;
        sum.memory_bytes = sum.memory_bytes.saturating_add(place.memory_bytes);
        sum.cpu_threads = sum.cpu_threads.saturating_add(place.cpu_threads);
    }
    for (_, more) in rest {
        // A provider may call a place of its own so.
        match places.iter_mut().find(|place| place.provider == more.provider && place.location == OTHER) {
            Some(place) => {
                place.machines += more.machines;
                place.memory_bytes = place.memory_bytes.saturating_add(more.memory_bytes);
                place.cpu_threads = place.cpu_threads.saturating_add(more.cpu_threads);
            }
            None => places.push(more),
        }
    }
    places.sort_by(|a, b| (&a.provider, &a.location).cmp(&(&b.provider, &b.location)));
    places
}
