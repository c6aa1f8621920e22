//! Encode BMDB types as messages of the API.

use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};

use crate::api::caller::Caller;
use bmdb::fleet::listing::{HoldSummary, ListedMachine};
use bmdb::fleet::provider::ProviderSummary;
use bmdb::fleet::sessions::{SessionSummary, WorkSummary};
use bmdb::fleet::shepherds::ShepherdSummary;
use bmdb::fleet::statistics::{
    Backlog, ClassCount, PhaseAge, ProcessThroughput, SampledStatistics, Statistics,
};
use bmdb::orders::credential::AccessCredential;
use model::machine_view::{EngagedBrake, LaneView, MachineName, WorkHolder};
use model::pause::Pause;
use model::routine::{ROUTINE_PROCESS, RoutineFold};
use model::time::Timestamp;
use model::timeline::{HistoryEntry, TimelineLine};
use model::waits::ProcessWait;
use model::why::Explanation;
use proto::fleet::v1;

/// The last second of the year 9999, the latest time of ProtoJSON.
const MAX_TIMESTAMP_SECONDS: i64 = 253_402_300_799;

/// Encodes a timestamp; a later one becomes the last that a message can contain.
#[must_use]
pub fn encode_timestamp(at: Timestamp) -> prost_types::Timestamp {
    if at.timestamp() > MAX_TIMESTAMP_SECONDS {
        return prost_types::Timestamp { seconds: MAX_TIMESTAMP_SECONDS, nanos: 999_999_999 };
    }
    let nanos = i32::try_from(at.timestamp_subsec_nanos().min(999_999_999)).unwrap_or_default();
    prost_types::Timestamp { seconds: at.timestamp(), nanos }
}

/// Decodes a timestamp of a request; `None` if it is out of range.
#[must_use]
pub fn decode_timestamp(time: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::from_timestamp(time.seconds, u32::try_from(time.nanos).ok()?)
}

/// Encodes a JSON value as Protobuf.
#[must_use]
pub fn encode_json_value(json: &serde_json::Value) -> Value {
    let kind = match json {
        serde_json::Value::Null => Kind::NullValue(0),
        serde_json::Value::Bool(truth) => Kind::BoolValue(*truth),
        serde_json::Value::Number(number) => match number.as_f64() {
            Some(number) if number.is_finite() => Kind::NumberValue(number),
            _ => Kind::StringValue(number.to_string()),
        },
        serde_json::Value::String(text) => Kind::StringValue(text.clone()),
        serde_json::Value::Array(values) => {
            Kind::ListValue(ListValue { values: values.iter().map(encode_json_value).collect() })
        }
        serde_json::Value::Object(object) => Kind::StructValue(encode_struct(object)),
    };
    Value { kind: Some(kind) }
}

/// Encodes a JSON object as a Protobuf struct.
#[must_use]
pub fn encode_struct(object: &serde_json::Map<String, serde_json::Value>) -> Struct {
    Struct { fields: object.iter().map(|(key, json)| (key.clone(), encode_json_value(json))).collect() }
}

/// Encodes a JSON object; `None` for any other value.
#[must_use]
pub fn encode_optional_struct(json: Option<&serde_json::Value>) -> Option<Struct> {
    json.and_then(serde_json::Value::as_object).map(encode_struct)
}

/// Encodes the names of a machine.
#[must_use]
pub fn encode_machine_name(name: &MachineName) -> v1::MachineName {
    v1::MachineName {
        machine: name.machine.to_string(),
        provider: name.provider.clone(),
        provider_id: name.provider_id.clone(),
    }
}

