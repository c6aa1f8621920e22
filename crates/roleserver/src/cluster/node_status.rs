//! Report the node's status to the curator.
//!
//! It is sent whenever it changes, and again when this runnable is restarted or [`REFRESH_INTERVAL`] has passed. A leader
//! of an earlier release stores only what it knows of a status, and a later one would miss the rest for as long as nothing
//! changes. The leader writes nothing if it has the same status already. A curator that refuses it gives the
//! reason, such as an address that the connection does not prove. The shepherd shows that reason until a report is
//! accepted.

use std::net::IpAddr;
use std::time::Duration;

use curator_client::status_text::describe_status;
use proto::curator::v1 as wire;
use proto::curator::v1::nodes_client::NodesClient;
use supervisor::combine::CombinedInputs;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::cluster::node_facts::{ControlPlane, CuratorConnection, NodeFacts};
use crate::cluster::node_problems::NodePart;

/// Pause between two reports: each one is a write in the cluster's etcd, and services may change often.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which a status is reported although it is the same.
pub const REFRESH_INTERVAL: Duration = Duration::from_mins(5);

/// Inputs of the node's status.
#[derive(Clone, Debug, Default)]
pub struct StatusInputs {
    /// Connection to the leader; `None` until this machine is a node.
    pub connection: Option<CuratorConnection>,
    /// Address at which other nodes connect to this one.
    pub address: Option<IpAddr>,
    /// This node's control plane; `None` while it does not run.
    pub control_plane: Option<ControlPlane>,
    /// Status of its services.
    pub services: Vec<wire::ServiceStatus>,
    /// Kubernetes status; `None` without Kubernetes.
    pub kubernetes: Option<wire::KubernetesStatus>,
    /// The authorities of the cluster that it uses; `None` until they are known.
    pub authority: Option<wire::AuthorityStatus>,
}

/// Combines the inputs of the status.
#[must_use]
pub fn status_inputs(facts: &NodeFacts) -> CombinedInputs<StatusInputs> {
    CombinedInputs::new(StatusInputs::default())
        .with(&facts.connection, |known: &mut StatusInputs, connection| known.connection = Some(connection))
        .with(&facts.address, |known: &mut StatusInputs, address| known.address = Some(address))
        .with(&facts.control_plane, |known: &mut StatusInputs, control_plane| {
            known.control_plane = control_plane;
        })
        .with(&facts.services, |known: &mut StatusInputs, services| known.services = services)
        .with(&facts.kubernetes, |known: &mut StatusInputs, kubernetes| known.kubernetes = kubernetes)
        .with(&facts.authority, |known: &mut StatusInputs, authority| known.authority = Some(authority))
}

/// Builds the status; `None` while the node's address is unknown.
#[must_use]
pub fn build_status(known: &StatusInputs, version: &str, boot_id: &str) -> Option<wire::NodeStatus> {
    Some(wire::NodeStatus {
        external_address: known.address?.to_string(),
        curator_port: known.control_plane.map_or(0, |control_plane| control_plane.port.into()),
        version: version.to_owned(),
        boot_id: boot_id.to_owned(),
        services: known.services.clone(),
        reported_at_ms: 0,
        kubernetes: known.kubernetes.clone(),
        authority: known.authority.clone(),
    })
}

/// Whether a status is reported. `last` is the one that was reported last, this long ago.
#[must_use]
pub fn is_report_due(last: Option<(&wire::NodeStatus, Duration)>, now: &wire::NodeStatus) -> bool {
    last.is_none_or(|(status, age)| status != now || age >= REFRESH_INTERVAL)
}

/// Makes the runnable that reports every change of the status.
#[must_use]
pub fn report_node_status(facts: NodeFacts, boot_id: String) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (facts, boot_id) = (facts.clone(), boot_id.clone());
        async move {
            let scope = starting.scope().clone();
            let mut starting = Some(starting);
            let mut inputs = status_inputs(&facts);
            let (mut known, mut healthy) = (StatusInputs::default(), None);
            let mut last = None::<(wire::NodeStatus, Instant)>;
            loop {
                let changed = tokio::time::timeout(REFRESH_INTERVAL, inputs.next());
                if let Ok(next) = scope.until_cancelled(changed).await? {
                    known = next;
                }
                let Some(connection) = &known.connection else { continue };
                let now = build_status(&known, env!("CARGO_PKG_VERSION"), &boot_id);
                let former = last.as_ref().map(|(status, at)| (status, at.elapsed()));
                let Some(now) = now.filter(|now| is_report_due(former, now)) else { continue };
                let mut nodes = NodesClient::new(connection.curators.channel());
                let request = wire::UpdateStatusRequest {
                    node_id: connection.id.to_string(),
                    status: Some(now.clone()),
                };
                let answer = scope.until_cancelled(nodes.update_status(request)).await?;
                let failure = answer.err();
                let refusal = failure.as_ref().filter(|status| status.code() == Code::FailedPrecondition);
                // A call that did not arrive decides nothing.
                if failure.is_none() || refusal.is_some() {
                    facts.problems.set(NodePart::Status, refusal.map(describe_failure));
                }
                if let Some(status) = failure {
                    return Err(RunnableError::msg(describe_failure(&status)));
                }
                last = Some((now, Instant::now()));
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.mark_healthy());
                }
                // Keep the healthy state until this run ends.
                let _ = &healthy;
                // Changes during the pause are sent in one report.
                scope.until_cancelled(tokio::time::sleep(REPORT_INTERVAL)).await?;
            }
        }
    })
}

fn describe_failure(status: &Status) -> String {
    format!("reporting the status of this node failed: {}", describe_status(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_reported_when_it_changes_and_again_after_a_while() {
        let (status, other) =
            (wire::NodeStatus::default(), wire::NodeStatus { curator_port: 1, ..Default::default() });
        let second = Duration::from_secs(1);
        assert!(is_report_due(None, &status), "it was never reported");
        for (last, age, due) in [
            (&other, Duration::ZERO, true),
            (&status, Duration::ZERO, false),
            (&status, REFRESH_INTERVAL.saturating_sub(second), false),
            // A leader of an earlier release may have stored a part of it.
            (&status, REFRESH_INTERVAL, true),
            (&other, REFRESH_INTERVAL, true),
        ] {
            assert_eq!(is_report_due(Some((last, age)), &status), due, "{age:?}");
        }
    }

    #[test]
    fn nothing_is_reported_before_the_address_is_known() {
        let services = vec![wire::ServiceStatus { service: "server".to_owned(), ..Default::default() }];
        let mut known = StatusInputs {
            services: services.clone(),
            control_plane: Some(ControlPlane { port: 7835 }),
            ..StatusInputs::default()
        };
        assert_eq!(build_status(&known, "1", "boot"), None);
        known.address = Some("10.0.0.1".parse().unwrap());
        let status = build_status(&known, "1", "boot").unwrap();
        assert_eq!((status.external_address.as_str(), status.curator_port), ("10.0.0.1", 7835));
        assert_eq!(status.services, services);
        known.control_plane = None;
        assert_eq!(build_status(&known, "1", "boot").unwrap().curator_port, 0);
    }
}
