//! Fetch clusters, and decode them into the types that commands print.

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::cluster::kubernetes::decode::{decode_kubernetes, decode_node_kubernetes, decode_upgrade};
use crate::cluster::view::{AuthorityRotationView, ClusterMachineView, ClusterView, SecretsEncryptionView};
use crate::error::CliError;
use model::cluster::authority_rotation::AuthorityWait;
use model::cluster::declaration::{DeclarationView, ServiceView};
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

/// The cluster of that name, or every cluster, as the API sends it, and the time of the answer.
pub(super) async fn fetch_cluster_messages(
    client: &FleetClient,
    name: Option<&str>,
) -> Result<(Vec<v1::Cluster>, Timestamp), CliError> {
    let request = v1::ListClustersRequest { name: name.unwrap_or_default().to_owned() };
    let result = ClustersClient::new(client.channel()).list(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    Ok((response.clusters, now))
}

/// Decodes a cluster as the API sends it.
pub(crate) fn decode_cluster(cluster: v1::Cluster) -> Result<ClusterView, CliError> {
    Ok(ClusterView {
        name: cluster.name,
        id: cluster.id,
        stage: cluster.stage,
        control_plane: cluster.control_plane,
        workers: cluster.workers,
        selector: cluster.selector,
        roles: cluster.roles,
        approval: cluster.approval,
        created_at: require_timestamp(cluster.created_at, "the time when a cluster was requested")?,
        created_by: cluster.created_by,
        deletion_requested_by: cluster.deletion_requested_by,
        curators: cluster.curators,
        observed_at: cluster.observed_at.and_then(decode_timestamp),
        snapshot_at: cluster.snapshot_at.and_then(decode_timestamp),
        epoch: cluster.epoch,
        restored_at: cluster.restored_at.and_then(decode_timestamp),
        restoring_from: cluster.restoring_from,
        restore_requested_by: cluster.restore_requested_by,
        key_since: cluster.key_since.and_then(decode_timestamp),
        key_rotation_requested_by: cluster.key_rotation_requested_by,
        keys_rejected_since: cluster.keys_rejected_since.and_then(decode_timestamp),
        voters: cluster.voters,
        voters_reached: cluster.voters_reached,
        wait_reasons: cluster.wait_reasons,
        machines: cluster.machines.into_iter().map(decode_machine).collect(),
        declarations: cluster.declarations.into_iter().map(decode_declaration).collect::<Result<_, _>>()?,
        kubernetes: cluster.kubernetes.map(decode_kubernetes).transpose()?,
        upgrade: cluster.upgrade.map(decode_upgrade).transpose()?,
        authority_rotation: cluster.authority_rotation.map(decode_authority_rotation),
        secrets_encryption: cluster.secrets_encryption.map(decode_secrets_encryption).transpose()?,
    })
}

fn decode_authority_rotation(rotation: v1::ClusterAuthorityRotation) -> AuthorityRotationView {
    let wait = |wait: v1::ClusterAuthorityWait| AuthorityWait { node: wait.node, reason: wait.reason };
    AuthorityRotationView {
        kind: rotation.kind,
        ordered_at: rotation.ordered_at.and_then(decode_timestamp),
        ordered_by: rotation.ordered_by,
        stage: rotation.stage,
        since: rotation.since.and_then(decode_timestamp),
        waits_for: rotation.waits_for.into_iter().map(wait).collect(),
    }
}

fn decode_secrets_encryption(
    secrets: v1::ClusterSecretsEncryption,
) -> Result<SecretsEncryptionView, CliError> {
    Ok(SecretsEncryptionView {
        stage: secrets.stage,
        since: require_timestamp(secrets.since, "the time when a stage of Secrets began")?,
        key: secrets.key,
        rotation_ordered_by: secrets.rotation_ordered_by,
    })
}

fn decode_declaration(declaration: v1::ClusterDeclaration) -> Result<DeclarationView, CliError> {
    Ok(DeclarationView {
        role: declaration.role,
        services: declaration.services,
        digest: declaration.digest,
        declared_at: require_timestamp(declaration.declared_at, "the time when a role was declared")?,
        declared_by: declaration.declared_by,
        withdrawn: declaration.withdrawn,
    })
}

fn decode_machine(machine: v1::ClusterMachine) -> ClusterMachineView {
    ClusterMachineView {
        machine: machine.machine,
        name: machine.name,
        part: machine.part,
        location: machine.location,
        phase: machine.phase,
        node: machine.node,
        state: machine.state,
        health: machine.health,
        roles: machine.roles,
        leave_reason: machine.leave_reason,
        wait_reason: machine.wait_reason,
        services: machine.services.into_iter().map(decode_service).collect(),
        kubernetes: machine.kubernetes.map(decode_node_kubernetes),
    }
}

fn decode_service(service: v1::ClusterServiceStatus) -> ServiceView {
    ServiceView {
        role: service.role,
        service: service.service,
        state: service.state,
        since: service.since.and_then(decode_timestamp),
        restarts: service.restarts,
        message: service.message,
    }
}
