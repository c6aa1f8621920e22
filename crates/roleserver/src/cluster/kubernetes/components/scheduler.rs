//! Arguments and health check of kube-scheduler.
//!
//! All nodes with the role run one. They elect their leader through their API servers.

use std::net::SocketAddr;

use model::kubernetes::bundle_manifest::{BundleComponent, KubernetesDuty};

use crate::cluster::kubernetes::components::{
    ComponentContext, KUBECONFIG, RenderingRelease, close_plain_port, format_flags, https_check, service_id,
};
use crate::cluster::kubernetes::key_material::{CLIENT_CAS, FRONT_PROXY_CAS, SERVER_CAS};
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedService};

/// Service name of the scheduler.
pub const NAME: &str = "kube-scheduler";

/// Program, arguments and files that it is started with.
pub fn render_component(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    render_for(context, RenderingRelease::Present)
}

/// What a release before digests of the inputs rendered.
pub fn render_former(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    render_for(context, RenderingRelease::Former)
}

fn render_for(context: &ComponentContext<'_>, release: RenderingRelease) -> Result<RenderedService, String> {
    let files = vec![context.kubeconfig(context.api_server(), "scheduler")];
    let read_once = [SERVER_CAS, CLIENT_CAS, FRONT_PROXY_CAS];
    context.render_for(release, BundleComponent::KubeScheduler, arguments(context), files, &read_once)
}

fn arguments(context: &ComponentContext<'_>) -> Vec<String> {
    let kubeconfig = context
        .component_directory(&service_id(KubernetesDuty::Controller, NAME))
        .join(KUBECONFIG)
        .display()
        .to_string();
    let flags = format_flags([
        ("authentication-kubeconfig", kubeconfig.as_str()),
        ("authorization-kubeconfig", &kubeconfig),
        ("bind-address", &context.address.to_string()),
        // Without it, the authorities in a ConfigMap would be trusted. API servers add theirs there and remove none.
        ("client-ca-file", &context.material.file_path(CLIENT_CAS)),
        ("kubeconfig", &kubeconfig),
        ("leader-elect", "true"),
        ("profiling", "false"),
        ("requestheader-client-ca-file", &context.material.file_path(FRONT_PROXY_CAS)),
        ("secure-port", &context.ports.scheduler.to_string()),
    ]);
    close_plain_port(flags, context.bundle.manifest.kubernetes)
}

/// Health check over HTTPS on `/healthz`, which needs no client certificate.
#[must_use]
pub fn health_check(context: &ComponentContext<'_>) -> RenderedHealthCheck {
    https_check(SocketAddr::new(context.address, context.ports.scheduler), "/healthz", None)
}

#[cfg(test)]
mod tests {
    use model::kubernetes::version::ReleaseVersion;

    use super::*;
    use crate::cluster::kubernetes::components::tests::{
        assert_former_is_without_later_flags, bundle_of_version, lines, with_context,
    };

    #[test]
    fn scheduler_arguments_match() {
        let arguments = with_context(|context| lines(&arguments(context)));
        insta::assert_snapshot!(arguments, @r"
        --authentication-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-scheduler/kubeconfig.json
        --authorization-kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-scheduler/kubeconfig.json
        --bind-address=10.0.0.7
        --client-ca-file=/state/cluster/kubernetes/x/clients.crt
        --kubeconfig=/state/cluster/kubernetes/kubernetes-controller_kube-scheduler/kubeconfig.json
        --leader-elect=true
        --profiling=false
        --requestheader-client-ca-file=/state/cluster/kubernetes/x/front-proxy-authorities.crt
        --secure-port=10259
        --port=0
        ");
    }

    #[test]
    fn port_without_tls_is_closed_in_versions_that_have_one() {
        for (version, expected) in
            [((1, 20, 2), true), ((1, 23, 17), true), ((1, 24, 0), false), ((1, 36, 3), false)]
        {
            let bundle = bundle_of_version(ReleaseVersion::new(version.0, version.1, version.2));
            let text =
                with_context(|context| lines(&arguments(&ComponentContext { bundle: &bundle, ..*context })));
            assert_eq!(text.contains("--port=0"), expected, "{version:?}");
        }
    }

    #[test]
    fn former_rendering_is_without_later_flags() {
        let (present, former) =
            with_context(|context| (render_component(context).unwrap(), render_former(context).unwrap()));
        assert_former_is_without_later_flags(&present, &former);
    }
}
