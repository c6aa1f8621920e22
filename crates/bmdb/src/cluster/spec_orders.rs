//! Orders about a cluster's specification: create, scale, approve members, delete.
//!
//! An order only changes the desired state: its transaction chooses no machine, contacts no curator and ends nothing.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::kubernetes::add_on_approval::approve_add_ons;
use crate::cluster::kubernetes::desired::{
    KubernetesPatch, kubernetes_audit_json, resolve_desired, store_desired,
};
use crate::cluster::lock::{lock_cluster, no_such_cluster, order_target};
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::machine::lookup::{LookupResult, find_machine};
use crate::orders::approval::append_approver;
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::secret_keys::SecretKeys;
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
        let what = "creating a cluster";
        self.execute_order(what, order, None, (spec, kubernetes), |tx, order, (spec, kubernetes)| {
            Box::pin(create_cluster_in_tx(tx, order, spec, kubernetes.as_ref()))
        })
        .await
    }

    /// Changes a cluster's specification.
    pub async fn change_cluster(
        &self,
        order: Order,
        name: String,
        change: ClusterSpecChange,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order("changing a cluster", order, None, (name, change), |tx, _, (name, change)| {
            Box::pin(change_cluster_in_tx(tx, name, change))
        })
        .await
    }

    /// Admits the key that a machine of a cluster reports now.
    pub async fn approve_cluster_member(
        &self,
        order: Order,
        name: String,
        machine: String,
    ) -> Result<OrderResult, BmdbError> {
        let what = "admitting a machine to a cluster";
        self.execute_order(what, order, None, (name, machine), |tx, _, (name, machine)| {
            Box::pin(approve_member_in_tx(tx, name, machine))
        })
        .await
    }

    /// Orders a cluster's deletion: its machines leave it, and then its rows are deleted.
    pub async fn delete_cluster(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        self.execute_order("deleting a cluster", order, None, name, |tx, order, name| {
            Box::pin(delete_cluster_in_tx(tx, order, name))
        })
        .await
    }
}

async fn create_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    spec: &ClusterSpec,
    patch: Option<&KubernetesPatch>,
) -> Result<OrderEffect, BmdbError> {
    spec.validate().map_err(|reason| order_rejected("INVALID_SPEC", reason))?;
    let kubernetes = match patch {
        Some(patch) => Some(resolve_desired(tx, &spec.name, None, patch).await?),
        None => None,
    };
    let by = match (&kubernetes, patch) {
        (Some(wanted), Some(patch)) => {
            approve_add_ons(tx, order, (&[], &spec.name), (None, wanted), &patch.trust).await?
        }
        _ => None,
    };
    let now = database_now(tx).await?;
    let made = sqlx::query_file_scalar!(
        "../../sql/cluster/insert.sql",
        Uuid::new_v4(),
        spec.name,
        i64::from(spec.control_plane),
        i64::from(spec.workers),
        spec.selector.to_string(),
        json!(spec.roles),
        spec.approval.as_str(),
        order.actor.name,
        json!(SecretKeys::new(now))
    )
    .fetch_optional(&mut *tx)
    .await
    .context("creating a cluster")?;
    let Some(made) = made else {
        let text = format!(
            "{} exists already; give another name, or change it with: shepherdctl cluster scale {}",
            order_target(&spec.name),
            spec.name
        );
        return Err(order_rejected("CLUSTER_EXISTS", text));
    };
    if let Some(kubernetes) = &kubernetes {
        store_desired(tx, made, kubernetes, &order.actor.name).await?;
    }
    let text = format!(
        "is requested: {}, {}{} from machines that {}; watch it with: shepherdctl cluster describe {}",
        count_noun(spec.control_plane, "member of the control plane", "members of the control plane"),
        count_noun(spec.workers, "worker", "workers"),
        kubernetes.as_ref().map(|k| format!(" with Kubernetes {}", k.version)).unwrap_or_default(),
        describe_selector(spec),
        spec.name
    );
    let text = append_approver(text, by.as_deref());
    let mut after = audit_json(spec);
    if let Some(kubernetes) = &kubernetes {
        after["kubernetes"] = kubernetes_audit_json(kubernetes);
    }
    Ok(OrderEffect::changed(text, None, Some(after)))
}

