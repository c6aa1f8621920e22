//! Kubernetes of a cluster as messages of the API: decode settings, encode state.
//!
//! The services `Clusters` and `ClusterKubernetes` have these messages.

use tonic::Status;

use crate::api::convert::encode_timestamp;
use crate::api::validate::single_line;
use bmdb::cluster::kubernetes::desired::KubernetesPatch;
use model::cluster::kubernetes::{
    ComponentStatus, KubernetesKeyRotation, NodeKubernetes, ObjectConflict, VolumeDriver,
};
use model::cluster::kubernetes_view::{BundleView, KubernetesView, UpgradeView};
use proto::fleet::v1;

/// Longest name of an artefact in a request, in characters.
const MAX_NAME_CHARS: usize = 100;

/// A field that is one line, for example the name of an artefact; `None` if it is empty.
pub(super) fn optional_line(field: &str, text: &str) -> Result<Option<String>, Status> {
    Ok(Some(single_line(field, text, MAX_NAME_CHARS)?.to_owned()).filter(|text| !text.is_empty()))
}

/// Validates and decodes a change of the Kubernetes settings.
pub(super) fn parse_patch(patch: &v1::KubernetesPatch) -> Result<KubernetesPatch, Status> {
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
    })
}

/// Encodes the Kubernetes state of a cluster.
pub(super) fn encode_kubernetes(view: KubernetesView) -> v1::ClusterKubernetesState {
    let rotation = |rotation: KubernetesKeyRotation| v1::ClusterKeyRotation {
        keys: rotation.keys,
        stage: rotation.stage,
        since: rotation.since.map(encode_timestamp),
        waits_for: rotation.waits_for,
        until: rotation.until.map(encode_timestamp),
        blocked_by: rotation.blocked_by,
        notified_at: rotation.notified_at.map(encode_timestamp),
    };
    v1::ClusterKubernetesState {
        bundle: view.bundle,
        version: view.version,
        service_range: view.service_range,
        pod_range: view.pod_range,
        node_prefix: view.node_prefix,
        domain: view.domain,
        add_ons: view.add_ons.into_iter().collect(),
        storage: (view.storage)
            .map(|storage| v1::ClusterStorage { driver: storage.driver, class: storage.class }),
        requested_at: Some(encode_timestamp(view.requested_at)),
        requested_by: view.requested_by,
        removal_requested_by: view.removal_requested_by,
        pending_rotations: view.pending_rotations,
        in_sync: view.status.in_sync,
        assigned_bundles: view.status.assigned_bundles.into_iter().collect(),
        rotations: view.status.rotations.into_iter().map(rotation).collect(),
        api_servers: view.status.api_servers,
    }
}

/// Encodes an upgrade of a cluster.
pub(super) fn encode_upgrade(view: UpgradeView) -> v1::ClusterUpgrade {
    let named = |bundle: Option<BundleView>| bundle.map(|b| (b.sha256, b.version)).unwrap_or_default();
    let (from, to) = (named(view.from), named(view.to));
    v1::ClusterUpgrade {
        id: view.id,
        from_sha256: from.0,
        from_version: from.1,
        to_sha256: to.0,
        to_version: to.1,
        release: view.release,
        roll_out: view.roll_out,
        release_done: view.release_done,
        rolling_back: view.rolling_back,
        parallelism: view.parallelism,
        deadline_seconds: view.deadline_seconds,
        created_at: Some(encode_timestamp(view.created_at)),
        created_by: view.created_by,
        reason: view.reason,
        pause_reason: view.pause_reason,
        ended_at: view.ended_at.map(encode_timestamp),
        outcome: view.outcome,
        requested_count: view.requested_count,
        completed_count: view.completed_count,
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
