//! Decode messages of the fleet API into the types that commands print.

use prost_types::value::Kind;
use serde_json::Value;
use uuid::Uuid;

use crate::error::CliError;
use bmdb::inspect::{HistoryEntry, MachineSummary, ProviderSummary, SessionSummary, WorkSummary};
use bmdb::statistics::{Backlog, ClassCount, PhaseAge, ProcessThroughput, SampledStatistics, Statistics};
use model::machine_view::{EngagedBrake, MachineName, WorkHolder};
use model::phase::Phase;
use model::process::Process;
use model::time::Timestamp;
use model::why::{Advice, Deadline, Explanation, NextWork, ProcessFailure};
use proto::fleet::v1;

/// Decodes a Protobuf timestamp; `None` if it is out of range.
#[must_use]
pub fn decode_timestamp(time: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::from_timestamp(time.seconds, u32::try_from(time.nanos).ok()?)
}

/// The error for a field that is missing or malformed in an API response.
#[must_use]
pub fn missing_field(what: &str) -> CliError {
    CliError::Failed(format!("the answer lacks {what}; is the server of another release?"))
}

/// Decodes a timestamp that the response must contain; `what` names it in the error.
pub fn require_timestamp(time: Option<prost_types::Timestamp>, what: &str) -> Result<Timestamp, CliError> {
    time.and_then(decode_timestamp).ok_or_else(|| missing_field(what))
}

/// Parses a UUID of a response; `what` names it in the error.
pub fn parse_uuid(text: &str, what: &str) -> Result<Uuid, CliError> {
    Uuid::try_parse(text).map_err(|_| missing_field(what))
}

/// Decodes the names of a machine.
pub fn decode_machine_name(name: Option<v1::MachineName>) -> Result<MachineName, CliError> {
    let name = name.ok_or_else(|| missing_field("a machine's name"))?;
    Ok(MachineName {
        machine: parse_uuid(&name.machine, "a machine's id")?,
        provider: name.provider,
        provider_id: name.provider_id,
    })
}

/// Decodes a machine of a list.
pub fn decode_machine(machine: v1::Machine) -> Result<MachineSummary, CliError> {
    Ok(MachineSummary {
        name: decode_machine_name(machine.name)?,
        phase: machine.phase,
        phase_since: require_timestamp(
            machine.phase_since,
            "the time since which a machine is in its state",
        )?,
        address: machine.address,
        location: machine.location,
        heartbeat_at: machine.heartbeat_at.and_then(decode_timestamp),
        working: machine.working,
        process: machine.process,
        ready_at: machine.ready_at.and_then(decode_timestamp),
        reason: machine.reason,
        labels: machine.labels.into_iter().collect(),
        priority: machine.priority,
    })
}

/// Decodes an open session of a process.
pub fn decode_session(session: v1::Session) -> Result<SessionSummary, CliError> {
    Ok(SessionSummary {
        session: parse_uuid(&session.session, "a session's id")?,
        process: parse_uuid(&session.process, "a process's id")?,
        component: session.component,
        host: session.host,
        pid: session.pid,
        version: session.version,
        started_at: require_timestamp(session.started_at, "the start time of a session")?,
        deadline: require_timestamp(session.deadline, "a session's deadline")?,
        work: session.work_items,
    })
}

/// Decodes a live work item.
pub fn decode_work(item: v1::WorkItem) -> Result<WorkSummary, CliError> {
    Ok(WorkSummary {
        name: decode_machine_name(item.name)?,
        lane: item.lane,
        work: decode_holder(item.holder.ok_or_else(|| missing_field("the holder of a work item"))?)?,
    })
}

/// Decodes the process that holds a work item or a lease.
pub fn decode_holder(holder: v1::WorkHolder) -> Result<WorkHolder, CliError> {
    Ok(WorkHolder {
        process: holder.process,
        fence: holder.fence,
        since: require_timestamp(holder.since, "the start time of a work item")?,
        session: parse_uuid(&holder.session, "a session's id")?,
        component: holder.component,
        host: holder.host,
        pid: holder.pid,
        session_deadline: holder.session_deadline.and_then(decode_timestamp),
        session_closed_at: holder.session_closed_at.and_then(decode_timestamp),
    })
}

