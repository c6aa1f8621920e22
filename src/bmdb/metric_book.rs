//! The book of everything that a process counts: what [`Metrics`][crate::bmdb::metrics::Metrics] shows, and what
//! `docs/metrics.md` says of it.
//!
//! A metric enters once, with its name, its help and its labels, and from that entry follow the lines that are
//! scraped and its line in the manual. So neither can have what the other has not; a test holds the manual in the
//! tree to the book, and a real service's answer to both.
//!
//! # Labels
//!
//! Each distinct set of values is a series that whoever scrapes keeps for months, so a label says at its entry
//! what its values are: one of a list, or names of some kind, of which there are never more than so many. A
//! machine, an address or a text of somebody else's is none.
//!
//! # Two forms
//!
//! [`Book::open_metrics`] is OpenMetrics, for those who ask for it. [`Book::plain`] is the older text format,
//! which every tool reads (`promtool check metrics` reads no other). They differ in what a counter is called in
//! its description: with `_total` in the older one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fmt::Write as _;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Metric, Registry};

/// First part of every name.
const PREFIX: &str = "shepherd";

/// What a label's values are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Values {
    /// One of these.
    OneOf(Vec<&'static str>),
    /// Names that the code does not know.
    Names {
        /// Whose names.
        of: &'static str,
        /// How many there are at most.
        most: usize,
    },
}

impl fmt::Display for Values {
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
    /// Its name.
    pub name: &'static str,
    /// What its values are.
    pub values: Values,
}

impl Label {
    /// A label with a fixed list of values.
    #[must_use]
    pub fn one_of(name: &'static str, values: impl IntoIterator<Item = &'static str>) -> Self {
        Self { name, values: Values::OneOf(values.into_iter().collect()) }
    }

    /// A label whose values are `most` names of something that others name.
    #[must_use]
    pub const fn names(name: &'static str, of: &'static str, most: usize) -> Self {
        Self { name, values: Values::Names { of, most } }
    }
}

/// Whose number it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// What this process did or has. Those of several are added up.
    Process,
    /// What is true of the fleet, the same from each shepherd. Of several one is taken, the largest as well as any.
    Fleet,
    /// What the database says of itself, to each shepherd when that asks. Of several the largest is taken.
    Database,
}

/// An entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name as it is scraped, but for what a histogram appends.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// What it counts.
    pub help: &'static str,
    /// Its labels, beside a histogram's `le`.
    pub labels: Vec<Label>,
    /// Whose number it is.
    pub scope: Scope,
}

impl Entry {
    /// The names that its lines begin with.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        match self.kind {
            "histogram" => ["_bucket", "_sum", "_count"].map(|part| format!("{}{part}", self.name)).into(),
            _ => vec![self.name.clone()],
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Book {
    registry: Registry,
    entries: Vec<Entry>,
}

impl Default for Book {
    fn default() -> Self {
        Self { registry: Registry::with_prefix(PREFIX), entries: Vec::new() }
    }
}

impl Book {
    /// Enters what this process did or has. The name gets the prefix `shepherd_`, and a counter's `_total`; the
    /// help gets its full stop.
    pub fn add(&mut self, name: &'static str, help: &'static str, labels: &[Label], metric: impl Metric) {
        self.enter(Scope::Process, name, help, labels, metric);
    }

    /// Enters what is true of the fleet.
    pub fn add_of_fleet(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[Label],
        metric: impl Metric,
    ) {
        self.enter(Scope::Fleet, name, help, labels, metric);
    }

    /// Enters what the database says of itself.
    pub fn add_of_database(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[Label],
        metric: impl Metric,
    ) {
        self.enter(Scope::Database, name, help, labels, metric);
    }

    fn enter(
        &mut self,
        scope: Scope,
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
        self.entries.push(Entry {
            name: format!("{PREFIX}_{name}{suffix}"),
            kind,
            help,
            labels: labels.to_vec(),
            scope,
        });
    }

