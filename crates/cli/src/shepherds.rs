//! `get shepherds`: the processes that work on the BMDB.

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::output::table::or_dash;
use model::humanize::{humanize_duration, relative_time};
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::shepherds_client::ShepherdsClient;

const COLUMNS: [Column; 8] = [
    Column::always("NAME"),
    Column::always("VERSION"),
    Column::always("WORKERS"),
    Column::always("WORK"),
    Column::always("AGE"),
    Column::always("ENDS"),
    Column::wide("UUID"),
    Column::always("COMPONENTS"),
];

/// Lists the shepherds, by host and process id.
pub(crate) async fn list_shepherds(client: &FleetClient) -> Result<ObjectList, CliError> {
    let result = ShepherdsClient::new(client.channel()).list(v1::ListShepherdsRequest {}).await;
    let mut response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    let mut objects = Vec::new();
    for shepherd in std::mem::take(&mut response.shepherds) {
        let row = shepherd_row(&shepherd, now)?;
        let document = ObjectDocument::of_message(&shepherd);
        objects.push(ListedObject { names: shepherd_names(&shepherd), rows: vec![row], document });
    }
    Ok(ObjectList::of_response(ObjectKind::Shepherd, &response, &COLUMNS, objects))
}

/// A shepherd is named HOST/PID, and after its host, if it is the only one there.
fn shepherd_names(shepherd: &v1::Shepherd) -> ObjectNames {
    let id = Some(shepherd.process.clone());
    match (&shepherd.host, shepherd.pid) {
        (Some(host), Some(pid)) => {
            ObjectNames { name: format!("{host}/{pid}"), others: vec![host.clone()], id }
        }
        _ => ObjectNames::of_id(shepherd.process.clone()),
    }
}

fn shepherd_row(shepherd: &v1::Shepherd, now: Timestamp) -> Result<Vec<String>, CliError> {
    let started_at = require_timestamp(shepherd.started_at, "the start time of a shepherd")?;
    let deadline = require_timestamp(shepherd.deadline, "a shepherd's deadline")?;
    Ok(vec![
        shepherd_names(shepherd).name,
        or_dash(shepherd.version.as_deref()),
        shepherd.workers.to_string(),
        shepherd.work_items.to_string(),
        humanize_duration(between(started_at, now)),
        relative_time(deadline, now),
        shepherd.process.clone(),
        format_components(&shepherd.components),
    ])
}

/// The components, each with the number of its sessions if it has several.
fn format_components(components: &[v1::ShepherdComponent]) -> String {
    let one = |component: &v1::ShepherdComponent| match component.sessions {
        1 => component.component.clone(),
        sessions => format!("{} ({sessions})", component.component),
    };
    components.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shepherd_is_one_row() {
        let moment = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let component = |name: &str, sessions| v1::ShepherdComponent { component: name.to_owned(), sessions };
        let shepherd = v1::Shepherd {
            process: "p".to_owned(),
            host: Some("rack1".to_owned()),
            pid: Some(7),
            version: Some("1.0".to_owned()),
            components: vec![component("api", 1), component("initializer", 10)],
            workers: 10,
            started_at: moment(0),
            deadline: moment(70),
            work_items: 2,
        };
        let now = Timestamp::from_timestamp(60, 0).unwrap();
        let row = shepherd_row(&shepherd, now).unwrap();
        assert_eq!(row, ["rack1/7", "1.0", "10", "2", "1m", "in 10s", "p", "api, initializer (10)"]);
        assert_eq!(shepherd_names(&shepherd).others, ["rack1"]);
        let unknown = v1::Shepherd { host: None, ..shepherd };
        assert_eq!(shepherd_names(&unknown).name, "p");
    }
}
