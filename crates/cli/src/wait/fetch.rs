//! Fetches the objects that are waited for, and makes snapshots of them.
//!
//! Machines are listed by their UUIDs, a hundred in a call. A power order is a fact of its machine that the list does
//! not have, so these machines are read one by one. When such an order is over, the history of the machine has the
//! event that ended it, which is read once.

use std::collections::HashMap;

use serde_json::Value;
use tonic::Code;

use crate::client::decode::{decode_struct, missing_field, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::cluster::authority_progress::describe_progress;
use crate::cluster::fetch::decode_cluster;
use crate::error::CliError;
use crate::machine::named::fetch_named_machines;
use crate::object::document::ObjectDocument;
use crate::wait::condition::{ClusterGoal, MachineGoal, WaitGoal};
use crate::wait::snapshot::{
    AuthorityState, ClusterState, FirstReport, HoldState, MachineState, PowerState, Snapshot, UpdateState,
    UpgradeState,
};
use model::event_name::{POWER_ORDER_CANCELLED, POWER_ORDER_GIVEN_UP, POWER_ORDERED};
use model::process::Lane;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;
use proto::fleet::v1::machines_client::MachinesClient;
use proto::fleet::v1::updates_client::UpdatesClient;

/// Events that begin or end a power order, and whether the order ended without having been carried out.
const POWER_EVENTS: [(&str, bool); 3] =
    [(POWER_ORDERED, false), (POWER_ORDER_CANCELLED, true), (POWER_ORDER_GIVEN_UP, true)];
/// Events of a machine in which the end of its power order is looked for.
const MAX_EVENTS: i32 = 500;

/// An object that is waited for.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    /// UUID of a machine or a cluster, or id of an update; `None` for a cluster until it was read.
    pub(crate) id: Option<String>,
    /// Its name, as other commands accept it.
    pub(crate) name: String,
    /// What was known of a machine when the waiting for its power order began.
    pub(crate) first: Option<FirstReport>,
    /// Whether its power order was over at the last read, and its history was read then.
    pub(crate) is_over: bool,
}

impl Subject {
    /// An object with this id.
    pub(crate) fn new(id: impl Into<String>, name: impl Into<String>) -> Self {
        Self { id: Some(id.into()), name: name.into(), first: None, is_over: false }
    }

    /// A cluster that was not read yet, and may not exist.
    pub(crate) fn cluster(name: impl Into<String>) -> Self {
        Self { id: None, name: name.into(), first: None, is_over: false }
    }
}

/// An object as it was read.
#[derive(Debug)]
pub(crate) struct ReadObject {
    /// UUID of a cluster.
    pub(crate) id: Option<String>,
    /// The fields that decide about it.
    pub(crate) snapshot: Snapshot,
    /// The object, for its output; `None` if it does not exist, or was not read whole.
    pub(crate) document: Option<ObjectDocument>,
}

impl ReadObject {
    const ABSENT: Self = Self { id: None, snapshot: Snapshot::Absent, document: None };
}

/// The objects that were read, in the order of the subjects.
#[derive(Debug)]
pub(crate) struct ReadObjects {
    /// The database's time of the last read.
    pub(crate) now: Timestamp,
    /// An object for each subject.
    pub(crate) objects: Vec<ReadObject>,
}

/// Reads the objects. There is at least one.
pub(crate) async fn read_objects(
    client: &FleetClient,
    goal: WaitGoal,
    subjects: &[Subject],
) -> Result<ReadObjects, CliError> {
    match goal {
        WaitGoal::Machine(MachineGoal::PowerOrderEnd(_)) => read_switched_machines(client, subjects).await,
        WaitGoal::Machine(_) => read_machines(client, subjects).await,
        WaitGoal::Cluster(goal) => read_clusters(client, goal, subjects).await,
        WaitGoal::UpdateFinished => read_updates(client, subjects).await,
    }
}

