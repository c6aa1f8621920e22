//! Desired Kubernetes of a cluster: bundle, ranges, add-ons, storage, key rotation, client certificates.
//!
//! An order only records the desired state; the holder of the cluster's lease passes it to the curators. Another bundle
//! than the one that nodes run cannot be set here, because it would reach all nodes at once: that is an upgrade
//! ([`crate::cluster::upgrade`]). Bundles and add-ons are artefacts of the fleet, which cannot be deleted while a
//! cluster uses them.
//!
//! This file reads what is stored. [`desired`] makes a specification of what an order asks for, `orders` executes the
//! orders, and [`user`] has the certificates of people for API servers.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::{BmdbError, order_rejected};
use model::cluster::kubernetes::{DesiredKubernetes, KubernetesSpec};
use model::cluster::view::KubernetesStatusView;
use model::time::Timestamp;

pub mod add_on_approval;
pub mod desired;
mod orders;
pub mod user;

const OPERATION: &str = "reading what clusters run of Kubernetes";

/// Desired and observed Kubernetes of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesRecord {
    /// The desired state as decisions need it.
    pub desired: DesiredKubernetes,
    /// When the desired state was last ordered.
    pub requested_at: Timestamp,
    /// Name of the operator who ordered it.
    pub requested_by: String,
    /// Operator who ordered its removal; `None` if it stays.
    pub removing_by: Option<String>,
    /// The curators' last report; `None` before the first.
    pub observed: Option<KubernetesStatusView>,
}

/// The Kubernetes of a cluster; `None` if it has none.
pub(crate) async fn read_kubernetes(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<KubernetesRecord>, BmdbError> {
    let row = sqlx::query_file!("../../sql/kubernetes/read_of_cluster.sql", cluster)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    let Some(row) = row else { return Ok(None) };
    let odd = |error: &dyn std::fmt::Display| BmdbError::Corrupt(format!("Kubernetes of a cluster: {error}"));
    let rotate: Vec<String> = serde_json::from_value(row.rotate).map_err(|error| odd(&error))?;
    let kubernetes = KubernetesSpec {
        bundle: hex::encode(row.bundle),
        version: row.version,
        service_range: row.service_range,
        pod_range: row.pod_range,
        node_prefix: u32::try_from(row.node_prefix).map_err(|error| odd(&error))?,
        domain: row.domain,
        add_ons: serde_json::from_value(row.add_ons).map_err(|error| odd(&error))?,
        storage: row.storage.map(serde_json::from_value).transpose().map_err(|error| odd(&error))?,
    };
    Ok(Some(KubernetesRecord {
        desired: DesiredKubernetes {
            spec: kubernetes,
            removing: row.removing_by.is_some(),
            pending_rotations: rotate.iter().filter_map(|keys| keys.parse().ok()).collect(),
        },
        requested_at: row.requested_at,
        requested_by: row.requested_by,
        removing_by: row.removing_by,
        // A value that another release wrote and this one cannot read is written again by the next pass.
        observed: row.observed.and_then(|observed| serde_json::from_value(observed).ok()),
    }))
}

/// The Kubernetes of a cluster that has one which is not being removed.
pub(crate) async fn require_kubernetes(
    tx: &mut PgConnection,
    cluster: Uuid,
    name: &str,
) -> Result<KubernetesRecord, BmdbError> {
    let line = read_kubernetes(tx, cluster).await?.filter(|line| line.removing_by.is_none());
    line.ok_or_else(|| {
        let text = format!(
            "the cluster {name} has no Kubernetes; give it one with: shepherdctl cluster kubernetes set {name} --bundle BUNDLE"
        );
        order_rejected("NO_KUBERNETES", text)
    })
}

/// Deletes the Kubernetes rows of a cluster that is about to be deleted.
#[cfg(feature = "sealing")]
pub(crate) async fn delete_cluster_kubernetes(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let doing = "forgetting a cluster's Kubernetes";
    sqlx::query_file!("../../sql/kubernetes/delete_users.sql", cluster)
        .execute(&mut *tx)
        .await
        .context(doing)?;
    sqlx::query_file!("../../sql/kubernetes/delete.sql", cluster).execute(&mut *tx).await.context(doing)?;
    sqlx::query_file!("../../sql/upgrade/delete_of_cluster.sql", cluster).execute(tx).await.context(doing)?;
    Ok(())
}
