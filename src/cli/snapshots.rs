//! `cluster snapshot|snapshots|restore`: what is kept of clusters, and bringing them back.

use serde_json::json;

use crate::bmdb::action::Done;
use crate::bmdb::cluster::target;
use crate::bmdb::cluster_restore::Restore;
use crate::bmdb::cluster_snapshot::snapshots_of;
use crate::cli::again;
use crate::cli::cluster::{RestoreCluster, SnapshotCluster, given, told};
use crate::cli::error::CliError;
use crate::cli::get;
use crate::cli::operate::direct;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::at;
use crate::cli::source::Source;
use crate::model::cluster::snapshot::SnapshotView;
use crate::model::telling::rough;
use crate::model::time::{Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::clusters_client::ClustersClient;

/// Has one taken.
pub(super) async fn ask(
    source: &Source,
    asked: &SnapshotCluster,
    format: Format,
) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order =
                direct("shepherd.fleet.v1.Clusters/Snapshot", target(&asked.name), Some(&asked.reason));
            bmdb.ask_for_snapshot(order, asked.name.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::SnapshotClusterRequest { name: asked.name.clone(), order: Some(order) };
                ClustersClient::new(service).snapshot(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

/// Has a cluster brought back.
pub(super) async fn restore(
    source: &Source,
    asked: &RestoreCluster,
    format: Format,
) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order =
                direct("shepherd.fleet.v1.Clusters/Restore", target(&asked.name), Some(&asked.reason));
            let restore = Restore {
                snapshot: asked.snapshot.clone(),
                onto: asked.onto.clone(),
                bypass_quorum: asked.bypass_quorum,
            };
            bmdb.restore_cluster(order, asked.name.clone(), restore).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::RestoreClusterRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    snapshot: asked.snapshot.clone().unwrap_or_default(),
                    onto: asked.onto.clone().unwrap_or_default(),
                    bypass_quorum: asked.bypass_quorum,
                };
                ClustersClient::new(service).restore(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

/// Lists those that are kept.
pub(super) async fn list(source: &Source, name: &str, format: Format) -> Result<String, CliError> {
    let (snapshots, now) = read(source, name).await?;
    if format == Format::Json {
        return get::json(&json!({ "snapshots": snapshots }));
    }
    if snapshots.is_empty() {
        return Ok(format!("no snapshot of {} is kept yet\n", target(name)));
    }
    let rows: Vec<Vec<String>> = snapshots
        .iter()
        .map(|snapshot| {
            vec![
                snapshot.id.clone(),
                rough(between(snapshot.taken_at, now)),
                snapshot.why.clone(),
                snapshot.revision.to_string(),
                snapshot.epoch.to_string(),
                snapshot.bytes.to_string(),
                snapshot.nodes.to_string(),
                snapshot.members.to_string(),
            ]
        })
        .collect();
    let head = ["SNAPSHOT", "AGE", "WHY", "REVISION", "EPOCH", "BYTES", "NODES", "MEMBERS"];
    Ok(table(&head, &rows, width()))
}

async fn read(source: &Source, name: &str) -> Result<(Vec<SnapshotView>, Timestamp), CliError> {
    match source {
        Source::Direct(bmdb) => {
            let name = name.to_owned();
            let look = bmdb.inspect(move |tx| {
                let name = name.clone();
                Box::pin(async move { snapshots_of(tx, &name).await })
            });
            Ok(look.await?)
        }
        Source::Api(remote) => {
            let request = v1::ListSnapshotsRequest { name: name.to_owned() };
            let said = ClustersClient::new(remote.service()).list_snapshots(request).await;
            let said = said.map_err(refused)?.into_inner();
            let snapshots = said.snapshots.into_iter().map(snapshot).collect::<Result<_, _>>()?;
            Ok((snapshots, at(said.at, "its moment")?))
        }
    }
}

fn snapshot(said: v1::ClusterSnapshot) -> Result<SnapshotView, CliError> {
    Ok(SnapshotView {
        id: said.id,
        taken_at: at(said.taken_at, "when a snapshot was taken")?,
        why: said.why,
        revision: said.revision,
        epoch: said.epoch,
        bytes: said.bytes,
        nodes: said.nodes,
        members: said.members,
        digest: said.digest,
    })
}
