//! Responses of curators: from messages on the wire to the model.
//!
//! Curators and nodes may be of a newer release. The state of a service, a kind of keys and the stage of a rotation that
//! this release does not have become general words, so that the rest of the response stays of use. A node without a
//! record, a state or a key is an error.

use std::time::Duration;

use chrono::DateTime;

use crate::curator_client::pki::TrustAnchor;
use crate::model::cluster::authority_rotation::{AuthorityProgress, AuthorityWait, ObservedAuthority};
use crate::model::cluster::declaration::ServiceView;
use crate::model::cluster::kubernetes::{
    CONTROLLER_ROLE, ComponentStatus, CuratorKubernetes, KeyPurpose, KubernetesKeyRotation, NodeKubernetes,
    ObjectConflict, WORKER_ROLE, spec_from_settings,
};
use crate::model::cluster::node_address::{AssignedAddress, NodeAddresses};
use crate::model::cluster::state::{CONSENSUS_MEMBER_ROLE, ClusterNode, NodeHealth, NodeState};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::node_health::Kind as HealthKind;
use crate::proto::curator::v1::service_status::Kind as ServiceKind;

/// Parses a node with its health and the status that it reported. The error names what is missing or wrong.
pub(super) fn parse_node(listed: wire::ListedNode) -> Result<ClusterNode, String> {
    let lacks = |what: &str| format!("a node without {what}");
    let node = listed.node.ok_or_else(|| lacks("a record"))?;
    let state = match node.state() {
        wire::NodeState::New => NodeState::New,
        wire::NodeState::Standby => NodeState::Standby,
        wire::NodeState::Up => NodeState::Up,
        wire::NodeState::Decommissioned => NodeState::Decommissioned,
        wire::NodeState::Unspecified => return Err(lacks("a state")),
    };
    let roles = node.roles.unwrap_or_default();
    let built_in = [
        (CONSENSUS_MEMBER_ROLE, roles.consensus_member.is_some()),
        (CONTROLLER_ROLE, roles.kubernetes_controller),
        (WORKER_ROLE, roles.kubernetes_worker),
    ];
    let built_in = built_in.into_iter().filter(|(_, given)| *given).map(|(role, _)| role.to_owned());
    let health = listed.health.unwrap_or_default();
    let status = node.status.unwrap_or_default();
    let addresses = NodeAddresses {
        recorded: status.external_address.parse().ok(),
        assigned: parse_assigned_address(listed.assigned_address.as_deref())?,
    };
    let silence = Duration::from_millis(health.since_heartbeat_ms.unwrap_or(0));
    Ok(ClusterNode {
        key: node.public_key.try_into().map_err(|_| lacks("a key of 32 bytes"))?,
        machine: node.machine_id.parse().ok(),
        state,
        roles: built_in.chain(roles.declared_roles).collect(),
        health: match health.kind() {
            HealthKind::Healthy => NodeHealth::Healthy,
            HealthKind::HeartbeatTimeout => NodeHealth::Silent(silence),
            HealthKind::Unknown | HealthKind::Unspecified => NodeHealth::Unknown,
        },
        services: status.services.into_iter().map(parse_service).collect(),
        kubernetes: status.kubernetes.map(parse_node_kubernetes),
        addresses,
        id: node.node_id,
    })
}

fn parse_assigned_address(text: Option<&str>) -> Result<AssignedAddress, String> {
    match text {
        None => Ok(AssignedAddress::Unknown),
        Some("") => Ok(AssignedAddress::Nothing),
        Some(text) => match text.parse() {
            Ok(address) => Ok(AssignedAddress::Address(address)),
            Err(_) => Err("a node with an assigned address that is not an IP address".to_owned()),
        },
    }
}

fn parse_service(status: wire::ServiceStatus) -> ServiceView {
    ServiceView {
        state: service_state_name(status.kind()).to_owned(),
        since: DateTime::from_timestamp_millis(status.since_ms),
        role: status.role,
        service: status.service,
        restarts: status.restarts,
        message: status.message,
    }
}

/// Parses the state of Kubernetes in a cluster.
pub(super) fn parse_kubernetes(response: wire::GetKubernetesResponse) -> CuratorKubernetes {
    CuratorKubernetes {
        spec: spec_from_settings(response.settings.unwrap_or_default()),
        assigned_bundles: response.assigned_bundles.into_iter().collect(),
        rotations: response.rotations.into_iter().map(parse_rotation).collect(),
        api_servers: response.api_servers,
    }
}

fn parse_rotation(rotation: wire::KubernetesRotation) -> KubernetesKeyRotation {
    use wire::kubernetes_rotation::Stage;
    let moment = |ms: i64| Some(ms).filter(|ms| *ms != 0).and_then(DateTime::from_timestamp_millis);
    KubernetesKeyRotation {
        // Newer curators may name keys that this release does not have.
        keys: KeyPurpose::from_wire(rotation.keys()).map_or("keys", KeyPurpose::as_str).to_owned(),
        stage: match rotation.stage() {
            Stage::Trusted => "trusted",
            Stage::Signing => "signs",
            Stage::Unspecified => "unknown",
        }
        .to_owned(),
        since: moment(rotation.since_ms),
        until: moment(rotation.until_ms),
        notified_at: moment(rotation.notified_at_ms),
        blocked_by: rotation.blocked_by,
        waits_for: rotation.waits_for,
    }
}

