//! Arguments, clean-up command and health check of kube-proxy.
//!
//! It forwards connections to service addresses with iptables rules, and needs the node's programs `iptables` and
//! `conntrack`. The rules stay when it stops, so that a restart interrupts nothing. When the role ends, kube-proxy is
//! run once more to remove them, with the command that is stored in its directory.
//!
//! The kernel's connection tracking limits belong to the host and are not changed.

use std::net::{Ipv4Addr, SocketAddr};

use model::kubernetes::bundle_manifest::{BundleComponent, KubernetesDuty};
use serde_json::json;

use crate::cluster::kubernetes::components::{
    ComponentContext, KUBECONFIG, format_flags, local_check, service_id,
};
use crate::cluster::kubernetes::key_material::SERVER_CAS;
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedService};
use crate::cluster::services::workdir::WorkdirFile;

/// Service name of kube-proxy.
pub const NAME: &str = "kube-proxy";
/// File with the command that removes its rules, below its directory: a JSON array of words.
pub const CLEAN_UP_FILE: &str = "clean-up.json";

/// Program, arguments and files that it is started with.
pub fn render_component(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    let program = context.bundle.program_path(BundleComponent::KubeProxy)?;
    let clean_up = json!([program, "--cleanup"]).to_string();
    let files = vec![
        WorkdirFile { path: CLEAN_UP_FILE.to_owned(), contents: clean_up, mode: 0o600 },
        context.kubeconfig(context.ports.load_balancer, "proxy"),
    ];
    context.render_component(BundleComponent::KubeProxy, arguments(context), files, &[SERVER_CAS])
}

fn arguments(context: &ComponentContext<'_>) -> Vec<String> {
    let kubeconfig = context
        .component_directory(&service_id(KubernetesDuty::Worker, NAME))
        .join(KUBECONFIG)
        .display()
        .to_string();
    let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)).to_string();
    format_flags([
        ("cluster-cidr", context.setup.settings().pod_range.as_str()),
        ("conntrack-max-per-core", "0"),
        ("conntrack-tcp-timeout-close-wait", "0s"),
        ("conntrack-tcp-timeout-established", "0s"),
        ("healthz-bind-address", &loopback(context.ports.proxy_health)),
        ("hostname-override", context.node),
        ("kubeconfig", &kubeconfig),
        ("metrics-bind-address", &loopback(context.ports.proxy_metrics)),
        ("proxy-mode", "iptables"),
    ])
}

/// Health check over HTTP on the loopback address.
#[must_use]
pub fn health_check(context: &ComponentContext<'_>) -> RenderedHealthCheck {
    local_check(context.ports.proxy_health)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::components::tests::{lines, with_context};

    #[test]
    fn proxy_arguments_and_clean_up_command_match() {
        let started = with_context(|context| render_component(context).unwrap());
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
