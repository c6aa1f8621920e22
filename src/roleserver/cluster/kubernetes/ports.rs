//! Where the components of Kubernetes listen.
//!
//! All of these but the load balancer's are at the address of the node, so that nodes of a test can stand beside each other
//! on one host. Others reach 6443 and 10250 (curators tell the former to everybody); the rest is for
//! looks at the components' health and for metrics, and asks who one is.

use std::net::{Ipv4Addr, SocketAddr};

/// The ports of a node's components.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ports {
    /// The API server.
    pub api_server: u16,
    /// The controller manager.
    pub controller_manager: u16,
    /// The scheduler.
    pub scheduler: u16,
    /// The kubelet.
    pub kubelet: u16,
    /// Whether the kubelet is well.
    pub kubelet_health: u16,
    /// Whether the proxy for services is well.
    pub proxy_health: u16,
    /// What the proxy for services counts.
    pub proxy_metrics: u16,
    /// Where a worker's components find whatever API server answers.
    pub load_balancer: SocketAddr,
}

impl Default for Ports {
    /// Those that Kubernetes itself has, and 6445 of the loopback.
    fn default() -> Self {
        Self {
            api_server: 6443,
            controller_manager: 10257,
            scheduler: 10259,
            kubelet: 10250,
            kubelet_health: 10248,
            proxy_health: 10256,
            proxy_metrics: 10249,
            load_balancer: SocketAddr::from((Ipv4Addr::LOCALHOST, 6445)),
        }
    }
}