/// Parses what the curators report of the authority. A certificate that is none is treated as not reported.
pub(super) fn parse_authority(cluster: &wire::GetClusterResponse) -> ObservedAuthority {
    let certificate = cluster.directory.as_ref().map(|directory| directory.ca_certificate.as_slice());
    ObservedAuthority {
        signer: certificate
            .and_then(|certificate| TrustAnchor::parse(certificate).ok())
            .map(|anchor| anchor.fingerprint()),
        progress: cluster.authority_rotation.as_ref().map(parse_authority_rotation),
    }
}

fn parse_authority_rotation(rotation: &wire::AuthorityRotation) -> AuthorityProgress {
    let wait = |wait: &wire::AuthorityWait| AuthorityWait {
        node: wait.node_id.clone(),
        reason: wait.reason.clone(),
    };
    AuthorityProgress {
        stage: match rotation.stage() {
            wire::AuthorityStage::Trusted => "trusted",
            wire::AuthorityStage::Signing => "signing",
            wire::AuthorityStage::Dropping => "dropping",
            // Newer curators may have stages that this release does not have.
            wire::AuthorityStage::Unspecified => "unknown",
        }
        .to_owned(),
        since: DateTime::from_timestamp_millis(rotation.since_ms),
        waits_for: rotation.waits_for.iter().map(wait).collect(),
    }
}

/// Parses the Kubernetes status that a node reported.
fn parse_node_kubernetes(status: wire::KubernetesStatus) -> NodeKubernetes {
    let component = |status: wire::KubernetesComponentStatus| ComponentStatus {
        state: service_state_name(status.kind()).to_owned(),
        since: DateTime::from_timestamp_millis(status.since_ms),
        name: status.name,
        restarts: status.restarts,
        message: status.message,
    };
    let conflict = |conflict: wire::KubernetesObjectConflict| ObjectConflict {
        kind: conflict.kind,
        name: conflict.name,
        message: conflict.message,
    };
    NodeKubernetes {
        bundle: status.bundle,
        version: status.version,
        components: status.components.into_iter().map(component).collect(),
        wait_reason: status.wait_reason,
        is_reconciler: status.is_reconciler,
        conflicts: status.conflicts.into_iter().map(conflict).collect(),
    }
}

/// The state of a service or a component as text for people.
const fn service_state_name(kind: ServiceKind) -> &'static str {
    match kind {
        // A newer node may send a state that this release does not have.
        ServiceKind::Unspecified => "unknown",
        ServiceKind::Waiting => "waiting",
        ServiceKind::Starting => "starting",
        ServiceKind::Healthy => "healthy",
        ServiceKind::Unhealthy => "unhealthy",
        ServiceKind::BackingOff => "backing off",
        ServiceKind::Ended => "ended",
        ServiceKind::Stopping => "stopping",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator_client::testing::authority;

    #[test]
    fn addresses_of_a_node_are_the_recorded_and_the_assigned_one() {
        let listed = |recorded: &str, assigned: Option<&str>| wire::ListedNode {
            node: Some(wire::Node {
                public_key: vec![7; 32],
                state: wire::NodeState::Up.into(),
                status: Some(wire::NodeStatus {
                    external_address: recorded.to_owned(),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            assigned_address: assigned.map(str::to_owned),
            ..Default::default()
        };
        let ip = |text: &str| text.parse::<std::net::IpAddr>().unwrap();
        for (recorded, assigned, expected) in [
            ("10.0.0.7", None, (Some(ip("10.0.0.7")), AssignedAddress::Unknown)),
            ("10.0.0.7", Some(""), (Some(ip("10.0.0.7")), AssignedAddress::Nothing)),
            ("", Some("10.0.0.8"), (None, AssignedAddress::Address(ip("10.0.0.8")))),
        ] {
            let addresses = parse_node(listed(recorded, assigned)).unwrap().addresses;
            assert_eq!((addresses.recorded, addresses.assigned), expected, "{assigned:?}");
        }
        let error = parse_node(listed("10.0.0.7", Some("m7"))).unwrap_err();
        assert_eq!(error, "a node with an assigned address that is not an IP address");
    }

    #[test]
    fn authority_is_known_by_its_certificate() {
        let signer = authority(1).anchor().clone();
        let answer = |ca_certificate: &[u8], stage: i32| wire::GetClusterResponse {
            directory: Some(wire::Directory {
                ca_certificate: ca_certificate.to_vec(),
                ..Default::default()
            }),
            authority_rotation: Some(wire::AuthorityRotation {
                stage,
                since_ms: 1_000,
                waits_for: vec![wire::AuthorityWait {
                    node_id: "n".to_owned(),
                    reason: "it is slow".to_owned(),
                }],
            }),
            ..Default::default()
        };
        let digest = Some(signer.fingerprint());
        for (certificate, stage, expected) in [
            (signer.certificate.as_slice(), 2, (digest.clone(), "signing")),
            // A stage of a later release.
            (signer.certificate.as_slice(), 99, (digest, "unknown")),
            (b"none".as_slice(), 1, (None, "trusted")),
        ] {
            let observed = parse_authority(&answer(certificate, stage));
            let progress = observed.progress.unwrap();
            assert_eq!((observed.signer, progress.stage.as_str()), expected);
            assert_eq!(progress.since, DateTime::from_timestamp(1, 0));
            assert_eq!(progress.waits_for[0].node, "n");
        }
        assert_eq!(parse_authority(&wire::GetClusterResponse::default()), ObservedAuthority::default());
    }
}
