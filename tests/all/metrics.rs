//! Metrics: the manual and the registry are the same, rules and dashboard name only existing metrics, and a real demo
//! shows all of them in a form that `promtool` accepts.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;
use shepherd::bmdb::metrics::Metrics;
use shepherd::bmdb::metrics::registry::{LabelValues, MetricDescriptor, MetricRegistry};
use shepherd::manager::provider_set::ProviderSet;
use shepherd::service::start::register_service_metrics;
use shepherd::service::traces::SpanCounts;

use crate::bmdb_kit::Kit;
use crate::demo::Demo;
use crate::harness::aloud::TestResult;
use crate::harness::program::{PATIENCE, Place};
use crate::harness::promtool::promtool;
use crate::harness::source;

const MANUAL: &str = "docs/metrics.md";
const RULES: &str = "contrib/alerts.yml";
const RULES_TEST: &str = "contrib/alerts-test.yml";
const BOARD: &str = "contrib/grafana.json";

/// All metrics of a service.
async fn everything(test_name: &str) -> Result<Metrics> {
    let kit = Kit::new(test_name).await?;
    let counted = Metrics::new();
    let _ = register_service_metrics(&counted, &kit.bmdb, &ProviderSet::default(), &SpanCounts::default());
    Ok(counted)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_manual_of_metrics_is_what_the_code_counts() -> TestResult {
    let manual = everything("metrics_manual").await?.with_registry(MetricRegistry::render_manual);
    if std::env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
        std::fs::write(source::root().join(MANUAL), &manual)?;
    }
    let written = source::read(Path::new(MANUAL))?;
    let missing: Vec<&str> = manual.lines().filter(|line| !written.contains(line)).collect();
    let gone: Vec<&str> = written.lines().filter(|line| !manual.contains(line)).collect();
    assert!(
        written == manual,
        "{MANUAL} is not what the code counts; rewrite it with INSTA_UPDATE=always and read the difference.\n\
         not in the manual: {missing:#?}\nin the manual alone: {gone:#?}"
    );
    Ok(())
}

/// A metric named in a query, and the values that its labels are compared with.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    metric: String,
    labels: Vec<(String, String)>,
}

/// Every metric of ours that a text names.
fn named(text: &str) -> Vec<Named> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("shepherd_") {
        let tail = &rest[at..];
        let is_part =
            rest[..at].chars().next_back().is_some_and(|before| before.is_alphanumeric() || before == '_');
        let end = tail.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(tail.len());
        let (metric, after) = tail.split_at(end);
        let mut labels = Vec::new();
        if let Some((matchers, _)) = after.strip_prefix('{').and_then(|after| after.split_once('}')) {
            for matcher in matchers.split(',') {
                let Some((name, value)) = matcher.split_once('=') else { continue };
                let name = name.trim().trim_end_matches('!');
                let value = value.trim_start_matches('~').trim_matches(|c| c == '"' || c == '\\');
                labels.push((name.to_owned(), value.to_owned()));
            }
        }
        if !is_part {
            found.push(Named { metric: metric.to_owned(), labels });
        }
        rest = after;
    }
    found
}

/// Labels that Prometheus adds itself, and the one of a histogram's buckets.
const OF_PROMETHEUS: [&str; 2] = ["instance", "le"];

