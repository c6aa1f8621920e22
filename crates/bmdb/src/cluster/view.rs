//! The view of a cluster: its record as people see it.

use crate::cluster::kubernetes::KubernetesRecord;
use crate::cluster::record::{ClusterDetails, ClusterMachineRecord};
use crate::cluster::upgrade::UpgradeRecord;
use model::cluster::kubernetes::KubernetesSpec;
use model::cluster::kubernetes_view::{BundleView, KubernetesView, UpgradeView};
use model::cluster::upgrade::BundleRef;
use model::cluster::view::{ClusterMachineView, ClusterView, RESTORING_STAGE, cluster_stage};

/// A cluster as people see it.
#[must_use]
pub fn cluster_view(found: &ClusterDetails) -> ClusterView {
    let ClusterDetails { cluster, machines, declarations, kubernetes, upgrade, .. } = found;
    let (deleting, founded) = (cluster.deleting.is_some(), cluster.founded.is_some());
    let stage = match &cluster.restoring {
        Some(_) if !deleting => RESTORING_STAGE,
        _ => cluster_stage(deleting, founded, machines.len(), cluster.converged),
    };
    let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
    ClusterView {
        name: cluster.spec.name.clone(),
        id: cluster.id.to_string(),
        stage: stage.to_owned(),
        control_plane: cluster.spec.control_plane,
        workers: cluster.spec.workers,
        selector: cluster.spec.selector.to_string(),
        roles: cluster.spec.roles.iter().cloned().collect(),
        approval: cluster.spec.approval.as_str().to_owned(),
        created_at: cluster.created_at,
        created_by: cluster.created_by.clone(),
        deletion_requested_by: cluster.deleting.as_ref().map(|(_, by)| by.clone()),
        curators: cluster.founded.as_ref().map(|founded| founded.curators.clone()).unwrap_or_default(),
        observed_at: cluster.observed_at,
        voters: cluster.voters.map(|(voters, _)| count(voters)),
        voters_reached: cluster.voters.map(|(_, reached)| count(reached)),
        snapshot_at: cluster.snapshots.last.as_ref().map(|last| last.at),
        epoch: cluster.epoch,
        restored_at: cluster.restored_at,
        restoring_from: cluster.restoring_from.map(|id| id.to_string()),
        restore_requested_by: cluster.restoring_by.clone(),
        key_since: cluster.key_since,
        key_rotation_requested_by: cluster.key_rotation_requested_by.clone(),
        keys_rejected_since: cluster.keys_rejected_since,
        wait_reasons: cluster.wait_reasons.clone(),
        machines: machines.iter().map(machine_view).collect(),
        declarations: declarations.clone(),
        kubernetes: kubernetes.as_ref().map(kubernetes_view),
        upgrade: upgrade.as_ref().map(upgrade_view),
    }
}

fn machine_view(line: &ClusterMachineRecord) -> ClusterMachineView {
    let (member, node) = (&line.member, line.node.as_ref());
    ClusterMachineView {
        machine: member.machine.to_string(),
        name: member.name.clone(),
        part: member.part.to_string(),
        location: line.location.clone(),
        phase: member.phase.to_string(),
        node: node.map(|node| node.id.clone()),
        state: node.map(|node| node.state.clone()),
        health: node.map(|node| node.health.clone()),
        roles: node.map(|node| node.roles.clone()).unwrap_or_default(),
        leave_reason: member.leave_reason.clone(),
        wait_reason: line.wait_reason.clone(),
        services: line.services.clone(),
        kubernetes: line.kubernetes.clone(),
    }
}

/// The Kubernetes of a cluster as people see it.
#[must_use]
fn kubernetes_view(line: &KubernetesRecord) -> KubernetesView {
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

/// An upgrade as people see it.
#[must_use]
fn upgrade_view(line: &UpgradeRecord) -> UpgradeView {
    let upgrade = &line.upgrade;
    let bundle =
        |bundle: &BundleRef| BundleView { sha256: bundle.digest.clone(), version: bundle.version.clone() };
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    UpgradeView {
        id: upgrade.id.clone(),
        from: upgrade.bundles.as_ref().map(|(from, _)| bundle(from)),
        to: upgrade.bundles.as_ref().map(|(_, to)| bundle(to)),
        release: line.release.clone(),
        roll_out: line.roll_out.clone(),
        release_done: line.roll_out_done,
        rolling_back: upgrade.rolling_back,
        parallelism: count(upgrade.parallelism),
        deadline_seconds: u32::try_from(upgrade.node_deadline.as_secs()).unwrap_or(u32::MAX),
        created_at: line.created_at,
        created_by: line.created_by.clone(),
        reason: line.reason.clone(),
        pause_reason: upgrade.pause_reason.clone(),
        ended_at: line.ended.as_ref().map(|(at, _)| *at),
        outcome: line.ended.as_ref().map(|(_, how)| how.clone()),
        requested_count: count(upgrade.requested_nodes.len()),
        completed_count: count(
            upgrade.requested_nodes.values().filter(|node_upgrade| node_upgrade.is_done).count(),
        ),
    }
}
