//! Fleet sample: counts of the whole fleet, taken once a minute, for metrics.
//!
//! One row per machine ([`SampledMachine`]) is enough to count it, so counting is tested without a database. Machines
//! are counted one after the other and not at one moment. Nothing has to be locked for it, and a fleet that changes
//! meanwhile is counted approximately.
//!
//! A sample is stored in the form it has here, so fields are only ever added: the previous release reads it too, and
//! this release reads samples of the previous one.
//!
//! # What is bounded
//!
//! Phases, processes and facts are fixed lists; names that only a newer release knows count as [`OTHER`]. Locations are
//! words of providers: those with the most machines have an entry each ([`MAX_LOCATIONS`]), and the rest of a
//! provider's machines count under [`OTHER`].

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::brake::ALL_PROVIDERS;
use crate::cluster::disruption::OBSERVATION_TTL;
use crate::cluster::view::STAGES;
use crate::facts::InstallationState;
use crate::phase::Phase;
use crate::plain_text::is_hidden;
use crate::policy::Policy;
use crate::process::Process;
use crate::time::{Timestamp, after, between};

#[cfg(test)]
mod tests;

/// Label of everything without a label of its own.
pub const OTHER: &str = "other";
/// Most locations that are counted separately.
pub const MAX_LOCATIONS: usize = 100;
/// Longest name of a location, in characters.
const MAX_LOCATION_CHARS: usize = 60;
/// Upper bounds of heartbeat ages, in seconds. Older heartbeats count behind the last bound.
pub const AGE_BOUNDS: [f64; 11] = [1.0, 5.0, 15.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0];
/// Facts that machines are counted by, besides their phases.
pub const FACTS: [&str; 8] = [
    PROVIDED,
    AGENT_STARTED,
    HEARTBEATING,
    INSTALLATION_PENDING,
    INSTALLATION_COMPLETE,
    ON_HOLD,
    HARDWARE_KNOWN,
    NO_PROVIDER,
];
const PROVIDED: &str = "provided";
const AGENT_STARTED: &str = "agent-started";
const HEARTBEATING: &str = "heartbeating";
const INSTALLATION_PENDING: &str = "installation-pending";
const INSTALLATION_COMPLETE: &str = "installation-complete";
const ON_HOLD: &str = "held";
const HARDWARE_KNOWN: &str = "hardware-known";
const NO_PROVIDER: &str = "without-provider";
/// Stages of clusters as label values, in the order of [`STAGES`].
pub const CLUSTER_STAGES: [&str; 6] =
    ["waiting-for-machines", "founding", "changing", "converged", "restoring", "deleting"];
/// States of cluster upgrades that are under way.
pub const UPGRADE_STATES: [&str; 2] = ["running", "paused"];
/// Kinds of brakes that are counted.
pub const BRAKE_KINDS: [&str; 2] = ["creation", "recovery"];
/// A minute, in milliseconds.
const MINUTE_MS: i64 = 60_000;

/// The start of the minute that a moment lies in.
#[must_use]
pub fn truncate_to_minute(at: Timestamp) -> Timestamp {
    let within = at.timestamp_millis().rem_euclid(MINUTE_MS);
    let minute = Timestamp::from_timestamp_millis(at.timestamp_millis() - within);
    minute.unwrap_or(at)
}

/// Whether a count is due at `now`, when the newest sample is that of the minute `latest`.
#[must_use]
pub fn is_sample_due(latest: Option<Timestamp>, now: Timestamp) -> bool {
    latest.is_none_or(|latest| latest < truncate_to_minute(now))
}

/// A lane of a machine, as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampledLane {
    /// Name of the process that it is due for.
    pub process: Option<String>,
    /// When it is due; `None` when nothing is.
    pub ready_at: Option<Timestamp>,
    /// Whether it is a timer, which a heartbeat may have moved since.
    pub timer: bool,
    /// Whether a worker holds a lease on it.
    pub is_leased: bool,
}

/// A machine, as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampledMachine {
    /// When it was read; ages count up to this moment.
    pub at: Timestamp,
    /// Name of its indexed phase.
    pub phase: String,
    /// When it entered that phase.
    pub phase_since: Timestamp,
    /// When something else happens unless the awaited event comes.
    pub deadline: Option<Timestamp>,
    /// Both lanes of the machine.
    pub lanes: Vec<SampledLane>,
    /// Names of processes that failed and wait.
    pub backoffs: Vec<String>,
    /// Name of its provider, if it has one.
    pub provider: Option<String>,
    /// Its location, in the provider's words.
    pub location: Option<String>,
    /// Whether it has an agent.
    pub agent_started: bool,
    /// When its agent last reported.
    pub heartbeat_at: Option<Timestamp>,
    /// State of the requested installation.
    pub installation: InstallationState,
    /// Whether an operator's hold is in force.
    pub is_held: bool,
    /// Bytes of memory and number of hardware threads, by its hardware report.
    pub hardware: Option<(i64, i64)>,
}

