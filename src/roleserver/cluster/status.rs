//! What this node says of itself: whenever it changes, and all of it anew when this starts again.

use std::net::IpAddr;
use std::time::Duration;

use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::nodes_client::NodesClient;
use crate::roleserver::cluster::facts::{Connection, ControlPlane, Facts};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::reduce::Inputs;

/// Between two reports: each is a write of the cluster, and services may change often.
const PAUSE: Duration = Duration::from_secs(1);

/// What is known of this node.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Its way to the leader.
    pub connection: Option<Connection>,
    /// Where others reach it.
    pub address: Option<IpAddr>,
    /// Whether it runs a control plane.
    pub control_plane: Option<ControlPlane>,
    /// How its services do.
    pub services: Vec<wire::ServiceStatus>,
    /// How Kubernetes does on it.
    pub kubernetes: Option<wire::KubernetesStatus>,
}

/// What it follows from, together.
#[must_use]
pub fn inputs(facts: &Facts) -> Inputs<Known> {
    Inputs::new(Known::default())
        .with(&facts.connection, |known: &mut Known, connection| known.connection = Some(connection))
        .with(&facts.address, |known: &mut Known, address| known.address = Some(address))
        .with(&facts.control_plane, |known: &mut Known, control_plane| known.control_plane = control_plane)
        .with(&facts.services, |known: &mut Known, services| known.services = services)
        .with(&facts.kubernetes, |known: &mut Known, kubernetes| known.kubernetes = kubernetes)
}

/// Decides what is said; nothing while nobody knows where the node is.
#[must_use]
pub fn decide(known: &Known, version: &str, boot_id: &str) -> Option<wire::NodeStatus> {
    Some(wire::NodeStatus {
        external_address: known.address?.to_string(),
        curator_port: known.control_plane.map_or(0, |control_plane| control_plane.port.into()),
        version: version.to_owned(),
        boot_id: boot_id.to_owned(),
        services: known.services.clone(),
        reported_at_ms: 0,
        kubernetes: known.kubernetes.clone(),
    })
}

/// The runnable.
#[must_use]
pub fn status(facts: Facts, boot_id: String) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (facts, boot_id) = (facts.clone(), boot_id.clone());
        async move {
            let scope = starting.scope().clone();
            let mut starting = Some(starting);
            let mut inputs = inputs(&facts);
            let (mut said, mut healthy) = (None, None);
            loop {
                let known = scope.until_cancelled(inputs.next()).await?;
                let Some(connection) = &known.connection else { continue };
                let now = decide(&known, env!("CARGO_PKG_VERSION"), &boot_id);
                let Some(now) = now.filter(|now| said.as_ref() != Some(now)) else { continue };
                let mut nodes = NodesClient::new(connection.curators.channel());
                let request = wire::UpdateStatusRequest {
                    node_id: connection.id.to_string(),
                    status: Some(now.clone()),
                };
                let answer = scope.until_cancelled(nodes.update_status(request)).await?;
                answer.map_err(|status| {
                    Stop::because(format!("saying how this node is was refused: {}", status.message()))
                })?;
                said = Some(now);
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.healthy());
                }
                // Held until the end of this life.
                let _ = &healthy;
                // What changes meanwhile is said together.
                scope.until_cancelled(tokio::time::sleep(PAUSE)).await?;
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_before_the_address_is_known_and_all_of_it_then() {
        let services = vec![wire::ServiceStatus { service: "server".to_owned(), ..Default::default() }];
        let mut known = Known {
            services: services.clone(),
            control_plane: Some(ControlPlane { port: 7835 }),
            ..Known::default()
        };
        assert_eq!(decide(&known, "1", "boot"), None);
        known.address = Some("10.0.0.1".parse().unwrap());
        let said = decide(&known, "1", "boot").unwrap();
        assert_eq!((said.external_address.as_str(), said.curator_port), ("10.0.0.1", 7835));
        assert_eq!(said.services, services);
        known.control_plane = None;
        assert_eq!(decide(&known, "1", "boot").unwrap().curator_port, 0);
    }
}
