//! Metrics of the newest fleet sample.
//!
//! The metrics are read straight from the sample. What a sample does not name is not shown, so nothing of an older
//! sample remains and no reader sees half of one. The one exception is the age of heartbeats, which accumulates from
//! sample to sample as a histogram does: `rate()` over some minutes shows the ages in those minutes, and the restart of
//! a shepherd is no dip.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::bmdb::metrics::labels::{phase_label, process_label, provider_label};
use crate::bmdb::metrics::registry::{Label, MetricRegistry};
use crate::model::brake::ALL_PROVIDERS;
use crate::model::fleet_sample::{
    AGE_BOUNDS, BRAKE_KINDS, CLUSTER_STAGES, FACTS, FleetSample, MAX_LOCATIONS, OTHER, UPGRADE_STATES,
};
use crate::model::phase::Phase;
use crate::model::process::Process;
use crate::model::time::Timestamp;

/// The sample that is shown. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct FleetMetrics {
    state: Arc<Mutex<FleetMetricsState>>,
}

#[derive(Debug, Default)]
struct FleetMetricsState {
    latest: Option<(Timestamp, FleetSample)>,
    ages: Vec<u64>,
    ages_sum: f64,
}

impl FleetMetrics {
    /// Shows a sample that was taken at `taken_at`, from now on.
    pub fn set_sample(&self, taken_at: Timestamp, sample: FleetSample) {
        let mut shown = self.lock();
        shown.ages.resize(AGE_BOUNDS.len() + 1, 0);
        for (all, more) in shown.ages.iter_mut().zip(&sample.heartbeat_ages.counts) {
            *all += more;
        }
        shown.ages_sum += sample.heartbeat_ages.sum_seconds;
        shown.latest = Some((taken_at, sample));
    }

    fn lock(&self) -> MutexGuard<'_, FleetMetricsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers all metrics of the fleet.
    pub(crate) fn register(&self, book: &mut MetricRegistry) {
        self.register_machines(book);
        self.register_work(book);
        self.register_locations(book);
        self.register_clusters(book);
        self.gauge(
            book,
            "fleet_sample_time_seconds",
            "Time of the latest sample of the fleet, in seconds since 1970 by the database's clock",
            &[],
            |_, taken_at| vec![gauge_series([], unix_seconds(taken_at))],
        );
    }

    fn register_machines(&self, book: &mut MetricRegistry) {
        let phases = [with_other_value(&phase_label(), Phase::ALL.map(Phase::as_str))];
        self.gauge(book, "fleet_machines", "Machines by phase", &phases, |sample, _| {
            let phases = sample.phases.iter();
            phases
                .map(|(phase, count)| gauge_series([("phase", phase)], count_to_f64(count.machines)))
                .collect()
        });
        self.gauge(
            book,
            "fleet_phase_max_age_seconds",
            "Age of the oldest machine in each phase",
            &phases,
            |sample, _| {
                let phases = sample.phases.iter();
                phases.map(|(phase, count)| gauge_series([("phase", phase)], count.oldest_seconds)).collect()
            },
        );
        self.gauge(
            book,
            "fleet_machines_past_deadline",
            "Machines past their phase deadline",
            &phases,
            |sample, _| {
                let phases = sample.phases.iter();
                phases
                    .map(|(phase, count)| gauge_series([("phase", phase)], count_to_f64(count.over_deadline)))
                    .collect()
            },
        );
        self.gauge(
            book,
            "fleet_machines_by_fact",
            "Machines that are not Retired, by fact; heartbeating: the last heartbeat is within the silence limit",
            &[Label::one_of("fact", FACTS)],
            |sample, _| {
                let facts = sample.facts.iter().filter(|(fact, _)| FACTS.contains(&fact.as_str()));
                facts.map(|(fact, count)| gauge_series([("fact", fact)], count_to_f64(*count))).collect()
            },
        );
        book.add_fleet_metric(
            "fleet_heartbeat_age_seconds",
            "Age of the last heartbeat of each machine with an agent that is not Retired, counted again with each sample",
            &[],
            HeartbeatAgeHistogram(self.clone()),
        );
    }