/// Decodes a provider with the result of its last call.
#[must_use]
pub fn decode_provider(provider: v1::Provider) -> ProviderSummary {
    ProviderSummary {
        provider: provider.provider,
        kind: provider.kind,
        listed_at: provider.listed_at.and_then(decode_timestamp),
        machines: provider.machines,
        error: provider.error,
        error_at: provider.error_at.and_then(decode_timestamp),
        brake: provider.brake,
        brake_since: provider.brake_since.and_then(decode_timestamp),
    }
}

/// Decodes a brake that is engaged.
pub fn decode_brake(brake: v1::Brake) -> Result<EngagedBrake, CliError> {
    Ok(EngagedBrake {
        kind: brake.kind,
        scope: brake.scope,
        reason: brake.reason,
        engaged_at: require_timestamp(brake.engaged_at, "the time when a brake was engaged")?,
        confirmed_at: require_timestamp(brake.confirmed_at, "the time when a brake was confirmed")?,
    })
}

/// Decodes the statistics of the fleet.
pub fn decode_statistics(response: v1::GetStatisticsResponse) -> Result<Statistics, CliError> {
    let counts = response.counts.into_iter().map(|count| {
        let v1::PhaseCount { phase, provider, machines, is_lower_bound: at_least } = count;
        ClassCount { phase, provider, machines, at_least }
    });
    let paces = response.throughput.into_iter().map(|pace| {
        let v1::ProcessThroughput { process, finished, failed, postponed: put_off, lost, mean_seconds } =
            pace;
        ProcessThroughput { process, finished, failed, postponed: put_off, lost, mean_seconds }
    });
    Ok(Statistics {
        counts: counts.collect(),
        throughput: paces.collect(),
        sampled: response.sample.map(decode_sampled_statistics).transpose()?,
        at: require_timestamp(response.read_at, "its read time")?,
    })
}

fn decode_sampled_statistics(count: v1::FleetSample) -> Result<SampledStatistics, CliError> {
    let phases = count.phases.into_iter().map(|of| PhaseAge {
        phase: of.phase,
        oldest_seconds: of.oldest_seconds,
        over_deadline: of.past_deadline,
    });
    let waiting = count.backlogs.into_iter().map(|of| Backlog {
        process: of.process,
        machines: of.machines,
        oldest_seconds: of.oldest_seconds,
    });
    let at = require_timestamp(count.sampled_at, "the time when the fleet was counted")?;
    Ok(SampledStatistics { at, phases: phases.collect(), backlogs: waiting.collect() })
}

/// Decodes an entry of a machine's history.
pub fn decode_event(event: v1::Event) -> Result<HistoryEntry, CliError> {
    Ok(HistoryEntry {
        at: require_timestamp(event.occurred_at, "the time of an event")?,
        event: event.event,
        lane: event.lane,
        fence: event.fence,
        process: event.process,
        session: event.session.as_deref().map(|session| parse_uuid(session, "a session's id")).transpose()?,
        component: event.component,
        host: event.host,
        detail: event.detail,
    })
}

/// Decodes the explanation of a machine's state.
pub fn decode_explanation(response: v1::WhyResponse) -> Result<Explanation, CliError> {
    Ok(Explanation {
        name: decode_machine_name(response.name)?,
        phase: phase_name(&response.phase),
        since: response.since.and_then(decode_timestamp),
        at: require_timestamp(response.read_at, "its read time")?,
        waits_for: response.waits_for,
        obstacle: response.obstacle,
        decided_at: response.decided_at,
        next: match response.next {
            None => None,
            Some(next) => Some(NextWork {
                process: process_name(&next.process),
                at: require_timestamp(next.at, "the time of the next work")?,
                timer: next.timer,
            }),
        },
        deadline: match response.deadline {
            None => None,
            Some(deadline) => Some(Deadline {
                at: require_timestamp(deadline.at, "a deadline")?,
                consequence: deadline.consequence,
            }),
        },
        failures: response
            .failures
            .into_iter()
            .map(|failure| {
                Ok(ProcessFailure {
                    process: process_name(&failure.process),
                    count: failure.count,
                    cause: failure.cause,
                    until: require_timestamp(failure.until, "the end of a wait")?,
                    next_wait_seconds: failure.next_wait_seconds,
                })
            })
            .collect::<Result<_, CliError>>()?,
        work: response.work,
        notes: response.notes,
        advice: response
            .advice
            .into_iter()
            .map(|advice| Advice { command: advice.command, when: advice.when })
            .collect(),
    })
}

