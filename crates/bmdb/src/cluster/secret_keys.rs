//! The keys of a cluster's Kubernetes Secrets: orders to replace the key, the stored state, and the sealed keys.
//!
//! What the next state is, is decided elsewhere ([`model::cluster::secret_keys`]). Every write depends on the state that
//! it follows from, so a shepherd that was away for too long neither makes a second key nor takes a step twice. A key is
//! sealed in the transaction that adds its number, and deleted in the one that forgets it.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::record::ClusterRecord;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::secret_keys::{SecretKey, SecretKeys, SecretsRotationOrder};
#[cfg(feature = "sealing")]
use model::cluster::state::MembershipOrder;
#[cfg(feature = "sealing")]
use model::ids::MachineId;

const REQUESTING: &str = "ordering another key for the Secrets of a cluster";

/// Prefix of the names under which the keys of a cluster are sealed, without the slash.
#[must_use]
pub fn secret_keys_prefix(cluster: Uuid) -> String {
    format!("cluster/{cluster}/secret-keys")
}

/// Name under which a key is sealed.
#[must_use]
pub fn secret_key_name(cluster: Uuid, key_name: &str) -> String {
    format!("{}/{key_name}", secret_keys_prefix(cluster))
}

impl Bmdb {
    /// Orders that the key of a cluster's Kubernetes Secrets be replaced.
    pub async fn rotate_secrets_key(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        self.execute_cluster_order(REQUESTING, order, name, |tx, order, cluster| {
            Box::pin(rotate_secrets_key_in_tx(tx, order, cluster))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// Stores the next state, if the present one is that which it follows from. Returns whether it did. `sealed` are the
    /// bytes of a key that the next state adds. A key that it does not have any more is deleted.
    pub async fn store_secret_keys(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        (before, next): (Option<&SecretKeys>, &SecretKeys),
        sealed: Option<Vec<u8>>,
    ) -> Result<bool, BmdbError> {
        let doing = "storing the state of the keys of a cluster's Secrets";
        let kept =
            |key: &SecretKey, state: &SecretKeys| state.keys.iter().any(|one| one.name() == key.name());
        let added = next.keys.iter().find(|key| before.is_none_or(|before| !kept(key, before)));
        let added = added.map(|key| secret_key_name(cluster, &key.name())).zip(sealed);
        let forgotten = before.into_iter().flat_map(|before| &before.keys).filter(|key| !kept(key, next));
        let forgotten: Vec<String> = forgotten.map(|key| secret_key_name(cluster, &key.name())).collect();
        let arguments = (json!(next), before.map(|before| json!(before)), added, forgotten);
        self.transact_under_lease(doing, lease, arguments, move |tx, (next, before, added, forgotten)| {
            Box::pin(async move {
                let stored = sqlx::query_file_scalar!(
                    "../../sql/cluster/update_secret_keys.sql",
                    cluster,
                    next,
                    before.as_ref()
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?;
                if stored.is_none() {
                    return Ok(false);
                }
                if let Some((name, sealed)) = added {
                    sqlx::query!(
                        "INSERT INTO sealed_secret (name, sealed, created_at)
                         VALUES ($1, $2, clock_timestamp())",
                        name,
                        sealed.as_slice()
                    )
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                }
                for name in forgotten {
                    sqlx::query!("DELETE FROM sealed_secret WHERE name = $1", name)
                        .execute(&mut *tx)
                        .await
                        .context(doing)?;
                }
                Ok(true)
            })
        })
        .await
    }

    /// Sends a controller the keys of Secrets; `sealed` is the order that has them.
    ///
    /// It is recorded as an order to join, for the reason that [`Bmdb::send_peer_certificate`] has.
    pub async fn send_secret_keys(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        (name, providers): (&str, &str),
        sealed: Vec<u8>,
    ) -> Result<(), BmdbError> {
        let detail = format!("those of Kubernetes Secrets of cluster {name}: {providers}");
        let order = (MembershipOrder::Join, sealed);
        self.place_recorded_order(lease, machine, order, ("ClusterSecretKeysSent", detail)).await
    }
}

async fn rotate_secrets_key_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    cluster: ClusterRecord,
) -> Result<OrderEffect, BmdbError> {
    let (id, name) = (cluster.id, cluster.spec.name);
    let state = cluster.secret_keys.filter(|state| state.stage.has_keys());
    let Some(state) = state else {
        let text = format!(
            "the key of the Kubernetes Secrets of the cluster {name} cannot be replaced: it has none yet; it gets one when \
             it has Kubernetes and all its controllers have a role server that knows it; watch it with: shepherdctl cluster \
             describe {name}"
        );
        return Err(order_rejected("NO_SECRETS_KEY", text));
    };
    if let Some(rotation) = &state.rotation {
        let text = format!(
            "already replaces the key of its Kubernetes Secrets, as {} ordered; nothing was changed",
            rotation.ordered_by
        );
        return Ok(OrderEffect::already(text, None));
    }
    let before = json!({ "key": state.current_key().map(SecretKey::name), "stage": state.stage });
    let ordered_at = database_now(tx).await?;
    let ordered_by = order.actor.name.clone();
    let next = SecretKeys { rotation: Some(SecretsRotationOrder { ordered_at, ordered_by }), ..state };
    sqlx::query!(
        "UPDATE cluster SET secret_keys = $2, version = version + 1 WHERE cluster_id = $1",
        id,
        json!(next)
    )
    .execute(&mut *tx)
    .await
    .context(REQUESTING)?;
    let text = format!(
        "replaces the key of its Kubernetes Secrets: its API servers restart one at a time, three times; watch it with: \
         shepherdctl cluster describe {name}"
    );
    Ok(OrderEffect::changed(text, Some(before), None))
}