/// Encodes a machine of a list.
#[must_use]
pub fn encode_machine(listed: &ListedMachine) -> v1::Machine {
    let line = &listed.summary;
    v1::Machine {
        name: Some(encode_machine_name(&line.name)),
        phase: line.phase.clone(),
        phase_since: Some(encode_timestamp(line.phase_since)),
        address: line.address.clone(),
        location: line.location.clone(),
        heartbeat_at: line.heartbeat_at.map(encode_timestamp),
        working: line.working.clone(),
        process: line.process.clone(),
        ready_at: line.ready_at.map(encode_timestamp),
        reason: line.reason.clone(),
        manufacturer: listed.hardware.manufacturer.clone(),
        product: listed.hardware.product.clone(),
        labels: line.labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
        priority: line.priority.clone(),
        cluster: line.cluster.clone(),
        hold: line.hold.as_ref().map(encode_hold),
    }
}

fn encode_hold(hold: &HoldSummary) -> v1::MachineHold {
    v1::MachineHold {
        scope: hold.scope.clone(),
        reason: hold.reason.clone(),
        held_by: hold.held_by.clone(),
        until: hold.until.map(encode_timestamp),
    }
}

/// Encodes the process that works on an item.
#[must_use]
pub fn encode_holder(holder: &WorkHolder) -> v1::WorkHolder {
    v1::WorkHolder {
        process: holder.process.clone(),
        fence: holder.fence,
        since: Some(encode_timestamp(holder.since)),
        session: holder.session.to_string(),
        component: holder.component.clone(),
        host: holder.host.clone(),
        pid: holder.pid,
        session_deadline: holder.session_deadline.map(encode_timestamp),
        session_closed_at: holder.session_closed_at.map(encode_timestamp),
    }
}

/// Encodes a lane of a schedule.
#[must_use]
pub fn encode_lane(lane: &LaneView) -> v1::Lane {
    v1::Lane {
        lane: lane.lane.clone(),
        process: lane.process.clone(),
        ready_at: lane.ready_at.map(encode_timestamp),
        timer: lane.timer,
        reason: lane.reason.clone(),
        decided_at: lane.decided_at.clone(),
        deadline: lane.deadline.map(encode_timestamp),
        priority: lane.priority,
        fence: lane.fence,
        losses: lane.losses,
        not_before: lane.not_before.map(encode_timestamp),
        holder: lane.work.as_ref().map(encode_holder),
        phase_index: lane.phase_index.clone(),
        phase_since: Some(encode_timestamp(lane.phase_since)),
        rules_version: lane.rules_version,
        policy_version: lane.policy_version,
    }
}

/// Encodes a process that waits.
#[must_use]
pub fn encode_wait(wait: ProcessWait) -> v1::ProcessWait {
    v1::ProcessWait {
        process: wait.process.to_owned(),
        active: wait.active,
        until: Some(encode_timestamp(wait.until)),
        failures: wait.failures,
        reason: wait.reason,
        last_interval_seconds: wait.last_interval_seconds,
    }
}

/// Encodes an entry of a machine's history.
#[must_use]
pub fn encode_event(line: HistoryEntry) -> v1::Event {
    v1::Event {
        occurred_at: Some(encode_timestamp(line.at)),
        event: line.event,
        lane: line.lane,
        fence: line.fence,
        process: line.process,
        session: line.session.map(|session| session.to_string()),
        component: line.component,
        host: line.host,
        detail: line.detail,
        routine: None,
    }
}

/// Encodes a line of a machine's timeline.
#[must_use]
pub fn encode_timeline_line(line: TimelineLine) -> v1::Event {
    match line {
        TimelineLine::Event(entry) => encode_event(entry),
        TimelineLine::Routine(fold) => v1::Event {
            occurred_at: Some(encode_timestamp(fold.first_at)),
            event: "Routine".to_owned(),
            lane: Some(ROUTINE_PROCESS.lane().as_str().to_owned()),
            process: Some(ROUTINE_PROCESS.as_str().to_owned()),
            routine: Some(encode_routine_fold(fold, 1)),
            ..v1::Event::default()
        },
    }
}

/// Encodes folded routine of that number of machines.
#[must_use]
pub fn encode_routine_fold(fold: RoutineFold, machines: u64) -> v1::RoutineFold {
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    v1::RoutineFold {
        work_items: number(fold.work_items),
        lines: number(fold.lines),
        machines: number(machines),
        last_at: Some(encode_timestamp(fold.last_at)),
    }
}

