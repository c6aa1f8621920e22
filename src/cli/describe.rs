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
use crate::cli::remote::refused;
use crate::cli::source::Source;
use crate::cli::{hardware, remote_outlook, timeline};
use crate::model::host_key::HostKey;
use crate::model::layout::labelled;
use crate::model::machine_view::{LaneView, MachineName};
use crate::model::phase::phase_of;
use crate::model::telling::{both, relative};
use crate::model::time::{Span, Timestamp};
use crate::model::waits::{Wait, backoffs, postponements};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;

/// How many of the last events are shown.
const EVENTS: i64 = 10;
/// Longest bytes that are shown in full.
const SHOWN_BYTES: usize = 64;

/// What is known of a machine, whoever was asked for it.
pub struct Described {
    /// Its names.
    pub name: MachineName,
    /// Where it is in its life.
    pub phase: &'static str,
    /// Since when it is known.
    pub created_at: Timestamp,
    /// The moment that all of this is about.
    pub at: Timestamp,
    /// Its facts.
    pub tags: Vec<Tag>,
    /// Both lanes.
    pub schedule: Vec<LaneView>,
    /// Processes that failed.
    pub backoffs: Vec<Wait>,
    /// Processes that were put off.
    pub postponements: Vec<Wait>,
    /// Newest first.
    pub events: Vec<HistoryLine>,
}

#[derive(Serialize)]
struct Description<'a> {
    #[serde(flatten)]
    name: &'a MachineName,
    phase: &'static str,
    created_at: Timestamp,
    at: Timestamp,
    /// Every fact by the name of its table, as its row.
    facts: Map<String, Value>,
    /// Lines of the hardware report: what, text.
    hardware: Vec<(String, String)>,
    schedule: &'a [LaneView],
    backoffs: &'a [Wait],
    postponements: &'a [Wait],
    /// Newest first.
    events: &'a [HistoryLine],
}

/// `describe machine M`.
pub async fn machine(source: &Source, machine: &str, format: Format) -> Result<String, CliError> {
    let described = match source {
        Source::Direct(bmdb) => read(bmdb, machine).await?,
        Source::Api(remote) => {
            let request = v1::DescribeMachineRequest { machine: machine.to_owned() };
            let said = MachinesClient::new(remote.service()).describe(request).await.map_err(refused)?;
            remote_outlook::described(said.into_inner())?
        }
    };
    match format {
        Format::Json => json(&description(&described)),
        Format::Table => Ok(render(&described)),
    }
}

async fn read(bmdb: &Bmdb, machine: &str) -> Result<Described, CliError> {
    let name = find(bmdb, machine).await?;
    let id = id_of(&name);
    let view = bmdb.machine_view(id).await?;
    let (tags, events) = bmdb
        .inspect(move |tx| {
            Box::pin(async move {
                Ok::<_, BmdbError>((tags(tx, id).await?, inspect::history(tx, id, None, EVENTS).await?))
            })
        })
        .await?;
    let (facts, now) = (&view.facts, view.at);
    Ok(Described {
        name: view.name(),
        phase: phase_of(facts, &view.policy, now).as_str(),
        created_at: facts.created_at,
        at: now,
        tags,
        backoffs: backoffs(facts, now),
        postponements: postponements(facts, now),
        events,
        schedule: view.lanes,
    })
}

fn description(of: &Described) -> Description<'_> {
    Description {
        name: &of.name,
        phase: of.phase,
        created_at: of.created_at,
        at: of.at,
        facts: of.tags.iter().map(|tag| (tag.table.clone(), Value::Object(tag.row.clone()))).collect(),
        hardware: of.tags.iter().flat_map(hardware_of).collect(),
        schedule: &of.schedule,
        backoffs: &of.backoffs,
        postponements: &of.postponements,
        events: &of.events,
    }
}

fn hardware_of(tag: &Tag) -> Vec<(String, String)> {
    let Some(bytes) = tag.row.get("report").and_then(bytes_of) else { return Vec::new() };
    if tag.table != "machine_hardware_report" {
        return Vec::new();
    }
    hardware::describe(&bytes)
        .unwrap_or_else(|error| vec![("unreadable".to_owned(), format!("{} bytes: {error}", bytes.len()))])
}

fn render(of: &Described) -> String {
    let (now, width) = (of.at, width());
    let mut text = labelled(
        0,
        &[
            ("machine".to_owned(), of.name.machine.to_string()),
            ("name".to_owned(), of.name.short()),
            ("phase".to_owned(), of.phase.to_owned()),
            ("known since".to_owned(), both(of.created_at, now)),
        ],
        width,
    );
    for tag in &of.tags {
        let title = tag.table.strip_prefix("machine_").unwrap_or(&tag.table);
        let _ = write!(text, "\n{title}\n");
        text.push_str(&labelled(2, &columns(tag, now), width));
        let hardware = hardware_of(tag);
        if !hardware.is_empty() {
            text.push_str(&labelled(4, &hardware, width));
        }
    }
    for lane in &of.schedule {
        let _ = write!(text, "\nschedule, lane {}\n", lane.lane);
        text.push_str(&labelled(2, &lane_lines(lane, now), width));
    }
    text.push_str(&waits("backoffs", &of.backoffs, now, width));
    text.push_str(&waits("postponed", &of.postponements, now, width));
    let shown: Vec<Vec<String>> = timeline::rows(&of.events);
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