async fn read_machines(client: &FleetClient, subjects: &[Subject]) -> Result<ReadObjects, CliError> {
    let names: Vec<String> = subjects.iter().filter_map(|subject| subject.id.clone()).collect();
    let named = fetch_named_machines(client, &names).await?;
    let mut machines: HashMap<String, v1::Machine> = HashMap::new();
    for machine in named.machines {
        let name = machine.name.as_ref().ok_or_else(|| missing_field("a machine's name"))?;
        machines.insert(name.machine.clone(), machine);
    }
    let objects = subjects.iter().map(|subject| {
        let found = subject.id.as_ref().and_then(|id| machines.remove(id));
        found.map_or(ReadObject::ABSENT, |machine| ReadObject {
            id: None,
            document: Some(ObjectDocument::of_message(&machine)),
            snapshot: Snapshot::Machine(MachineState {
                phase: machine.phase,
                reason: machine.reason,
                working: machine.working,
                power: PowerState::default(),
            }),
        })
    });
    Ok(ReadObjects { now: named.read_at, objects: objects.collect() })
}

/// Reads machines with the state of their power orders.
async fn read_switched_machines(client: &FleetClient, subjects: &[Subject]) -> Result<ReadObjects, CliError> {
    let mut service = MachinesClient::new(client.channel());
    let (mut now, mut objects) = (Timestamp::UNIX_EPOCH, Vec::new());
    for subject in subjects {
        let machine = subject.id.clone().unwrap_or_default();
        let response = match service.get(v1::GetMachineRequest { machine: machine.clone() }).await {
            Ok(response) => response.into_inner(),
            Err(status) if status.code() == Code::NotFound => {
                objects.push(ReadObject::ABSENT);
                continue;
            }
            Err(status) => return Err(status_to_error(status)),
        };
        now = now.max(require_timestamp(response.read_at, "its read time")?);
        let mut state = decode_switched_machine(response);
        state.power.first.clone_from(&subject.first);
        if must_read_history(subject, &state.power) {
            let request =
                v1::TimelineRequest { machine, limit: MAX_EVENTS, ..v1::TimelineRequest::default() };
            let events = service.timeline(request).await.map_err(status_to_error)?.into_inner().events;
            state.power.abandoned = find_abandonment(events);
        }
        objects.push(ReadObject { id: None, snapshot: Snapshot::Machine(state), document: None });
    }
    Ok(ReadObjects { now, objects })
}

/// Whether the history of the machine has to be read for the end of its power order. Once is enough: an order that was
/// abandoned ends the waiting, and one that was carried out stays so.
const fn must_read_history(subject: &Subject, power: &PowerState) -> bool {
    !power.is_pending && !subject.is_over
}

fn decode_switched_machine(response: v1::GetMachineResponse) -> MachineState {
    let mut facts = response.facts;
    let mut fact = |table: &str| facts.remove(table).map(decode_struct);
    let time = |value: &Value| value.as_str().and_then(|text| text.parse::<Timestamp>().ok());
    let is_pending = fact("machine_power_order").is_some();
    let heartbeat = fact("machine_agent_heartbeat");
    let hold = fact("machine_hold").map(|hold| HoldState { until: time(&hold["until"]) });
    let lane = response.schedule.into_iter().find(|lane| lane.lane == Lane::Access.as_str());
    let (reason, holder) = lane.map(|lane| (lane.reason, lane.holder)).unwrap_or_default();
    MachineState {
        phase: response.phase,
        reason,
        working: holder.map(|holder| holder.process),
        power: PowerState {
            is_pending,
            abandoned: None,
            boot_id: heartbeat.as_ref().and_then(|beat| Some(beat["boot_id"].as_str()?.to_owned())),
            heartbeat_at: heartbeat.as_ref().and_then(|beat| time(&beat["at"])),
            hold,
            first: None,
        },
    }
}

/// Why the last power order ended without having been carried out, by the events of its machine, newest first.
fn find_abandonment(events: Vec<v1::Event>) -> Option<String> {
    let of_power = |event: v1::Event| {
        let (_, is_abandoned) = POWER_EVENTS.iter().find(|(name, _)| *name == event.event)?;
        Some((*is_abandoned, event))
    };
    let (is_abandoned, event) = events.into_iter().find_map(of_power)?;
    is_abandoned.then(|| event.detail.unwrap_or(event.event))
}

