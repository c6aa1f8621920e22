//! Locking the cluster that an order names, the rejection of a name that no cluster has, and the version of its desired
//! state.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::record::SpecColumns;
use crate::connection::DbContext as _;
use crate::connection::error::{BmdbError, order_rejected};
use model::cluster::spec::ClusterSpec;

const OPERATION: &str = "reading clusters";
/// The target of orders about clusters, for people.
#[must_use]
pub fn order_target(name: &str) -> String {
    format!("the cluster {name}")
}

/// The error for a name that no cluster has.
#[must_use]
pub fn no_such_cluster(name: &str) -> BmdbError {
    let output = format!("there is no cluster {name:?}; run: shepherdctl cluster get");
    order_rejected("NO_SUCH_CLUSTER", output)
}

/// Locks the cluster of that name to change its specification; a cluster that is being deleted cannot be changed.
pub(crate) async fn lock_cluster(
    tx: &mut PgConnection,
    name: &str,
) -> Result<(Uuid, ClusterSpec), BmdbError> {
    let found =
        sqlx::query_file!("../../sql/cluster/lock.sql", name).fetch_optional(tx).await.context(OPERATION)?;
    let found = found.ok_or_else(|| no_such_cluster(name))?;
    if let Some(by) = found.deleting_by {
        let text = format!("{} is being deleted, as {by} ordered, and cannot be changed", order_target(name));
        return Err(order_rejected("CLUSTER_ENDS", text));
    }
    let spec = SpecColumns {
        name: found.name,
        control_plane: found.control_plane,
        workers: found.workers,
        selector: found.selector,
        roles: found.roles,
        approval: found.approval,
    };
    Ok((found.cluster_id, spec.into_spec()?))
}

/// Increments the version of a cluster when its desired state changes outside its row, as a part of the order `what`.
pub(crate) async fn increment_version(
    tx: &mut PgConnection,
    cluster: Uuid,
    what: &'static str,
) -> Result<(), BmdbError> {
    sqlx::query!("UPDATE cluster SET settled = FALSE, version = version + 1 WHERE cluster_id = $1", cluster)
        .execute(tx)
        .await
        .context(what)
        .map(drop)
}
