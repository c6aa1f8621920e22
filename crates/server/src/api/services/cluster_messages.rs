//! Encode a cluster and its machines as messages of the API.

use crate::api::convert::encode_timestamp;
use crate::api::services::kubernetes_messages::{encode_kubernetes, encode_node_kubernetes, encode_upgrade};
use bmdb::cluster::record::{ClusterDetails, ClusterMachineRecord};
use model::cluster::authority_rotation::{AuthorityProgress, AuthorityRotationOrder, AuthorityWait};
use model::cluster::declaration::{DeclarationView, ServiceView};
use model::cluster::secret_keys::{SecretKey, SecretKeys};
use model::cluster::view::{RESTORING_STAGE, cluster_stage};
use proto::fleet::v1;

/// Encodes a cluster with everything that is stored about it.
pub(super) fn encode_cluster(details: ClusterDetails) -> v1::Cluster {
    let ClusterDetails { cluster, machines, declarations, kubernetes, upgrade, .. } = details;
    let (deleting, founded) = (cluster.deleting.is_some(), cluster.founded.is_some());
    let stage = match &cluster.restoring {
        Some(_) if !deleting => RESTORING_STAGE,
        _ => cluster_stage(deleting, founded, machines.len(), cluster.converged),
    };
    let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
    v1::Cluster {
        name: cluster.spec.name,
        id: cluster.id.to_string(),
        stage: stage.to_owned(),
        control_plane: cluster.spec.control_plane,
        workers: cluster.spec.workers,
        selector: cluster.spec.selector.to_string(),
        roles: cluster.spec.roles.into_iter().collect(),
        approval: cluster.spec.approval.as_str().to_owned(),
        created_at: Some(encode_timestamp(cluster.created_at)),
        created_by: cluster.created_by,
        deletion_requested_by: cluster.deleting.map(|(_, by)| by),
        curators: cluster.founded.map(|founded| founded.curators).unwrap_or_default(),
        observed_at: cluster.observed_at.map(encode_timestamp),
        voters: cluster.voters.map(|(voters, _)| count(voters)),
        voters_reached: cluster.voters.map(|(_, reached)| count(reached)),
        wait_reasons: cluster.wait_reasons,
        machines: machines.into_iter().map(encode_machine).collect(),
        declarations: declarations.into_iter().map(encode_declaration).collect(),
        snapshot_at: cluster.snapshots.last.map(|last| encode_timestamp(last.at)),
        epoch: cluster.epoch,
        restored_at: cluster.restored_at.map(encode_timestamp),
        restoring_from: cluster.restoring_from.map(|id| id.to_string()),
        restore_requested_by: cluster.restoring_by,
        key_since: cluster.key_since.map(encode_timestamp),
        key_rotation_requested_by: cluster.key_rotation_requested_by,
        keys_rejected_since: cluster.keys_rejected_since.map(encode_timestamp),
        kubernetes: kubernetes.map(encode_kubernetes),
        upgrade: upgrade.map(encode_upgrade),
        authority_rotation: encode_authority_rotation(cluster.authority_rotation, cluster.authority_progress),
        secrets_encryption: cluster.secret_keys.map(encode_secrets_encryption),
    }
}

fn encode_secrets_encryption(state: SecretKeys) -> v1::ClusterSecretsEncryption {
    v1::ClusterSecretsEncryption {
        stage: state.stage.as_str().to_owned(),
        since: Some(encode_timestamp(state.since)),
        key: state.current_key().map(SecretKey::name),
        rotation_ordered_by: state.rotation.map(|rotation| rotation.ordered_by),
    }
}

/// Encodes the replacement of an authority: the order, and how far the curators are.
fn encode_authority_rotation(
    order: Option<AuthorityRotationOrder>,
    progress: Option<AuthorityProgress>,
) -> Option<v1::ClusterAuthorityRotation> {
    if order.is_none() && progress.is_none() {
        return None;
    }
    let mut rotation = v1::ClusterAuthorityRotation::default();
    if let Some(order) = order {
        rotation.kind = Some(order.kind.as_str().to_owned());
        rotation.ordered_at = Some(encode_timestamp(order.ordered_at));
        rotation.ordered_by = Some(order.ordered_by);
    }
    if let Some(progress) = progress {
        let wait = |wait: AuthorityWait| v1::ClusterAuthorityWait { node: wait.node, reason: wait.reason };
        rotation.stage = Some(progress.stage);
        rotation.since = progress.since.map(encode_timestamp);
        rotation.waits_for = progress.waits_for.into_iter().map(wait).collect();
    }
    Some(rotation)
}

fn encode_machine(record: ClusterMachineRecord) -> v1::ClusterMachine {
    let ClusterMachineRecord { member, location, wait_reason, node, services, kubernetes, .. } = record;
    let (node, state, health, roles) = match node {
        Some(node) => (Some(node.id), Some(node.state), Some(node.health), node.roles),
        None => (None, None, None, Vec::new()),
    };
    v1::ClusterMachine {
        machine: member.machine.to_string(),
        name: member.name,
        part: member.part.to_string(),
        location,
        phase: member.phase.to_string(),
        node,
        state,
        health,
        roles,
        leave_reason: member.leave_reason,
        wait_reason,
        services: services.into_iter().map(encode_service).collect(),
        kubernetes: kubernetes.map(encode_node_kubernetes),
    }
}

fn encode_declaration(declaration: DeclarationView) -> v1::ClusterDeclaration {
    v1::ClusterDeclaration {
        role: declaration.role,
        services: declaration.services,
        digest: declaration.digest,
        declared_at: Some(encode_timestamp(declaration.declared_at)),
        declared_by: declaration.declared_by,
        withdrawn: declaration.withdrawn,
    }
}

fn encode_service(service: ServiceView) -> v1::ClusterServiceStatus {
    v1::ClusterServiceStatus {
        role: service.role,
        service: service.service,
        state: service.state,
        since: service.since.map(encode_timestamp),
        restarts: service.restarts,
        message: service.message,
    }
}
