//! Desired Kubernetes of a cluster: bundle, ranges, add-ons, storage, key rotation.
//!
//! An order only records the desired state; the holder of the cluster's lease passes it to the curators. Another bundle
//! than the one that nodes run cannot be set here, because it would reach all nodes at once: that is an upgrade
//! (`cluster_upgrade.rs`). Bundles and add-ons are artefacts of the fleet, which cannot be deleted while a cluster uses
//! them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::action::OrderOutcome;
use crate::artefact::list_artefacts;
use crate::audit::{
    Order, OrderResult, begin_dry_run, find_by_idempotency_key, record_audit, roll_back_dry_run,
};
use crate::cluster::lock_cluster;
use crate::cluster_upgrade::read_active_upgrade;
use crate::connection::{Bmdb, DbContext as _};
use crate::error::BmdbError;
#[cfg(feature = "sealing")]
use crate::named_lease::{NamedLease, lock_named_lease};
use model::artefact::{ArtefactView, find_artefact, parse_digest};
use model::cluster::kubernetes::{
    DEFAULT_DOMAIN, DEFAULT_NODE_PREFIX, DEFAULT_POD_RANGE, DEFAULT_SERVICE_RANGE, DesiredKubernetes,
    KubernetesSpec, RotatableKeys, VolumeDriver,
};
use model::cluster::kubernetes_view::{KubernetesStatusView, KubernetesView};
use model::time::Timestamp;

const OPERATION: &str = "reading what clusters run of Kubernetes";
const SETTING: &str = "saying what a cluster is to run of Kubernetes";

/// Desired and observed Kubernetes of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesRecord {
    /// The desired state as decisions need it.
    pub desired: DesiredKubernetes,
    /// When the desired state was last ordered.
    pub requested_at: Timestamp,
    /// Name of the operator who ordered it.
    pub requested_by: String,
    /// Operator who ordered its removal; `None` if it stays.
    pub removing_by: Option<String>,
    /// The curators' last report; `None` before the first.
    pub observed: Option<KubernetesStatusView>,
}

/// The change that an order makes. An absent field leaves the value as it is, or at its default for a new Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubernetesPatch {
    /// The bundle: an artefact's digest, the beginning of it, or its name.
    pub bundle: Option<String>,
    /// Range of the addresses of services.
    pub service_range: Option<String>,
    /// Range from which nodes get their ranges for pods.
    pub pod_range: Option<String>,
    /// Prefix length of one node's range.
    pub node_prefix: Option<u32>,
    /// DNS domain of services.
    pub domain: Option<String>,
    /// Add-ons to set: the artefact with the objects, by the add-on's name.
    pub add_ons: BTreeMap<String, String>,
    /// Names of add-ons to remove.
    pub remove_add_ons: BTreeSet<String>,
    /// The volume driver; one without a name removes it.
    pub storage: Option<VolumeDriver>,
}

pub(crate) fn order_rejected(reason: &'static str, text: impl Into<String>) -> BmdbError {
    BmdbError::OrderRejected { reason, message: text.into() }
}

