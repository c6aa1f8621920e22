//! What the API answers, as the types that answers are printed from: so that a command says the same,
//! whomever it asked.

use prost_types::value::Kind;
use serde_json::Value;
use uuid::Uuid;

use crate::bmdb::inspect::{HistoryLine, MachineLine, ProviderLine, SessionLine, WorkLine};
use crate::bmdb::statistics::{Backlog, ClassCount, Counted, Pace, PhaseAge, Statistics};
use crate::cli::error::CliError;
use crate::model::machine_view::{BrakeLine, Holder, MachineName};
use crate::model::phase::Phase;
use crate::model::process::Process;
use crate::model::time::Timestamp;
use crate::model::why::{Advice, Deadline, Failure, Next, Why};
use crate::proto::fleet::v1;

/// A moment.
#[must_use]
pub fn moment(said: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::from_timestamp(said.seconds, u32::try_from(said.nanos).ok()?)
}

/// That something is missing in what the API answered.
#[must_use]
pub fn odd(what: &str) -> CliError {
    CliError::Failed(format!(
        "the API answered without {what}; is it of another release? With --direct and --bmdb_url the database is asked \
         itself"
    ))
}

/// A moment that must be there.
pub fn at(said: Option<prost_types::Timestamp>, what: &str) -> Result<Timestamp, CliError> {
    said.and_then(moment).ok_or_else(|| odd(what))
}

/// An id.
pub fn id(text: &str, what: &str) -> Result<Uuid, CliError> {
    Uuid::try_parse(text).map_err(|_| odd(what))
}

/// Names of a machine.
pub fn name(said: Option<v1::MachineName>) -> Result<MachineName, CliError> {
    let said = said.ok_or_else(|| odd("a machine's name"))?;
    Ok(MachineName {
        machine: id(&said.machine, "a machine's id")?,
        provider: said.provider,
        provider_id: said.provider_id,
    })
}

/// A machine of a list.
pub fn machine(said: v1::Machine) -> Result<MachineLine, CliError> {
    Ok(MachineLine {
        name: name(said.name)?,
        phase: said.phase,
        phase_since: at(said.phase_since, "a phase's beginning")?,
        address: said.address,
        location: said.location,
        heartbeat_at: said.heartbeat_at.and_then(moment),
        working: said.working,
        process: said.process,
        ready_at: said.ready_at.and_then(moment),
        reason: said.reason,
        labels: said.labels.into_iter().collect(),
        priority: said.priority,
    })
}

/// An open session.
pub fn session(said: v1::Session) -> Result<SessionLine, CliError> {
    Ok(SessionLine {
        session: id(&said.session, "a session's id")?,
        process: id(&said.process, "a process's id")?,
        component: said.component,
        host: said.host,
        pid: said.pid,
        version: said.version,
        started_at: at(said.started_at, "a session's beginning")?,
        deadline: at(said.deadline, "a session's deadline")?,
        work: said.work,
    })
}

/// A live work item.
pub fn work(said: v1::WorkItem) -> Result<WorkLine, CliError> {
    Ok(WorkLine {
        name: name(said.name)?,
        lane: said.lane,
        work: holder(said.work.ok_or_else(|| odd("who works"))?)?,
    })
}

/// Who works.
pub fn holder(said: v1::Holder) -> Result<Holder, CliError> {
    Ok(Holder {
        process: said.process,
        fence: said.fence,
        since: at(said.since, "a work item's beginning")?,
        session: id(&said.session, "a session's id")?,
        component: said.component,
        host: said.host,
        pid: said.pid,
        session_deadline: said.session_deadline.and_then(moment),
        session_closed_at: said.session_closed_at.and_then(moment),
    })
}

/// What a provider answered last.
#[must_use]
pub fn provider(said: v1::Provider) -> ProviderLine {
    ProviderLine {
        provider: said.provider,
        kind: said.kind,
        listed_at: said.listed_at.and_then(moment),
        machines: said.machines,
        error: said.error,
        error_at: said.error_at.and_then(moment),
        brake: said.brake,
        brake_since: said.brake_since.and_then(moment),
    }
}

/// A brake that is on.
pub fn brake(said: v1::Brake) -> Result<BrakeLine, CliError> {
    Ok(BrakeLine {
        kind: said.kind,
        scope: said.scope,
        reason: said.reason,
        engaged_at: at(said.engaged_at, "a brake's beginning")?,
        seen_at: at(said.seen_at, "when a brake was seen")?,
    })
}

/// The fleet in figures.
pub fn statistics(said: v1::GetStatisticsResponse) -> Result<Statistics, CliError> {
    let counts = said.counts.into_iter().map(|count| {
        let v1::PhaseCount { phase, provider, machines, at_least } = count;
        ClassCount { phase, provider, machines, at_least }
    });
    let paces = said.paces.into_iter().map(|pace| {
        let v1::Pace { process, finished, failed, put_off, lost, mean_seconds } = pace;
        Pace { process, finished, failed, put_off, lost, mean_seconds }
    });
    Ok(Statistics {
        counts: counts.collect(),
        paces: paces.collect(),
        counted: said.counted.map(counted).transpose()?,
        at: at(said.at, "its moment")?,
    })
}