async fn change_cluster_in_tx(
    tx: &mut PgConnection,
    name: &str,
    change: &ClusterSpecChange,
) -> Result<OrderEffect, BmdbError> {
    let (id, spec) = lock_cluster(tx, name).await?;
    let wanted = spec.apply_change(change).map_err(|reason| order_rejected("INVALID_SPEC", reason))?;
    if wanted == spec {
        let text = "already has these settings; nothing was changed";
        return Ok(OrderEffect::already(text, Some(audit_json(&spec))));
    }
    // An order about workers alone does not change what the last one about the control plane demanded.
    let keep_authority = change.control_plane.map(|_| change.keep_authority);
    sqlx::query!(
        "UPDATE cluster SET control_plane = $2, workers = $3, roles = $4, settled = FALSE, version = version + 1,
             keep_authority = COALESCE($5::BOOL, keep_authority)
         WHERE cluster_id = $1",
        id,
        i64::from(wanted.control_plane),
        i64::from(wanted.workers),
        json!(wanted.roles),
        keep_authority
    )
    .execute(&mut *tx)
    .await
    .context("changing a cluster")?;
    let roles = match wanted.roles.len() {
        0 => "no roles of yours".to_owned(),
        _ => format!("the roles {}", wanted.roles.iter().cloned().collect::<Vec<_>>().join(", ")),
    };
    let authority = match keep_authority {
        Some(true) if wanted.control_plane < spec.control_plane => "; it keeps its authority",
        Some(false) if wanted.control_plane < spec.control_plane => {
            "; its authority is replaced when a member of the control plane has left"
        }
        _ => "",
    };
    let text = format!(
        "will have {} and {}, with {roles}{authority}; watch it with: shepherdctl cluster describe {name}",
        count_noun(wanted.control_plane, "member of the control plane", "members of the control plane"),
        count_noun(wanted.workers, "worker", "workers"),
    );
    let mut after = audit_json(&wanted);
    if keep_authority == Some(true) {
        after["keep_authority"] = json!(true);
    }
    Ok(OrderEffect::changed(text, Some(audit_json(&spec)), Some(after)))
}

async fn approve_member_in_tx(
    tx: &mut PgConnection,
    name: &str,
    machine: &str,
) -> Result<OrderEffect, BmdbError> {
    let (id, _) = lock_cluster(tx, name).await?;
    let members = sqlx::query_file!("../../sql/cluster/list_member_keys.sql", id)
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    // Machines of other clusters do not make the name of a member ambiguous.
    let of_cluster = members.iter().find(|member| {
        member.machine_id.to_string() == machine || member.provider_id.as_deref() == Some(machine)
    });
    let wanted = match of_cluster.map(|member| member.machine_id) {
        Some(wanted) => Some(wanted),
        None => match find_machine(tx, machine).await? {
            LookupResult::One(found) => Some(found.machine),
            LookupResult::Unresolved(_) => None,
        },
    };
    let known = members.into_iter().find(|member| Some(member.machine_id) == wanted);
    let Some(member) = known else {
        let text = format!(
            "the cluster {name} has no machine {machine:?}; run: shepherdctl cluster describe {name}"
        );
        return Err(order_rejected("NO_SUCH_MACHINE", text));
    };
    if member.node_key.is_none() {
        let text = format!("cannot admit {machine} yet: it has not reported a key; nothing was changed");
        return Ok(OrderEffect::no_effect(text, None));
    }
    if member.approved == member.node_key {
        let text = format!("has already admitted {machine}; nothing was changed");
        return Ok(OrderEffect::already(text, None));
    }
    let key = sqlx::query_file_scalar!("../../sql/cluster/approve_member.sql", member.machine_id, id)
        .fetch_optional(&mut *tx)
        .await
        .context("admitting a machine to a cluster")?;
    let key = hex::encode(key.unwrap_or_default());
    let text = format!("admits {machine} with the key {key}, which it reported over its agent channel");
    let after = json!({ "machine": member.machine_id, "key": key });
    Ok(OrderEffect::changed(text, None, Some(after)))
}

async fn delete_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
) -> Result<OrderEffect, BmdbError> {
    let found = sqlx::query_file!("../../sql/cluster/lock.sql", name)
        .fetch_optional(&mut *tx)
        .await
        .context(OPERATION)?;
    let found = found.ok_or_else(|| no_such_cluster(name))?;
    if let Some(by) = found.deleting_by {
        let text = format!("is already being deleted, as {by} ordered; nothing was changed");
        return Ok(OrderEffect::already(text, None));
    }
    sqlx::query!(
        "UPDATE cluster SET deleting_at = clock_timestamp(), deleting_by = $2, version = version + 1
         WHERE cluster_id = $1",
        found.cluster_id,
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .context("deleting a cluster")?;
    let output =
        "is being deleted: its machines are ordered to leave it, and to remove their data of it".to_owned();
    Ok(OrderEffect::changed(output, None, None))
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
