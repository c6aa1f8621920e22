//! `cluster get`: list of clusters.

use serde_json::json;

use crate::client::fleet_client::FleetClient;
use crate::cluster::fetch::fetch_clusters;
use crate::cluster::view::ClusterView;
use crate::error::CliError;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use model::humanize::humanize_duration;
use model::time::between;

pub(crate) const GET_EXAMPLES: &str = "\
Example:
  shepherdctl cluster get -o json | jq -r '.clusters[] | select(.stage != \"converged\") | .name'";

pub(super) async fn show_clusters(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let (clusters, now) = fetch_clusters(client, None).await?;
    if format == Format::Json {
        return format_json(&json!({ "clusters": clusters }));
    }
    if clusters.is_empty() {
        return Ok("no clusters; create one with: shepherdctl cluster create NAME\n".to_owned());
    }
    let rows: Vec<Vec<String>> = clusters
        .iter()
        .map(|cluster| {
            vec![
                cluster.name.clone(),
                cluster.stage.clone(),
                cluster.control_plane.to_string(),
                cluster.workers.to_string(),
                format!("{}/{}", cluster.healthy_nodes(), cluster.machines.len()),
                format_votes(cluster),
                humanize_duration(between(cluster.created_at, now)),
            ]
        })
        .collect();
    let head = ["CLUSTER", "STAGE", "CONTROL PLANE", "WORKERS", "HEALTHY", "VOTES", "AGE"];
    Ok(format_table(&head, &rows, terminal_width()))
}

pub(super) fn format_votes(cluster: &ClusterView) -> String {
    match (cluster.voters_reached, cluster.voters) {
        (Some(reached), Some(voters)) => format!("{reached}/{voters}"),
        _ => "-".to_owned(),
    }
}
