//! Sealed snapshots of a cluster's etcd records: request, store, retain, read.
//!
//! Snapshots arrive sealed as a whole and are cut into chunks so that no row is large. A snapshot is written with all
//! its chunks in one transaction that checks the cluster's lease, and the same transaction deletes the snapshots that
//! are not retained any more: there are never fewer than the policy demands, and never many more.

use std::collections::BTreeSet;

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::cluster_order::lock_and_read_cluster;
use crate::cluster::reading::require_cluster;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::named_lease::NamedLease;
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::snapshot::{SnapshotReason, SnapshotView, snapshots_to_delete};
use model::time::Timestamp;

const OPERATION: &str = "reading snapshots of a cluster";
/// Size of a chunk in bytes.
const CHUNK_BYTES: usize = 512 << 10;

/// A snapshot to store.
#[derive(Clone)]
pub struct NewSnapshot {
    /// Id of the snapshot.
    pub id: Uuid,
    /// When it was taken, by the database's clock: a moment before it was read.
    pub taken_at: Timestamp,
    /// Why the snapshot was taken.
    pub reason: SnapshotReason,
    /// etcd's revision when it was taken.
    pub revision: i64,
    /// How often the cluster had been restored.
    pub epoch: u64,
    /// Size of the encoded snapshot in bytes, before sealing.
    pub bytes: usize,
    /// Number of nodes in it.
    pub nodes: usize,
    /// Number of nodes in it that were members of etcd.
    pub members: usize,
    /// Nodes whose members voted in etcd when it was taken.
    pub voters: BTreeSet<String>,
    /// SHA-256 of the certificate of the authority that signed when it was taken.
    pub authority: Vec<u8>,
    /// SHA-256 of the encoded snapshot, before sealing.
    pub digest: [u8; 32],
    /// The compressed and sealed snapshot.
    pub sealed: Vec<u8>,
}

fn to_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The snapshots of a cluster, newest first.
pub(crate) async fn list_snapshots(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Vec<SnapshotView>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/cluster/list_snapshots.sql", cluster)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| SnapshotView {
            id: row.snapshot_id.to_string(),
            taken_at: row.taken_at,
            reason: row.why,
            revision: row.revision,
            epoch: row.epoch.try_into().unwrap_or(0),
            bytes: row.bytes.try_into().unwrap_or(0),
            nodes: row.nodes.try_into().unwrap_or(0),
            members: row.members.try_into().unwrap_or(0),
            digest: hex::encode(row.digest),
            image_bytes: row.image_bytes.and_then(|bytes| bytes.try_into().ok()),
        })
        .collect())
}

/// The snapshots of the cluster of that name, newest first, and the database's clock when they were read.
pub async fn list_cluster_snapshots(
    tx: &mut PgConnection,
    name: &str,
) -> Result<(Vec<SnapshotView>, Timestamp), BmdbError> {
    let cluster = require_cluster(tx, name).await?;
    Ok((list_snapshots(tx, cluster.id).await?, database_now(tx).await?))
}

/// Deletes all snapshots of a cluster that is about to be deleted.
#[cfg(feature = "sealing")]
pub(crate) async fn delete_cluster_snapshots(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let rows = sqlx::query_file!("../../sql/cluster/list_snapshots.sql", cluster)
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let ids: Vec<Uuid> = rows.into_iter().map(|row| row.snapshot_id).collect();
    delete_snapshots(tx, &ids).await
}

async fn delete_snapshots(tx: &mut PgConnection, ids: &[Uuid]) -> Result<(), BmdbError> {
    if ids.is_empty() {
        return Ok(());
    }
    let doing = "forgetting old snapshots of a cluster";
    sqlx::query!("DELETE FROM cluster_snapshot_chunk WHERE snapshot_id = ANY($1)", ids)
        .execute(&mut *tx)
        .await
        .context(doing)?;
    sqlx::query!("DELETE FROM cluster_snapshot WHERE snapshot_id = ANY($1)", ids)
        .execute(tx)
        .await
        .context(doing)?;
    Ok(())
}

impl Bmdb {
    /// Requests that a snapshot of a cluster be taken soon.
    pub async fn request_cluster_snapshot(
        &self,
        order: Order,
        name: String,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order("requesting a snapshot of a cluster", order, None, name, |tx, _, name| {
            Box::pin(request_snapshot_in_tx(tx, name))
        })
        .await
    }

