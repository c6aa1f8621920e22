//! Snapshots of clusters' records, sealed, and the orders for them.
//!
//! What is kept here was sealed before it came, as one, and is cut into chunks so that no row is large. A snapshot is
//! written with all its chunks in one transaction that checks the cluster's lease, and the same transaction forgets those
//! that are not kept any more: there is never less than the policy says, and never much more.

use std::collections::BTreeSet;

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::{clusters, locked, no_such};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::model::cluster::snapshot::{SnapshotView, Why, to_forget};
use crate::model::time::Timestamp;

const WHAT: &str = "reading snapshots of a cluster";
/// Bytes of a chunk.
const CHUNK: usize = 512 << 10;

/// A snapshot to be kept.
#[derive(Clone)]
pub struct NewSnapshot {
    /// Which.
    pub id: Uuid,
    /// When it was taken, by the database's clock: a moment before it was read.
    pub taken_at: Timestamp,
    /// Why.
    pub why: Why,
    /// etcd's revision.
    pub revision: i64,
    /// How often the cluster had been restored.
    pub epoch: u64,
    /// Its size, encoded, in bytes.
    pub bytes: usize,
    /// Nodes in it.
    pub nodes: usize,
    /// Nodes in it that were members of etcd.
    pub members: usize,
    /// Nodes whose members voted in etcd when it was taken.
    pub voters: BTreeSet<String>,
    /// SHA-256 of it, encoded.
    pub digest: [u8; 32],
    /// It, sealed.
    pub sealed: Vec<u8>,
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The snapshots of a cluster, newest first.
pub(crate) async fn snapshots(tx: &mut PgConnection, cluster: Uuid) -> Result<Vec<SnapshotView>, BmdbError> {
    let rows =
        sqlx::query_file!("sql/cluster/list_snapshots.sql", cluster).fetch_all(tx).await.doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| SnapshotView {
            id: row.snapshot_id.to_string(),
            taken_at: row.taken_at,
            why: row.why,
            revision: row.revision,
            epoch: row.epoch.try_into().unwrap_or(0),
            bytes: row.bytes.try_into().unwrap_or(0),
            nodes: row.nodes.try_into().unwrap_or(0),
            members: row.members.try_into().unwrap_or(0),
            digest: hex::encode(row.digest),
        })
        .collect())
}

/// The snapshots of the cluster of that name, newest first, and when that was read.
pub async fn snapshots_of(
    tx: &mut PgConnection,
    name: &str,
) -> Result<(Vec<SnapshotView>, Timestamp), BmdbError> {
    let cluster = clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such(name))?;
    Ok((snapshots(tx, cluster.id).await?, inspect::now(tx).await?))
}

/// Forgets all snapshots of a cluster that is about to go.
#[cfg(feature = "shepherd")]
pub(crate) async fn remove_snapshots(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let rows =
        sqlx::query_file!("sql/cluster/list_snapshots.sql", cluster).fetch_all(&mut *tx).await.doing(WHAT)?;
    let ids: Vec<Uuid> = rows.into_iter().map(|row| row.snapshot_id).collect();
    forget(tx, &ids).await
}

async fn forget(tx: &mut PgConnection, ids: &[Uuid]) -> Result<(), BmdbError> {
    if ids.is_empty() {
        return Ok(());
    }
    let doing = "forgetting old snapshots of a cluster";
    sqlx::query_file!("sql/cluster/delete_snapshot_chunks.sql", ids).execute(&mut *tx).await.doing(doing)?;
    sqlx::query_file!("sql/cluster/delete_snapshots.sql", ids).execute(tx).await.doing(doing)?;
    Ok(())
}

impl Bmdb {
    /// Has a snapshot of a cluster taken soon.
    pub async fn ask_for_snapshot(&self, order: Order, name: String) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("asking for a snapshot of a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { ask(tx, &order, &name).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Keeps a snapshot, and forgets those that are not kept any more. Says how many it forgot.
    pub async fn keep_snapshot(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        new: NewSnapshot,
    ) -> Result<usize, BmdbError> {
        self.read_policy().await?;
        let policy = self.policy().1.cluster_snapshots;
        let (lease, doing) = (lease.clone(), "keeping a snapshot of a cluster");
        self.transact(doing, move |tx| {
            let (lease, new) = (lease.clone(), new.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                // The one that it may be ordered to be restored from stays, whatever its age.
                let needed = sqlx::query_file_scalar!("sql/cluster/lock_by_id.sql", cluster)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(doing)?
                    .flatten();
                sqlx::query_file!(
                    "sql/cluster/insert_snapshot.sql",
                    new.id,
                    cluster,
                    new.taken_at,
                    new.why.as_str(),
                    new.revision,
                    i64::try_from(new.epoch).unwrap_or(i64::MAX),
                    number(new.bytes),
                    number(new.nodes),
                    number(new.members),
                    json!(new.voters),
                    new.digest.as_slice()
                )
                .execute(&mut *tx)
                .await
                .doing(doing)?;
                for (place, chunk) in new.sealed.chunks(CHUNK).enumerate() {
                    sqlx::query_file!("sql/cluster/insert_snapshot_chunk.sql", new.id, number(place), chunk)
                        .execute(&mut *tx)
                        .await
                        .doing(doing)?;
                }
                let rows = sqlx::query_file!("sql/cluster/list_snapshots.sql", cluster)
                    .fetch_all(&mut *tx)
                    .await
                    .doing(doing)?;
                let taken: Vec<(Uuid, Timestamp)> =
                    rows.into_iter().map(|row| (row.snapshot_id, row.taken_at)).collect();
                let mut old = to_forget(&taken, &policy, inspect::now(tx).await?);
                old.retain(|id| Some(*id) != needed);
                forget(tx, &old).await?;
                sqlx::query_file!("sql/cluster/delete_expired_left_nodes.sql", cluster)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                Ok(old.len())
            })
        })
        .await
    }

    /// A snapshot as it was sealed; empty when it is gone.
    pub async fn sealed_snapshot(&self, id: Uuid) -> Result<Vec<u8>, BmdbError> {
        let chunks = self
            .statement("reading a snapshot of a cluster", move |pool| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/cluster/list_snapshot_chunks.sql", id).fetch_all(pool).await
                })
            })
            .await?;
        Ok(chunks.concat())
    }
}

async fn ask(tx: &mut PgConnection, order: &Order, name: &str) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = locked(tx, name).await?;
    let cluster = clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such(name))?;
    if cluster.founded.is_none() {
        let said = format!(
            "no snapshot of the cluster {name} can be taken: it is not founded yet; see what it waits for with: \
             shepherdctl cluster describe {name}"
        );
        return Err(BmdbError::OrderRefused { reason: "NOT_FOUNDED", said });
    }
    begin_attempt(tx, order).await?;
    sqlx::query_file!("sql/cluster/request_snapshot.sql", id)
        .execute(&mut *tx)
        .await
        .doing("asking for a snapshot of a cluster")?;
    end_attempt(tx, order).await?;
    let said = format!(
        "has a snapshot taken as soon as its curators answer; see it with: shepherdctl cluster snapshots {name}"
    );
    write_down(tx, order, None, Done { changed: true, said }, None, None).await
}
