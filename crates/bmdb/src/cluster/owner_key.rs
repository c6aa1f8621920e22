//! Rotation of the shepherd's owner key for a cluster.
//!
//! The key in force is always sealed under the name it was founded with, so a shepherd of a release that cannot rotate
//! keys uses the one in force, too. A replaced key moves to a name of its own, in the transaction that puts the next
//! one in its place: at any moment exactly one key is in force.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::lock::no_such_cluster;
use crate::cluster::record::ClusterRecord;
#[cfg(feature = "sealing")]
use crate::connection::database_now;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::orders::order::{Order, OrderEffect, OrderResult};
#[cfg(feature = "sealing")]
use model::cluster::owner_key::OwnerPublicKey;
use model::cluster::owner_key::{FormerKey, OwnerKeyRotationRequest, OwnerKeys};
use model::cluster::spec::ClusterSpec;
#[cfg(feature = "sealing")]
use model::time::Timestamp;

const OPERATION: &str = "reading the shepherd's keys for a cluster";
const REQUESTING: &str = "requesting another key for a cluster";

/// Name under which the key in force is sealed.
#[must_use]
pub fn current_secret_name(cluster: Uuid) -> String {
    format!("cluster/{cluster}/owner")
}

/// Name under which the next key is sealed.
#[must_use]
pub fn next_secret_name(cluster: Uuid) -> String {
    format!("cluster/{cluster}/owner/next")
}

/// Name under which a former key is sealed.
#[must_use]
pub fn former_secret_name(cluster: Uuid, public_key: [u8; 32]) -> String {
    format!("cluster/{cluster}/owner/{}", hex::encode(public_key))
}

fn parse_public_key(bytes: Vec<u8>) -> Result<[u8; 32], BmdbError> {
    let corrupt =
        |_| BmdbError::Corrupt("a key of the shepherd for a cluster that does not have 32 bytes".to_owned());
    bytes.try_into().map_err(corrupt)
}

/// State of the shepherd's keys for a cluster; `None` if the cluster does not exist.
async fn read_keys(tx: &mut PgConnection, cluster: Uuid) -> Result<Option<OwnerKeys>, BmdbError> {
    let row = sqlx::query_file!("../../sql/cluster/read_keys.sql", cluster)
        .fetch_optional(&mut *tx)
        .await
        .context(OPERATION)?;
    let Some(row) = row else { return Ok(None) };
    let former = sqlx::query!(
        "SELECT public_key, replaced_at, removed_at FROM cluster_former_key WHERE cluster_id = $1
         ORDER BY replaced_at DESC, public_key",
        cluster
    )
    .fetch_all(tx)
    .await
    .context(OPERATION)?;
    let former = former.into_iter().map(|row| {
        Ok(FormerKey {
            key: parse_public_key(row.public_key)?,
            replaced_at: row.replaced_at,
            removed_at: row.removed_at,
        })
    });
    Ok(Some(OwnerKeys {
        current_since: row.since,
        rotation_request: row
            .key_rotation_requested_at
            .zip(row.key_rotation_requested_by)
            .map(|(at, by)| OwnerKeyRotationRequest { requested_at: at, requested_by: by }),
        next: row.key_next.map(parse_public_key).transpose()?,
        former: former.collect::<Result<_, BmdbError>>()?,
        oldest_snapshot: row.oldest_snapshot,
        rejected_since: row.keys_refused_since,
    }))
}

/// Queues the removal of former keys again, so that the curators receive all of them.
#[cfg(feature = "sealing")]
pub(crate) async fn requeue_key_removals(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let doing = "having former keys refused again";
    // A cluster that was restored from a snapshot knows of no removal since.
    sqlx::query!(
        "UPDATE cluster_former_key SET removed_at = NULL WHERE cluster_id = $1 AND removed_at IS NOT NULL",
        cluster
    )
    .execute(tx)
    .await
    .context(doing)?;
    Ok(())
}

/// Deletes the records of former keys of a cluster that is about to be deleted. The sealed keys are deleted with its
/// secrets.
#[cfg(feature = "sealing")]
pub(crate) async fn delete_former_keys(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let doing = "forgetting the former keys for a cluster";
    sqlx::query!("DELETE FROM cluster_former_key WHERE cluster_id = $1", cluster)
        .execute(tx)
        .await
        .context(doing)?;
    Ok(())
}

