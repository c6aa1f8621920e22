//! `describe machine`: all facts, schedule and history of one machine.
//!
//! Facts are found by reflection and shown column by column, so that a fact of a newer schema is not hidden. Bytes
//! that this release understands (a hardware report, host keys) are decoded, others are shown as bytes. Programs get
//! the response of the API, in which each fact is its row.

use std::fmt::Write as _;

use serde_json::Value;

use crate::client::decode::{
    decode_machine_name, decode_timestamp, missing_field, phase_name, process_name, require_timestamp,
};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::machine::history::{EVENT_HEADERS, decode_event, event_row};
use crate::object::document::format_message;
use crate::output::Format;
use crate::output::table::{format_table, terminal_width};
use crate::work::decode_holder;
use bmdb::machine::tags::{Tag, TagColumn};
use model::byte_size::ByteSize;
use model::hardware_report::describe_report;
use model::host_key::HostKey;
use model::humanize::{relative_and_absolute_time, relative_time};
use model::machine_view::{LaneView, MachineName};
use model::text_layout::format_labelled;
use model::time::{Span, Timestamp};
use model::timeline::HistoryEntry;
use model::waits::ProcessWait;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

/// Longest value, in bytes, that is shown in full.
const MAX_SHOWN_BYTES: usize = 64;

/// The description of a machine.
struct MachineDescription {
    /// UUID, provider and provider's id.
    name: MachineName,
    /// Phase of the machine's life cycle.
    phase: &'static str,
    /// When the machine was added to the BMDB.
    created_at: Timestamp,
    /// When all of this was read.
    at: Timestamp,
    /// The machine's facts, by table.
    tags: Vec<Tag>,
    /// Schedule of both lanes of the machine.
    schedule: Vec<LaneView>,
    /// Processes that wait because their last run failed.
    backoffs: Vec<ProcessWait>,
    /// Processes that wait because they were postponed.
    postponements: Vec<ProcessWait>,
    /// Most recent history entries, newest first.
    events: Vec<HistoryEntry>,
}

/// Runs `describe machine M`: fetches and prints the description.
pub async fn describe_machine(
    client: &FleetClient,
    machine: &str,
    format: Format,
) -> Result<String, CliError> {
    let request = v1::DescribeMachineRequest { machine: machine.to_owned() };
    let response = MachinesClient::new(client.channel()).describe(request).await.map_err(status_to_error)?;
    let response = response.into_inner();
    match format {
        Format::Json => format_message(&response),
        Format::Table => Ok(render_description(&decode_description(response)?)),
    }
}

/// Decodes the full description of one machine.
fn decode_description(response: v1::DescribeMachineResponse) -> Result<MachineDescription, CliError> {
    Ok(MachineDescription {
        name: decode_machine_name(response.name)?,
        phase: phase_name(&response.phase),
        created_at: require_timestamp(response.created_at, "the time since which a machine is known")?,
        at: require_timestamp(response.read_at, "its read time")?,
        tags: response.facts.into_iter().map(decode_fact).collect::<Result<_, _>>()?,
        schedule: response.schedule.into_iter().map(decode_lane).collect::<Result<_, _>>()?,
        backoffs: response.backoffs.into_iter().map(decode_wait).collect::<Result<_, _>>()?,
        postponements: response.postponements.into_iter().map(decode_wait).collect::<Result<_, _>>()?,
        events: response.events.into_iter().map(decode_event).collect::<Result<_, _>>()?,
    })
}

