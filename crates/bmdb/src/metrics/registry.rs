//! Metric registry: descriptors, label values, both text formats and the generated manual.
//!
//! A metric is registered once, with its name, its help and its labels. The scraped lines
//! ([`Metrics`][crate::metrics::Metrics]) and its line in `docs/metrics.md` follow from that entry, so neither
//! can have what the other lacks. A test compares the manual in the tree with the registry, and a real service's answer
//! with both.
//!
//! # Labels
//!
//! A monitoring system stores each distinct set of values as a series for months, so a label declares its values: one
//! of a list, or names of some kind, with a maximum number. A machine, an address or a foreign text is never a label
//! value.
//!
//! # Two forms
//!
//! [`MetricRegistry::encode_openmetrics`] is OpenMetrics, for clients that request it.
//! [`MetricRegistry::encode_prometheus_text`] is the older text format, which every tool reads (`promtool check
//! metrics` reads no other). They differ in the name of a counter in its description: with `_total` in the older one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Metric, Registry};

/// Prefix of every name.
const PREFIX: &str = "shepherd";

/// The values of a label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelValues {
    /// One of the values of this list.
    OneOf(Vec<&'static str>),
    /// Names that are not fixed in the code.
    Names {
        /// What the names are of, for the manual.
        of: &'static str,
        /// How many there are at most.
        most: usize,
    },
}

impl fmt::Display for LabelValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OneOf(values) => {
                let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
                f.write_str(&values.join(", "))
            }
            Self::Names { of, most } => write!(f, "{of}; {most} at most"),
        }
    }
}

/// A label of a metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Name of the label.
    pub name: &'static str,
    /// The values it can have.
    pub values: LabelValues,
}

impl Label {
    /// A label with a fixed list of values.
    #[must_use]
    pub fn one_of(name: &'static str, values: impl IntoIterator<Item = &'static str>) -> Self {
        Self { name, values: LabelValues::OneOf(values.into_iter().collect()) }
    }

    /// A label whose values are at most `most` names, of something that is not fixed in the code.
    #[must_use]
    pub const fn names(name: &'static str, of: &'static str, most: usize) -> Self {
        Self { name, values: LabelValues::Names { of, most } }
    }
}

/// What a number describes, and so how those of several processes are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MetricScope {
    /// What this process did or has. The numbers of several processes are added up.
    Process,
    /// What is true of the fleet, the same from each shepherd. Of several numbers any can be taken, such as the
    /// largest.
    Fleet,
    /// What the database reports about itself to the shepherd that queries it. Of several numbers the largest is taken.
    Database,
}

/// A registered metric with everything the manual needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricDescriptor {
    /// Its name as it is scraped, without the suffixes of a histogram.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// What it counts, one sentence without its full stop.
    pub help: &'static str,
    /// Its labels, without a histogram's `le`.
    pub labels: Vec<Label>,
    /// What its number describes.
    pub scope: MetricScope,
}

impl MetricDescriptor {
    /// The names that its lines in the output begin with.
    #[must_use]
    pub fn series_names(&self) -> Vec<String> {
        match self.kind {
            "histogram" => ["_bucket", "_sum", "_count"].map(|part| format!("{}{part}", self.name)).into(),
            _ => vec![self.name.clone()],
        }
    }
}

/// The registry of a process: see the module.
#[derive(Debug)]
pub struct MetricRegistry {
    registry: Registry,
    descriptors: Vec<MetricDescriptor>,
}

impl Default for MetricRegistry {
    fn default() -> Self {
        Self { registry: Registry::with_prefix(PREFIX), descriptors: Vec::new() }
    }
}

impl MetricRegistry {
    /// Registers a metric of this process. The name gets the prefix `shepherd_`, and a counter's `_total`; the help
    /// gets its full stop.
    pub fn add_process_metric(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[Label],
        metric: impl Metric,
    ) {
        self.register_metric(MetricScope::Process, name, help, labels, metric);
    }