/// Count of the machines in a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PhaseSample {
    /// Number of machines in the phase.
    pub machines: u64,
    /// Longest time that one of them has been in the phase, in seconds.
    pub oldest_seconds: f64,
    /// Number of machines whose deadline has passed.
    pub over_deadline: u64,
}

/// Count of work that is due and not under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DueSample {
    /// Number of machines with such work.
    pub machines: u64,
    /// Longest time that one of them has waited, in seconds.
    pub oldest_seconds: f64,
}

/// Count of the machines at a location.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LocationSample {
    /// Provider of these machines.
    pub provider: String,
    /// The location in the provider's words; empty where the provider reports none.
    pub location: String,
    /// Number of machines at the location.
    pub machines: u64,
    /// Sum of their memory in bytes, as far as their hardware is reported.
    pub memory_bytes: i64,
    /// Sum of their hardware threads, as far as their hardware is reported.
    pub cpu_threads: i64,
}

/// A cluster, as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampledCluster {
    /// When it was read; ages count up to this moment.
    pub at: Timestamp,
    /// Its stage: one of [`STAGES`].
    pub stage: &'static str,
    /// Whether its control plane exists, and its deletion was not ordered.
    pub is_active: bool,
    /// When its curators last answered.
    pub observed_at: Option<Timestamp>,
    /// When its last snapshot was taken.
    pub snapshot_at: Option<Timestamp>,
    /// Its Kubernetes; `None` for a cluster without.
    pub kubernetes: Option<SampledKubernetes>,
    /// Whether its upgrade is paused; `None` when none is under way.
    pub upgrade_paused: Option<bool>,
}

/// Kubernetes of a cluster, as it was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampledKubernetes {
    /// Components on its nodes that are unhealthy.
    pub unhealthy_components: u64,
    /// Nodes that have not acted on a step of a key rotation: the largest number of any rotation under way.
    pub nodes_behind: u64,
}

/// Counts of clusters and of their nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterCounts {
    /// Number of clusters in each stage.
    #[serde(deserialize_with = "deserialize_stages")]
    pub stages: BTreeMap<String, u64>,
    /// Active clusters whose curators have not answered for longer than an observation counts.
    pub unheard: u64,
    /// Age of the last snapshot of the cluster whose last snapshot is the oldest, in seconds.
    pub oldest_snapshot_seconds: f64,
    /// Active clusters that have Kubernetes.
    pub kubernetes: u64,
    /// Components of Kubernetes that are unhealthy.
    pub components_unwell: u64,
    /// Nodes that have not acted yet on a step of a key rotation.
    pub nodes_behind: u64,
    /// Upgrades under way that are not paused.
    pub upgrades_going: u64,
    /// Upgrades under way that are paused.
    pub upgrades_paused: u64,
}

/// A brake that is engaged.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SampledBrake {
    /// What it stops; a sample only has [`BRAKE_KINDS`].
    pub kind: String,
    /// Its provider, or [`ALL_PROVIDERS`].
    pub scope: String,
}

/// Distribution of the ages of last heartbeats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HeartbeatAges {
    /// Machines by the first of [`AGE_BOUNDS`] that the age does not exceed, and one more count for those beyond all.
    pub counts: Vec<u64>,
    /// Sum of all ages, in seconds.
    pub sum_seconds: f64,
}

/// A count of the fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetSample {
    /// Counts of machines, by name of the phase.
    pub phases: BTreeMap<String, PhaseSample>,
    /// Numbers of machines, by name of the fact.
    pub facts: BTreeMap<String, u64>,
    /// Work that waits for a worker, by name of the process.
    pub due: BTreeMap<String, DueSample>,
    /// Machines that wait after a failure, by name of the process.
    pub backoffs: BTreeMap<String, u64>,
    /// Work under way, by name of the process.
    pub work: BTreeMap<String, u64>,
    /// Ages of the last heartbeats of machines that have an agent.
    pub heartbeat_ages: HeartbeatAges,
    /// Machines and their hardware, by location.
    pub places: Vec<LocationSample>,
    /// Brakes that are engaged.
    pub brakes: Vec<SampledBrake>,
    /// Counts of all clusters.
    pub clusters: ClusterCounts,
}

