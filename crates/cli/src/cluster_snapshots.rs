//! `cluster snapshot|snapshots|restore`: take, list and restore cluster snapshots.

use serde_json::json;

use crate::api_decode::require_timestamp;
use crate::cluster::{RestoreCluster, SnapshotCluster, format_response, require_reason};
use crate::error::CliError;
use crate::fleet_client::{FleetClient, status_to_error};
use crate::get;
use crate::order_retry;
use crate::output::{Format, format_table, terminal_width};
use bmdb::cluster::order_target;
use model::cluster::snapshot::SnapshotView;
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

/// Orders a snapshot of a cluster.
pub(super) async fn request_snapshot(
    client: &FleetClient,
    args: &SnapshotCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::SnapshotClusterRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).snapshot(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

/// Orders the restoration of a cluster from a snapshot.
pub(super) async fn restore_cluster(
    client: &FleetClient,
    args: &RestoreCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::RestoreClusterRequest {
            name: args.name.clone(),
            order: Some(order),
            snapshot: args.snapshot.clone().unwrap_or_default(),
            target_machine: args.target_machine.clone().unwrap_or_default(),
            bypass_quorum: args.bypass_quorum,
        };
        ClustersClient::new(service).restore(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

/// Lists the stored snapshots of a cluster.
pub(super) async fn show_snapshots(
    client: &FleetClient,
    name: &str,
    format: Format,
) -> Result<String, CliError> {
    let (snapshots, now) = fetch_snapshots(client, name).await?;
    if format == Format::Json {
        return get::format_json(&json!({ "snapshots": snapshots }));
    }
    if snapshots.is_empty() {
        return Ok(format!("no snapshot of {} is kept yet\n", order_target(name)));
    }
    let rows: Vec<Vec<String>> = snapshots
        .iter()
        .map(|snapshot| {
            vec![
                snapshot.id.clone(),
                humanize_duration(between(snapshot.taken_at, now)),
                snapshot.reason.clone(),
                snapshot.revision.to_string(),
                snapshot.epoch.to_string(),
                snapshot.bytes.to_string(),
                snapshot.nodes.to_string(),
                snapshot.members.to_string(),
            ]
        })
        .collect();
    let head = ["SNAPSHOT", "AGE", "WHY", "REVISION", "EPOCH", "BYTES", "NODES", "MEMBERS"];
    Ok(format_table(&head, &rows, terminal_width()))
}

async fn fetch_snapshots(
    client: &FleetClient,
    name: &str,
) -> Result<(Vec<SnapshotView>, Timestamp), CliError> {
    let request = v1::ListSnapshotsRequest { name: name.to_owned() };
    let result = ClustersClient::new(client.channel()).list_snapshots(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let snapshots = response.snapshots.into_iter().map(decode_snapshot).collect::<Result<_, _>>()?;
    Ok((snapshots, require_timestamp(response.read_at, "its read time")?))
}

fn decode_snapshot(snapshot: v1::ClusterSnapshot) -> Result<SnapshotView, CliError> {
    Ok(SnapshotView {
        id: snapshot.id,
        taken_at: require_timestamp(snapshot.taken_at, "the time when a snapshot was taken")?,
        reason: snapshot.reason,
        revision: snapshot.revision,
        epoch: snapshot.epoch,
        bytes: snapshot.bytes,
        nodes: snapshot.nodes,
        members: snapshot.members,
        digest: snapshot.digest,
    })
}
