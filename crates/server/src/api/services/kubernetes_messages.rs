//! Kubernetes of a cluster as messages of the API: decode settings, encode state.
//!
//! The services `Clusters` and `ClusterKubernetes` have these messages.

use tonic::Status;

use crate::api::convert::encode_timestamp;
use crate::api::validate::single_line;
use bmdb::cluster::kubernetes::KubernetesRecord;
use bmdb::cluster::kubernetes::desired::KubernetesPatch;
use bmdb::cluster::upgrade::UpgradeRecord;
use model::cluster::kubernetes::{
    ComponentStatus, KubernetesKeyRotation, KubernetesSpec, NodeKubernetes, ObjectConflict, VolumeDriver,
};
use model::cluster::upgrade::BundleRef;
use model::signed_artefact::signing_trust::SigningTrust;
use proto::fleet::v1;

/// Longest name of an artefact in a request, in characters.
const MAX_NAME_CHARS: usize = 100;

/// A field that is one line, for example the name of an artefact; `None` if it is empty.
pub(super) fn optional_line(field: &str, text: &str) -> Result<Option<String>, Status> {
    Ok(Some(single_line(field, text, MAX_NAME_CHARS)?.to_owned()).filter(|text| !text.is_empty()))
}

/// Validates and decodes a change of the Kubernetes settings.
pub(super) fn parse_patch(
    patch: &v1::KubernetesPatch,
    trust: &SigningTrust,
) -> Result<KubernetesPatch, Status> {
    let storage = patch.storage.as_ref().map(|storage| -> Result<VolumeDriver, Status> {
        Ok(VolumeDriver {
            driver: single_line("storage.driver", &storage.driver, MAX_NAME_CHARS)?.to_owned(),
            class: single_line("storage.class", &storage.class, MAX_NAME_CHARS)?.to_owned(),
        })
    });
    let add_ons = patch.add_ons.iter().map(|(name, artefact)| -> Result<(String, String), Status> {
        Ok((
            single_line("add_ons", name, MAX_NAME_CHARS)?.to_owned(),
            single_line("add_ons", artefact, MAX_NAME_CHARS)?.to_owned(),
        ))
    });
    Ok(KubernetesPatch {
        bundle: optional_line("bundle", &patch.bundle)?,
        service_range: optional_line("service_range", &patch.service_range)?,
        pod_range: optional_line("pod_range", &patch.pod_range)?,
        node_prefix: Some(patch.node_prefix).filter(|prefix| *prefix != 0),
        domain: optional_line("domain", &patch.domain)?,
        add_ons: add_ons.collect::<Result<_, _>>()?,
        remove_add_ons: patch.remove_add_ons.iter().cloned().collect(),
        storage: storage.transpose()?,
        trust: trust.clone(),
    })
}

/// Encodes the Kubernetes state of a cluster.
pub(super) fn encode_kubernetes(record: KubernetesRecord) -> v1::ClusterKubernetesState {
    let KubernetesSpec { bundle, version, service_range, pod_range, node_prefix, domain, add_ons, storage } =
        record.desired.spec;
    let pending = record.desired.pending_rotations.iter();
    let status = record.observed.unwrap_or_default();
    v1::ClusterKubernetesState {
        bundle,
        version,
        service_range,
        pod_range,
        node_prefix,
        domain,
        add_ons: add_ons.into_iter().collect(),
        storage: storage.map(|storage| v1::ClusterStorage { driver: storage.driver, class: storage.class }),
        requested_at: Some(encode_timestamp(record.requested_at)),
        requested_by: record.requested_by,
        removal_requested_by: record.removing_by,
        pending_rotations: pending.map(|keys| keys.as_str().to_owned()).collect(),
        in_sync: status.in_sync,
        assigned_bundles: status.assigned_bundles.into_iter().collect(),
        rotations: status.rotations.into_iter().map(encode_rotation).collect(),
        api_servers: status.api_servers,
    }
}

fn encode_rotation(rotation: KubernetesKeyRotation) -> v1::ClusterKeyRotation {
    // Stored under the name that the curators' contract has for it.
    let stage = if rotation.stage == "signs" { "signing".to_owned() } else { rotation.stage };
    v1::ClusterKeyRotation {
        keys: rotation.keys,
        stage,
        since: rotation.since.map(encode_timestamp),
        waits_for: rotation.waits_for,
        until: rotation.until.map(encode_timestamp),
        blocked_by: rotation.blocked_by,
        notified_at: rotation.notified_at.map(encode_timestamp),
    }
}

/// Encodes an upgrade of a cluster.
pub(super) fn encode_upgrade(record: UpgradeRecord) -> v1::ClusterUpgrade {
    let upgrade = record.upgrade;
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let completed = upgrade.requested_nodes.values().filter(|node_upgrade| node_upgrade.is_done).count();
    let (from, to) = upgrade.bundles.unzip();
    let named = |bundle: Option<BundleRef>| bundle.map(|b| (b.digest, b.version)).unwrap_or_default();
    let ((from_sha256, from_version), (to_sha256, to_version)) = (named(from), named(to));
    let (ended_at, outcome) = record.ended.unzip();
    v1::ClusterUpgrade {
        id: upgrade.id,
        from_sha256,
        from_version,
        to_sha256,
        to_version,
        release: record.release,
        roll_out: record.roll_out,
        release_done: record.roll_out_done,
        rolling_back: upgrade.rolling_back,
        parallelism: count(upgrade.parallelism),
        deadline_seconds: u32::try_from(upgrade.node_deadline.as_secs()).unwrap_or(u32::MAX),
        created_at: Some(encode_timestamp(record.created_at)),
        created_by: record.created_by,
        reason: record.reason,
        pause_reason: upgrade.pause_reason,
        ended_at: ended_at.map(encode_timestamp),
        outcome,
        requested_count: count(upgrade.requested_nodes.len()),
        completed_count: count(completed),
    }
}

/// Encodes the Kubernetes components of a node.
pub(super) fn encode_node_kubernetes(view: NodeKubernetes) -> v1::ClusterNodeKubernetes {
    let component = |component: ComponentStatus| v1::ClusterComponentStatus {
        name: component.name,
        state: component.state,
        since: component.since.map(encode_timestamp),
        restarts: component.restarts,
        message: component.message,
    };
    let clash = |clash: ObjectConflict| v1::ClusterObjectConflict {
        kind: clash.kind,
        name: clash.name,
        message: clash.message,
    };
    v1::ClusterNodeKubernetes {
        bundle: view.bundle,
        version: view.version,
        components: view.components.into_iter().map(component).collect(),
        wait_reason: view.wait_reason,
        is_reconciler: view.is_reconciler,
        conflicts: view.conflicts.into_iter().map(clash).collect(),
    }
}
