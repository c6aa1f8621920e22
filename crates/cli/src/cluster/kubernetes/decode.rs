//! Decode the Kubernetes state of a cluster and of its nodes.

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::cluster::view::{
    BundleView, KeyRotationView, KubernetesStatus, KubernetesView, NodeKubernetesView, UpgradeView,
};
use crate::error::CliError;
use model::cluster::kubernetes::{ComponentStatus, ObjectConflict, VolumeDriver};
use proto::fleet::v1;

/// Decodes the Kubernetes state of a cluster.
pub(crate) fn decode_kubernetes(
    kubernetes_state: v1::ClusterKubernetesState,
) -> Result<KubernetesView, CliError> {
    let rotation = |cluster_rotation: v1::ClusterKeyRotation| KeyRotationView {
        keys: cluster_rotation.keys,
        stage: cluster_rotation.stage,
        since: cluster_rotation.since.and_then(decode_timestamp),
        waits_for: cluster_rotation.waits_for,
        until: cluster_rotation.until.and_then(decode_timestamp),
        blocked_by: cluster_rotation.blocked_by,
        notified_at: cluster_rotation.notified_at.and_then(decode_timestamp),
    };
    Ok(KubernetesView {
        bundle: kubernetes_state.bundle,
        version: kubernetes_state.version,
        service_range: kubernetes_state.service_range,
        pod_range: kubernetes_state.pod_range,
        node_prefix: kubernetes_state.node_prefix,
        domain: kubernetes_state.domain,
        add_ons: kubernetes_state.add_ons.into_iter().collect(),
        storage: kubernetes_state
            .storage
            .map(|storage| VolumeDriver { driver: storage.driver, class: storage.class }),
        requested_at: require_timestamp(
            kubernetes_state.requested_at,
            "the time when Kubernetes was requested",
        )?,
        requested_by: kubernetes_state.requested_by,
        removal_requested_by: kubernetes_state.removal_requested_by,
        pending_rotations: kubernetes_state.pending_rotations,
        status: KubernetesStatus {
            in_sync: kubernetes_state.in_sync,
            assigned_bundles: kubernetes_state.assigned_bundles.into_iter().collect(),
            rotations: kubernetes_state.rotations.into_iter().map(rotation).collect(),
            api_servers: kubernetes_state.api_servers,
        },
    })
}

/// Decodes an upgrade of a cluster.
pub(crate) fn decode_upgrade(upgrade: v1::ClusterUpgrade) -> Result<UpgradeView, CliError> {
    let bundle = |sha256: String, version: String| {
        Some(BundleView { sha256, version }).filter(|bundle| !bundle.sha256.is_empty())
    };
    Ok(UpgradeView {
        id: upgrade.id,
        from: bundle(upgrade.from_sha256, upgrade.from_version),
        to: bundle(upgrade.to_sha256, upgrade.to_version),
        release: upgrade.release,
        roll_out: upgrade.roll_out,
        release_done: upgrade.release_done,
        rolling_back: upgrade.rolling_back,
        parallelism: upgrade.parallelism,
        deadline_seconds: upgrade.deadline_seconds,
        created_at: require_timestamp(upgrade.created_at, "the time when an upgrade was ordered")?,
        created_by: upgrade.created_by,
        reason: upgrade.reason,
        pause_reason: upgrade.pause_reason,
        ended_at: upgrade.ended_at.and_then(decode_timestamp),
        outcome: upgrade.outcome,
        requested_count: upgrade.requested_count,
        completed_count: upgrade.completed_count,
    })
}

/// Decodes the Kubernetes components of a node.
pub(crate) fn decode_node_kubernetes(kubernetes: v1::ClusterNodeKubernetes) -> NodeKubernetesView {
    let component = |cluster_component: v1::ClusterComponentStatus| ComponentStatus {
        name: cluster_component.name,
        state: cluster_component.state,
        since: cluster_component.since.and_then(decode_timestamp),
        restarts: cluster_component.restarts,
        message: cluster_component.message,
    };
    let clash = |cluster_clash: v1::ClusterObjectConflict| ObjectConflict {
        kind: cluster_clash.kind,
        name: cluster_clash.name,
        message: cluster_clash.message,
    };
    NodeKubernetesView {
        bundle: kubernetes.bundle,
        version: kubernetes.version,
        components: kubernetes.components.into_iter().map(component).collect(),
        wait_reason: kubernetes.wait_reason,
        is_reconciler: kubernetes.is_reconciler,
        conflicts: kubernetes.conflicts.into_iter().map(clash).collect(),
    }
}
