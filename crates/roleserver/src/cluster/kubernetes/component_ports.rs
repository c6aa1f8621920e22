//! Listen ports of Kubernetes components.
//!
//! Only the API server (6443), the kubelet (10250), the controller manager and the scheduler listen at the node's
//! address. This allows several nodes of a test to run on one host. Other nodes connect to 6443, which curators publish
//! to everyone, and to 10250. The remaining ports serve health checks and metrics.

use std::net::{Ipv4Addr, SocketAddr};

/// Ports that the components of a node listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentPorts {
    /// API server, at the node's address.
    pub api_server: u16,
    /// Controller manager, at the node's address.
    pub controller_manager: u16,
    /// Scheduler, at the node's address.
    pub scheduler: u16,
    /// Kubelet API, at the node's address.
    pub kubelet: u16,
    /// Health check of the kubelet, on the loopback address.
    pub kubelet_health: u16,
    /// Health check of kube-proxy, on the loopback address.
    pub proxy_health: u16,
    /// Metrics of kube-proxy, on the loopback address.
    pub proxy_metrics: u16,
    /// Address at which a worker's components connect to the API servers.
    pub load_balancer: SocketAddr,
}

impl Default for ComponentPorts {
    /// The default ports of Kubernetes, and 127.0.0.1:6445 for the load balancer.
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