fn decode_fact(fact: v1::Fact) -> Result<Tag, CliError> {
    let Ok(Value::Object(row)) = serde_json::from_str(&fact.row) else {
        return Err(missing_field("a fact's row"));
    };
    let columns = fact.columns.into_iter().map(|one| TagColumn { name: one.name, kind: one.r#type });
    Ok(Tag { table: fact.table, columns: columns.collect(), row })
}

fn decode_wait(wait: v1::ProcessWait) -> Result<ProcessWait, CliError> {
    Ok(ProcessWait {
        process: process_name(&wait.process),
        active: wait.active,
        until: require_timestamp(wait.until, "the end of a wait")?,
        failures: wait.failures,
        last_interval_seconds: wait.last_interval_seconds,
        reason: wait.reason,
    })
}

fn decode_lane(lane: v1::Lane) -> Result<LaneView, CliError> {
    Ok(LaneView {
        lane: lane.lane,
        process: lane.process,
        ready_at: lane.ready_at.and_then(decode_timestamp),
        timer: lane.timer,
        reason: lane.reason,
        decided_at: lane.decided_at,
        deadline: lane.deadline.and_then(decode_timestamp),
        priority: lane.priority,
        fence: lane.fence,
        losses: lane.losses,
        not_before: lane.not_before.and_then(decode_timestamp),
        phase_index: lane.phase_index,
        phase_since: require_timestamp(lane.phase_since, "the time since which a machine is in its state")?,
        rules_version: lane.rules_version,
        policy_version: lane.policy_version,
        work: lane.holder.map(decode_holder).transpose()?,
    })
}

fn hardware_lines(tag: &Tag) -> Vec<(String, String)> {
    let Some(bytes) = tag.row.get("report").and_then(parse_bytea) else { return Vec::new() };
    if tag.table != "machine_hardware_report" {
        return Vec::new();
    }
    describe_report(&bytes)
        .unwrap_or_else(|error| vec![("unreadable".to_owned(), format!("{} bytes: {error}", bytes.len()))])
}

fn render_description(of: &MachineDescription) -> String {
    let (now, width) = (of.at, terminal_width());
    let mut text = format_labelled(
        0,
        &[
            ("machine".to_owned(), of.name.machine.to_string()),
            ("name".to_owned(), of.name.short_name()),
            ("phase".to_owned(), of.phase.to_owned()),
            ("known since".to_owned(), relative_and_absolute_time(of.created_at, now)),
        ],
        width,
    );
    for tag in &of.tags {
        let title = tag.table.strip_prefix("machine_").unwrap_or(&tag.table);
        let _ = write!(text, "\n{title}\n");
        text.push_str(&format_labelled(2, &column_lines(tag, now), width));
        let hardware = hardware_lines(tag);
        if !hardware.is_empty() {
            text.push_str(&format_labelled(4, &hardware, width));
        }
    }
    for lane in &of.schedule {
        let _ = write!(text, "\nschedule, lane {}\n", lane.lane);
        text.push_str(&format_labelled(2, &lane_lines(lane, now), width));
    }
    text.push_str(&format_waits("backoffs", &of.backoffs, now, width));
    text.push_str(&format_waits("postponed", &of.postponements, now, width));
    let shown: Vec<Vec<String>> = of.events.iter().map(|event| event_row(event, now)).collect();
    if !shown.is_empty() {
        text.push_str("\nlast events, newest first\n");
        for line in format_table(&EVENT_HEADERS, &shown, width.map(|width| width.saturating_sub(2))).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

fn column_lines(tag: &Tag, now: Timestamp) -> Vec<(String, String)> {
    tag.columns
        .iter()
        .filter_map(|column| {
            let value = tag.row.get(&column.name)?;
            let text = match (value, column.kind.as_str()) {
                (Value::Null, _) => return None,
                (Value::String(_), "bytea") => format_bytea(tag, &column.name, value),
                (Value::String(moment), "timestamp with time zone") => moment
                    .parse::<Timestamp>()
                    .map_or_else(|_| moment.clone(), |moment| relative_and_absolute_time(moment, now)),
                (Value::String(text), _) => text.clone(),
                (Value::Number(number), _) if column.name.ends_with("_bytes") => {
                    number.as_u64().map_or_else(|| number.to_string(), |bytes| ByteSize(bytes).humanize())
                }
                (other, _) => other.to_string(),
            };
            Some((column.name.clone(), text))
        })
        .collect()
}

/// Parses bytes in the form in which PostgreSQL writes them into JSON: `\x0102`.
fn parse_bytea(value: &Value) -> Option<Vec<u8>> {
    hex::decode(value.as_str()?.strip_prefix("\\x")?).ok()
}

fn format_bytea(tag: &Tag, column: &str, value: &Value) -> String {
    let Some(bytes) = parse_bytea(value) else { return value.to_string() };
    if tag.table == "machine_ssh_host_key" {
        return HostKey { algorithm: String::new(), key: bytes }.fingerprint();
    }
    if tag.table == "machine_hardware_report" && column == "report" {
        return format!("{} bytes:", bytes.len());
    }
    if bytes.len() > MAX_SHOWN_BYTES { format!("{} bytes", bytes.len()) } else { hex::encode(bytes) }
}

fn lane_lines(lane: &LaneView, now: Timestamp) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    let mut add = |label: &str, value: String| lines.push((label.to_owned(), value));
    match (&lane.process, lane.ready_at) {
        (Some(process), Some(at)) if lane.timer => {
            add("next", format!("{process}, not before {}", relative_and_absolute_time(at, now)));
        }
        (Some(process), Some(at)) => {
            add("next", format!("{process} {}", relative_and_absolute_time(at, now)));
        }
        _ => add("next", "nothing by time alone".to_owned()),
    }
    add("reason", lane.reason.clone());
    add("decided at", lane.decided_at.clone());
    if let Some(at) = lane.deadline {
        add("deadline", relative_and_absolute_time(at, now));
    }
    add("priority", lane.priority.to_string());
    add("fence", lane.fence.to_string());
    if lane.losses > 0 {
        add("losses", lane.losses.to_string());
    }
    if let Some(at) = lane.not_before.filter(|at| *at > now) {
        add("not before", relative_and_absolute_time(at, now));
    }
    if let Some(work) = &lane.work {
        let who = work.component.as_deref().unwrap_or("?");
        let host = work.host.as_deref().unwrap_or("?");
        let pid = work.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        let ends = match (work.session_closed_at, work.session_deadline) {
            (Some(at), _) => format!("ended {}", relative_time(at, now)),
            (None, Some(at)) => format!("ends {}", relative_time(at, now)),
            (None, None) => "unknown".to_owned(),
        };
        add(
            "under way",
            format!(
                "{} since {}, fence {}",
                work.process,
                relative_and_absolute_time(work.since, now),
                work.fence
            ),
        );
        add("held by", format!("{who} on {host}, pid {pid}"));
        add("session", format!("{}, {ends}", work.session));
    }
    lines
}

fn format_waits(title: &str, waits: &[ProcessWait], now: Timestamp, width: Option<usize>) -> String {
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
            (
                wait.process.to_owned(),
                format!("{failures}{state} {}: {}", relative_and_absolute_time(wait.until, now), wait.reason),
            )
        })
        .collect();
    format!("\n{title}\n{}", format_labelled(2, &lines, width))
}
