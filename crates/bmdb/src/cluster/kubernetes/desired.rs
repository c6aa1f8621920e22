//! The Kubernetes specification that an order describes: resolved artefacts, defaults, what cannot change.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::lock::increment_version;
use crate::connection::DbContext as _;
use crate::connection::error::{BmdbError, order_rejected};
use crate::engine::policy::read_policy_in_tx;
use crate::fleet::artefact::list_artefacts;
use model::artefact::{ArtefactView, find_artefact, parse_digest};
use model::cluster::kubernetes::{
    DEFAULT_DOMAIN, DEFAULT_NODE_PREFIX, DEFAULT_POD_RANGE, DEFAULT_SERVICE_RANGE, KubernetesSpec,
    VolumeDriver,
};
use model::signed_artefact::decide_assignment;
use model::signed_artefact::signing_trust::SigningTrust;

const SETTING: &str = "saying what a cluster is to run of Kubernetes";

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
    /// The keys that the bundle and the add-ons must be signed with, those of the shepherd that received the order. Without
    /// any, they need no signature.
    pub trust: SigningTrust,
}

/// Resolves and locks the complete artefact that a text names, with its signature; nobody can remove it until the transaction ends.
async fn lock_artefact(
    tx: &mut PgConnection,
    all: &[ArtefactView],
    text: &str,
) -> Result<(ArtefactView, Option<String>), BmdbError> {
    let found = find_artefact(all, text).map_err(|reason| order_rejected("NO_SUCH_ARTEFACT", reason))?;
    let digest = parse_digest(&found.sha256).map_err(BmdbError::Corrupt)?;
    let there = sqlx::query_file!("../../sql/artefact/lock.sql", digest.0.as_slice())
        .fetch_optional(tx)
        .await
        .context(SETTING)?;
    let Some(there) = there.filter(|there| there.added_at.is_some()) else {
        return Err(order_rejected(
            "NO_SUCH_ARTEFACT",
            format!("the artefact {} is not whole", found.sha256),
        ));
    };
    Ok((found.clone(), there.signature))
}

/// Resolves the bundle that a text names: its digest, and its version of Kubernetes. It must be signed with one of the keys
/// in `trust`, if there are any, unless the policy allows unsigned ones.
pub(crate) async fn resolve_bundle(
    tx: &mut PgConnection,
    text: &str,
    trust: &SigningTrust,
) -> Result<(String, String), BmdbError> {
    let (all, _) = list_artefacts(tx).await?;
    let (found, signature) = lock_artefact(tx, &all, text).await?;
    let Some(version) = found.kubernetes else {
        let text = format!(
            "the artefact {} ({}) is not a bundle of Kubernetes: it does not begin with the manifest of one",
            found.name.unwrap_or_default(),
            &found.sha256[..16]
        );
        return Err(order_rejected("NO_BUNDLE", text));
    };
    let allows_unsigned = read_policy_in_tx(tx).await?.allow_unsigned_releases;
    decide_assignment(signature.as_deref(), trust, allows_unsigned).map_err(|reason| {
        let name = found.name.as_deref().unwrap_or(&found.sha256);
        order_rejected("NOT_SIGNED", format!("no cluster gets the bundle {name}: {reason}"))
    })?;
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
                format!("the cluster {name} has no Kubernetes yet; name the bundle with --bundle BUNDLE");
            return Err(order_rejected("NO_BUNDLE", text));
        }
        (Some(before), None) => before.clone(),
        (before, Some(text)) => {
            let (bundle, version) = resolve_bundle(tx, text, &wish.trust).await?;
            if before.is_some_and(|before| before.bundle != bundle) {
                let text = format!(
                    "the cluster {name} runs another bundle, and all of its nodes would change at once; to \
                     change them one by one, run: shepherdctl cluster upgrade {name} --kubernetes-bundle {}",
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
            "the ranges and the domain of the cluster {name} cannot be changed, because running components would \
             not adopt the change. Remove Kubernetes from it and set it again"
        );
        return Err(order_rejected("FIXED", text));
    }
    if let Some(storage) = &wish.storage {
        wanted.storage = Some(storage.clone()).filter(|storage| !storage.driver.is_empty());
    }
    let (all, _) = list_artefacts(tx).await?;
    for (add_on, artefact) in &wish.add_ons {
        let (found, _) = lock_artefact(tx, &all, artefact).await?;
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
    increment_version(tx, cluster, SETTING).await
}

/// A specification as the audit stores it.
pub(crate) fn kubernetes_audit_json(wanted: &KubernetesSpec) -> Value {
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
