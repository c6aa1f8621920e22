//! Orders to replace the authority of a cluster, and how far that is.
//!
//! An order changes the desired state and nothing else ([`model::cluster::authority_rotation`]). The holder of the
//! cluster's lease calls the curators, stores what they report, and ends the order. An order after a theft takes the place
//! of a planned one, and is carried out by orders to machines (`authority_theft`).

use serde_json::json;
use sqlx::PgConnection;

use crate::cluster::cluster_order::lock_and_read_cluster;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::orders::order::{Order, OrderEffect, OrderResult};
#[cfg(feature = "sealing")]
use model::cluster::authority_rotation::AuthorityProgress;
use model::cluster::authority_rotation::{RotationKind, rotation_objection};
#[cfg(feature = "sealing")]
use uuid::Uuid;

const REQUESTING: &str = "ordering that the authority of a cluster be replaced";

impl Bmdb {
    /// Orders that the authority of a cluster be replaced.
    pub async fn rotate_cluster_authority(
        &self,
        order: Order,
        name: String,
        kind: RotationKind,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order(REQUESTING, order, None, (name, kind), |tx, order, (name, kind)| {
            Box::pin(rotate_authority_in_tx(tx, order, name, *kind))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// Stores the digest of the authority that the planned order replaces, unless one is stored.
    pub async fn record_replaced_authority(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        digest: &[u8],
    ) -> Result<(), BmdbError> {
        let digest = digest.to_vec();
        self.execute_under_lease("beginning to replace the authority of a cluster", lease, move || {
            sqlx::query!(
                "UPDATE cluster SET authority_rotation_from = $2
                 WHERE cluster_id = $1 AND authority_rotation = 'planned' AND authority_rotation_from IS NULL",
                cluster,
                digest.as_slice()
            )
        })
        .await
    }

    /// Stores what the curators report of a replacement; `None`: there is none.
    pub async fn record_authority_progress(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        progress: Option<&AuthorityProgress>,
    ) -> Result<(), BmdbError> {
        let progress = progress.map(|progress| json!(progress));
        self.execute_under_lease("storing how far a replacement of an authority is", lease, move || {
            sqlx::query!(
                "UPDATE cluster SET authority_rotation_progress = $2 WHERE cluster_id = $1",
                cluster,
                progress
            )
        })
        .await
    }

    /// Records that the planned order is carried out, and requests a snapshot that has the new authority.
    pub async fn end_authority_rotation(&self, lease: &NamedLease, cluster: Uuid) -> Result<(), BmdbError> {
        self.execute_under_lease("ending the order to replace an authority", lease, move || {
            sqlx::query_file!("../../sql/cluster/end_authority_rotation.sql", cluster)
        })
        .await
    }
}

async fn rotate_authority_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    kind: RotationKind,
) -> Result<OrderEffect, BmdbError> {
    let cluster = lock_and_read_cluster(tx, name).await?;
    let id = cluster.id;
    if cluster.founded.is_none() {
        let text = format!(
            "the authority of the cluster {name} cannot be replaced: the cluster is not founded yet; see what it waits \
             for with: shepherdctl cluster describe {name}"
        );
        return Err(order_rejected("NOT_FOUNDED", text));
    }
    if let Some(by) = &cluster.restoring_by {
        let text = format!(
            "the authority of the cluster {name} cannot be replaced: the cluster is being restored, as {by} ordered; \
             watch it with: shepherdctl cluster describe {name}"
        );
        return Err(order_rejected("RESTORING", text));
    }
    let (present, progress) = (cluster.authority_rotation.as_ref(), cluster.authority_progress.as_ref());
    if let Some(text) = rotation_objection(name, kind, present, progress) {
        return Err(order_rejected("ROTATING", text));
    }
    sqlx::query_file!("../../sql/cluster/order_authority_rotation.sql", id, kind.as_str(), order.actor.name)
        .execute(&mut *tx)
        .await
        .context(REQUESTING)?;
    let begins = match kind {
        RotationKind::Planned => "as soon as its curators answer",
        RotationKind::Compromised => "by orders to its machines, which the stolen one does not sign",
    };
    let text = format!("replaces its authority {begins}; watch it with: shepherdctl cluster describe {name}");
    Ok(OrderEffect::changed(text, None, Some(json!({ "cluster": name, "rotation": kind.as_str() }))))
}
