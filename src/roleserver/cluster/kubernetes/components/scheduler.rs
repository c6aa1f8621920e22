//! kube-scheduler. All nodes with the role run one; those elect their own leader through their API servers.

use std::net::SocketAddr;

use crate::model::kubernetes::bundle::{Component, Duty};
use crate::roleserver::cluster::kubernetes::components::{Around, KUBECONFIG, check, flags, id};
use crate::roleserver::cluster::kubernetes::material::{FRONT_PROXY, SERVERS};
use crate::roleserver::cluster::services::wanted::{Check, Rendered};

/// Its name.
pub const NAME: &str = "kube-scheduler";

/// What it is started with.
pub fn rendered(around: &Around<'_>) -> Result<Rendered, String> {
    let files = vec![around.kubeconfig(around.api_server(), "scheduler")];
    around.rendered(Component::KubeScheduler, arguments(around), files, &[SERVERS, FRONT_PROXY])
}

/// Its arguments.
#[must_use]
pub fn arguments(around: &Around<'_>) -> Vec<String> {
    let kubeconfig = around.own(&id(Duty::Controller, NAME)).join(KUBECONFIG).display().to_string();
    flags([
        ("authentication-kubeconfig", kubeconfig.as_str()),
        ("authorization-kubeconfig", &kubeconfig),
        ("bind-address", &around.address.to_string()),
        ("kubeconfig", &kubeconfig),
        ("leader-elect", "true"),
        ("profiling", "false"),
        ("requestheader-client-ca-file", &around.material.path(FRONT_PROXY)),
        ("secure-port", &around.ports.scheduler.to_string()),
    ])
}

/// How it is seen to be well: whoever asks that need not say who he is.
#[must_use]
pub fn looked_at(around: &Around<'_>) -> Check {
    check(SocketAddr::new(around.address, around.ports.scheduler), "/healthz", None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::{lines, with};

    #[test]
    fn scheduler_is_started_so() {
        let arguments = with(|around| lines(&arguments(around)));
        insta::assert_snapshot!(arguments, @r"
        --authentication-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-scheduler/kubeconfig.json
        --authorization-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-scheduler/kubeconfig.json
        --bind-address=10.0.0.7
        --kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-scheduler/kubeconfig.json
        --leader-elect=true
        --profiling=false
        --requestheader-client-ca-file=/state/cluster/kubernetes/x/front-proxy-authorities.crt
        --secure-port=10259
        ");
    }
}