async fn read_clusters(
    client: &FleetClient,
    goal: ClusterGoal,
    subjects: &[Subject],
) -> Result<ReadObjects, CliError> {
    let name = match subjects {
        [only] => only.name.clone(),
        _ => String::new(),
    };
    let result = ClustersClient::new(client.channel()).list(v1::ListClustersRequest { name }).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    let mut clusters = response.clusters;
    let objects = subjects.iter().map(|subject| {
        // Another cluster may have the name by now.
        let is_subject = |cluster: &v1::Cluster| {
            cluster.name == subject.name && subject.id.as_ref().is_none_or(|id| *id == cluster.id)
        };
        let Some(place) = clusters.iter().position(is_subject) else { return Ok(ReadObject::ABSENT) };
        let cluster = clusters.swap_remove(place);
        let authority = match goal {
            ClusterGoal::AuthorityReplaced => Some(decode_authority(cluster.clone())?),
            ClusterGoal::Ready | ClusterGoal::Deleted | ClusterGoal::UpgradeEnd(_) => None,
        };
        Ok(ReadObject {
            id: Some(cluster.id.clone()),
            document: Some(ObjectDocument::of_message(&cluster)),
            snapshot: Snapshot::Cluster(ClusterState { authority, ..decode_cluster_state(cluster) }),
        })
    });
    Ok(ReadObjects { now, objects: objects.collect::<Result<_, CliError>>()? })
}

fn decode_authority(cluster: v1::Cluster) -> Result<AuthorityState, CliError> {
    let progress = describe_progress(&decode_cluster(cluster)?);
    Ok(progress.map_or(AuthorityState::Settled, AuthorityState::Replacing))
}

fn decode_cluster_state(cluster: v1::Cluster) -> ClusterState {
    let count = |part: &str, leaves: bool| {
        let machines = cluster.machines.iter();
        let counted = machines.filter(|machine| machine.leave_reason.is_some() == leaves);
        u32::try_from(counted.filter(|machine| machine.part == part).count()).unwrap_or(u32::MAX)
    };
    let [controllers, workers] =
        ["control-plane", "worker"].map(|part| (count(part, false), count(part, true)));
    let machines = cluster.machines.into_iter();
    ClusterState {
        stage: cluster.stage,
        desired: (cluster.control_plane, cluster.workers),
        members: (controllers.0, workers.0),
        leaving: controllers.1.saturating_add(workers.1),
        wait_reasons: cluster.wait_reasons,
        machine_waits: machines.filter_map(|machine| Some((machine.name, machine.wait_reason?))).collect(),
        upgrade: cluster.upgrade.map(|upgrade| UpgradeState {
            outcome: upgrade.outcome,
            pause_reason: upgrade.pause_reason,
            completed: upgrade.completed_count,
            requested: upgrade.requested_count,
        }),
        authority: None,
    }
}

/// Reads updates one by one, because the API returns the machines of a single one only.
async fn read_updates(client: &FleetClient, subjects: &[Subject]) -> Result<ReadObjects, CliError> {
    let mut service = UpdatesClient::new(client.channel());
    let (mut now, mut objects) = (Timestamp::UNIX_EPOCH, Vec::new());
    for subject in subjects {
        let request = v1::ListUpdatesRequest { id: subject.id.clone().unwrap_or_default() };
        let response = service.list(request).await.map_err(status_to_error)?.into_inner();
        now = now.max(require_timestamp(response.read_at, "its read time")?);
        let found = response.updates.into_iter().find(|update| subject.id.as_ref() == Some(&update.id));
        objects.push(found.map_or(ReadObject::ABSENT, |update| ReadObject {
            id: None,
            document: Some(ObjectDocument::of_message(&update)),
            snapshot: Snapshot::Update(decode_update(update)),
        }));
    }
    Ok(ReadObjects { now, objects })
}