    /// Stores a snapshot and deletes those that are not retained any more. Returns how many it deleted.
    pub async fn store_cluster_snapshot(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        new: NewSnapshot,
    ) -> Result<usize, BmdbError> {
        self.read_policy().await?;
        let policy = self.policy().1.cluster_snapshots;
        let doing = "keeping a snapshot of a cluster";
        self.transact_under_lease(doing, lease, new, move |tx, new| {
            Box::pin(async move {
                // A snapshot that a restore is ordered from stays, whatever its age.
                // The lock keeps a restore from being ordered meanwhile.
                let needed = sqlx::query_scalar!(
                    "SELECT restoring_from FROM cluster WHERE cluster_id = $1 FOR UPDATE",
                    cluster
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?
                .flatten();
                sqlx::query!(
                    "INSERT INTO cluster_snapshot (snapshot_id, cluster_id, taken_at, why, revision, epoch,
                         bytes, nodes, members, voters, digest, authority)
                     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
                    new.id,
                    cluster,
                    new.taken_at,
                    new.reason.as_str(),
                    new.revision,
                    i64::try_from(new.epoch).unwrap_or(i64::MAX),
                    to_i64(new.bytes),
                    to_i64(new.nodes),
                    to_i64(new.members),
                    json!(new.voters),
                    new.digest.as_slice(),
                    new.authority
                )
                .execute(&mut *tx)
                .await
                .context(doing)?;
                for (place, chunk) in new.sealed.chunks(CHUNK_BYTES).enumerate() {
                    sqlx::query!(
                        "INSERT INTO cluster_snapshot_chunk (snapshot_id, number, sealed)
                         VALUES ($1, $2, $3)",
                        new.id,
                        to_i64(place),
                        chunk
                    )
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                }
                let rows = sqlx::query_file!("../../sql/cluster/list_snapshots.sql", cluster)
                    .fetch_all(&mut *tx)
                    .await
                    .context(doing)?;
                let taken: Vec<(Uuid, Timestamp)> =
                    rows.into_iter().map(|row| (row.snapshot_id, row.taken_at)).collect();
                let mut old = snapshots_to_delete(&taken, &policy, database_now(tx).await?);
                old.retain(|id| Some(*id) != needed);
                delete_snapshots(tx, &old).await?;
                sqlx::query_file!("../../sql/cluster/delete_expired_left_nodes.sql", cluster)
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                Ok(old.len())
            })
        })
        .await
    }

    /// The newest snapshot of a cluster: its SHA-256 before sealing, and its sealed bytes; `None` if there is none.
    pub async fn newest_sealed_snapshot(
        &self,
        cluster: Uuid,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>, BmdbError> {
        let listed = self.transact_read_only(move |tx| Box::pin(list_snapshots(tx, cluster))).await?;
        let Some(newest) = listed.into_iter().next() else { return Ok(None) };
        let corrupt = || BmdbError::Corrupt("the id or the digest of a snapshot".to_owned());
        let id: Uuid = newest.id.parse().map_err(|_| corrupt())?;
        let digest = hex::decode(&newest.digest).map_err(|_| corrupt())?;
        Ok(Some((digest, self.read_sealed_snapshot(id).await?)))
    }

    /// The sealed bytes of a snapshot; empty when it was deleted.
    pub async fn read_sealed_snapshot(&self, id: Uuid) -> Result<Vec<u8>, BmdbError> {
        let chunks = self
            .statement("reading a snapshot of a cluster", move |pool| {
                Box::pin(
                    sqlx::query_scalar!(
                        "SELECT sealed FROM cluster_snapshot_chunk WHERE snapshot_id = $1 ORDER BY number",
                        id
                    )
                    .fetch_all(pool),
                )
            })
            .await?;
        Ok(chunks.concat())
    }
}

async fn request_snapshot_in_tx(tx: &mut PgConnection, name: &str) -> Result<OrderEffect, BmdbError> {
    let cluster = lock_and_read_cluster(tx, name).await?;
    let id = cluster.id;
    if cluster.founded.is_none() {
        let text = format!(
            "no snapshot of the cluster {name} can be taken: it is not founded yet; see what it waits for with: \
             shepherdctl cluster describe {name}"
        );
        return Err(order_rejected("NOT_FOUNDED", text));
    }
    sqlx::query!(
        "UPDATE cluster SET snapshot_requested_at = clock_timestamp(), version = version + 1
         WHERE cluster_id = $1",
        id
    )
    .execute(&mut *tx)
    .await
    .context("requesting a snapshot of a cluster")?;
    let text = format!(
        "takes a snapshot as soon as its curators answer; see it with: shepherdctl cluster snapshots {name}"
    );
    Ok(OrderEffect::changed(text, None, None))
}
