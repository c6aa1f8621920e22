//! The shepherd's keys as an owner of a cluster: orders for another one, and what came of it.
//!
//! The key in force is always sealed under the name that it was founded with, so that a shepherd of a release that replaces no
//! keys goes by the one in force, too. A key that is replaced moves to a name of its own, in the transaction that lets the
//! next one take its place: at any moment there is one in force.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::{clusters, locked, no_such};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
#[cfg(feature = "shepherd")]
use crate::bmdb::inspect;
#[cfg(feature = "shepherd")]
use crate::bmdb::lease::{NamedLease, lock_lease};
#[cfg(feature = "shepherd")]
use crate::model::cluster::key::Public;
use crate::model::cluster::key::{Asked, Former, Keys};
#[cfg(feature = "shepherd")]
use crate::model::time::Timestamp;

const WHAT: &str = "reading the shepherd's keys for a cluster";
const ASKING: &str = "asking for another key for a cluster";

/// Name under which the key in force is sealed.
#[must_use]
pub fn current_secret(cluster: Uuid) -> String {
    format!("cluster/{cluster}/owner")
}

/// Name under which the key is sealed that is to take its place.
#[must_use]
pub fn next_secret(cluster: Uuid) -> String {
    format!("cluster/{cluster}/owner/next")
}

/// Name under which one is sealed that was in force.
#[must_use]
pub fn former_secret(cluster: Uuid, public_key: [u8; 32]) -> String {
    format!("cluster/{cluster}/owner/{}", hex::encode(public_key))
}

fn public(bytes: Vec<u8>) -> Result<[u8; 32], BmdbError> {
    let corrupt =
        |_| BmdbError::Corrupt("a key of the shepherd for a cluster that has not 32 bytes".to_owned());
    bytes.try_into().map_err(corrupt)
}

/// What is known of the shepherd's keys for a cluster; none where there is no such cluster.
pub(crate) async fn keys(tx: &mut PgConnection, cluster: Uuid) -> Result<Option<Keys>, BmdbError> {
    let row =
        sqlx::query_file!("sql/cluster/read_keys.sql", cluster).fetch_optional(&mut *tx).await.doing(WHAT)?;
    let Some(row) = row else { return Ok(None) };
    let former =
        sqlx::query_file!("sql/cluster/list_former_keys.sql", cluster).fetch_all(tx).await.doing(WHAT)?;
    let former = former.into_iter().map(|row| {
        Ok(Former { key: public(row.public_key)?, replaced_at: row.replaced_at, removed_at: row.removed_at })
    });
    Ok(Some(Keys {
        since: row.since,
        asked: row.key_asked_at.zip(row.key_asked_by).map(|(at, by)| Asked { at, by }),
        next: row.key_next.map(public).transpose()?,
        former: former.collect::<Result<_, BmdbError>>()?,
        oldest_snapshot: row.oldest_snapshot,
        refused_since: row.keys_refused_since,
    }))
}

/// Has its curators told again which keys they are to refuse.
#[cfg(feature = "shepherd")]
pub(crate) async fn remove_keys_again(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let doing = "having former keys refused again";
    sqlx::query_file!("sql/cluster/requeue_key_removals.sql", cluster).execute(tx).await.doing(doing)?;
    Ok(())
}

/// Forgets former keys of a cluster that is about to go. What is sealed goes with its secrets.
#[cfg(feature = "shepherd")]
pub(crate) async fn forget_former_keys(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let doing = "forgetting the former keys for a cluster";
    sqlx::query_file!("sql/cluster/delete_former_keys.sql", cluster).execute(tx).await.doing(doing)?;
    Ok(())
}

