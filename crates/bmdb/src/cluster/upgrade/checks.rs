//! Checks before an upgrade of a cluster: whether it is founded, and the versions that its nodes run.

use sqlx::PgConnection;

use crate::cluster::cluster_order::lock_and_read_cluster;
use crate::cluster::reading::read_cluster_details;
use crate::cluster::record::ClusterDetails;
use crate::connection::error::{BmdbError, order_rejected};
use model::cluster::spec::ClusterPart;
use model::kubernetes::skew::NodeVersion;
use model::kubernetes::version::ReleaseVersion;

/// Locks a cluster that can be upgraded, and reads all of it.
pub(super) async fn lock_upgradable_cluster(
    tx: &mut PgConnection,
    name: &str,
) -> Result<ClusterDetails, BmdbError> {
    let cluster = lock_and_read_cluster(tx, name).await?;
    let found = read_cluster_details(tx, cluster).await?;
    if found.cluster.founded.is_none() || found.cluster.restoring.is_some() {
        let output = format!(
            "the cluster {name} is still being founded or restored; see: shepherdctl cluster \
                              describe {name}"
        );
        return Err(order_rejected("NOT_FOUNDED", output));
    }
    Ok(found)
}

/// Versions that the nodes run, as last reported.
pub(super) fn running_versions(found: &ClusterDetails) -> Vec<NodeVersion> {
    let staying = found.machines.iter().filter(|line| line.member.leave_reason.is_none());
    let of = |line: &crate::cluster::record::ClusterMachineRecord| {
        let version = line.kubernetes.as_ref()?.version.parse().ok()?;
        Some(NodeVersion {
            name: line.member.name.clone(),
            controller: line.member.part == ClusterPart::ControlPlane,
            version,
        })
    };
    staying.filter_map(of).collect()
}

pub(super) fn parse_version(text: &str) -> Result<ReleaseVersion, BmdbError> {
    text.parse().map_err(|error| {
        order_rejected(
            "NO_VERSION",
            format!(
                "a version of Kubernetes cannot be read, so whether the upgrade is allowed is unknown: \
                 {error}"
            ),
        )
    })
}