    fn register_work(&self, book: &mut MetricRegistry) {
        let processes = [with_other_value(&process_label(), Process::ALL.map(Process::as_str))];
        self.gauge(book, "fleet_work_active", "Work items in progress", &processes, |sample, _| {
            let work = sample.work.iter();
            work.map(|(process, count)| gauge_series([("process", process)], count_to_f64(*count))).collect()
        });
        self.gauge(
            book,
            "fleet_work_due",
            "Machines that are due for work that no worker has claimed",
            &processes,
            |sample, _| {
                let due = sample.due.iter();
                due.map(|(process, waiting)| {
                    gauge_series([("process", process)], count_to_f64(waiting.machines))
                })
                .collect()
            },
        );
        self.gauge(
            book,
            "fleet_work_due_max_age_seconds",
            "How long the machine that has waited longest has been due",
            &processes,
            |sample, _| {
                let due = sample.due.iter();
                due.map(|(process, waiting)| gauge_series([("process", process)], waiting.oldest_seconds))
                    .collect()
            },
        );
        self.gauge(
            book,
            "fleet_backoffs",
            "Machines that wait to retry a process that failed",
            &processes,
            |sample, _| {
                let backoffs = sample.backoffs.iter();
                backoffs
                    .map(|(process, count)| gauge_series([("process", process)], count_to_f64(*count)))
                    .collect()
            },
        );
        self.gauge(
            book,
            "fleet_brakes",
            "1 while a brake is on: for new machines of a provider (creation), or for recovery",
            &[
                Label::one_of("kind", BRAKE_KINDS),
                Label::names("scope", "names that the configuration gives providers, and `*` for all", 101),
            ],
            brake_series,
        );
    }

    fn register_locations(&self, book: &mut MetricRegistry) {
        let places = [
            provider_label(),
            Label::names(
                "location",
                "location that the provider reports, or empty; those with the most machines, and `other` for the \
                 rest",
                MAX_LOCATIONS + 100,
            ),
        ];
        self.gauge(book, "fleet_location_machines", "Machines at a location", &places, |sample, _| {
            let places = sample.places.iter();
            places.map(|place| gauge_series(location_labels(place), count_to_f64(place.machines))).collect()
        });
        self.gauge(
            book,
            "fleet_location_memory_bytes",
            "Memory of the machines at a location, as far as it is reported",
            &places,
            |sample, _| {
                let places = sample.places.iter();
                places
                    .map(|place| gauge_series(location_labels(place), sum_to_f64(place.memory_bytes)))
                    .collect()
            },
        );
        self.gauge(
            book,
            "fleet_location_cpu_threads",
            "Processor threads of the machines at a location, as far as they are reported",
            &places,
            |sample, _| {
                let places = sample.places.iter();
                places
                    .map(|place| gauge_series(location_labels(place), sum_to_f64(place.cpu_threads)))
                    .collect()
            },
        );
    }

    fn register_clusters(&self, book: &mut MetricRegistry) {
        let stages = [with_other_value(&Label::one_of("stage", CLUSTER_STAGES), CLUSTER_STAGES)];
        self.gauge(book, "fleet_clusters", "Clusters by stage", &stages, |sample, _| {
            let stages = sample.clusters.stages.iter();
            stages.map(|(stage, count)| gauge_series([("stage", stage)], count_to_f64(*count))).collect()
        });
        self.gauge(
            book,
            "fleet_clusters_unreachable",
            "Clusters whose curators have all been unreachable for over a minute",
            &[],
            |sample, _| vec![gauge_series([], count_to_f64(sample.clusters.unheard))],
        );
        self.gauge(
            book,
            "fleet_cluster_snapshot_max_age_seconds",
            "Age of the latest snapshot of the cluster whose latest snapshot is the oldest",
            &[],
            |sample, _| vec![gauge_series([], sample.clusters.oldest_snapshot_seconds)],
        );
        self.register_kubernetes(book);
    }

