//! `describe machine`: everything that is known of one machine.
//!
//! Facts are found by reflection and shown column by column, so that a fact of a
//! newer schema is not hidden. Bytes that this release understands (a hardware
//! report, host keys) are shown as what they mean, others as bytes.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::find::id_of;
use crate::bmdb::inspect::{self, HistoryLine, Tag};
use crate::bmdb::tags::tags;
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::find;
use crate::cli::output::{Format, table, width};
use crate::cli::{hardware, timeline};
use crate::model::facts::MachineFacts;
use crate::model::host_key::HostKey;
use crate::model::layout::labelled;
use crate::model::machine_view::{LaneView, MachineName, MachineView};
use crate::model::phase::phase_of;
use crate::model::process::Process;
use crate::model::telling::{both, relative};
use crate::model::time::{Span, Timestamp};

/// How many of the last events are shown.
const EVENTS: i64 = 10;
/// Longest bytes that are shown in full.
const SHOWN_BYTES: usize = 64;

#[derive(Serialize)]
struct Description {
    #[serde(flatten)]
    name: MachineName,
    phase: &'static str,
    created_at: Timestamp,
    at: Timestamp,
    /// Every fact by the name of its table, as its row.
    facts: Map<String, Value>,
    /// Lines of the hardware report: what, text.
    hardware: Vec<(String, String)>,
    schedule: Vec<LaneView>,
    backoffs: Vec<Wait>,
    postponements: Vec<Wait>,
    /// Newest first.
    events: Vec<HistoryLine>,
}

/// A process that waits.
#[derive(Serialize)]
struct Wait {
    process: &'static str,
    /// `false` once its time has come and the process has not finished since.
    active: bool,
    until: Timestamp,
    failures: Option<u32>,
    last_interval_seconds: Option<u64>,
    reason: String,
}

/// `describe machine M`.
pub async fn machine(bmdb: &Bmdb, machine: &str, format: Format) -> Result<String, CliError> {
    let name = find(bmdb, machine).await?;
    let id = id_of(&name);
    let view = bmdb.machine_view(id).await?;
    let (tags, events) = bmdb
        .inspect(move |tx| {
            Box::pin(async move {
                Ok::<_, BmdbError>((tags(tx, id).await?, inspect::history(tx, id, EVENTS).await?))
            })
        })
        .await?;
    match format {
        Format::Json => json(&description(&view, &tags, events)),
        Format::Table => Ok(render(&view, &tags, &events)),
    }
}

fn description(view: &MachineView, tags: &[Tag], events: Vec<HistoryLine>) -> Description {
    let (facts, now) = (&view.facts, view.at);
    Description {
        name: view.name(),
        phase: phase_of(facts, &view.policy, now).as_str(),
        created_at: facts.created_at,
        at: now,
        facts: tags.iter().map(|tag| (tag.table.clone(), Value::Object(tag.row.clone()))).collect(),
        hardware: tags.iter().flat_map(hardware_of).collect(),
        schedule: view.lanes.clone(),
        backoffs: backoffs(facts, now),
        postponements: postponements(facts, now),
        events,
    }
}

fn backoffs(facts: &MachineFacts, now: Timestamp) -> Vec<Wait> {
    let wait = |(process, fact): (&Process, &crate::model::backoff::BackoffFact)| Wait {
        process: process.as_str(),
        active: fact.until > now,
        until: fact.until,
        failures: Some(fact.failures),
        last_interval_seconds: Some(fact.last_interval.as_secs()),
        reason: fact.cause.clone(),
    };
    facts.backoffs.iter().map(wait).collect()
}

fn postponements(facts: &MachineFacts, now: Timestamp) -> Vec<Wait> {
    let wait = |(process, fact): (&Process, &crate::model::facts::Postponement)| Wait {
        process: process.as_str(),
        active: fact.until > now,
        until: fact.until,
        failures: None,
        last_interval_seconds: None,
        reason: format!("{} ({})", fact.reason, fact.decided_at),
    };
    facts.postponements.iter().map(wait).collect()
}

fn hardware_of(tag: &Tag) -> Vec<(String, String)> {
    let Some(bytes) = tag.row.get("report").and_then(bytes_of) else { return Vec::new() };
    if tag.table != "machine_hardware_report" {
        return Vec::new();
    }
    hardware::describe(&bytes)
        .unwrap_or_else(|error| vec![("unreadable".to_owned(), format!("{} bytes: {error}", bytes.len()))])
}

