//! What clusters are to run of Kubernetes: the orders about it, and what became of them.
//!
//! An order only writes down what is wanted; whoever holds the cluster's lease tells the curators. Another bundle than the
//! one that nodes run is no setting: it would reach all of them at once, so that is an upgrade's (`cluster_upgrade.rs`).
//! A bundle and an add-on are artefacts of the fleet, and stay for as long as a cluster has them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::artefact::artefacts;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::locked;
use crate::bmdb::cluster_upgrade::upgrade_under_way;
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
#[cfg(feature = "shepherd")]
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::model::artefact::{ArtefactView, find, read_digest};
use crate::model::cluster::kubernetes::{
    DOMAIN, Keys, Kubernetes, NODE_PREFIX, POD_RANGE, SERVICE_RANGE, Storage, Wanted,
};
use crate::model::cluster::kubernetes_view::{Known, KubernetesView};
use crate::model::time::Timestamp;

const WHAT: &str = "reading what clusters run of Kubernetes";
const SETTING: &str = "saying what a cluster is to run of Kubernetes";

/// What is wanted, and what is known.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesLine {
    /// What decisions need.
    pub wanted: Wanted,
    /// When it was asked for.
    pub asked_at: Timestamp,
    /// By whom.
    pub asked_by: String,
    /// Who said that it is to go.
    pub removing_by: Option<String>,
    /// What the curators said last.
    pub known: Option<Known>,
}

/// What an order says of it; what is absent stays as it is, or is as usual where there was nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// The bundle: an artefact's digest, the beginning of it, or its name.
    pub bundle: Option<String>,
    /// From which services get their addresses.
    pub service_range: Option<String>,
    /// From which nodes get theirs for pods.
    pub pod_range: Option<String>,
    /// How long the prefix of one node's range is.
    pub node_prefix: Option<u32>,
    /// In which services have names.
    pub domain: Option<String>,
    /// Artefacts with objects that are to be kept, by their names as add-ons.
    pub add_ons: BTreeMap<String, String>,
    /// Add-ons that are not to be kept any more.
    pub remove_add_ons: BTreeSet<String>,
    /// Who makes volumes; one without a name: nobody any more.
    pub storage: Option<Storage>,
}

pub(crate) fn refused(reason: &'static str, said: impl Into<String>) -> BmdbError {
    BmdbError::OrderRefused { reason, said: said.into() }
}