/// Encodes the explanation of a machine's state.
#[must_use]
pub fn encode_explanation(why: Explanation) -> v1::WhyResponse {
    v1::WhyResponse {
        name: Some(encode_machine_name(&why.name)),
        phase: why.phase.to_owned(),
        since: why.since.map(encode_timestamp),
        read_at: Some(encode_timestamp(why.at)),
        waits_for: why.waits_for,
        obstacle: why.obstacle,
        decided_at: why.decided_at,
        next: why.next.map(|next| v1::NextWork {
            process: next.process.to_owned(),
            at: Some(encode_timestamp(next.at)),
            timer: next.timer,
        }),
        deadline: why.deadline.map(|deadline| v1::Deadline {
            at: Some(encode_timestamp(deadline.at)),
            consequence: deadline.consequence,
        }),
        failures: why
            .failures
            .into_iter()
            .map(|failure| v1::ProcessFailure {
                process: failure.process.to_owned(),
                count: failure.count,
                cause: failure.cause,
                until: Some(encode_timestamp(failure.until)),
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
        recovery: why.recovery.map(|recovery| v1::RecentRecovery {
            ended_at: Some(encode_timestamp(recovery.ended_at)),
            step: recovery.step,
        }),
        power: why.power.map(|switch| v1::PowerSwitch {
            kind: switch.kind,
            ordered_by: switch.ordered_by,
            carried_out_at: Some(encode_timestamp(switch.carried_out_at)),
            reported: switch.reported,
        }),
    }
}

/// Encodes an open session of a process.
#[must_use]
pub fn encode_session(line: SessionSummary) -> v1::Session {
    v1::Session {
        session: line.session.to_string(),
        process: line.process.to_string(),
        component: line.component,
        host: line.host,
        pid: line.pid,
        version: line.version,
        started_at: Some(encode_timestamp(line.started_at)),
        deadline: Some(encode_timestamp(line.deadline)),
        work_items: line.work,
    }
}

/// Encodes a process with open sessions.
#[must_use]
pub fn encode_shepherd(line: ShepherdSummary) -> v1::Shepherd {
    let components = line.components.into_iter();
    v1::Shepherd {
        process: line.process.to_string(),
        host: line.host,
        pid: line.pid,
        version: line.version,
        components: components
            .map(|(component, sessions)| v1::ShepherdComponent { component, sessions })
            .collect(),
        workers: line.workers,
        started_at: Some(encode_timestamp(line.started_at)),
        deadline: Some(encode_timestamp(line.deadline)),
        work_items: line.work,
    }
}

/// Encodes a live work item.
#[must_use]
pub fn encode_work(line: &WorkSummary) -> v1::WorkItem {
    v1::WorkItem {
        name: Some(encode_machine_name(&line.name)),
        lane: line.lane.clone(),
        holder: Some(encode_holder(&line.work)),
    }
}

/// Encodes a provider with the result of its last call.
#[must_use]
pub fn encode_provider(line: ProviderSummary) -> v1::Provider {
    v1::Provider {
        provider: line.provider,
        kind: line.kind,
        listed_at: line.listed_at.map(encode_timestamp),
        machines: line.machines,
        error: line.error,
        error_at: line.error_at.map(encode_timestamp),
        brake: line.brake,
        brake_since: line.brake_since.map(encode_timestamp),
        not_adopted: line.not_adopted.map(|surplus| {
            let (machines, limit) = surplus.to_numbers();
            let since = line.not_adopted_since.map(encode_timestamp);
            v1::NotAdopted { machines, limit, reason: surplus.reason(), since }
        }),
    }
}

/// Encodes a brake that is engaged.
#[must_use]
pub fn encode_brake(line: EngagedBrake) -> v1::Brake {
    v1::Brake {
        kind: line.kind,
        scope: line.scope,
        reason: line.reason,
        engaged_at: Some(encode_timestamp(line.engaged_at)),
        confirmed_at: Some(encode_timestamp(line.confirmed_at)),
    }
}

/// Encodes a pause of a control loop.
#[must_use]
pub fn encode_pause(pause: &Pause) -> v1::LoopPause {
    v1::LoopPause {
        provider: pause.provider.clone(),
        reason: pause.reason.clone(),
        paused_by: pause.by.clone(),
        since: Some(encode_timestamp(pause.since)),
        until: pause.until.map(encode_timestamp),
    }
}

/// Encodes a credential without its secret.
#[must_use]
pub fn encode_credential(of: &AccessCredential) -> v1::Credential {
    v1::Credential {
        credential_id: of.id.to_string(),
        kind: of.kind.clone(),
        name: of.name.clone(),
        role: of.role.as_str().to_owned(),
        providers: of.scope.providers(),
        created_at: Some(encode_timestamp(of.created_at)),
        created_by: of.created_by.clone(),
        expires_at: of.expires_at.map(encode_timestamp),
        revoked_at: of.revoked_at.map(encode_timestamp),
        revoked_by: of.revoked_by.clone(),
        active: of.active,
    }
}

/// Encodes the credential of a caller. A login to the database has a kind of its own, and neither id nor dates.
#[must_use]
pub fn encode_caller(caller: &Caller) -> v1::Credential {
    match caller {
        Caller::Credential(credential) => encode_credential(credential),
        Caller::DatabaseLogin(_) => v1::Credential {
            kind: "database-login".to_owned(),
            name: caller.name().to_owned(),
            role: caller.role().as_str().to_owned(),
            active: true,
            ..v1::Credential::default()
        },
    }
}

/// Encodes the statistics of the fleet.
#[must_use]
pub fn encode_statistics(found: Statistics) -> v1::GetStatisticsResponse {
    let Statistics { counts, throughput: paces, sampled: counted, at: now } = found;
    v1::GetStatisticsResponse {
        counts: counts.into_iter().map(encode_class_count).collect(),
        read_at: Some(encode_timestamp(now)),
        throughput: paces.into_iter().map(encode_throughput).collect(),
        sample: counted.map(encode_fleet_count),
    }
}

fn encode_class_count(found: ClassCount) -> v1::PhaseCount {
    let ClassCount { phase, provider, machines, at_least } = found;
    v1::PhaseCount { phase, provider, machines, is_lower_bound: at_least }
}

fn encode_throughput(found: ProcessThroughput) -> v1::ProcessThroughput {
    let ProcessThroughput { process, finished, failed, postponed: put_off, lost, mean_seconds } = found;
    v1::ProcessThroughput { process, finished, failed, postponed: put_off, lost, mean_seconds }
}

fn encode_fleet_count(found: SampledStatistics) -> v1::FleetSample {
    let phases = found.phases.into_iter().map(|PhaseAge { phase, oldest_seconds, over_deadline }| {
        v1::PhaseAge { phase, oldest_seconds, past_deadline: over_deadline }
    });
    let waiting = found.backlogs.into_iter().map(|Backlog { process, machines, oldest_seconds }| {
        v1::Backlog { process, machines, oldest_seconds }
    });
    v1::FleetSample {
        sampled_at: Some(encode_timestamp(found.at)),
        phases: phases.collect(),
        backlogs: waiting.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_round_trip() {
        let moment_of: Timestamp = "2026-11-20T18:00:00.123456Z".parse().unwrap();
        assert_eq!(decode_timestamp(encode_timestamp(moment_of)), Some(moment_of));
        let held_for_ever = encode_timestamp(Timestamp::MAX_UTC);
        assert_eq!(decode_timestamp(held_for_ever).unwrap().to_string(), "9999-12-31 23:59:59.999999999 UTC");
        assert_eq!(decode_timestamp(prost_types::Timestamp { seconds: 0, nanos: -1 }), None);
        assert_eq!(decode_timestamp(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 }), None);
    }
}
