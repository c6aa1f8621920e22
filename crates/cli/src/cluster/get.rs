//! `get clusters`, `cluster get`: list of clusters.

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::cluster::fetch::decode_cluster;
use crate::cluster::view::ClusterView;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

const COLUMNS: [Column; 7] = [
    Column::always("NAME"),
    Column::always("STAGE"),
    Column::always("CONTROL PLANE"),
    Column::always("WORKERS"),
    Column::always("HEALTHY"),
    Column::always("VOTES"),
    Column::always("AGE"),
];

/// Lists all clusters, ordered by name.
pub(crate) async fn list_clusters(client: &FleetClient) -> Result<ObjectList, CliError> {
    let request = v1::ListClustersRequest { name: String::new() };
    let result = ClustersClient::new(client.channel()).list(request).await;
    let mut response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    let mut objects = Vec::new();
    for message in std::mem::take(&mut response.clusters) {
        let document = ObjectDocument::of_message(&message);
        let cluster = decode_cluster(message)?;
        let names =
            ObjectNames { name: cluster.name.clone(), others: Vec::new(), id: Some(cluster.id.clone()) };
        objects.push(ListedObject { names, rows: vec![cluster_row(&cluster, now)], document });
    }
    Ok(ObjectList::of_response(ObjectKind::Cluster, &response, &COLUMNS, objects))
}

fn cluster_row(cluster: &ClusterView, now: Timestamp) -> Vec<String> {
    vec![
        cluster.name.clone(),
        cluster.stage.clone(),
        cluster.control_plane.to_string(),
        cluster.workers.to_string(),
        format!("{}/{}", cluster.healthy_nodes(), cluster.machines.len()),
        format_votes(cluster),
        humanize_duration(between(cluster.created_at, now)),
    ]
}

pub(super) fn format_votes(cluster: &ClusterView) -> String {
    match (cluster.voters_reached, cluster.voters) {
        (Some(reached), Some(voters)) => format!("{reached}/{voters}"),
        _ => "-".to_owned(),
    }
}
