//! kube-controller-manager.
//!
//! All nodes with the role run one; those elect their own leader through their API servers. Nodes get their ranges for pods
//! from the curator, and certificates too, so that it allots none and signs none.

use std::net::SocketAddr;

use crate::model::kubernetes::bundle::{Component, Duty};
use crate::roleserver::cluster::kubernetes::components::{Around, KUBECONFIG, check, flags, id};
use crate::roleserver::cluster::kubernetes::material::{FRONT_PROXY, SERVERS, SIGNING_KEY};
use crate::roleserver::cluster::services::wanted::{Check, Rendered};

/// Its name.
pub const NAME: &str = "kube-controller-manager";

/// What it is started with.
pub fn rendered(around: &Around<'_>) -> Result<Rendered, String> {
    let files = vec![around.kubeconfig(around.api_server(), "controller-manager")];
    let read_once = [SERVERS, SIGNING_KEY, FRONT_PROXY];
    around.rendered(Component::KubeControllerManager, arguments(around), files, &read_once)
}

/// Its arguments.
#[must_use]
pub fn arguments(around: &Around<'_>) -> Vec<String> {
    let (material, settings) = (around.material, around.setup.settings());
    let kubeconfig = around.own(&id(Duty::Controller, NAME)).join(KUBECONFIG).display().to_string();
    flags([
        ("allocate-node-cidrs", "false"),
        ("authentication-kubeconfig", kubeconfig.as_str()),
        ("authorization-kubeconfig", &kubeconfig),
        ("bind-address", &around.address.to_string()),
        ("cluster-cidr", &settings.pod_range),
        ("kubeconfig", &kubeconfig),
        ("leader-elect", "true"),
        ("profiling", "false"),
        ("requestheader-client-ca-file", &material.path(FRONT_PROXY)),
        ("root-ca-file", &material.path(SERVERS)),
        ("secure-port", &around.ports.controller_manager.to_string()),
        ("service-account-private-key-file", &material.path(SIGNING_KEY)),
        ("service-cluster-ip-range", &settings.service_range),
        ("use-service-account-credentials", "true"),
    ])
}

/// How it is seen to be well: whoever asks that need not say who he is.
#[must_use]
pub fn looked_at(around: &Around<'_>) -> Check {
    check(SocketAddr::new(around.address, around.ports.controller_manager), "/healthz", None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::{lines, with};

    #[test]
    fn controller_manager_is_started_so() {
        let arguments = with(|around| lines(&arguments(around)));
        insta::assert_snapshot!(arguments, @r"
        --allocate-node-cidrs=false
        --authentication-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-controller-manager/kubeconfig.json
        --authorization-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-controller-manager/kubeconfig.json
        --bind-address=10.0.0.7
        --cluster-cidr=10.128.0.0/12
        --kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-controller-manager/kubeconfig.json
        --leader-elect=true
        --profiling=false
        --requestheader-client-ca-file=/state/cluster/kubernetes/x/front-proxy-authorities.crt
        --root-ca-file=/state/cluster/kubernetes/x/servers.crt
        --secure-port=10257
        --service-account-private-key-file=/state/cluster/kubernetes/x/service-accounts.key
        --service-cluster-ip-range=10.96.0.0/16
        --use-service-account-credentials=true
        ");
    }
}
