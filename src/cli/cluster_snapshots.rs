//! `cluster snapshot|snapshots|restore`: take, list and restore cluster snapshots.

use serde_json::json;

use crate::bmdb::action::OrderOutcome;
use crate::bmdb::cluster::order_target;
use crate::bmdb::cluster_restore::RestoreRequest;
use crate::bmdb::cluster_snapshot::list_cluster_snapshots;
use crate::cli::api_decode::require_timestamp;
use crate::cli::backend::Backend;
use crate::cli::cluster::{RestoreCluster, SnapshotCluster, format_outcome, require_reason};
use crate::cli::error::CliError;
use crate::cli::fleet_client::status_to_error;
use crate::cli::get;
use crate::cli::machine_orders::direct_order;
use crate::cli::order_retry;
use crate::cli::output::{Format, format_table, terminal_width};
use crate::model::cluster::snapshot::SnapshotView;
use crate::model::humanize::humanize_duration;
use crate::model::time::{Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::clusters_client::ClustersClient;

/// Orders a snapshot of a cluster.
pub(super) async fn request_snapshot(
    source: &Backend,
    args: &SnapshotCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let done = match source {
        Backend::Direct(bmdb) => {
            let order = direct_order(
                "shepherd.fleet.v1.Clusters/Snapshot",
                order_target(&args.name),
                Some(&args.reason),
            );
            bmdb.request_cluster_snapshot(order, args.name.clone()).await?.outcome
        }
        Backend::Api(remote) => {
            let give = async |service, order| {
                let request = v1::SnapshotClusterRequest { name: args.name.clone(), order: Some(order) };
                ClustersClient::new(service).snapshot(request).await
            };
            let done = order_retry::send_order(&mut remote.clone(), &args.reason, give).await?;
            OrderOutcome { changed: done.changed, message: done.message }
        }
    };
    format_outcome(&args.name, &done, format)
}

/// Orders the restoration of a cluster from a snapshot.
pub(super) async fn restore_cluster(
    source: &Backend,
    args: &RestoreCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let done = match source {
        Backend::Direct(bmdb) => {
            let order = direct_order(
                "shepherd.fleet.v1.Clusters/Restore",
                order_target(&args.name),
                Some(&args.reason),
            );
            let restore = RestoreRequest {
                snapshot: args.snapshot.clone(),
                target_machine: args.target_machine.clone(),
                bypass_quorum: args.bypass_quorum,
            };
            bmdb.restore_cluster(order, args.name.clone(), restore).await?.outcome
        }
        Backend::Api(remote) => {
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
            let done = order_retry::send_order(&mut remote.clone(), &args.reason, give).await?;
            OrderOutcome { changed: done.changed, message: done.message }
        }
    };
    format_outcome(&args.name, &done, format)
}

/// Lists the stored snapshots of a cluster.
pub(super) async fn show_snapshots(source: &Backend, name: &str, format: Format) -> Result<String, CliError> {
    let (snapshots, now) = fetch_snapshots(source, name).await?;
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

async fn fetch_snapshots(source: &Backend, name: &str) -> Result<(Vec<SnapshotView>, Timestamp), CliError> {
    match source {
        Backend::Direct(bmdb) => {
            let name = name.to_owned();
            let look = bmdb.transact_read_only(move |tx| {
                let name = name.clone();
                Box::pin(async move { list_cluster_snapshots(tx, &name).await })
            });
            Ok(look.await?)
        }
        Backend::Api(remote) => {
            let request = v1::ListSnapshotsRequest { name: name.to_owned() };
            let result = ClustersClient::new(remote.authorized_channel()).list_snapshots(request).await;
            let response = result.map_err(status_to_error)?.into_inner();
            let snapshots = response.snapshots.into_iter().map(decode_snapshot).collect::<Result<_, _>>()?;
            Ok((snapshots, require_timestamp(response.read_at, "its moment")?))
        }
    }
}

fn decode_snapshot(snapshot: v1::ClusterSnapshot) -> Result<SnapshotView, CliError> {
    Ok(SnapshotView {
        id: snapshot.id,
        taken_at: require_timestamp(snapshot.taken_at, "when a snapshot was taken")?,
        reason: snapshot.reason,
        revision: snapshot.revision,
        epoch: snapshot.epoch,
        bytes: snapshot.bytes,
        nodes: snapshot.nodes,
        members: snapshot.members,
        digest: snapshot.digest,
    })
}