    /// Registers a metric of the fleet.
    pub fn add_fleet_metric(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[Label],
        metric: impl Metric,
    ) {
        self.register_metric(MetricScope::Fleet, name, help, labels, metric);
    }

    /// Registers a metric of the database.
    pub fn add_database_metric(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[Label],
        metric: impl Metric,
    ) {
        self.register_metric(MetricScope::Database, name, help, labels, metric);
    }

    fn register_metric(
        &mut self,
        scope: MetricScope,
        name: &'static str,
        help: &'static str,
        labels: &[Label],
        metric: impl Metric,
    ) {
        let (kind, suffix) = match metric.metric_type() {
            MetricType::Counter => ("counter", "_total"),
            MetricType::Gauge => ("gauge", ""),
            MetricType::Histogram => ("histogram", ""),
            MetricType::Info | MetricType::Unknown => ("untyped", ""),
        };
        self.registry.register(name, help, metric);
        self.descriptors.push(MetricDescriptor {
            name: format!("{PREFIX}_{name}{suffix}"),
            kind,
            help,
            labels: labels.to_vec(),
            scope,
        });
    }

    /// Every registered metric, in the order of registration.
    #[must_use]
    pub fn descriptors(&self) -> &[MetricDescriptor] {
        &self.descriptors
    }

    /// Encodes everything as OpenMetrics.
    pub fn encode_openmetrics(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Encodes everything in the older text format.
    pub fn encode_prometheus_text(&self) -> Result<String, fmt::Error> {
        let counters = self.descriptors.iter().filter(|entry| entry.kind == "counter");
        let counters: BTreeSet<&str> =
            counters.filter_map(|entry| entry.name.strip_suffix("_total")).collect();
        let mut plain = String::new();
        for line in self.encode_openmetrics()?.lines() {
            let described = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '));
            match described.and_then(|(what, rest)| Some((what, rest.split_once(' ')?))) {
                Some((what @ ("HELP" | "TYPE"), (name, rest))) if counters.contains(name) => {
                    writeln!(plain, "# {what} {name}_total {rest}")?;
                }
                Some(("HELP" | "TYPE", _)) => writeln!(plain, "{line}")?,
                _ if line.starts_with('#') => {}
                _ => writeln!(plain, "{line}")?,
            }
        }
        Ok(plain)
    }

    /// Renders the manual, which `docs/metrics.md` contains.
    #[must_use]
    pub fn render_manual(&self) -> String {
        let mut manual = MANUAL_INTRODUCTION.to_owned();
        for (scope, heading) in [
            (MetricScope::Fleet, FLEET_SECTION),
            (MetricScope::Process, PROCESS_SECTION),
            (MetricScope::Database, DATABASE_SECTION),
        ] {
            manual.push_str(heading);
            manual.push_str("\n| metric | kind | labels | what |\n| --- | --- | --- | --- |\n");
            let mut entries: Vec<&MetricDescriptor> =
                self.descriptors.iter().filter(|entry| entry.scope == scope).collect();
            entries.sort_by(|a, b| a.name.cmp(&b.name));
            for entry in entries {
                let labels: Vec<String> =
                    entry.labels.iter().map(|label| format!("`{}`", label.name)).collect();
                let (name, kind, help) = (&entry.name, entry.kind, entry.help);
                // Writing to a String cannot fail.
                let _ = writeln!(manual, "| `{name}` | {kind} | {} | {help}. |", labels.join(", "));
            }
        }
        manual.push_str(LABELS_SECTION);
        let mut labels: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
        for entry in &self.descriptors {
            for label in &entry.labels {
                labels.entry((label.name, label.values.to_string())).or_default().push(&entry.name);
            }
        }
        for ((name, values), mut metrics) in labels {
            metrics.sort_unstable();
            let metrics: Vec<String> = metrics.iter().map(|metric| format!("`{metric}`")).collect();
            let _ = writeln!(manual, "| `{name}` | {values} | {} |", metrics.join(", "));
        }
        manual
    }
}

const MANUAL_INTRODUCTION: &str = "\
# Metrics

`shepherd --metrics_listen_address ADDRESS:PORT` serves these at `http://ADDRESS:PORT/metrics`, without a query to the
database. Plain HTTP: keep it on a trusted network. This page is generated from the code, and a test compares the two.

Alert rules for these metrics are in [contrib/alerts.yml](../contrib/alerts.yml), and
[contrib/grafana.json](../contrib/grafana.json) is a dashboard for Grafana.
";

const FLEET_SECTION: &str = "
## Fleet

Once a minute the shepherd that acquires the lease for it counts the fleet and stores the result as one row
(`fleet_sample`, retained for 30 days). Every shepherd serves the latest row, so these metrics are the same from each:
use `max`, not `sum`, over several. `shepherd_fleet_sample_time_seconds` is the time of the row. Before the first row none
of these metrics exist. Phases are the indexed ones, which may be out of date by a minute.
";

const PROCESS_SECTION: &str = "
## Process

Counters of this shepherd since its start, and its state at this moment. Sum them over several shepherds.
";

const DATABASE_SECTION: &str = "
## Database

Statistics that the database reports to each shepherd: use `max` over several.
";

const LABELS_SECTION: &str = "
## Labels

Every label has few values, and never the name or address of a machine.

| label | values | metrics |
| --- | --- | --- |
";

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::EncodeLabelSet;
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::family::Family;
    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::metrics::histogram::Histogram;

