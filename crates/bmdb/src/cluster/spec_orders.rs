//! Orders about a cluster's specification: create, scale, approve members, delete.
//!
//! An order only changes the desired state: its transaction chooses no machine, contacts no curator and ends nothing.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::kubernetes::desired::{
    KubernetesPatch, kubernetes_audit_json, resolve_desired, store_desired,
};
use crate::cluster::lock::{lock_cluster, no_such_cluster, order_target};
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};
use crate::orders::audit::{begin_dry_run, end_dry_run, find_by_idempotency_key, record_audit};
use crate::orders::order::{Order, OrderOutcome, OrderResult};
use model::cluster::spec::{ClusterSpec, ClusterSpecChange};

const OPERATION: &str = "reading clusters";

impl Bmdb {
    /// Creates a cluster, which is founded later.
    pub async fn create_cluster(
        &self,
        order: Order,
        spec: ClusterSpec,
        kubernetes: Option<KubernetesPatch>,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("asking for a cluster", move |tx| {
                let (order, spec, kubernetes) = (order.clone(), spec.clone(), kubernetes.clone());
                Box::pin(async move { create_cluster_in_tx(tx, &order, &spec, kubernetes.as_ref()).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Changes a cluster's specification.
    pub async fn change_cluster(
        &self,
        order: Order,
        name: String,
        change: ClusterSpecChange,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("changing a cluster", move |tx| {
                let (order, name, change) = (order.clone(), name.clone(), change.clone());
                Box::pin(async move { change_cluster_in_tx(tx, &order, &name, &change).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Admits the key that a machine of a cluster reports now.
    pub async fn approve_cluster_member(
        &self,
        order: Order,
        name: String,
        machine: String,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("letting a machine into a cluster", move |tx| {
                let (order, name, machine) = (order.clone(), name.clone(), machine.clone());
                Box::pin(async move { approve_member_in_tx(tx, &order, &name, &machine).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Orders a cluster's deletion: its machines leave it, and then its rows are deleted.
    pub async fn delete_cluster(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("ending a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { delete_cluster_in_tx(tx, &order, &name).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }
}

async fn create_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    spec: &ClusterSpec,
    kubernetes: Option<&KubernetesPatch>,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    spec.validate()
        .map_err(|reason| BmdbError::OrderRejected { reason: "NO_SUCH_CLUSTER", message: reason })?;
    let kubernetes = match kubernetes {
        Some(wish) => Some(resolve_desired(tx, &spec.name, None, wish).await?),
        None => None,
    };
    begin_dry_run(tx, order).await?;
    let made = sqlx::query_file_scalar!(
        "../../sql/cluster/insert.sql",
        Uuid::new_v4(),
        spec.name,
        i64::from(spec.control_plane),
        i64::from(spec.workers),
        spec.selector.to_string(),
        json!(spec.roles),
        spec.approval.as_str(),
        order.actor.name
    )
    .fetch_optional(&mut *tx)
    .await
    .context("asking for a cluster")?;
    let Some(made) = made else {
        let text = format!(
            "{} exists already; give another name, or change it with: shepherdctl cluster scale {}",
            order_target(&spec.name),
            spec.name
        );
        return Err(BmdbError::OrderRejected { reason: "CLUSTER_EXISTS", message: text });
    };
    if let Some(kubernetes) = &kubernetes {
        store_desired(tx, made, kubernetes, &order.actor.name).await?;
    }
    end_dry_run(tx, order).await?;
    let text = format!(
        "is requested: {}, {}{} from machines that {}; watch it with: shepherdctl cluster describe {}",
        count_noun(spec.control_plane, "member of the control plane", "members of the control plane"),
        count_noun(spec.workers, "worker", "workers"),
        kubernetes.as_ref().map(|k| format!(" with Kubernetes {}", k.version)).unwrap_or_default(),
        describe_selector(spec),
        spec.name
    );
    let mut after = audit_json(spec);
    if let Some(kubernetes) = &kubernetes {
        after["kubernetes"] = kubernetes_audit_json(kubernetes);
    }
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, None, Some(after)).await
}

async fn change_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    change: &ClusterSpecChange,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let (id, spec) = lock_cluster(tx, name).await?;
    let wanted = spec
        .apply_change(change)
        .map_err(|reason| BmdbError::OrderRejected { reason: "NO_SUCH_CLUSTER", message: reason })?;
    if wanted == spec {
        let text = "is so already; nothing was changed".to_owned();
        return record_audit(
            tx,
            order,
            None,
            OrderOutcome { changed: false, message: text },
            Some(audit_json(&spec)),
            Some(audit_json(&spec)),
        )
        .await;
    }
    begin_dry_run(tx, order).await?;
    sqlx::query_file!(
        "../../sql/cluster/update_spec.sql",
        id,
        i64::from(wanted.control_plane),
        i64::from(wanted.workers),
        json!(wanted.roles)
    )
    .execute(&mut *tx)
    .await
    .context("changing a cluster")?;
    end_dry_run(tx, order).await?;
    let roles = match wanted.roles.len() {
        0 => "no roles of yours".to_owned(),
        _ => format!("the roles {}", wanted.roles.iter().cloned().collect::<Vec<_>>().join(", ")),
    };
    let text = format!(
        "is to have {} and {}, with {roles}; watch it with: shepherdctl cluster describe {name}",
        count_noun(wanted.control_plane, "member of the control plane", "members of the control plane"),
        count_noun(wanted.workers, "worker", "workers"),
    );
    record_audit(
        tx,
        order,
        None,
        OrderOutcome { changed: true, message: text },
        Some(audit_json(&spec)),
        Some(audit_json(&wanted)),
    )
    .await
}

async fn approve_member_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    machine: &str,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = lock_cluster(tx, name).await?;
    let members = sqlx::query_file!("../../sql/cluster/list_member_keys.sql", id)
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let known = members.into_iter().find(|member| {
        member.machine_id.to_string() == machine || member.provider_id.as_deref() == Some(machine)
    });
    let nothing = match &known {
        None => Some(format!("has no machine {machine:?}; run: shepherdctl cluster describe {name}")),
        Some(member) if member.node_key.is_none() => {
            Some(format!("cannot let {machine} in yet: it has not reported a key; nothing was changed"))
        }
        Some(member) if member.approved == member.node_key => {
            Some(format!("lets {machine} in already; nothing was changed"))
        }
        Some(_) => None,
    };
    let (Some(member), None) = (known, &nothing) else {
        let text = nothing.unwrap_or_default();
        return record_audit(tx, order, None, OrderOutcome { changed: false, message: text }, None, None)
            .await;
    };
    begin_dry_run(tx, order).await?;
    let key = sqlx::query_file_scalar!("../../sql/cluster/approve_member.sql", member.machine_id, id)
        .fetch_optional(&mut *tx)
        .await
        .context("letting a machine into a cluster")?;
    end_dry_run(tx, order).await?;
    let key = hex::encode(key.unwrap_or_default());
    let text = format!("lets {machine} in by the key {key}, which it reported over its agent channel");
    let after = json!({ "machine": member.machine_id, "key": key });
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, None, Some(after)).await
}

async fn delete_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let found = sqlx::query_file!("../../sql/cluster/lock.sql", name)
        .fetch_optional(&mut *tx)
        .await
        .context(OPERATION)?;
    let found = found.ok_or_else(|| no_such_cluster(name))?;
    if let Some(by) = found.deleting_by {
        let text = format!("is ending already, as {by} ordered; nothing was changed");
        return record_audit(tx, order, None, OrderOutcome { changed: false, message: text }, None, None)
            .await;
    }
    begin_dry_run(tx, order).await?;
    sqlx::query_file!("../../sql/cluster/mark_deleting.sql", found.cluster_id, order.actor.name)
        .execute(&mut *tx)
        .await
        .context("ending a cluster")?;
    end_dry_run(tx, order).await?;
    let output = "ends: its machines are ordered to leave it, and what they keep of it is removed".to_owned();
    record_audit(tx, order, None, OrderOutcome { changed: true, message: output }, None, None).await
}

fn count_noun(count: u32, one: &str, several: &str) -> String {
    match count {
        0 => format!("no {several}"),
        1 => format!("1 {one}"),
        _ => format!("{count} {several}"),
    }
}

fn describe_selector(spec: &ClusterSpec) -> String {
    match spec.selector.to_string().as_str() {
        "" => "are free".to_owned(),
        text => format!("are free and fit {text}"),
    }
}

/// A specification as the audit stores it.
fn audit_json(spec: &ClusterSpec) -> Value {
    json!({
        "cluster": spec.name,
        "control_plane": spec.control_plane,
        "workers": spec.workers,
        "select": spec.selector.to_string(),
        "roles": spec.roles,
        "approval": spec.approval.as_str(),
    })
}
