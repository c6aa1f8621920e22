//! `cluster rotate-key`: the shepherd's own key for a cluster.

use std::fmt::Write as _;

use crate::bmdb::action::Done;
use crate::bmdb::cluster::target;
use crate::cli::again;
use crate::cli::cluster::{RotateClusterKey, given, told as told_of};
use crate::cli::error::CliError;
use crate::cli::operate::direct;
use crate::cli::output::Format;
use crate::cli::source::Source;
use crate::model::cluster::view::ClusterView;
use crate::model::telling::rough;
use crate::model::time::{Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::clusters_client::ClustersClient;

/// Has it replaced.
pub(super) async fn rotate(
    source: &Source,
    asked: &RotateClusterKey,
    format: Format,
) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order =
                direct("shepherd.fleet.v1.Clusters/RotateKey", target(&asked.name), Some(&asked.reason));
            bmdb.rotate_cluster_key(order, asked.name.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::RotateClusterKeyRequest { name: asked.name.clone(), order: Some(order) };
                ClustersClient::new(service).rotate_key(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told_of(&asked.name, &done, format)
}

/// What is said of it where the cluster is described; nothing before there is a cluster that knows it.
pub(super) fn told(cluster: &ClusterView, now: Timestamp) -> Option<String> {
    let mut said = format!("{} old", rough(between(cluster.key_since?, now)));
    if let Some(by) = &cluster.key_asked_by {
        let _ = write!(said, "; to be replaced, as {by} ordered");
    }
    if let Some(since) = cluster.keys_refused_since {
        let _ = write!(said, "; refused by its curators for {}", rough(between(since, now)));
    }
    Some(said)
}