/// The Kubernetes of a cluster; `None` if it has none.
pub(crate) async fn read_kubernetes(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<KubernetesRecord>, BmdbError> {
    let row = sqlx::query_file!("../../sql/kubernetes/read_of_cluster.sql", cluster)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    let Some(row) = row else { return Ok(None) };
    let odd = |error: &dyn std::fmt::Display| BmdbError::Corrupt(format!("Kubernetes of a cluster: {error}"));
    let rotate: Vec<String> = serde_json::from_value(row.rotate).map_err(|error| odd(&error))?;
    let kubernetes = KubernetesSpec {
        bundle: hex::encode(row.bundle),
        version: row.version,
        service_range: row.service_range,
        pod_range: row.pod_range,
        node_prefix: u32::try_from(row.node_prefix).map_err(|error| odd(&error))?,
        domain: row.domain,
        add_ons: serde_json::from_value(row.add_ons).map_err(|error| odd(&error))?,
        storage: row.storage.map(serde_json::from_value).transpose().map_err(|error| odd(&error))?,
    };
    Ok(Some(KubernetesRecord {
        desired: DesiredKubernetes {
            spec: kubernetes,
            removing: row.removing_by.is_some(),
            pending_rotations: rotate.iter().filter_map(|keys| keys.parse().ok()).collect(),
        },
        requested_at: row.requested_at,
        requested_by: row.requested_by,
        removing_by: row.removing_by,
        // A value that another release wrote and this one cannot read is written again by the next pass.
        observed: row.observed.and_then(|observed| serde_json::from_value(observed).ok()),
    }))
}

/// The Kubernetes of a cluster as people see it.
#[must_use]
pub(crate) fn kubernetes_view(line: &KubernetesRecord) -> KubernetesView {
    let KubernetesSpec { bundle, version, service_range, pod_range, node_prefix, domain, add_ons, storage } =
        line.desired.spec.clone();
    let mut status = line.observed.clone().unwrap_or_default();
    for rotation in &mut status.rotations {
        // Stored under the name that the curators' contract has for it.
        if rotation.stage == "signs" {
            "signing".clone_into(&mut rotation.stage);
        }
    }
    KubernetesView {
        bundle,
        version,
        service_range,
        pod_range,
        node_prefix,
        domain,
        add_ons,
        storage,
        requested_at: line.requested_at,
        requested_by: line.requested_by.clone(),
        removal_requested_by: line.removing_by.clone(),
        pending_rotations: line
            .desired
            .pending_rotations
            .iter()
            .map(|keys| keys.as_str().to_owned())
            .collect(),
        status,
    }
}

/// Resolves and locks the complete artefact that a text names; nobody can remove it until the transaction ends.
async fn lock_artefact(
    tx: &mut PgConnection,
    all: &[ArtefactView],
    text: &str,
) -> Result<ArtefactView, BmdbError> {
    let found = find_artefact(all, text).map_err(|reason| order_rejected("NO_SUCH_ARTEFACT", reason))?;
    let digest = parse_digest(&found.sha256).map_err(BmdbError::Corrupt)?;
    let there = sqlx::query_file!("../../sql/artefact/lock.sql", digest.0.as_slice())
        .fetch_optional(tx)
        .await
        .context(SETTING)?;
    if there.is_none_or(|there| there.added_at.is_none()) {
        return Err(order_rejected(
            "NO_SUCH_ARTEFACT",
            format!("the artefact {} is not whole", found.sha256),
        ));
    }
    Ok(found.clone())
}

/// Resolves the bundle that a text names: its digest, and its version of Kubernetes.
pub(crate) async fn resolve_bundle(tx: &mut PgConnection, text: &str) -> Result<(String, String), BmdbError> {
    let (all, _) = list_artefacts(tx).await?;
    let found = lock_artefact(tx, &all, text).await?;
    let Some(version) = found.kubernetes else {
        let text = format!(
            "the artefact {} ({}) is no bundle of Kubernetes: it does not begin with the manifest of one",
            found.name.unwrap_or_default(),
            &found.sha256[..16]
        );
        return Err(order_rejected("NO_BUNDLE", text));
    };
    Ok((found.sha256, version))
}

/// The specification that an order describes.
pub(crate) async fn resolve_desired(
    tx: &mut PgConnection,
    name: &str,
    before: Option<&KubernetesSpec>,
    wish: &KubernetesPatch,
) -> Result<KubernetesSpec, BmdbError> {
    let mut wanted = match (before, &wish.bundle) {
        (None, None) => {
            let text =
                format!("the cluster {name} has no Kubernetes yet; say by which bundle with --bundle BUNDLE");
            return Err(order_rejected("NO_BUNDLE", text));
        }
        (Some(before), None) => before.clone(),
        (before, Some(text)) => {
            let (bundle, version) = resolve_bundle(tx, text).await?;
            if before.is_some_and(|before| before.bundle != bundle) {
                let text = format!(
                    "the cluster {name} runs another bundle, and all of its nodes would change at once; they do so one by one \
                     with: shepherdctl cluster upgrade {name} --kubernetes_bundle {}",
                    &bundle[..16]
                );
                return Err(order_rejected("ANOTHER_BUNDLE", text));
            }
            let usual = KubernetesSpec {
                service_range: DEFAULT_SERVICE_RANGE.to_owned(),
                pod_range: DEFAULT_POD_RANGE.to_owned(),
                node_prefix: DEFAULT_NODE_PREFIX,
                domain: DEFAULT_DOMAIN.to_owned(),
                ..KubernetesSpec::default()
            };
            KubernetesSpec { bundle, version, ..before.cloned().unwrap_or(usual) }
        }
    };
    let was = wanted.clone();
    if let Some(range) = &wish.service_range {
        wanted.service_range.clone_from(range);
    }
    if let Some(range) = &wish.pod_range {
        wanted.pod_range.clone_from(range);
    }
    wanted.node_prefix = wish.node_prefix.unwrap_or(wanted.node_prefix);
    if let Some(domain) = &wish.domain {
        wanted.domain.clone_from(domain);
    }
    let place =
        |k: &KubernetesSpec| (k.service_range.clone(), k.pod_range.clone(), k.node_prefix, k.domain.clone());
    if before.is_some() && place(&was) != place(&wanted) {
        let text = format!(
            "the ranges and the domain of the cluster {name} cannot be changed: nothing that runs would follow. Remove \
             Kubernetes from it and set it again"
        );
        return Err(order_rejected("FIXED", text));
    }
    if let Some(storage) = &wish.storage {
        wanted.storage = Some(storage.clone()).filter(|storage| !storage.driver.is_empty());
    }
    let (all, _) = list_artefacts(tx).await?;
    for (add_on, artefact) in &wish.add_ons {
        let found = lock_artefact(tx, &all, artefact).await?;
        wanted.add_ons.insert(add_on.clone(), found.sha256);
    }
    for add_on in &wish.remove_add_ons {
        if wanted.add_ons.remove(add_on).is_none() {
            return Err(order_rejected(
                "NO_SUCH_ADD_ON",
                format!("the cluster {name} has no add-on {add_on:?}"),
            ));
        }
    }
    wanted.validate().map_err(|reason| order_rejected("NO_SUCH_KUBERNETES", reason))?;
    Ok(wanted)
}

/// Stores the specification. The caller has locked the cluster.
pub(crate) async fn store_desired(
    tx: &mut PgConnection,
    cluster: Uuid,
    wanted: &KubernetesSpec,
    by: &str,
) -> Result<(), BmdbError> {
    let digest = parse_digest(&wanted.bundle).map_err(BmdbError::Corrupt)?;
    sqlx::query_file!(
        "../../sql/kubernetes/upsert.sql",
        cluster,
        digest.0.as_slice(),
        wanted.version,
        wanted.service_range,
        wanted.pod_range,
        i64::from(wanted.node_prefix),
        wanted.domain,
        json!(wanted.add_ons),
        wanted.storage.as_ref().map(|storage| json!(storage)),
        by
    )
    .execute(&mut *tx)
    .await
    .context(SETTING)?;
    sqlx::query_file!("../../sql/cluster/increment_version.sql", cluster)
        .execute(tx)
        .await
        .context(SETTING)?;
    Ok(())
}

/// A specification as the audit stores it.
pub(crate) fn audit_json(wanted: &KubernetesSpec) -> Value {
    json!({
        "bundle": wanted.bundle,
        "version": wanted.version,
        "service_range": wanted.service_range,
        "pod_range": wanted.pod_range,
        "node_prefix": wanted.node_prefix,
        "domain": wanted.domain,
        "add_ons": wanted.add_ons,
        "storage": wanted.storage,
    })
}

impl Bmdb {
    /// Gives a cluster Kubernetes, or changes its specification.
    pub async fn set_kubernetes(
        &self,
        order: Order,
        name: String,
        wish: KubernetesPatch,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction(SETTING, move |tx| {
                let (order, name, wish) = (order.clone(), name.clone(), wish.clone());
                Box::pin(async move { set_kubernetes_in_tx(tx, &order, &name, &wish).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Requests the removal of Kubernetes from a cluster.
    pub async fn remove_kubernetes(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("taking Kubernetes from a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { remove_kubernetes_in_tx(tx, &order, &name).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Requests that certificates or keys of a cluster's Kubernetes be replaced.
    pub async fn rotate_kubernetes_keys(
        &self,
        order: Order,
        name: String,
        keys: RotatableKeys,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("having keys of Kubernetes replaced", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { rotate_keys_in_tx(tx, &order, &name, keys).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Records that the curators received the request to rotate these keys.
    #[cfg(feature = "sealing")]
    pub async fn record_rotation_started(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        keys: RotatableKeys,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "writing down that keys of Kubernetes are replaced");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_named_lease(tx, &lease).await?;
                sqlx::query_file!("../../sql/kubernetes/remove_rotation_request.sql", cluster, keys.as_str())
                    .execute(tx)
                    .await
                    .context(doing)?;
                Ok(())
            })
        })
        .await
    }

    /// Deletes Kubernetes that no curator has any more.
    #[cfg(feature = "sealing")]
    pub async fn delete_kubernetes(&self, lease: &NamedLease, cluster: Uuid) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "forgetting Kubernetes of a cluster");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_named_lease(tx, &lease).await?;
                sqlx::query_file!("../../sql/kubernetes/delete_removed.sql", cluster)
                    .execute(tx)
                    .await
                    .context(doing)?;
                Ok(())
            })
        })
        .await
    }
}

