//! What the BMDB tells, as messages.

use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};

use crate::bmdb::credential::Credential;
use crate::bmdb::inspect::{HistoryLine, ProviderLine, SessionLine, WorkLine};
use crate::bmdb::listing::Listed;
use crate::bmdb::statistics::{Backlog, ClassCount, Counted, Pace, PhaseAge, Statistics};
use crate::model::machine_view::{BrakeLine, Holder, LaneView, MachineName};
use crate::model::time::Timestamp;
use crate::model::waits::Wait;
use crate::model::why::Why;
use crate::proto::fleet::v1;

/// The last second of the year 9999: what ends later cannot be written as JSON says moments.
const LAST_SECOND: i64 = 253_402_300_799;

/// A moment; the last one that a message can hold for whatever is later.
#[must_use]
pub fn at(at: Timestamp) -> prost_types::Timestamp {
    if at.timestamp() > LAST_SECOND {
        return prost_types::Timestamp { seconds: LAST_SECOND, nanos: 999_999_999 };
    }
    let nanos = i32::try_from(at.timestamp_subsec_nanos().min(999_999_999)).unwrap_or_default();
    prost_types::Timestamp { seconds: at.timestamp(), nanos }
}

/// A moment that somebody said.
#[must_use]
pub fn moment(said: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::from_timestamp(said.seconds, u32::try_from(said.nanos).ok()?)
}

/// A JSON value.
#[must_use]
pub fn value(json: &serde_json::Value) -> Value {
    let kind = match json {
        serde_json::Value::Null => Kind::NullValue(0),
        serde_json::Value::Bool(truth) => Kind::BoolValue(*truth),
        serde_json::Value::Number(number) => match number.as_f64() {
            Some(number) if number.is_finite() => Kind::NumberValue(number),
            _ => Kind::StringValue(number.to_string()),
        },
        serde_json::Value::String(text) => Kind::StringValue(text.clone()),
        serde_json::Value::Array(values) => {
            Kind::ListValue(ListValue { values: values.iter().map(value).collect() })
        }
        serde_json::Value::Object(object) => Kind::StructValue(structure(object)),
    };
    Value { kind: Some(kind) }
}

/// A JSON object.
#[must_use]
pub fn structure(object: &serde_json::Map<String, serde_json::Value>) -> Struct {
    Struct { fields: object.iter().map(|(key, json)| (key.clone(), value(json))).collect() }
}

/// A JSON object, where it is one.
#[must_use]
pub fn optional_structure(json: Option<&serde_json::Value>) -> Option<Struct> {
    json.and_then(serde_json::Value::as_object).map(structure)
}

/// Names of a machine.
#[must_use]
pub fn name(name: &MachineName) -> v1::MachineName {
    v1::MachineName {
        machine: name.machine.to_string(),
        provider: name.provider.clone(),
        provider_id: name.provider_id.clone(),
    }
}

/// A machine of a list.
#[must_use]
pub fn machine(listed: &Listed) -> v1::Machine {
    let line = &listed.line;
    v1::Machine {
        name: Some(name(&line.name)),
        phase: line.phase.clone(),
        phase_since: Some(at(line.phase_since)),
        address: line.address.clone(),
        location: line.location.clone(),
        heartbeat_at: line.heartbeat_at.map(at),
        working: line.working.clone(),
        process: line.process.clone(),
        ready_at: line.ready_at.map(at),
        reason: line.reason.clone(),
        manufacturer: listed.manufacturer.clone(),
        product: listed.product.clone(),
        labels: line.labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
        priority: line.priority.clone(),
    }
}

/// Who works.
#[must_use]
pub fn holder(holder: &Holder) -> v1::Holder {
    v1::Holder {
        process: holder.process.clone(),
        fence: holder.fence,
        since: Some(at(holder.since)),
        session: holder.session.to_string(),
        component: holder.component.clone(),
        host: holder.host.clone(),
        pid: holder.pid,
        session_deadline: holder.session_deadline.map(at),
        session_closed_at: holder.session_closed_at.map(at),
    }
}

/// A lane of a schedule.
#[must_use]
pub fn lane(lane: &LaneView) -> v1::Lane {
    v1::Lane {
        lane: lane.lane.clone(),
        process: lane.process.clone(),
        ready_at: lane.ready_at.map(at),
        timer: lane.timer,
        reason: lane.reason.clone(),
        decided_at: lane.decided_at.clone(),
        deadline: lane.deadline.map(at),
        priority: lane.priority,
        fence: lane.fence,
        losses: lane.losses,
        not_before: lane.not_before.map(at),
        work: lane.work.as_ref().map(holder),
        phase_index: lane.phase_index.clone(),
        phase_since: Some(at(lane.phase_since)),
        rules_version: lane.rules_version,
        policy_version: lane.policy_version,
    }
}

/// A process that waits.
#[must_use]
pub fn wait(wait: Wait) -> v1::Wait {
    v1::Wait {
        process: wait.process.to_owned(),
        active: wait.active,
        until: Some(at(wait.until)),
        failures: wait.failures,
        reason: wait.reason,
        last_interval_seconds: wait.last_interval_seconds,
    }
}