    fn register_kubernetes(&self, book: &mut MetricRegistry) {
        self.gauge(
            book,
            "fleet_kubernetes_clusters",
            "Clusters with a control plane that are configured to run Kubernetes",
            &[],
            |sample, _| vec![gauge_series([], count_to_f64(sample.clusters.kubernetes))],
        );
        self.gauge(
            book,
            "fleet_kubernetes_components_unhealthy",
            "Kubernetes components on cluster nodes that are not healthy, by the latest report of the curators",
            &[],
            |sample, _| vec![gauge_series([], count_to_f64(sample.clusters.components_unwell))],
        );
        self.gauge(
            book,
            "fleet_kubernetes_nodes_pending_rotation",
            "Nodes that have not yet applied the current step of a rotation of Kubernetes keys",
            &[],
            |sample, _| vec![gauge_series([], count_to_f64(sample.clusters.nodes_behind))],
        );
        self.gauge(
            book,
            "fleet_cluster_upgrades",
            "Cluster upgrades in progress, by whether they continue or are paused",
            &[Label::one_of("state", UPGRADE_STATES)],
            |sample, _| {
                let counts = [sample.clusters.upgrades_going, sample.clusters.upgrades_paused];
                let states = UPGRADE_STATES.map(str::to_owned);
                states
                    .iter()
                    .zip(counts)
                    .map(|(state, count)| gauge_series([("state", state)], count_to_f64(count)))
                    .collect()
            },
        );
    }

    fn gauge(
        &self,
        book: &mut MetricRegistry,
        name: &'static str,
        help: &'static str,
        labels: &[Label],
        lines: fn(&FleetSample, Timestamp) -> Vec<GaugeSeries>,
    ) {
        book.add_fleet_metric(name, help, labels, SampleGauge { metrics: self.clone(), lines });
    }
}