/// A count under way.
#[derive(Clone, Debug)]
pub struct FleetTally {
    policy: Policy,
    sample: FleetSample,
    places: BTreeMap<(String, String), LocationSample>,
}

impl FleetTally {
    /// An empty count: every known name is there, with zero.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let mut sample = FleetSample::default();
        for phase in Phase::ALL {
            sample.phases.insert(phase.to_string(), PhaseSample::default());
        }
        for fact in FACTS {
            sample.facts.insert(fact.to_owned(), 0);
        }
        for process in Process::ALL {
            sample.due.insert(process.to_string(), DueSample::default());
            sample.backoffs.insert(process.to_string(), 0);
            sample.work.insert(process.to_string(), 0);
        }
        for stage in STAGES {
            sample.clusters.stages.insert(stage_label(stage), 0);
        }
        sample.heartbeat_ages.counts = vec![0; AGE_BOUNDS.len() + 1];
        Self { policy, sample, places: BTreeMap::new() }
    }

    /// Adds a machine to the count.
    pub fn add_machine(&mut self, machine: &SampledMachine) {
        let now = machine.at;
        let phase = self.sample.phases.entry(phase_label(&machine.phase)).or_default();
        phase.machines += 1;
        phase.oldest_seconds = phase.oldest_seconds.max(between(machine.phase_since, now).as_secs_f64());
        phase.over_deadline += u64::from(machine.deadline.is_some_and(|deadline| deadline < now));
        for lane in &machine.lanes {
            self.add_lane(lane, now);
        }
        for process in &machine.backoffs {
            *self.sample.backoffs.entry(process_label(process)).or_default() += 1;
        }
        // A retired machine is only a record. Its last heartbeat grows older for ever, and must not matter.
        if machine.phase != Phase::Retired.as_str() {
            self.add_facts(machine);
            self.add_location(machine);
        }
    }

    /// Adds a cluster to the count.
    pub fn add_cluster(&mut self, cluster: &SampledCluster) {
        let clusters = &mut self.sample.clusters;
        *clusters.stages.entry(stage_label(cluster.stage)).or_default() += 1;
        if !cluster.is_active {
            return;
        }
        if let Some(kubernetes) = cluster.kubernetes {
            clusters.kubernetes += 1;
            clusters.components_unwell += kubernetes.unhealthy_components;
            clusters.nodes_behind += kubernetes.nodes_behind;
        }
        clusters.upgrades_going += u64::from(cluster.upgrade_paused == Some(false));
        clusters.upgrades_paused += u64::from(cluster.upgrade_paused == Some(true));
        clusters.unheard +=
            u64::from(cluster.observed_at.is_none_or(|seen| between(seen, cluster.at) > OBSERVATION_TTL));
        if let Some(taken) = cluster.snapshot_at {
            let age = between(taken, cluster.at).as_secs_f64();
            clusters.oldest_snapshot_seconds = clusters.oldest_snapshot_seconds.max(age);
        }
    }

    /// A timer that came due is checked before it can be claimed, and nearly always moved. So it does not count.
    fn add_lane(&mut self, lane: &SampledLane, now: Timestamp) {
        let (Some(process), Some(ready_at)) = (&lane.process, lane.ready_at) else { return };
        if lane.is_leased || lane.timer || ready_at > now {
            return;
        }
        let waiting = self.sample.due.entry(process_label(process)).or_default();
        waiting.machines += 1;
        waiting.oldest_seconds = waiting.oldest_seconds.max(between(ready_at, now).as_secs_f64());
    }

    fn add_facts(&mut self, machine: &SampledMachine) {
        let limit = self.policy.recovery_silence_timeout.0;
        let last_contact = machine.heartbeat_at.filter(|_| machine.agent_started);
        let heartbeating = last_contact.is_some_and(|at| after(at, limit) > machine.at);
        for (fact, holds) in [
            (PROVIDED, machine.provider.is_some()),
            (NO_PROVIDER, machine.provider.is_none()),
            (AGENT_STARTED, machine.agent_started),
            (HEARTBEATING, heartbeating),
            (INSTALLATION_PENDING, machine.installation == InstallationState::Pending),
            (INSTALLATION_COMPLETE, machine.installation == InstallationState::Succeeded),
            (ON_HOLD, machine.is_held),
            (HARDWARE_KNOWN, machine.hardware.is_some()),
        ] {
            *self.sample.facts.entry(fact.to_owned()).or_default() += u64::from(holds);
        }
        if let Some(at) = last_contact {
            let age = between(at, machine.at).as_secs_f64();
            let bucket = AGE_BOUNDS.iter().position(|bound| age <= *bound).unwrap_or(AGE_BOUNDS.len());
            let ages = &mut self.sample.heartbeat_ages;
            ages.counts[bucket] += 1;
            ages.sum_seconds += age;
        }
    }

    fn add_location(&mut self, machine: &SampledMachine) {
        let Some(provider) = machine.provider.clone() else { return };
        let location = machine.location.as_deref().map(location_label).unwrap_or_default();
        let place = self
            .places
            .entry((provider.clone(), location.clone()))
            .or_insert_with(|| LocationSample { provider, location, ..LocationSample::default() });
        let (memory, threads) = machine.hardware.unwrap_or_default();
        place.machines += 1;
        place.memory_bytes = place.memory_bytes.saturating_add(memory.max(0));
        place.cpu_threads = place.cpu_threads.saturating_add(threads.max(0));
    }

    /// Ends the count, and adds the work under way and the engaged brakes.
    #[must_use]
    pub fn into_sample(mut self, work: Vec<(String, u64)>, mut brakes: Vec<SampledBrake>) -> FleetSample {
        for (process, count) in work {
            *self.sample.work.entry(process_label(&process)).or_default() += count;
        }
        brakes.retain(|brake| BRAKE_KINDS.contains(&brake.kind.as_str()));
        brakes.sort();
        brakes.dedup();
        self.sample.brakes = brakes;
        self.sample.places = limit_locations(self.places.into_values().collect());
        self.sample
    }
}

