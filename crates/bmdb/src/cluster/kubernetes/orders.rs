//! Orders about a cluster's Kubernetes: set, remove, rotate keys; and their completion under the cluster's lease.

use serde_json::json;
use sqlx::PgConnection;
#[cfg(feature = "sealing")]
use uuid::Uuid;

use crate::cluster::kubernetes::add_on_approval::approve_add_ons;
use crate::cluster::kubernetes::desired::{
    KubernetesPatch, kubernetes_audit_json, resolve_desired, store_desired,
};
use crate::cluster::kubernetes::{read_kubernetes, require_kubernetes};
use crate::cluster::lock::{increment_version, lock_cluster};
use crate::cluster::upgrade::read_active_upgrade;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::orders::approval::append_approver;
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::kubernetes::KeyPurpose;

const SETTING: &str = "saying what a cluster is to run of Kubernetes";

impl Bmdb {
    /// Gives a cluster Kubernetes, or changes its specification.
    pub async fn set_kubernetes(
        &self,
        order: Order,
        name: String,
        wish: KubernetesPatch,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order(SETTING, order, None, (name, wish), |tx, order, (name, wish)| {
            Box::pin(set_kubernetes_in_tx(tx, order, name, wish))
        })
        .await
    }

    /// Requests the removal of Kubernetes from a cluster.
    pub async fn remove_kubernetes(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        self.execute_order("taking Kubernetes from a cluster", order, None, name, |tx, order, name| {
            Box::pin(remove_kubernetes_in_tx(tx, order, name))
        })
        .await
    }

    /// Requests that certificates or keys of a cluster's Kubernetes be replaced.
    pub async fn rotate_kubernetes_keys(
        &self,
        order: Order,
        name: String,
        keys: KeyPurpose,
    ) -> Result<OrderResult, BmdbError> {
        let what = "having keys of Kubernetes replaced";
        self.execute_order(what, order, None, (name, keys), |tx, _, (name, keys)| {
            Box::pin(rotate_keys_in_tx(tx, name, *keys))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// Records that the curators received the request to rotate these keys.
    pub async fn record_rotation_started(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        keys: KeyPurpose,
    ) -> Result<(), BmdbError> {
        self.execute_under_lease("recording that keys of Kubernetes are replaced", lease, move || {
            sqlx::query_file!("../../sql/kubernetes/remove_rotation_request.sql", cluster, keys.as_str())
        })
        .await
    }

    /// Deletes Kubernetes that no curator has any more.
    pub async fn delete_kubernetes(&self, lease: &NamedLease, cluster: Uuid) -> Result<(), BmdbError> {
        self.execute_under_lease("forgetting Kubernetes of a cluster", lease, move || {
            sqlx::query_file!("../../sql/kubernetes/delete_removed.sql", cluster)
        })
        .await
    }
}

async fn set_kubernetes_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    wish: &KubernetesPatch,
) -> Result<OrderEffect, BmdbError> {
    let (id, _) = lock_cluster(tx, name).await?;
    let before = read_kubernetes(tx, id).await?;
    if let Some(by) = before.as_ref().and_then(|before| before.removing_by.as_ref()) {
        let text = format!(
            "Kubernetes of the cluster {name} is being removed, as {by} ordered; set it again when it is gone \
             (shepherdctl cluster describe {name})"
        );
        return Err(order_rejected("KUBERNETES_GOES", text));
    }
    let before = before.map(|before| before.desired.spec);
    let wanted = resolve_desired(tx, name, before.as_ref(), wish).await?;
    let was = before.as_ref().map(kubernetes_audit_json);
    if before.as_ref() == Some(&wanted) {
        let text = "already has these settings; nothing was changed";
        return Ok(OrderEffect::already(text, was));
    }
    let by =
        approve_add_ons(tx, order, (id.as_bytes(), name), (before.as_ref(), &wanted), &wish.trust).await?;
    store_desired(tx, id, &wanted, &order.actor.name).await?;
    let add_ons = match wanted.add_ons.len() {
        0 => "no add-ons".to_owned(),
        _ => format!("the add-ons {}", wanted.add_ons.keys().cloned().collect::<Vec<_>>().join(", ")),
    };
    let text = format!(
        "is to run Kubernetes {} with {add_ons}; watch it with: shepherdctl cluster describe {name}",
        wanted.version
    );
    let text = append_approver(text, by.as_deref());
    Ok(OrderEffect::changed(text, was, Some(kubernetes_audit_json(&wanted))))
}

async fn remove_kubernetes_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
) -> Result<OrderEffect, BmdbError> {
    let (id, _) = lock_cluster(tx, name).await?;
    let before = read_kubernetes(tx, id).await?;
    let nothing = match &before {
        None => Some("has no Kubernetes; nothing was changed".to_owned()),
        Some(before) => before
            .removing_by
            .as_ref()
            .map(|by| format!("already loses its Kubernetes, as {by} ordered; nothing was changed")),
    };
    let (Some(before), None) = (before, &nothing) else {
        let text = nothing.unwrap_or_default();
        return Ok(OrderEffect::already(text, None));
    };
    if let Some(upgrade) = read_active_upgrade(tx, id).await? {
        return Err(order_rejected("UPGRADING", upgrade.conflict_message(name)));
    }
    sqlx::query_file!("../../sql/kubernetes/mark_removing.sql", id, order.actor.name)
        .execute(&mut *tx)
        .await
        .context(SETTING)?;
    increment_version(tx, id, SETTING).await?;
    let text =
        "loses its Kubernetes: its workers stop pods, then its controllers end, and its authorities are \
                deleted; what Kubernetes stored in etcd stays there"
            .to_owned();
    let was = Some(kubernetes_audit_json(&before.desired.spec));
    Ok(OrderEffect::changed(text, was, None))
}

async fn rotate_keys_in_tx(
    tx: &mut PgConnection,
    name: &str,
    keys: KeyPurpose,
) -> Result<OrderEffect, BmdbError> {
    let (id, _) = lock_cluster(tx, name).await?;
    let line = require_kubernetes(tx, id, name).await?;
    let what = keys.as_str();
    let under_way =
        line.observed.iter().flat_map(|known| &known.rotations).any(|rotation| rotation.keys == what);
    if under_way || line.desired.pending_rotations.contains(&keys) {
        let text = format!("already replaces the Kubernetes keys {what}; nothing was changed");
        return Ok(OrderEffect::already(text, None));
    }
    let mut requests: Vec<&str> = line.desired.pending_rotations.iter().map(|keys| keys.as_str()).collect();
    requests.push(what);
    sqlx::query_file!("../../sql/kubernetes/set_rotation_requests.sql", id, json!(requests))
        .execute(&mut *tx)
        .await
        .context(SETTING)?;
    increment_version(tx, id, SETTING).await?;
    let text = format!(
        "replaces the Kubernetes keys {what} in steps, each after every node has applied the one before; watch it \
         with: shepherdctl cluster describe {name}"
    );
    Ok(OrderEffect::changed(text, None, Some(json!({ "rotate": what }))))
}