    /// Everything that is in it.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// All of it as OpenMetrics.
    pub fn open_metrics(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// All of it in the older text format.
    pub fn plain(&self) -> Result<String, fmt::Error> {
        let counters = self.entries.iter().filter(|entry| entry.kind == "counter");
        let counters: BTreeSet<&str> =
            counters.filter_map(|entry| entry.name.strip_suffix("_total")).collect();
        let mut plain = String::new();
        for line in self.open_metrics()?.lines() {
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

    /// The manual, as `docs/metrics.md` has it.
    #[must_use]
    pub fn manual(&self) -> String {
        let mut manual = MANUAL.to_owned();
        for (scope, heading) in
            [(Scope::Fleet, OF_FLEET), (Scope::Process, OF_PROCESS), (Scope::Database, OF_DATABASE)]
        {
            manual.push_str(heading);
            manual.push_str("\n| metric | kind | labels | what |\n| --- | --- | --- | --- |\n");
            let mut entries: Vec<&Entry> = self.entries.iter().filter(|entry| entry.scope == scope).collect();
            entries.sort_by(|a, b| a.name.cmp(&b.name));
            for entry in entries {
                let labels: Vec<String> =
                    entry.labels.iter().map(|label| format!("`{}`", label.name)).collect();
                let (name, kind, help) = (&entry.name, entry.kind, entry.help);
                // Writing to a String cannot fail.
                let _ = writeln!(manual, "| `{name}` | {kind} | {} | {help}. |", labels.join(", "));
            }
        }
        manual.push_str(OF_LABELS);
        let mut labels: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
        for entry in &self.entries {
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

const MANUAL: &str = "\
# Metrics

`shepherd --metrics_listen_address ADDRESS:PORT` serves these at `http://ADDRESS:PORT/metrics`, without a query to the
database. Plain HTTP: keep it on a trusted network. This page is generated from the code, and a test compares the two.

Alert rules for these metrics are in [contrib/alerts.yml](../contrib/alerts.yml), and
[contrib/grafana.json](../contrib/grafana.json) is a dashboard for Grafana.
";

const OF_FLEET: &str = "
## Fleet

Once a minute the shepherd that acquires the lease for it counts the fleet and stores the result as one row
(`fleet_sample`, retained for 30 days). Every shepherd serves the latest row, so these metrics are the same from each:
use `max`, not `sum`, over several. `shepherd_fleet_sample_time_seconds` is the time of the row. Before the first row none
of these metrics exist. Phases are the indexed ones, which may be out of date by a minute.
";

const OF_PROCESS: &str = "
## Process

Counters of this shepherd since its start, and its state at this moment. Sum them over several shepherds.
";

const OF_DATABASE: &str = "
## Database

Statistics that the database reports to each shepherd: use `max` over several.
";

const OF_LABELS: &str = "
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

    fn book() -> Book {
        let mut book = Book::default();
        let sheep: Family<ByColour, Counter> = Family::default();
        sheep.get_or_create(&ByColour { colour: "black" }).inc();
        book.add("sheep", "Sheep counted", &[Label::one_of("colour", ["black", "white"])], sheep);
        let asleep: Gauge = Gauge::default();
        book.add_of_fleet("asleep", "Whether somebody sleeps", &[], asleep);
        book.add("jump_seconds", "Time over the fence", &[], Histogram::new([0.5]));
        book
    }

    #[test]
    fn counters_are_described_by_the_name_of_their_lines_in_the_older_format() {
        let book = book();
        let plain = book.plain().unwrap();
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
        let open = book.open_metrics().unwrap();
        assert!(open.contains("# TYPE shepherd_sheep counter\n") && open.ends_with("# EOF\n"), "{open}");
    }

    #[test]
    fn the_manual_has_every_entry_and_what_its_labels_can_be() {
        let manual = book().manual();
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
        let lines: Vec<String> = book.entries().iter().flat_map(Entry::lines).collect();
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