/// What a cluster is to run of Kubernetes, if it is to run any.
pub(crate) async fn kubernetes_of(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<KubernetesLine>, BmdbError> {
    let row = sqlx::query_file!("sql/kubernetes/read_of_cluster.sql", cluster)
        .fetch_optional(tx)
        .await
        .doing(WHAT)?;
    let Some(row) = row else { return Ok(None) };
    let odd = |error: &dyn std::fmt::Display| BmdbError::Corrupt(format!("Kubernetes of a cluster: {error}"));
    let rotate: Vec<String> = serde_json::from_value(row.rotate).map_err(|error| odd(&error))?;
    let kubernetes = Kubernetes {
        bundle: hex::encode(row.bundle),
        version: row.version,
        service_range: row.service_range,
        pod_range: row.pod_range,
        node_prefix: u32::try_from(row.node_prefix).map_err(|error| odd(&error))?,
        domain: row.domain,
        add_ons: serde_json::from_value(row.add_ons).map_err(|error| odd(&error))?,
        storage: row.storage.map(serde_json::from_value).transpose().map_err(|error| odd(&error))?,
    };
    Ok(Some(KubernetesLine {
        wanted: Wanted {
            kubernetes,
            removing: row.removing_by.is_some(),
            rotate: rotate.iter().filter_map(|keys| keys.parse().ok()).collect(),
        },
        asked_at: row.asked_at,
        asked_by: row.asked_by,
        removing_by: row.removing_by,
        // What another release wrote is said again with the next look.
        known: row.known.and_then(|known| serde_json::from_value(known).ok()),
    }))
}

/// As people see it.
#[must_use]
pub(crate) fn view(line: &KubernetesLine) -> KubernetesView {
    let Kubernetes { bundle, version, service_range, pod_range, node_prefix, domain, add_ons, storage } =
        line.wanted.kubernetes.clone();
    KubernetesView {
        bundle,
        version,
        service_range,
        pod_range,
        node_prefix,
        domain,
        add_ons,
        storage,
        asked_at: line.asked_at,
        asked_by: line.asked_by.clone(),
        removing_by: line.removing_by.clone(),
        rotate: line.wanted.rotate.iter().map(|keys| keys.as_str().to_owned()).collect(),
        known: line.known.clone().unwrap_or_default(),
    }
}

/// The artefact that somebody means, whole; nobody removes it from here on.
async fn used(tx: &mut PgConnection, all: &[ArtefactView], said: &str) -> Result<ArtefactView, BmdbError> {
    let found = find(all, said).map_err(|said| refused("NO_SUCH_ARTEFACT", said))?;
    let digest = read_digest(&found.sha256).map_err(BmdbError::Corrupt)?;
    let there = sqlx::query_file!("sql/artefact/lock.sql", digest.0.as_slice())
        .fetch_optional(tx)
        .await
        .doing(SETTING)?;
    if there.is_none_or(|there| there.added_at.is_none()) {
        return Err(refused("NO_SUCH_ARTEFACT", format!("the artefact {} is not whole", found.sha256)));
    }
    Ok(found.clone())
}

/// The bundle that somebody means: its digest, and the version of Kubernetes in it.
pub(crate) async fn bundle(tx: &mut PgConnection, said: &str) -> Result<(String, String), BmdbError> {
    let (all, _) = artefacts(tx).await?;
    let found = used(tx, &all, said).await?;
    let Some(version) = found.kubernetes else {
        let said = format!(
            "the artefact {} ({}) is no bundle of Kubernetes: it does not begin with the manifest of one",
            found.name.unwrap_or_default(),
            &found.sha256[..16]
        );
        return Err(refused("NO_BUNDLE", said));
    };
    Ok((found.sha256, version))
}

/// What Kubernetes is to be, as an order says.
pub(crate) async fn wanted(
    tx: &mut PgConnection,
    name: &str,
    before: Option<&Kubernetes>,
    wish: &Wish,
) -> Result<Kubernetes, BmdbError> {
    let mut wanted = match (before, &wish.bundle) {
        (None, None) => {
            let said =
                format!("the cluster {name} has no Kubernetes yet; say by which bundle with --bundle BUNDLE");
            return Err(refused("NO_BUNDLE", said));
        }
        (Some(before), None) => before.clone(),
        (before, Some(said)) => {
            let (bundle, version) = bundle(tx, said).await?;
            if before.is_some_and(|before| before.bundle != bundle) {
                let said = format!(
                    "the cluster {name} runs another bundle, and all of its nodes would change at once; they do so one by one \
                     with: shepherdctl cluster upgrade {name} --kubernetes {}",
                    &bundle[..16]
                );
                return Err(refused("ANOTHER_BUNDLE", said));
            }
            let usual = Kubernetes {
                service_range: SERVICE_RANGE.to_owned(),
                pod_range: POD_RANGE.to_owned(),
                node_prefix: NODE_PREFIX,
                domain: DOMAIN.to_owned(),
                ..Kubernetes::default()
            };
            Kubernetes { bundle, version, ..before.cloned().unwrap_or(usual) }
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
        |k: &Kubernetes| (k.service_range.clone(), k.pod_range.clone(), k.node_prefix, k.domain.clone());
    if before.is_some() && place(&was) != place(&wanted) {
        let said = format!(
            "the ranges and the domain of the cluster {name} cannot be changed: nothing that runs would follow. Take \
             Kubernetes from it and give it anew"
        );
        return Err(refused("FIXED", said));
    }
    if let Some(storage) = &wish.storage {
        wanted.storage = Some(storage.clone()).filter(|storage| !storage.driver.is_empty());
    }
    let (all, _) = artefacts(tx).await?;
    for (add_on, artefact) in &wish.add_ons {
        let found = used(tx, &all, artefact).await?;
        wanted.add_ons.insert(add_on.clone(), found.sha256);
    }
    for add_on in &wish.remove_add_ons {
        if wanted.add_ons.remove(add_on).is_none() {
            return Err(refused("NO_SUCH_ADD_ON", format!("the cluster {name} has no add-on {add_on:?}")));
        }
    }
    wanted.check().map_err(|said| refused("NO_SUCH_KUBERNETES", said))?;
    Ok(wanted)
}

/// Writes down what Kubernetes is to be; whoever orders it has locked the cluster.
pub(crate) async fn keep(
    tx: &mut PgConnection,
    cluster: Uuid,
    wanted: &Kubernetes,
    by: &str,
) -> Result<(), BmdbError> {
    let digest = read_digest(&wanted.bundle).map_err(BmdbError::Corrupt)?;
    sqlx::query_file!(
        "sql/kubernetes/upsert.sql",
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
    .doing(SETTING)?;
    sqlx::query_file!("sql/cluster/increment_version.sql", cluster).execute(tx).await.doing(SETTING)?;
    Ok(())
}

/// What it is to be, as the audit says it.
pub(crate) fn told(wanted: &Kubernetes) -> Value {
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
    /// Gives a cluster Kubernetes, or changes what it is to be.
    pub async fn set_kubernetes(&self, order: Order, name: String, wish: Wish) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(SETTING, move |tx| {
                let (order, name, wish) = (order.clone(), name.clone(), wish.clone());
                Box::pin(async move { set(tx, &order, &name, &wish).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Takes Kubernetes from a cluster.
    pub async fn remove_kubernetes(&self, order: Order, name: String) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("taking Kubernetes from a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { remove(tx, &order, &name).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Has certificates or keys of a cluster's Kubernetes replaced.
    pub async fn rotate_kubernetes(
        &self,
        order: Order,
        name: String,
        keys: Keys,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("having keys of Kubernetes replaced", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { rotate(tx, &order, &name, keys).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Writes down that the curators were told what to replace.
    #[cfg(feature = "shepherd")]
    pub async fn kubernetes_rotated(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        keys: Keys,
    ) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "writing down that keys of Kubernetes are replaced");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/kubernetes/remove_rotation_request.sql", cluster, keys.as_str())
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }

    /// Forgets Kubernetes that no curator has any more.
    #[cfg(feature = "shepherd")]
    pub async fn forget_kubernetes(&self, lease: &NamedLease, cluster: Uuid) -> Result<(), BmdbError> {
        let (lease, doing) = (lease.clone(), "forgetting Kubernetes of a cluster");
        self.transact(doing, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/kubernetes/delete_removed.sql", cluster)
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }
}

async fn set(tx: &mut PgConnection, order: &Order, name: &str, wish: &Wish) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = locked(tx, name).await?;
    let before = kubernetes_of(tx, id).await?;
    if let Some(by) = before.as_ref().and_then(|before| before.removing_by.as_ref()) {
        let said = format!(
            "Kubernetes of the cluster {name} is going, as {by} ordered; give it anew when it is gone (shepherdctl cluster \
             describe {name})"
        );
        return Err(refused("KUBERNETES_GOES", said));
    }
    let before = before.map(|before| before.wanted.kubernetes);
    let wanted = wanted(tx, name, before.as_ref(), wish).await?;
    let was = before.as_ref().map(told);
    if before.as_ref() == Some(&wanted) {
        let said = "is so already; nothing was changed".to_owned();
        return write_down(tx, order, None, Done { changed: false, said }, was.clone(), was).await;
    }
    begin_attempt(tx, order).await?;
    keep(tx, id, &wanted, &order.actor.name).await?;
    end_attempt(tx, order).await?;
    let add_ons = match wanted.add_ons.len() {
        0 => "no add-ons".to_owned(),
        _ => format!("the add-ons {}", wanted.add_ons.keys().cloned().collect::<Vec<_>>().join(", ")),
    };
    let said = format!(
        "is to run Kubernetes {} with {add_ons}; watch it with: shepherdctl cluster describe {name}",
        wanted.version
    );
    write_down(tx, order, None, Done { changed: true, said }, was, Some(told(&wanted))).await
}

async fn remove(tx: &mut PgConnection, order: &Order, name: &str) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = locked(tx, name).await?;
    let before = kubernetes_of(tx, id).await?;
    let nothing = match &before {
        None => Some("has no Kubernetes; nothing was changed".to_owned()),
        Some(before) => before
            .removing_by
            .as_ref()
            .map(|by| format!("loses its Kubernetes already, as {by} ordered; nothing was changed")),
    };
    let (Some(before), None) = (before, &nothing) else {
        let said = nothing.unwrap_or_default();
        return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
    };
    if let Some(upgrade) = upgrade_under_way(tx, id).await? {
        return Err(refused("UPGRADING", upgrade.in_the_way(name)));
    }
    begin_attempt(tx, order).await?;
    sqlx::query_file!("sql/kubernetes/mark_removing.sql", id, order.actor.name)
        .execute(&mut *tx)
        .await
        .doing(SETTING)?;
    sqlx::query_file!("sql/cluster/increment_version.sql", id).execute(&mut *tx).await.doing(SETTING)?;
    end_attempt(tx, order).await?;
    let said = "loses its Kubernetes: its workers stop pods, then its controllers end, and its authorities are forgotten; what \
                Kubernetes kept in etcd stays there"
        .to_owned();
    let was = Some(told(&before.wanted.kubernetes));
    write_down(tx, order, None, Done { changed: true, said }, was, None).await
}

async fn rotate(tx: &mut PgConnection, order: &Order, name: &str, keys: Keys) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = locked(tx, name).await?;
    let line = running(tx, id, name).await?;
    let what = keys.as_str();
    let under_way =
        line.known.iter().flat_map(|known| &known.rotations).any(|rotation| rotation.what == what);
    if under_way || line.wanted.rotate.contains(&keys) {
        let said = format!("has {what} of Kubernetes replaced already; nothing was changed");
        return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
    }
    begin_attempt(tx, order).await?;
    let mut asked: Vec<&str> = line.wanted.rotate.iter().map(|keys| keys.as_str()).collect();
    asked.push(what);
    sqlx::query_file!("sql/kubernetes/set_rotation_requests.sql", id, json!(asked))
        .execute(&mut *tx)
        .await
        .doing(SETTING)?;
    sqlx::query_file!("sql/cluster/increment_version.sql", id).execute(&mut *tx).await.doing(SETTING)?;
    end_attempt(tx, order).await?;
    let said = format!(
        "has {what} of Kubernetes replaced in steps, each when every node acts on the one before; watch it with: shepherdctl \
         cluster describe {name}"
    );
    write_down(tx, order, None, Done { changed: true, said }, None, Some(json!({ "rotate": what }))).await
}

/// Kubernetes of a cluster that has one and is to keep it.
pub(crate) async fn running(
    tx: &mut PgConnection,
    cluster: Uuid,
    name: &str,
) -> Result<KubernetesLine, BmdbError> {
    let line = kubernetes_of(tx, cluster).await?.filter(|line| line.removing_by.is_none());
    line.ok_or_else(|| {
        let said = format!(
            "the cluster {name} has no Kubernetes; give it one with: shepherdctl cluster kubernetes set {name} --bundle BUNDLE"
        );
        refused("NO_KUBERNETES", said)
    })
}

/// Forgets all of a cluster that is about to go.
#[cfg(feature = "shepherd")]
pub(crate) async fn remove_of_cluster(tx: &mut PgConnection, cluster: Uuid) -> Result<(), BmdbError> {
    let doing = "forgetting a cluster's Kubernetes";
    sqlx::query_file!("sql/kubernetes/delete_users.sql", cluster).execute(&mut *tx).await.doing(doing)?;
    sqlx::query_file!("sql/kubernetes/delete.sql", cluster).execute(&mut *tx).await.doing(doing)?;
    sqlx::query_file!("sql/upgrade/delete_of_cluster.sql", cluster).execute(tx).await.doing(doing)?;
    Ok(())
}