fn decode_update(update: v1::Update) -> UpdateState {
    let mut counts: Vec<String> =
        update.counts.iter().map(|(state, count)| format!("{state} {count}")).collect();
    counts.sort_unstable();
    let failed = update.machines.into_iter().filter(|machine| machine.state == "failed");
    UpdateState {
        outcome: update.outcome,
        pause_reason: update.pause_reason,
        counts: counts.join(", "),
        failures: failed.map(|machine| (machine.name, machine.message.unwrap_or_default())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use prost_types::value::Kind;

    use super::*;

    fn fact(fields: &[(&str, &str)]) -> prost_types::Struct {
        let field = |(name, text): &(&str, &str)| {
            let kind = Some(Kind::StringValue((*text).to_owned()));
            ((*name).to_owned(), prost_types::Value { kind })
        };
        prost_types::Struct { fields: fields.iter().map(field).collect() }
    }

    #[test]
    fn power_order_is_read_from_facts() {
        let lane =
            v1::Lane { lane: "access".to_owned(), reason: "ordered".to_owned(), ..v1::Lane::default() };
        let facts = [
            ("machine_power_order", fact(&[("switch", "reboot")])),
            ("machine_agent_heartbeat", fact(&[("at", "2026-11-20T18:00:00Z"), ("boot_id", "one")])),
            ("machine_hold", fact(&[("until", "2026-11-20T18:05:00Z")])),
        ];
        let response = |facts: &[(&str, prost_types::Struct)]| v1::GetMachineResponse {
            phase: "Ready".to_owned(),
            facts: facts.iter().map(|(table, row)| ((*table).to_owned(), row.clone())).collect(),
            schedule: vec![lane.clone()],
            ..v1::GetMachineResponse::default()
        };
        let state = decode_switched_machine(response(&facts));
        assert_eq!((state.phase.as_str(), state.reason.as_str()), ("Ready", "ordered"));
        let until = "2026-11-20T18:05:00Z".parse().ok();
        let expected = PowerState {
            is_pending: true,
            boot_id: Some("one".to_owned()),
            heartbeat_at: "2026-11-20T18:00:00Z".parse().ok(),
            hold: Some(HoldState { until }),
            ..PowerState::default()
        };
        assert_eq!(state.power, expected);
        assert_eq!(decode_switched_machine(response(&[])).power, PowerState::default());
    }

    #[test]
    fn history_is_read_once_when_the_order_is_over() {
        let state = |is_pending| PowerState { is_pending, ..PowerState::default() };
        let subject = |is_over| Subject { is_over, ..Subject::new("1", "sim/a") };
        for (is_over, is_pending, expected) in
            [(false, true, false), (false, false, true), (true, false, false), (true, true, false)]
        {
            assert_eq!(must_read_history(&subject(is_over), &state(is_pending)), expected);
        }
    }

    #[test]
    fn newest_event_of_a_power_order_decides() {
        let event = |name: &str, detail: Option<&str>| v1::Event {
            event: name.to_owned(),
            detail: detail.map(str::to_owned),
            ..v1::Event::default()
        };
        let (noted, ordered) = (event("Finished", None), event("PowerOrdered", Some("reboot")));
        let given_up = event("PowerOrderGivenUp", Some("the order to reboot it failed"));
        for (events, expected) in [
            (vec![], None),
            (vec![noted.clone(), ordered.clone(), given_up.clone()], None),
            (vec![noted, given_up, ordered.clone()], Some("the order to reboot it failed")),
            (vec![event("PowerOrderCancelled", None), ordered], Some("PowerOrderCancelled")),
        ] {
            assert_eq!(find_abandonment(events).as_deref(), expected);
        }
    }

    #[test]
    fn machines_of_a_cluster_are_counted_by_part() {
        let machine = |part: &str, leave_reason: Option<&str>| v1::ClusterMachine {
            name: "m".to_owned(),
            part: part.to_owned(),
            leave_reason: leave_reason.map(str::to_owned),
            ..v1::ClusterMachine::default()
        };
        let machines = vec![
            machine("control-plane", None),
            machine("worker", None),
            machine("worker", Some("it is being retired")),
            machine("worker", None),
        ];
        let state = decode_cluster_state(v1::Cluster {
            control_plane: 1,
            workers: 3,
            machines,
            ..v1::Cluster::default()
        });
        assert_eq!((state.desired, state.members, state.leaving), ((1, 3), (1, 2), 1));
    }
}