/// A line of history.
#[must_use]
pub fn event(line: HistoryLine) -> v1::Event {
    v1::Event {
        at: Some(at(line.at)),
        event: line.event,
        lane: line.lane,
        fence: line.fence,
        process: line.process,
        session: line.session.map(|session| session.to_string()),
        component: line.component,
        host: line.host,
        detail: line.detail,
    }
}

/// Why a machine is as it is.
#[must_use]
pub fn why(why: Why) -> v1::WhyResponse {
    v1::WhyResponse {
        name: Some(name(&why.name)),
        phase: why.phase.to_owned(),
        since: why.since.map(at),
        at: Some(at(why.at)),
        waits_for: why.waits_for,
        obstacle: why.obstacle,
        decided_at: why.decided_at,
        next: why.next.map(|next| v1::Next {
            process: next.process.to_owned(),
            at: Some(at(next.at)),
            timer: next.timer,
        }),
        deadline: why
            .deadline
            .map(|deadline| v1::Deadline { at: Some(at(deadline.at)), then: deadline.then }),
        failures: why
            .failures
            .into_iter()
            .map(|failure| v1::Failure {
                process: failure.process.to_owned(),
                count: failure.count,
                cause: failure.cause,
                until: Some(at(failure.until)),
                next_wait_seconds: failure.next_wait_seconds,
            })
            .collect(),
        work: why.work,
        notes: why.notes,
        advice: why
            .advice
            .into_iter()
            .map(|advice| v1::Advice { command: advice.command, when: advice.when })
            .collect(),
    }
}

/// An open session.
#[must_use]
pub fn session(line: SessionLine) -> v1::Session {
    v1::Session {
        session: line.session.to_string(),
        process: line.process.to_string(),
        component: line.component,
        host: line.host,
        pid: line.pid,
        version: line.version,
        started_at: Some(at(line.started_at)),
        deadline: Some(at(line.deadline)),
        work: line.work,
    }
}

/// A live work item.
#[must_use]
pub fn work(line: &WorkLine) -> v1::WorkItem {
    v1::WorkItem { name: Some(name(&line.name)), lane: line.lane.clone(), work: Some(holder(&line.work)) }
}

/// A provider.
#[must_use]
pub fn provider(line: ProviderLine) -> v1::Provider {
    v1::Provider {
        provider: line.provider,
        kind: line.kind,
        listed_at: line.listed_at.map(at),
        machines: line.machines,
        error: line.error,
        error_at: line.error_at.map(at),
        brake: line.brake,
        brake_since: line.brake_since.map(at),
    }
}

/// A brake.
#[must_use]
pub fn brake(line: BrakeLine) -> v1::Brake {
    v1::Brake {
        kind: line.kind,
        scope: line.scope,
        reason: line.reason,
        engaged_at: Some(at(line.engaged_at)),
        seen_at: Some(at(line.seen_at)),
    }
}

/// A credential.
#[must_use]
pub fn credential(of: &Credential) -> v1::Credential {
    v1::Credential {
        credential: of.id.to_string(),
        kind: of.kind.clone(),
        name: of.name.clone(),
        role: of.role.as_str().to_owned(),
        providers: of.scope.providers(),
        created_at: Some(at(of.created_at)),
        created_by: of.created_by.clone(),
        expires_at: of.expires_at.map(at),
        revoked_at: of.revoked_at.map(at),
        revoked_by: of.revoked_by.clone(),
        active: of.active,
    }
}

/// The fleet in figures.
#[must_use]
pub fn statistics(found: Statistics) -> v1::GetStatisticsResponse {
    let Statistics { counts, paces, counted, at: now } = found;
    v1::GetStatisticsResponse {
        counts: counts.into_iter().map(class_count).collect(),
        at: Some(at(now)),
        paces: paces.into_iter().map(pace).collect(),
        counted: counted.map(fleet_count),
    }
}

fn class_count(found: ClassCount) -> v1::PhaseCount {
    let ClassCount { phase, provider, machines, at_least } = found;
    v1::PhaseCount { phase, provider, machines, at_least }
}

fn pace(found: Pace) -> v1::Pace {
    let Pace { process, finished, failed, put_off, lost, mean_seconds } = found;
    v1::Pace { process, finished, failed, put_off, lost, mean_seconds }
}

fn fleet_count(found: Counted) -> v1::FleetCount {
    let phases = found.phases.into_iter().map(|PhaseAge { phase, oldest_seconds, over_deadline }| {
        v1::PhaseAge { phase, oldest_seconds, over_deadline }
    });
    let waiting = found.waiting.into_iter().map(|Backlog { process, machines, oldest_seconds }| {
        v1::Backlog { process, machines, oldest_seconds }
    });
    v1::FleetCount { at: Some(at(found.at)), phases: phases.collect(), waiting: waiting.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_go_there_and_back() {
        let moment_of: Timestamp = "2026-11-20T18:00:00.123456Z".parse().unwrap();
        assert_eq!(moment(at(moment_of)), Some(moment_of));
        let held_for_ever = at(Timestamp::MAX_UTC);
        assert_eq!(moment(held_for_ever).unwrap().to_string(), "9999-12-31 23:59:59.999999999 UTC");
        assert_eq!(moment(prost_types::Timestamp { seconds: 0, nanos: -1 }), None);
        assert_eq!(moment(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 }), None);
    }
}