fn render(view: &MachineView, tags: &[Tag], events: &[HistoryLine]) -> String {
    let (facts, now, width) = (&view.facts, view.at, width());
    let mut text = labelled(
        0,
        &[
            ("machine".to_owned(), facts.machine.to_string()),
            ("name".to_owned(), view.name().short()),
            ("phase".to_owned(), phase_of(facts, &view.policy, now).to_string()),
            ("known since".to_owned(), both(facts.created_at, now)),
        ],
        width,
    );
    for tag in tags {
        let title = tag.table.strip_prefix("machine_").unwrap_or(&tag.table);
        let _ = write!(text, "\n{title}\n");
        text.push_str(&labelled(2, &columns(tag, now), width));
        let hardware = hardware_of(tag);
        if !hardware.is_empty() {
            text.push_str(&labelled(4, &hardware, width));
        }
    }
    for lane in &view.lanes {
        let _ = write!(text, "\nschedule, lane {}\n", lane.lane);
        text.push_str(&labelled(2, &lane_lines(lane, now), width));
    }
    text.push_str(&waits("backoffs", &backoffs(facts, now), now, width));
    text.push_str(&waits("postponed", &postponements(facts, now), now, width));
    let shown: Vec<Vec<String>> = timeline::rows(events);
    if !shown.is_empty() {
        text.push_str("\nlast events, newest first\n");
        for line in table(&timeline::HEADERS, &shown, width.map(|width| width.saturating_sub(2))).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

fn columns(tag: &Tag, now: Timestamp) -> Vec<(String, String)> {
    tag.columns
        .iter()
        .filter_map(|column| {
            let value = tag.row.get(&column.name)?;
            let text = match (value, column.kind.as_str()) {
                (Value::Null, _) => return None,
                (Value::String(_), "bytea") => bytes_as_text(tag, &column.name, value),
                (Value::String(moment), "timestamp with time zone") => {
                    moment.parse::<Timestamp>().map_or_else(|_| moment.clone(), |moment| both(moment, now))
                }
                (Value::String(text), _) => text.clone(),
                (other, _) => other.to_string(),
            };
            Some((column.name.clone(), text))
        })
        .collect()
}

/// Bytes as PostgreSQL writes them into JSON: `\x0102`.
fn bytes_of(value: &Value) -> Option<Vec<u8>> {
    hex::decode(value.as_str()?.strip_prefix("\\x")?).ok()
}

fn bytes_as_text(tag: &Tag, column: &str, value: &Value) -> String {
    let Some(bytes) = bytes_of(value) else { return value.to_string() };
    if tag.table == "machine_ssh_host_key" {
        return HostKey { algorithm: String::new(), key: bytes }.fingerprint();
    }
    if tag.table == "machine_hardware_report" && column == "report" {
        return format!("{} bytes:", bytes.len());
    }
    if bytes.len() > SHOWN_BYTES { format!("{} bytes", bytes.len()) } else { hex::encode(bytes) }
}

fn lane_lines(lane: &LaneView, now: Timestamp) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    let mut add = |label: &str, value: String| lines.push((label.to_owned(), value));
    match (&lane.process, lane.ready_at) {
        (Some(process), Some(at)) if lane.timer => {
            add("next", format!("{process}, not before {}", both(at, now)));
        }
        (Some(process), Some(at)) => add("next", format!("{process} {}", both(at, now))),
        _ => add("next", "nothing by time alone".to_owned()),
    }
    add("reason", lane.reason.clone());
    add("decided at", lane.decided_at.clone());
    if let Some(at) = lane.deadline {
        add("deadline", both(at, now));
    }
    add("priority", lane.priority.to_string());
    add("fence", lane.fence.to_string());
    if lane.losses > 0 {
        add("losses", lane.losses.to_string());
    }
    if let Some(at) = lane.not_before.filter(|at| *at > now) {
        add("not before", both(at, now));
    }
    if let Some(work) = &lane.work {
        let who = work.component.as_deref().unwrap_or("?");
        let host = work.host.as_deref().unwrap_or("?");
        let pid = work.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        let ends = match (work.session_closed_at, work.session_deadline) {
            (Some(at), _) => format!("ended {}", relative(at, now)),
            (None, Some(at)) => format!("ends {}", relative(at, now)),
            (None, None) => "unknown".to_owned(),
        };
        add("under way", format!("{} since {}, fence {}", work.process, both(work.since, now), work.fence));
        add("held by", format!("{who} on {host}, pid {pid}"));
        add("session", format!("{}, {ends}", work.session));
    }
    lines
}

fn waits(title: &str, waits: &[Wait], now: Timestamp, width: Option<usize>) -> String {
    if waits.is_empty() {
        return String::new();
    }
    let lines: Vec<(String, String)> = waits
        .iter()
        .map(|wait| {
            let state = if wait.active { "ends" } else { "ended" };
            let failures =
                wait.failures.zip(wait.last_interval_seconds).map_or_else(String::new, |(count, last)| {
                    let interval = Span::seconds(last);
                    format!("{count} in a row, waits {interval}; ")
                });
            (wait.process.to_owned(), format!("{failures}{state} {}: {}", both(wait.until, now), wait.reason))
        })
        .collect();
    format!("\n{title}\n{}", labelled(2, &lines, width))
}