fn counted(said: v1::FleetCount) -> Result<Counted, CliError> {
    let phases = said.phases.into_iter().map(|of| PhaseAge {
        phase: of.phase,
        oldest_seconds: of.oldest_seconds,
        over_deadline: of.over_deadline,
    });
    let waiting = said.waiting.into_iter().map(|of| Backlog {
        process: of.process,
        machines: of.machines,
        oldest_seconds: of.oldest_seconds,
    });
    let at = at(said.at, "when the fleet was counted")?;
    Ok(Counted { at, phases: phases.collect(), waiting: waiting.collect() })
}

/// A line of history.
pub fn event(said: v1::Event) -> Result<HistoryLine, CliError> {
    Ok(HistoryLine {
        at: at(said.at, "an event's moment")?,
        event: said.event,
        lane: said.lane,
        fence: said.fence,
        process: said.process,
        session: said.session.as_deref().map(|session| id(session, "a session's id")).transpose()?,
        component: said.component,
        host: said.host,
        detail: said.detail,
    })
}

/// Why a machine is as it is.
pub fn why(said: v1::WhyResponse) -> Result<Why, CliError> {
    Ok(Why {
        name: name(said.name)?,
        phase: phase(&said.phase),
        since: said.since.and_then(moment),
        at: at(said.at, "its moment")?,
        waits_for: said.waits_for,
        obstacle: said.obstacle,
        decided_at: said.decided_at,
        next: match said.next {
            None => None,
            Some(next) => Some(Next {
                process: process(&next.process),
                at: at(next.at, "when is next")?,
                timer: next.timer,
            }),
        },
        deadline: match said.deadline {
            None => None,
            Some(deadline) => Some(Deadline { at: at(deadline.at, "a deadline")?, then: deadline.then }),
        },
        failures: said
            .failures
            .into_iter()
            .map(|failure| {
                Ok(Failure {
                    process: process(&failure.process),
                    count: failure.count,
                    cause: failure.cause,
                    until: at(failure.until, "the end of a wait")?,
                    next_wait_seconds: failure.next_wait_seconds,
                })
            })
            .collect::<Result<_, CliError>>()?,
        work: said.work,
        notes: said.notes,
        advice: said
            .advice
            .into_iter()
            .map(|advice| Advice { command: advice.command, when: advice.when })
            .collect(),
    })
}

/// A phase by its name.
#[must_use]
pub fn phase(said: &str) -> &'static str {
    Phase::ALL.into_iter().map(Phase::as_str).find(|known| *known == said).unwrap_or("(of another release)")
}

/// A process by its name.
#[must_use]
pub fn process(said: &str) -> &'static str {
    Process::ALL
        .into_iter()
        .map(Process::as_str)
        .find(|known| *known == said)
        .unwrap_or("(of another release)")
}

/// A JSON object. A number that is whole may have been written without a point, and is.
#[must_use]
pub fn json_object(said: prost_types::Struct) -> Value {
    Value::Object(said.fields.into_iter().map(|(key, value)| (key, json_value(value))).collect())
}

fn json_value(said: prost_types::Value) -> Value {
    match said.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(truth)) => Value::Bool(truth),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::NumberValue(number)) => whole(number)
            .or_else(|| serde_json::Number::from_f64(number).map(Value::Number))
            .unwrap_or(Value::Null),
        Some(Kind::ListValue(list)) => Value::Array(list.values.into_iter().map(json_value).collect()),
        Some(Kind::StructValue(object)) => json_object(object),
    }
}

/// A number without a fraction, as far as each of those has a double of its own.
fn whole(number: f64) -> Option<Value> {
    const MOST: f64 = 9_007_199_254_740_991.0;
    if number.fract() != 0.0 || number.abs() > MOST {
        return None;
    }
    format!("{number:.0}").parse::<i64>().ok().map(Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the server makes it, which this room does not know.
    fn said(json: &Value) -> prost_types::Value {
        let kind = match json {
            Value::Null => Kind::NullValue(0),
            Value::Bool(truth) => Kind::BoolValue(*truth),
            Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
            Value::String(text) => Kind::StringValue(text.clone()),
            Value::Array(values) => {
                Kind::ListValue(prost_types::ListValue { values: values.iter().map(said).collect() })
            }
            Value::Object(object) => Kind::StructValue(prost_types::Struct {
                fields: object.iter().map(|(key, json)| (key.clone(), said(json))).collect(),
            }),
        };
        prost_types::Value { kind: Some(kind) }
    }

    #[test]
    fn policy_comes_through_the_api_as_it_is() {
        use crate::model::policy::Policy;
        let written = serde_json::to_value(Policy::default()).unwrap();
        let read: Policy = serde_json::from_value(json_value(said(&written))).unwrap();
        assert_eq!(read, Policy::default());
        for (number, expected) in
            [(3.0, "3"), (0.2, "0.2"), (-1.0, "-1"), (1e300, "1e+300"), (f64::NAN, "null")]
        {
            let value = json_value(prost_types::Value { kind: Some(Kind::NumberValue(number)) });
            assert_eq!(value.to_string(), expected);
        }
    }

    #[test]
    fn answer_that_lacks_something_is_said_to() {
        let said = machine(v1::Machine::default()).unwrap_err().to_string();
        assert!(said.starts_with("the API answered without a machine's name"), "{said}");
    }
}