/// The error in how a metric is named, if there is one.
fn wrong(named: &Named, entries: &[MetricDescriptor]) -> Option<String> {
    let Some(entry) = entries.iter().find(|entry| entry.series_names().contains(&named.metric)) else {
        return Some(format!("there is no {}", named.metric));
    };
    let mut of_ours = named.labels.iter().filter(|(name, _)| !OF_PROMETHEUS.contains(&name.as_str()));
    of_ours.find_map(|(name, values)| {
        let label = entry.labels.iter().find(|label| label.name == name);
        let Some(label) = label else { return Some(format!("{} has no label {name}", named.metric)) };
        match &label.values {
            LabelValues::Names { .. } => None,
            LabelValues::OneOf(known) => values
                .split('|')
                .find(|value| !known.contains(value))
                .map(|value| format!("{} never has {name}={value:?}", named.metric)),
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_and_board_name_metrics_and_labels_that_there_are() -> TestResult {
    let entries = everything("metrics_named").await?.with_registry(|book| book.descriptors().to_vec());
    for file in [RULES, RULES_TEST, BOARD] {
        let text = source::read(Path::new(file))?.replace("\\\"", "\"");
        let found = named(&text);
        assert!(found.len() > 20, "{file}: {found:?}");
        let wrong: Vec<String> = found.iter().filter_map(|one| wrong(one, &entries)).collect();
        assert!(wrong.is_empty(), "{file}: {wrong:#?}");
    }
    let _: serde_json::Value = serde_json::from_str(&source::read(Path::new(BOARD))?)?;
    for line in source::read(Path::new(RULES))?.lines() {
        if let Some(page) = line.trim().strip_prefix("page: ") {
            source::read(Path::new(page)).context("a rule names a page that there is not")?;
        }
    }

    // The check finds the errors that it is for.
    let text =
        "rate(shepherd_work_finished_total{result=~\"failed|lost\",process!=\"Update\"}[5m]) / my_shepherd_x";
    let found = named(text);
    let labels =
        |list: &[(&str, &str)]| list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    assert!(
        found
            == [Named {
                metric: "shepherd_work_finished_total".to_owned(),
                labels: labels(&[("result", "failed|lost"), ("process", "Update")]),
            }]
    );
    for (text, expected) in [
        ("shepherd_naps_total", "there is no shepherd_naps_total"),
        ("shepherd_phase_duration_seconds", "there is no shepherd_phase_duration_seconds"),
        ("shepherd_work_started_total{machine=\"a\"}", "shepherd_work_started_total has no label machine"),
        (
            "shepherd_fleet_machines{phase=~\"Ready|Napping\"}",
            "shepherd_fleet_machines never has phase=\"Napping\"",
        ),
    ] {
        let message = named(text).first().and_then(|one| wrong(one, &entries));
        assert!(message.as_deref() == Some(expected), "{text}: {message:?}");
    }
    Ok(())
}

#[test]
fn each_alert_fires_where_it_should_and_none_in_a_healthy_fleet() -> TestResult {
    let text = promtool(&["check", "rules", RULES], "")?;
    assert!(text.contains("SUCCESS: "), "{text}");
    let text = promtool(&["test", "rules", RULES_TEST], "")?;
    assert!(text.contains("SUCCESS"), "{text}");
    let (rules, test) = (source::read(Path::new(RULES))?, source::read(Path::new(RULES_TEST))?);
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 20, "{alerts:?}");
    for alert in alerts {
        assert!(test.contains(&format!("alertname=\"{alert}\"")), "{alert} is never expected to fire");
    }
    Ok(())
}

/// One sample of a response.
#[derive(Debug)]
struct Sample<'t> {
    name: &'t str,
    labels: Vec<(&'t str, String)>,
    value: f64,
}

/// Parses a response, line by line.
fn samples(text: &str) -> Result<Vec<Sample<'_>>> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(|line| sample(line).with_context(|| line.to_owned())).collect()
}

fn sample(line: &str) -> Result<Sample<'_>> {
    let end = line.find(['{', ' ']).context("no end of the name")?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = rest.trim_start_matches(',').split_once("=\"").context("no label")?;
            let mut value = String::new();
            let mut escaped = false;
            let mut close = None;
            for (at, c) in after.char_indices() {
                match c {
                    '"' if !escaped => {
                        close = Some(at);
                        break;
                    }
                    '\\' if !escaped => escaped = true,
                    c => {
                        value.push(c);
                        escaped = false;
                    }
                }
            }
            labels.push((label, value));
            rest = &after[close.context("no end of the value")? + 1..];
        }
        rest = &rest[1..];
    }
    Ok(Sample { name, labels, value: rest.trim().parse()? })
}

/// Samples of a response that the registry does not have, or has in another form.
fn unheard_of(samples: &[Sample<'_>], entries: &[MetricDescriptor]) -> Vec<String> {
    let mut wrong = BTreeSet::new();
    let mut names: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for sample in samples {
        let Some(entry) =
            entries.iter().find(|entry| entry.series_names().iter().any(|line| line == sample.name))
        else {
            wrong.insert(format!("{} is in no book", sample.name));
            continue;
        };
        let shown: Vec<&str> =
            sample.labels.iter().map(|(name, _)| *name).filter(|name| *name != "le").collect();
        let known: Vec<&str> = entry.labels.iter().map(|label| label.name).collect();
        if shown != known {
            wrong.insert(format!("{} has the labels {shown:?}, and by the book {known:?}", sample.name));
            continue;
        }
        for label in &entry.labels {
            let Some((_, value)) = sample.labels.iter().find(|(name, _)| *name == label.name) else {
                continue;
            };
            match &label.values {
                LabelValues::OneOf(values) if !values.contains(&value.as_str()) => {
                    wrong.insert(format!("{} has {}={value:?}", sample.name, label.name));
                }
                LabelValues::OneOf(_) => {}
                LabelValues::Names { most, .. } => {
                    let seen = names.entry((sample.name, label.name)).or_default();
                    seen.insert(value);
                    if seen.len() > *most {
                        wrong.insert(format!("{} has more than {most} of {}", sample.name, label.name));
                    }
                }
            }
        }
    }
    wrong.into_iter().collect()
}

/// The names in the tables of the manual.
fn documented() -> Result<BTreeSet<String>> {
    let manual = source::read(Path::new(MANUAL))?;
    let rows = manual.lines().filter_map(|line| line.strip_prefix("| `shepherd_"));
    let names: BTreeSet<String> =
        rows.filter_map(|row| row.split('`').next()).map(|name| format!("shepherd_{name}")).collect();
    ensure!(names.len() > 50, "{names:?}");
    Ok(names)
}

/// The response of an address.
fn scraped(address: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "GET /metrics HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no body")?;
    ensure!(head.contains(" 200 "), "{head}");
    Ok(body.to_owned())
}