/// The static name of a phase, or a placeholder for a phase of another release.
#[must_use]
pub fn phase_name(text: &str) -> &'static str {
    Phase::ALL.into_iter().map(Phase::as_str).find(|known| *known == text).unwrap_or("(of another release)")
}

/// The static name of a process, or a placeholder for a process of another release.
#[must_use]
pub fn process_name(text: &str) -> &'static str {
    Process::ALL
        .into_iter()
        .map(Process::as_str)
        .find(|known| *known == text)
        .unwrap_or("(of another release)")
}

/// Decodes a Protobuf struct as a JSON object. Protobuf has only doubles, so a number without a fraction becomes an
/// integer.
#[must_use]
pub fn decode_struct(reported: prost_types::Struct) -> Value {
    Value::Object(reported.fields.into_iter().map(|(key, value)| (key, decode_value(value))).collect())
}

fn decode_value(value: prost_types::Value) -> Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(truth)) => Value::Bool(truth),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::NumberValue(number)) => to_integer(number)
            .or_else(|| serde_json::Number::from_f64(number).map(Value::Number))
            .unwrap_or(Value::Null),
        Some(Kind::ListValue(list)) => Value::Array(list.values.into_iter().map(decode_value).collect()),
        Some(Kind::StructValue(object)) => decode_struct(object),
    }
}

/// A number without a fraction as an integer, within the range in which a double represents every integer exactly.
fn to_integer(number: f64) -> Option<Value> {
    const MAX_SAFE_INTEGER: f64 = 9_007_199_254_740_991.0;
    if number.fract() != 0.0 || number.abs() > MAX_SAFE_INTEGER {
        return None;
    }
    format!("{number:.0}").parse::<i64>().ok().map(Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The server's encoder, repeated here because `cli` does not import the server.
    fn encode_value(json: &Value) -> prost_types::Value {
        let kind = match json {
            Value::Null => Kind::NullValue(0),
            Value::Bool(truth) => Kind::BoolValue(*truth),
            Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
            Value::String(text) => Kind::StringValue(text.clone()),
            Value::Array(values) => {
                Kind::ListValue(prost_types::ListValue { values: values.iter().map(encode_value).collect() })
            }
            Value::Object(object) => Kind::StructValue(prost_types::Struct {
                fields: object.iter().map(|(key, json)| (key.clone(), encode_value(json))).collect(),
            }),
        };
        prost_types::Value { kind: Some(kind) }
    }

    #[test]
    fn policy_round_trips_through_the_api() {
        use model::policy::Policy;
        let written = serde_json::to_value(Policy::default()).unwrap();
        let read: Policy = serde_json::from_value(decode_value(encode_value(&written))).unwrap();
        assert_eq!(read, Policy::default());
        for (number, expected) in
            [(3.0, "3"), (0.2, "0.2"), (-1.0, "-1"), (1e300, "1e+300"), (f64::NAN, "null")]
        {
            let value = decode_value(prost_types::Value { kind: Some(Kind::NumberValue(number)) });
            assert_eq!(value.to_string(), expected);
        }
    }

    #[test]
    fn response_with_a_missing_field_is_an_error() {
        let text = decode_machine(v1::Machine::default()).unwrap_err().to_string();
        assert!(text.starts_with("the answer lacks a machine's name"), "{text}");
    }
}
