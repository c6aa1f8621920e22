//! kube-proxy, which brings what is sent to a service to its pods.
//!
//! It writes rules of iptables, with the programs `iptables` and `conntrack` of the node. They stay when it ends, so that a
//! restart interrupts nothing; when the role goes it is run once more to remove them, and finds in its directory with what.
//!
//! Connections that the kernel keeps track of are the host's affair: how many there may be is not changed.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::json;

use crate::model::kubernetes::bundle::{Component, Duty};
use crate::roleserver::cluster::kubernetes::components::{Around, KUBECONFIG, check_here, flags, id};
use crate::roleserver::cluster::kubernetes::material::SERVERS;
use crate::roleserver::cluster::services::placing::Placed;
use crate::roleserver::cluster::services::wanted::{Check, Rendered};

/// Its name.
pub const NAME: &str = "kube-proxy";
/// The command that removes its rules, below its directory: words in JSON.
pub const CLEAN_UP: &str = "clean-up.json";

/// What it is started with.
pub fn rendered(around: &Around<'_>) -> Result<Rendered, String> {
    let program = around.bundle.program(Component::KubeProxy)?;
    let clean_up = json!([program, "--cleanup"]).to_string();
    let files = vec![
        Placed { path: CLEAN_UP.to_owned(), contents: clean_up, mode: 0o600 },
        around.kubeconfig(around.ports.load_balancer, "proxy"),
    ];
    around.rendered(Component::KubeProxy, arguments(around), files, &[SERVERS])
}

/// Its arguments.
#[must_use]
pub fn arguments(around: &Around<'_>) -> Vec<String> {
    let kubeconfig = around.own(&id(Duty::Worker, NAME)).join(KUBECONFIG).display().to_string();
    let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string();
    flags([
        ("cluster-cidr", around.setup.settings().pod_range.as_str()),
        ("conntrack-max-per-core", "0"),
        ("conntrack-tcp-timeout-close-wait", "0s"),
        ("conntrack-tcp-timeout-established", "0s"),
        ("healthz-bind-address", &loopback(around.ports.proxy_health)),
        ("hostname-override", around.node),
        ("kubeconfig", &kubeconfig),
        ("metrics-bind-address", &loopback(around.ports.proxy_metrics)),
        ("proxy-mode", "iptables"),
    ])
}

/// How it is seen to be well.
#[must_use]
pub fn looked_at(around: &Around<'_>) -> Check {
    check_here(around.ports.proxy_health)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::{lines, with};

    #[test]
    fn proxy_is_started_so_and_says_how_its_rules_go() {
        let started = with(|around| rendered(around).unwrap());
        insta::assert_snapshot!(lines(&started.arguments), @r#"
        --cluster-cidr=10.128.0.0/12
        --conntrack-max-per-core=0
        --conntrack-tcp-timeout-close-wait=0s
        --conntrack-tcp-timeout-established=0s
        --healthz-bind-address=127.0.0.1:10256
        --hostname-override=node-00112233445566778899aabbccddeeff
        --kubeconfig=/state/cluster/kubernetes/kubernetes-worker_kube-proxy/kubeconfig.json
        --metrics-bind-address=127.0.0.1:10249
        --proxy-mode=iptables
        "#);
        assert_eq!(started.files[0].contents, "[\"/bundle/bin/kube-proxy\",\"--cleanup\"]");
        assert!(started.files[1].contents.contains("https://127.0.0.1:6445"));
    }
}