/// The sum of the samples under a name with a label.
fn sum(samples: &[Sample<'_>], name: &str, label: &str) -> f64 {
    let of_name = samples.iter().filter(|sample| sample.name == name);
    let labelled =
        of_name.filter(|sample| label.is_empty() || sample.labels.iter().any(|(_, value)| value == label));
    labelled.map(|sample| sample.value).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_demo_shows_every_documented_metric_and_prometheus_takes_them() -> TestResult {
    let entries = everything("metrics_demo").await?.with_registry(|book| book.descriptors().to_vec());
    Ok(tokio::task::spawn_blocking(move || demo_shows(&entries)).await??)
}

fn demo_shows(entries: &[MetricDescriptor]) -> Result<()> {
    let place = Place::new()?;
    let mut demo = Demo::spawn(place.program(["demo", "--machines", "8"]))?;
    demo.until("Ctrl-C ends the demo")?;
    // Until a machine was recovered, and the fleet was sampled after that. The machine is Ready as soon as it is
    // recovered, and counts as heartbeating after the next heartbeat of its new agent.
    demo.pasted(&place, "simulator fault sim-0007 kill")?;
    demo.until("sim-0007  Ready → ")?;
    let line =
        demo.output_lines.iter().find(|line| line.ends_with("/metrics")).context("no address is printed")?;
    let address =
        line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).context("no address")?;
    let address = address.to_owned();
    let deadline = Instant::now() + PATIENCE;
    let text = loop {
        let text = scraped(&address)?;
        let samples = samples(&text)?;
        let ready = sum(&samples, "shepherd_fleet_machines", "Ready");
        let recovered = sum(&samples, "shepherd_phase_duration_seconds_count", "Recovering");
        let heartbeating = sum(&samples, "shepherd_fleet_machines_by_fact", "heartbeating");
        if ready >= 8.0 && recovered >= 1.0 && heartbeating >= 8.0 {
            break text;
        }
        if Instant::now() > deadline {
            bail!(
                "Ready: {ready}, recovered: {recovered}, heartbeating: {heartbeating}, and 8, 1 and 8 at least:\n{text}"
            );
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    let shown = samples(&text)?;
    let names: BTreeSet<&str> = shown.iter().map(|sample| sample.name).collect();
    for name in documented()? {
        let parts = [name.clone(), format!("{name}_bucket")];
        ensure!(parts.iter().any(|part| names.contains(part.as_str())), "{name} is not shown:\n{text}");
    }
    let strange = unheard_of(&shown, entries);
    ensure!(strange.is_empty(), "{strange:#?}");
    for (name, label, least) in [
        ("shepherd_fleet_location_machines", "sim", 8.0),
        ("shepherd_fleet_location_memory_bytes", "sim", 8.0 * 1e9),
        ("shepherd_fleet_location_cpu_threads", "sim", 8.0),
        ("shepherd_fleet_heartbeat_age_seconds_count", "", 8.0),
        ("shepherd_provider_call_seconds_count", "list", 1.0),
        ("shepherd_work_wait_seconds_count", "AgentStart", 8.0),
        ("shepherd_work_completion_seconds_count", "initializer", 8.0),
        ("shepherd_claim_seconds_count", "work", 1.0),
        ("shepherd_bmdb_pool_connections_limit", "", 32.0),
        ("shepherd_bmdb_pool_wait_seconds_count", "", 8.0),
        ("shepherd_sessions_started_total", "sampler", 1.0),
    ] {
        let sum = sum(&shown, name, label);
        ensure!(sum >= least, "{name} of {label:?} is {sum}, and {least} at least:\n{text}");
    }
    let message = promtool(&["check", "metrics"], &text)?;
    ensure!(message.is_empty(), "{message}");
    demo.signal(Signal::INT)?;
    ensure!(demo.end()?.0 == Some(0), "{:#?}", demo.output_lines);
    place.must_be_clean()
}