impl Bmdb {
    /// Has the shepherd's key for a cluster replaced soon.
    pub async fn rotate_cluster_key(&self, order: Order, name: String) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(ASKING, move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { ask(tx, &order, &name).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// What is known of the shepherd's keys for a cluster, and when that was read; none where there is no such cluster.
    #[cfg(feature = "shepherd")]
    pub async fn cluster_keys(&self, cluster: Uuid) -> Result<Option<(Keys, Timestamp)>, BmdbError> {
        self.inspect(move |tx| {
            Box::pin(async move {
                let keys = keys(tx, cluster).await?;
                Ok(keys.zip(Some(inspect::now(tx).await?)))
            })
        })
        .await
    }

    /// Keeps the next key, unless there is one already or the cluster ends.
    #[cfg(feature = "shepherd")]
    pub async fn keep_next_key(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        (key, sealed): (Public, Vec<u8>),
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "keeping the next key for a cluster");
        self.transact(doing, move |tx| {
            let (lease, sealed) = (lease.clone(), sealed.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let kept =
                    sqlx::query_file_scalar!("sql/cluster/store_next_key.sql", cluster, key.as_slice())
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(doing)?;
                if kept.is_some() {
                    let name = next_secret(cluster);
                    sqlx::query_file!("sql/secret/upsert.sql", name, sealed)
                        .execute(tx)
                        .await
                        .doing(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Lets the next key be in force, and the one before be a former one.
    #[cfg(feature = "shepherd")]
    pub async fn switch_cluster_key(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        before: Public,
        next: Public,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "letting the next key for a cluster be in force");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let switched =
                    sqlx::query_file_scalar!("sql/cluster/activate_next_key.sql", cluster, next.as_slice())
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(doing)?;
                if switched.is_none() {
                    return Ok(());
                }
                sqlx::query_file!("sql/cluster/insert_former_key.sql", cluster, before.as_slice())
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                for (from, to) in [
                    (current_secret(cluster), former_secret(cluster, before)),
                    (next_secret(cluster), current_secret(cluster)),
                ] {
                    sqlx::query_file!("sql/secret/rename.sql", from, to)
                        .execute(&mut *tx)
                        .await
                        .doing(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Writes down that its curators refuse a former key.
    #[cfg(feature = "shepherd")]
    pub async fn former_key_removed(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        key: Public,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "writing down that a former key for a cluster is refused");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/cluster/record_former_key_removed.sql", cluster, key.as_slice())
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }

    /// Forgets a former key that its curators refuse.
    #[cfg(feature = "shepherd")]
    pub async fn forget_former_key(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        key: Public,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "forgetting a former key for a cluster");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let gone =
                    sqlx::query_file_scalar!("sql/cluster/delete_former_key.sql", cluster, key.as_slice())
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(doing)?;
                if gone.is_some() {
                    let name = former_secret(cluster, key);
                    sqlx::query_file!("sql/secret/delete.sql", name).execute(tx).await.doing(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Writes down whether its curators refuse every key that is here.
    #[cfg(feature = "shepherd")]
    pub async fn cluster_keys_refused(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        refused: bool,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "writing down whether curators refuse the shepherd's keys");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/cluster/record_keys_rejected.sql", cluster, refused)
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
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
            "the shepherd's key for the cluster {name} cannot be replaced: the cluster is not founded yet; see what it \
             waits for with: shepherdctl cluster describe {name}"
        );
        return Err(BmdbError::OrderRefused { reason: "NOT_FOUNDED", said });
    }
    let known = keys(tx, id).await?.ok_or_else(|| no_such(name))?;
    if let Some(Asked { by, .. }) = known.asked {
        let said =
            format!("has the shepherd's key for it replaced already, as {by} ordered; nothing was changed");
        return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
    }
    begin_attempt(tx, order).await?;
    sqlx::query_file!("sql/cluster/request_key_rotation.sql", id, order.actor.name)
        .execute(&mut *tx)
        .await
        .doing(ASKING)?;
    end_attempt(tx, order).await?;
    let said = format!(
        "has the shepherd's key for it replaced as soon as its curators answer; watch it with: shepherdctl cluster \
         describe {name}"
    );
    let before = json!({ "key_since": known.since });
    write_down(tx, order, None, Done { changed: true, said }, Some(before), None).await
}
