//! Arguments and health check of kube-controller-manager.
//!
//! All nodes with the role run one. They elect their leader through their API servers. The curator assigns pod ranges
//! to nodes and issues certificates, so the controller manager does neither.

use std::net::SocketAddr;

use model::kubernetes::bundle_manifest::{BundleComponent, KubernetesDuty};

use crate::cluster::kubernetes::components::{
    ComponentContext, KUBECONFIG, RenderingRelease, close_plain_port, format_flags, https_check, service_id,
};
use crate::cluster::kubernetes::key_material::{CLIENT_CAS, FRONT_PROXY_CAS, SERVER_CAS, SIGNING_KEY};
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedService};

/// Service name of the controller manager.
pub const NAME: &str = "kube-controller-manager";

/// Program, arguments and files that it is started with.
pub fn render_component(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    render_for(context, RenderingRelease::Present)
}

/// What a release before digests of the inputs rendered.
pub fn render_former(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    render_for(context, RenderingRelease::Former)
}

fn render_for(context: &ComponentContext<'_>, release: RenderingRelease) -> Result<RenderedService, String> {
    let files = vec![context.kubeconfig(context.api_server(), "controller-manager")];
    let read_once = [SERVER_CAS, SIGNING_KEY, CLIENT_CAS, FRONT_PROXY_CAS];
    context.render_for(release, BundleComponent::KubeControllerManager, arguments(context), files, &read_once)
}

fn arguments(context: &ComponentContext<'_>) -> Vec<String> {
    let (material, settings) = (context.material, context.setup.settings());
    let kubeconfig = context
        .component_directory(&service_id(KubernetesDuty::Controller, NAME))
        .join(KUBECONFIG)
        .display()
        .to_string();
    let flags = format_flags([
        ("allocate-node-cidrs", "false"),
        ("authentication-kubeconfig", kubeconfig.as_str()),
        ("authorization-kubeconfig", &kubeconfig),
        ("bind-address", &context.address.to_string()),
        // Without it, the authorities in a ConfigMap would be trusted. API servers add theirs there and remove none.
        ("client-ca-file", &material.file_path(CLIENT_CAS)),
        ("cluster-cidr", &settings.pod_range),
        ("kubeconfig", &kubeconfig),
        ("leader-elect", "true"),
        ("profiling", "false"),
        ("requestheader-client-ca-file", &material.file_path(FRONT_PROXY_CAS)),
        ("root-ca-file", &material.file_path(SERVER_CAS)),
        ("secure-port", &context.ports.controller_manager.to_string()),
        ("service-account-private-key-file", &material.file_path(SIGNING_KEY)),
        ("service-cluster-ip-range", &settings.service_range),
        ("use-service-account-credentials", "true"),
    ]);
    close_plain_port(flags, context.bundle.manifest.kubernetes)
}

/// Health check over HTTPS on `/healthz`, which needs no client certificate.
#[must_use]
pub fn health_check(context: &ComponentContext<'_>) -> RenderedHealthCheck {
    https_check(SocketAddr::new(context.address, context.ports.controller_manager), "/healthz", None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::components::tests::{
        assert_former_is_without_later_flags, lines, with_context,
    };

    #[test]
    fn controller_manager_arguments_match() {
        let arguments = with_context(|context| lines(&arguments(context)));
        insta::assert_snapshot!(arguments, @r"
        --allocate-node-cidrs=false
        --authentication-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-controller-manager/kubeconfig.json
        --authorization-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-controller-manager/kubeconfig.json
        --bind-address=10.0.0.7
        --client-ca-file=/state/cluster/kubernetes/x/clients.crt
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
        --port=0
        ");
    }

    #[test]
    fn former_rendering_is_without_later_flags() {
        let (present, former) =
            with_context(|context| (render_component(context).unwrap(), render_former(context).unwrap()));
        assert_former_is_without_later_flags(&present, &former);
    }
}