impl FleetSample {
    /// Scopes that a brake may have: every provider that has machines or a brake, and all of them.
    #[must_use]
    pub fn brake_scopes(&self) -> Vec<String> {
        let of_places = self.places.iter().map(|place| place.provider.clone());
        let of_brakes = self.brakes.iter().map(|brake| brake.scope.clone());
        let mut scopes: Vec<String> = of_places.chain(of_brakes).chain([ALL_PROVIDERS.to_owned()]).collect();
        scopes.sort_unstable();
        scopes.dedup();
        scopes
    }
}

/// Reads counts by stage, also under the names that stages have in samples of a former release.
fn deserialize_stages<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, u64>, D::Error> {
    let mut stages = BTreeMap::new();
    for (stage, count) in BTreeMap::<String, u64>::deserialize(deserializer)? {
        let stage = match stage.as_str() {
            "settled" => "converged".to_owned(),
            "ending" => "deleting".to_owned(),
            _ => stage,
        };
        *stages.entry(stage).or_default() += count;
    }
    Ok(stages)
}

/// The label value for a stage of a cluster.
fn stage_label(stage: &str) -> String {
    let known = STAGES.iter().position(|known| *known == stage);
    known.map_or(OTHER, |known| CLUSTER_STAGES[known]).to_owned()
}

fn phase_label(name: &str) -> String {
    name.parse::<Phase>().map_or_else(|_| OTHER.to_owned(), |phase| phase.to_string())
}

fn process_label(name: &str) -> String {
    name.parse::<Process>().map_or_else(|_| OTHER.to_owned(), |process| process.to_string())
}

/// The label value for a provider's location: without hidden characters, and of limited length.
fn location_label(location: &str) -> String {
    location.chars().filter(|c| !is_hidden(*c)).take(MAX_LOCATION_CHARS).collect()
}

/// The locations with the most machines, and one more for each provider that has other locations.
fn limit_locations(mut places: Vec<LocationSample>) -> Vec<LocationSample> {
    places
        .sort_by(|a, b| (b.machines, &a.provider, &a.location).cmp(&(a.machines, &b.provider, &b.location)));
    let mut rest: BTreeMap<String, LocationSample> = BTreeMap::new();
    for place in places.split_off(places.len().min(MAX_LOCATIONS)) {
        let sum = rest.entry(place.provider.clone()).or_insert_with(|| LocationSample {
            provider: place.provider.clone(),
            location: OTHER.to_owned(),
            ..LocationSample::default()
        });
        sum.machines += place.machines;
        sum.memory_bytes = sum.memory_bytes.saturating_add(place.memory_bytes);
        sum.cpu_threads = sum.cpu_threads.saturating_add(place.cpu_threads);
    }
    for (_, more) in rest {
        // A provider may have a location of that name.
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