impl Bmdb {
    /// Requests that the shepherd's key for a cluster be replaced soon.
    pub async fn rotate_cluster_key(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        self.execute_cluster_order(REQUESTING, order, name, |tx, order, cluster| {
            Box::pin(request_key_rotation_in_tx(tx, order, cluster))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// State of the shepherd's keys for a cluster, and the database's clock when it was read; `None` if the cluster
    /// does not exist.
    pub async fn cluster_keys(&self, cluster: Uuid) -> Result<Option<(OwnerKeys, Timestamp)>, BmdbError> {
        self.transact_read_only(move |tx| {
            Box::pin(async move {
                let keys = read_keys(tx, cluster).await?;
                Ok(keys.zip(Some(database_now(tx).await?)))
            })
        })
        .await
    }

    /// Stores the next key, unless there is one already or the cluster is being deleted.
    pub async fn store_next_cluster_key(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        (key, sealed): (OwnerPublicKey, Vec<u8>),
    ) -> Result<(), BmdbError> {
        let doing = "keeping the next key for a cluster";
        self.transact_under_lease(doing, lease, sealed, move |tx, sealed| {
            Box::pin(async move {
                // A rotation that is under way is completed first.
                let kept = sqlx::query_scalar!(
                    "UPDATE cluster SET key_next = $2, key_next_at = clock_timestamp()
                     WHERE cluster_id = $1 AND key_next IS NULL AND deleting_at IS NULL
                     RETURNING cluster_id",
                    cluster,
                    key.as_slice()
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?;
                if kept.is_some() {
                    let name = next_secret_name(cluster);
                    // The secret that is replaced was never used.
                    sqlx::query!(
                        "INSERT INTO sealed_secret (name, sealed, created_at)
                         VALUES ($1, $2, clock_timestamp()) ON CONFLICT (name)
                         DO UPDATE SET sealed = excluded.sealed, created_at = excluded.created_at",
                        name,
                        sealed
                    )
                    .execute(tx)
                    .await
                    .context(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Puts the next key in force and makes the present one a former key.
    pub async fn activate_next_cluster_key(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        before: OwnerPublicKey,
        next: OwnerPublicKey,
    ) -> Result<(), BmdbError> {
        let doing = "letting the next key for a cluster be in force";
        self.transact_under_lease(doing, lease, (), move |tx, ()| {
            Box::pin(async move {
                let switched = sqlx::query_file_scalar!(
                    "../../sql/cluster/activate_next_key.sql",
                    cluster,
                    next.as_slice()
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?;
                if switched.is_none() {
                    return Ok(());
                }
                sqlx::query!(
                    "INSERT INTO cluster_former_key (cluster_id, public_key, replaced_at)
                     VALUES ($1, $2, clock_timestamp())
                     ON CONFLICT (cluster_id, public_key) DO NOTHING",
                    cluster,
                    before.as_slice()
                )
                .execute(&mut *tx)
                .await
                .context(doing)?;
                for (from, to) in [
                    (current_secret_name(cluster), former_secret_name(cluster, before)),
                    (next_secret_name(cluster), current_secret_name(cluster)),
                ] {
                    sqlx::query!("UPDATE sealed_secret SET name = $2 WHERE name = $1", from, to)
                        .execute(&mut *tx)
                        .await
                        .context(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Records that the cluster's curators reject a former key now.
    pub async fn record_former_key_removed(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        key: OwnerPublicKey,
    ) -> Result<(), BmdbError> {
        let doing = "recording that a former key for a cluster is refused";
        self.execute_under_lease(doing, lease, move || {
            sqlx::query!(
                "UPDATE cluster_former_key SET removed_at = clock_timestamp()
                 WHERE cluster_id = $1 AND public_key = $2 AND removed_at IS NULL",
                cluster,
                key.as_slice()
            )
        })
        .await
    }

    /// Deletes a former key that the cluster's curators reject.
    pub async fn delete_former_key(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        key: OwnerPublicKey,
    ) -> Result<(), BmdbError> {
        let doing = "forgetting a former key for a cluster";
        self.transact_under_lease(doing, lease, (), move |tx, ()| {
            Box::pin(async move {
                let gone = sqlx::query_scalar!(
                    "DELETE FROM cluster_former_key
                     WHERE cluster_id = $1 AND public_key = $2 AND removed_at IS NOT NULL
                     RETURNING cluster_id",
                    cluster,
                    key.as_slice()
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?;
                if gone.is_some() {
                    let name = former_secret_name(cluster, key);
                    sqlx::query!("DELETE FROM sealed_secret WHERE name = $1", name)
                        .execute(tx)
                        .await
                        .context(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Records whether the cluster's curators reject every key that the BMDB has.
    pub async fn record_cluster_keys_rejected(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        refused: bool,
    ) -> Result<(), BmdbError> {
        let doing = "recording whether curators refuse the shepherd's keys";
        self.execute_under_lease(doing, lease, move || {
            sqlx::query!(
                "UPDATE cluster SET keys_refused_since =
                     CASE WHEN $2::BOOL THEN COALESCE(keys_refused_since, clock_timestamp()) END
                 WHERE cluster_id = $1",
                cluster,
                refused
            )
        })
        .await
    }
}

async fn request_key_rotation_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    cluster: ClusterRecord,
) -> Result<OrderEffect, BmdbError> {
    let ClusterRecord { id, founded, spec: ClusterSpec { name, .. }, .. } = cluster;
    if founded.is_none() {
        let text = format!(
            "the shepherd's key for the cluster {name} cannot be replaced: the cluster is not founded yet; see what it \
             waits for with: shepherdctl cluster describe {name}"
        );
        return Err(order_rejected("NOT_FOUNDED", text));
    }
    let known = read_keys(tx, id).await?.ok_or_else(|| no_such_cluster(&name))?;
    if let Some(OwnerKeyRotationRequest { requested_by: by, .. }) = known.rotation_request {
        let text =
            format!("already replaces the shepherd's key for it, as {by} ordered; nothing was changed");
        return Ok(OrderEffect::already(text, None));
    }
    sqlx::query!(
        "UPDATE cluster SET key_rotation_requested_at = clock_timestamp(), key_rotation_requested_by = $2,
             version = version + 1
         WHERE cluster_id = $1",
        id,
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .context(REQUESTING)?;
    let text = format!(
        "replaces the shepherd's key for it as soon as its curators answer; watch it with: shepherdctl cluster \
         describe {name}"
    );
    let before = json!({ "key_since": known.current_since });
    Ok(OrderEffect::changed(text, Some(before), None))
}