async fn set_kubernetes_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    wish: &KubernetesPatch,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
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
    let was = before.as_ref().map(audit_json);
    if before.as_ref() == Some(&wanted) {
        let text = "is so already; nothing was changed".to_owned();
        return record_audit(
            tx,
            order,
            None,
            OrderOutcome { changed: false, message: text },
            was.clone(),
            was,
        )
        .await;
    }
    begin_dry_run(tx, order).await?;
    store_desired(tx, id, &wanted, &order.actor.name).await?;
    roll_back_dry_run(tx, order).await?;
    let add_ons = match wanted.add_ons.len() {
        0 => "no add-ons".to_owned(),
        _ => format!("the add-ons {}", wanted.add_ons.keys().cloned().collect::<Vec<_>>().join(", ")),
    };
    let text = format!(
        "is to run Kubernetes {} with {add_ons}; watch it with: shepherdctl cluster describe {name}",
        wanted.version
    );
    record_audit(
        tx,
        order,
        None,
        OrderOutcome { changed: true, message: text },
        was,
        Some(audit_json(&wanted)),
    )
    .await
}

async fn remove_kubernetes_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = lock_cluster(tx, name).await?;
    let before = read_kubernetes(tx, id).await?;
    let nothing = match &before {
        None => Some("has no Kubernetes; nothing was changed".to_owned()),
        Some(before) => before
            .removing_by
            .as_ref()
            .map(|by| format!("loses its Kubernetes already, as {by} ordered; nothing was changed")),
    };
    let (Some(before), None) = (before, &nothing) else {
        let text = nothing.unwrap_or_default();
        return record_audit(tx, order, None, OrderOutcome { changed: false, message: text }, None, None)
            .await;
    };
    if let Some(upgrade) = read_active_upgrade(tx, id).await? {
        return Err(order_rejected("UPGRADING", upgrade.conflict_message(name)));
    }
    begin_dry_run(tx, order).await?;
    sqlx::query_file!("../../sql/kubernetes/mark_removing.sql", id, order.actor.name)
        .execute(&mut *tx)
        .await
        .context(SETTING)?;
    sqlx::query_file!("../../sql/cluster/increment_version.sql", id)
        .execute(&mut *tx)
        .await
        .context(SETTING)?;
    roll_back_dry_run(tx, order).await?;
    let text = "loses its Kubernetes: its workers stop pods, then its controllers end, and its authorities are forgotten; what \
                Kubernetes kept in etcd stays there"
        .to_owned();
    let was = Some(audit_json(&before.desired.spec));
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, was, None).await
}

