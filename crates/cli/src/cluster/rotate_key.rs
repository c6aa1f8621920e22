//! `cluster rotate-key`: rotate the shepherd's owner key for a cluster.

use std::fmt::Write as _;

use crate::cluster::ClusterOrderArgs;
use crate::cluster::outcome::send_cluster_order;
use crate::cluster::view::ClusterView;
use crate::context::CommandContext;
use crate::error::CliError;
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const ROTATE_KEY_EXAMPLES: &str = "\
Example:
  shepherdctl cluster rotate-key ams --reason 'a backup of the database is lost'

The curators accept the next key before they reject the previous one and its certificates. The key is also
replaced every thirty days, or at the interval of `shepherd --cluster_key_rotation_interval`. Certificates
of people do not change.";

/// Orders the rotation of a cluster's owner key.
pub(super) async fn rotate_cluster_key(
    context: &CommandContext,
    args: &ClusterOrderArgs,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::RotateClusterKeyRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).rotate_key(request).await
    };
    send_cluster_order(context, args, give).await
}

/// Describes the age and rotation of the key for `cluster describe`; `None` until a cluster with this key exists.
pub(super) fn format_key_status(cluster: &ClusterView, now: Timestamp) -> Option<String> {
    let mut text = format!("{} old", humanize_duration(between(cluster.key_since?, now)));
    if let Some(by) = &cluster.key_rotation_requested_by {
        let _ = write!(text, "; to be replaced, as {by} ordered");
    }
    if let Some(since) = cluster.keys_rejected_since {
        let _ = write!(text, "; refused by its curators for {}", humanize_duration(between(since, now)));
    }
    Some(text)
}