    use super::*;

    #[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
    struct ByColour {
        colour: &'static str,
    }

    fn book() -> MetricRegistry {
        let mut book = MetricRegistry::default();
        let sheep: Family<ByColour, Counter> = Family::default();
        sheep.get_or_create(&ByColour { colour: "black" }).inc();
        book.add_process_metric(
            "sheep",
            "Sheep counted",
            &[Label::one_of("colour", ["black", "white"])],
            sheep,
        );
        let asleep: Gauge = Gauge::default();
        book.add_fleet_metric("asleep", "Whether somebody sleeps", &[], asleep);
        book.add_process_metric("jump_seconds", "Time over the fence", &[], Histogram::new([0.5]));
        book
    }

    #[test]
    fn prometheus_text_describes_counters_with_their_total_suffix() {
        let book = book();
        let plain = book.encode_prometheus_text().unwrap();
        for line in [
            "# HELP shepherd_sheep_total Sheep counted.",
            "# TYPE shepherd_sheep_total counter",
            "shepherd_sheep_total{colour=\"black\"} 1",
            "# TYPE shepherd_asleep gauge",
            "shepherd_asleep 0",
            "# TYPE shepherd_jump_seconds histogram",
            "shepherd_jump_seconds_bucket{le=\"+Inf\"} 0",
        ] {
            assert!(plain.lines().any(|shown| shown == line), "{line} is missing in\n{plain}");
        }
        assert!(!plain.contains("EOF"), "{plain}");
        let open = book.encode_openmetrics().unwrap();
        assert!(open.contains("# TYPE shepherd_sheep counter\n") && open.ends_with("# EOF\n"), "{open}");
    }

    #[test]
    fn the_manual_has_every_entry_and_what_its_labels_can_be() {
        let manual = book().render_manual();
        for line in [
            "| `shepherd_sheep_total` | counter | `colour` | Sheep counted. |",
            "| `shepherd_asleep` | gauge |  | Whether somebody sleeps. |",
            "| `colour` | `black`, `white` | `shepherd_sheep_total` |",
        ] {
            assert!(manual.lines().any(|shown| shown == line), "{line} is missing in\n{manual}");
        }
    }

    #[test]
    fn a_histogram_has_three_kinds_of_lines() {
        let book = book();
        let lines: Vec<String> = book.descriptors().iter().flat_map(MetricDescriptor::series_names).collect();
        assert_eq!(
            lines,
            [
                "shepherd_sheep_total",
                "shepherd_asleep",
                "shepherd_jump_seconds_bucket",
                "shepherd_jump_seconds_sum",
                "shepherd_jump_seconds_count"
            ]
        );
    }
}