async fn rotate_keys_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    keys: RotatableKeys,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = lock_cluster(tx, name).await?;
    let line = require_kubernetes(tx, id, name).await?;
    let what = keys.as_str();
    let under_way =
        line.observed.iter().flat_map(|known| &known.rotations).any(|rotation| rotation.keys == what);
    if under_way || line.desired.pending_rotations.contains(&keys) {
        let text = format!("has {what} of Kubernetes replaced already; nothing was changed");
        return record_audit(tx, order, None, OrderOutcome { changed: false, message: text }, None, None)
            .await;
    }
    begin_dry_run(tx, order).await?;
    let mut requests: Vec<&str> = line.desired.pending_rotations.iter().map(|keys| keys.as_str()).collect();
    requests.push(what);
    sqlx::query_file!("../../sql/kubernetes/set_rotation_requests.sql", id, json!(requests))
        .execute(&mut *tx)
        .await
        .context(SETTING)?;
    sqlx::query_file!("../../sql/cluster/increment_version.sql", id)
        .execute(&mut *tx)
        .await
        .context(SETTING)?;
    roll_back_dry_run(tx, order).await?;
    let text = format!(
        "has {what} of Kubernetes replaced in steps, each when every node acts on the one before; watch it with: shepherdctl \
         cluster describe {name}"
    );
    record_audit(
        tx,
        order,
        None,
        OrderOutcome { changed: true, message: text },
        None,
        Some(json!({ "rotate": what })),
    )
    .await
}

/// The Kubernetes of a cluster that has one which is not being removed.
pub(crate) async fn require_kubernetes(
    tx: &mut PgConnection,
    cluster: Uuid,
    name: &str,
) -> Result<KubernetesRecord, BmdbError> {
    let line = read_kubernetes(tx, cluster).await?.filter(|line| line.removing_by.is_none());
    line.ok_or_else(|| {
        let text = format!(
            "the cluster {name} has no Kubernetes; give it one with: shepherdctl cluster kubernetes set {name} --bundle BUNDLE"
        );
        order_rejected("NO_KUBERNETES", text)
    })
}

/// Deletes the Kubernetes rows of a cluster that is about to be deleted.
#[cfg(feature = "sealing")]
pub(crate) async fn delete_cluster_kubernetes(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let doing = "forgetting a cluster's Kubernetes";
    sqlx::query_file!("../../sql/kubernetes/delete_users.sql", cluster)
        .execute(&mut *tx)
        .await
        .context(doing)?;
    sqlx::query_file!("../../sql/kubernetes/delete.sql", cluster).execute(&mut *tx).await.context(doing)?;
    sqlx::query_file!("../../sql/upgrade/delete_of_cluster.sql", cluster).execute(tx).await.context(doing)?;
    Ok(())
}