/// The labels and the value of one time series.
struct GaugeSeries {
    labels: Vec<(&'static str, String)>,
    value: f64,
}

fn gauge_series<const N: usize>(labels: [(&'static str, &String); N], value: f64) -> GaugeSeries {
    GaugeSeries { labels: labels.map(|(name, value)| (name, value.clone())).into(), value }
}

fn location_labels(place: &crate::model::fleet_sample::LocationSample) -> [(&'static str, &String); 2] {
    [("provider", &place.provider), ("location", &place.location)]
}

/// Every possible brake is shown, on or off.
fn brake_series(sample: &FleetSample, _: Timestamp) -> Vec<GaugeSeries> {
    let mut lines = Vec::new();
    for kind in BRAKE_KINDS {
        for scope in sample.brake_scopes() {
            if kind == "creation" && scope == ALL_PROVIDERS {
                continue;
            }
            let on = sample.brakes.iter().any(|brake| brake.kind == kind && brake.scope == scope);
            let labels = vec![("kind", kind.to_owned()), ("scope", scope)];
            lines.push(GaugeSeries { labels, value: f64::from(u8::from(on)) });
        }
    }
    lines
}

/// A label whose values a newer release may extend.
fn with_other_value(label: &Label, known: impl IntoIterator<Item = &'static str>) -> Label {
    Label::one_of(label.name, known.into_iter().chain([OTHER]))
}

#[expect(clippy::cast_precision_loss, reason = "fleets are far below 2^52 machines")]
const fn count_to_f64(count: u64) -> f64 {
    count as f64
}

#[expect(clippy::cast_precision_loss, reason = "a page more or less of a fleet's memory is nothing")]
const fn sum_to_f64(sum: i64) -> f64 {
    sum as f64
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds since 1970 are far below 2^52")]
fn unix_seconds(at: Timestamp) -> f64 {
    at.timestamp_millis() as f64 / 1_000.0
}

/// A gauge that is read from the newest sample.
struct SampleGauge {
    metrics: FleetMetrics,
    lines: fn(&FleetSample, Timestamp) -> Vec<GaugeSeries>,
}

impl fmt::Debug for SampleGauge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SampleGauge").finish_non_exhaustive()
    }
}

impl EncodeMetric for SampleGauge {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let shown = self.metrics.lock();
        let Some((taken_at, sample)) = &shown.latest else { return Ok(()) };
        for GaugeSeries { labels, value } in (self.lines)(sample, *taken_at) {
            if labels.is_empty() {
                encoder.encode_gauge(&value)?;
            } else {
                encoder.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }

    fn is_empty(&self) -> bool {
        self.metrics.lock().latest.is_none()
    }
}

/// The ages of heartbeats, accumulated over all samples that were shown.
#[derive(Debug)]
struct HeartbeatAgeHistogram(FleetMetrics);

impl EncodeMetric for HeartbeatAgeHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let shown = self.0.lock();
        let bounds = AGE_BOUNDS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(shown.ages.iter().copied()).collect();
        encoder.encode_histogram::<NoLabelSet>(shown.ages_sum, shown.ages.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }

    fn is_empty(&self) -> bool {
        self.0.lock().latest.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fleet_sample::{FleetTally, LocationSample, SampledBrake};
    use crate::model::policy::Policy;

    fn sample() -> FleetSample {
        let mut sample = FleetTally::new(Policy::default()).into_sample(Vec::new(), Vec::new());
        sample.heartbeat_ages.counts[1] = 2;
        sample.heartbeat_ages.sum_seconds = 6.5;
        sample
    }

    fn encoded_lines(metrics: &FleetMetrics) -> Vec<String> {
        let mut book = MetricRegistry::default();
        metrics.register(&mut book);
        book.encode_prometheus_text().unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn only_the_newest_sample_is_exported() {
        let metrics = FleetMetrics::default();
        assert_eq!(encoded_lines(&metrics), Vec::<String>::new());
        let at = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let place = |provider: &str| LocationSample {
            provider: provider.to_owned(),
            location: "a \"row\"".to_owned(),
            machines: 3,
            memory_bytes: 1 << 40,
            cpu_threads: 96,
        };
        metrics.set_sample(at, FleetSample { places: vec![place("old")], ..sample() });
        let brake = SampledBrake { kind: "recovery".to_owned(), scope: "rack".to_owned() };
        metrics.set_sample(at, FleetSample { places: vec![place("rack")], brakes: vec![brake], ..sample() });
        let lines = encoded_lines(&metrics);
        for line in [
            "shepherd_fleet_machines{phase=\"Ready\"} 0.0",
            "shepherd_fleet_location_machines{provider=\"rack\",location=\"a \\\"row\\\"\"} 3.0",
            "shepherd_fleet_location_memory_bytes{provider=\"rack\",location=\"a \\\"row\\\"\"} 1099511627776.0",
            "shepherd_fleet_brakes{kind=\"recovery\",scope=\"rack\"} 1.0",
            "shepherd_fleet_brakes{kind=\"recovery\",scope=\"*\"} 0.0",
            "shepherd_fleet_brakes{kind=\"creation\",scope=\"rack\"} 0.0",
            "shepherd_fleet_heartbeat_age_seconds_bucket{le=\"1.0\"} 0",
            "shepherd_fleet_heartbeat_age_seconds_bucket{le=\"5.0\"} 4",
            "shepherd_fleet_heartbeat_age_seconds_bucket{le=\"+Inf\"} 4",
            "shepherd_fleet_heartbeat_age_seconds_sum 13.0",
            "shepherd_fleet_sample_time_seconds 1800000000.0",
        ] {
            assert!(lines.iter().any(|shown| shown == line), "{line} is missing in\n{}", lines.join("\n"));
        }
        assert!(!lines.iter().any(|line| line.contains("\"old\"")), "{}", lines.join("\n"));
    }
}
