//! Arguments, configuration and health check of the kubelet.
//!
//! It connects to the API servers through the node's own load balancer. The control groups of its pods are below one
//! that belongs to this role server, so that everything left of pods can be found and killed when the role ends.

use model::kubernetes::address_ranges::ClusterRanges;
use model::kubernetes::bundle_manifest::{BundleComponent, KUBELET, KubernetesDuty};
use model::kubernetes::version::ReleaseVersion;
use serde_json::json;

use crate::cluster::kubernetes::components::{
    ComponentContext, KUBECONFIG, containerd, local_check, service_id,
};
use crate::cluster::kubernetes::key_material::{CLIENT_CAS, SERVER_CAS};
use crate::cluster::kubernetes::pod_cgroups;
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedService};
use crate::cluster::services::workdir::WorkdirFile;

/// Service name of the kubelet.
pub const NAME: &str = KUBELET;
const CONFIG_FILE: &str = "config.json";
/// Add-on that resolves the names of services in pods.
const DNS_ADD_ON: &str = "dns";
/// The first version without the flag that selects a container runtime.
const RUNTIME_FLAG_REMOVED: ReleaseVersion = ReleaseVersion::new(1, 24, 0);
/// The first version that gets the pause image from containerd instead of a flag.
const PAUSE_FLAG_REMOVED: ReleaseVersion = ReleaseVersion::new(1, 35, 0);

/// Program, arguments and files that it is started with.
pub fn render_component(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    let files = vec![
        context.kubeconfig(context.ports.load_balancer, "kubelet"),
        WorkdirFile { path: CONFIG_FILE.to_owned(), contents: render_config(context), mode: 0o600 },
    ];
    let read_once = ["kubelet-server.crt", "kubelet-server.key", CLIENT_CAS, SERVER_CAS];
    context.render_component(BundleComponent::Kubelet, arguments(context), files, &read_once)
}

fn arguments(context: &ComponentContext<'_>) -> Vec<String> {
    let own = context.component_directory(&service_id(KubernetesDuty::Worker, NAME));
    let file = |name: &str| own.join(name).display().to_string();
    let version = context.bundle.manifest.kubernetes;
    let pause = context.bundle.find_image(containerd::PAUSE_IMAGE).map(|(image, _)| image.reference.clone());
    let mut flags = vec![
        ("cert-dir", file("certificates")),
        ("config", file(CONFIG_FILE)),
        ("container-runtime-endpoint", format!("unix://{}", containerd::socket_path(context).display())),
        ("hostname-override", context.node.to_owned()),
        ("kubeconfig", file(KUBECONFIG)),
        ("node-ip", context.address.to_string()),
        ("root-dir", file("root")),
    ];
    if version < RUNTIME_FLAG_REMOVED {
        flags.push(("container-runtime", "remote".to_owned()));
    }
    if let Some(pause) = pause.filter(|_| version < PAUSE_FLAG_REMOVED) {
        // Keeps the pause image from being garbage collected when the disk is full.
        flags.push(("pod-infra-container-image", pause));
    }
    flags.into_iter().map(|(name, value)| format!("--{name}={value}")).collect()
}

/// Its configuration (`kubelet.config.k8s.io/v1beta1`) as JSON, which is also YAML.
fn render_config(context: &ComponentContext<'_>) -> String {
    let (material, settings) = (context.material, context.setup.settings());
    let own = context.component_directory(&service_id(KubernetesDuty::Worker, NAME));
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": context.address,
        "port": context.ports.kubelet,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": context.ports.kubelet_health,
        "tlsCertFile": material.file_path("kubelet-server.crt"),
        "tlsPrivateKeyFile": material.file_path("kubelet-server.key"),
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": material.file_path(CLIENT_CAS)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": context.cgroup_driver.as_str(),
        // With the driver `systemd` the kubelet makes the name of a slice of it (`pod_cgroups::slice_name`).
        "cgroupRoot": format!("/{}", pod_cgroups::cgroup_name(context.instance_name)),
        "failSwapOn": false,
        "clusterDomain": settings.domain,
        "volumePluginDir": own.join("plugins"),
        // Images from the bundle could not be pulled again, so garbage collection is off.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi", "nodefs.available": "5%", "nodefs.inodesFree": "5%", "imagefs.available": "5%",
        },
    });
    let declared = settings.add_ons.iter().map(|add_on| add_on.name.as_str());
    let mut add_ons = declared.chain(context.bundle.add_ons().iter().map(|add_on| add_on.name.as_str()));
    let ranges = ClusterRanges::new(&settings.service_range, &settings.pod_range, settings.node_prefix);
    if add_ons.any(|name| name == DNS_ADD_ON)
        && let Ok(ranges) = ranges
    {
        config["clusterDNS"] = json!([ranges.dns_address()]);
    }
    format!("{config:#}\n")
}

/// Health check over HTTP on the loopback address.
#[must_use]
pub fn health_check(context: &ComponentContext<'_>) -> RenderedHealthCheck {
    local_check(context.ports.kubelet_health)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::cgroup_driver::CgroupDriver;
    use crate::cluster::kubernetes::components::tests::{bundle_of_version, lines, with_context};

    #[test]
    fn kubelet_arguments_match() {
        let arguments = with_context(|context| lines(&arguments(context)));
        insta::assert_snapshot!(arguments, @r#"
        --cert-dir=/state/cluster/kubernetes/kubernetes-worker_kubelet/certificates
        --config=/state/cluster/kubernetes/kubernetes-worker_kubelet/config.json
        --container-runtime-endpoint=unix:///state/cluster/kubernetes/kubernetes-worker_containerd/socket
        --hostname-override=node-00112233445566778899aabbccddeeff
        --kubeconfig=/state/cluster/kubernetes/kubernetes-worker_kubelet/kubeconfig.json
        --node-ip=10.0.0.7
        --root-dir=/state/cluster/kubernetes/kubernetes-worker_kubelet/root
        --container-runtime=remote
        --pod-infra-container-image=registry.k8s.io/pause:3.2
        "#);
        insta::assert_snapshot!(with_context(render_config), @r#"
        {
          "address": "10.0.0.7",
          "apiVersion": "kubelet.config.k8s.io/v1beta1",
          "authentication": {
            "anonymous": {
              "enabled": false
            },
            "webhook": {
              "enabled": true
            },
            "x509": {
              "clientCAFile": "/state/cluster/kubernetes/x/clients.crt"
            }
          },
          "authorization": {
            "mode": "Webhook"
          },
          "cgroupDriver": "cgroupfs",
          "cgroupRoot": "/roleserver-0123456789ab-pods",
          "clusterDomain": "cluster.local",
          "evictionHard": {
            "imagefs.available": "5%",
            "memory.available": "100Mi",
            "nodefs.available": "5%",
            "nodefs.inodesFree": "5%"
          },
          "failSwapOn": false,
          "healthzBindAddress": "127.0.0.1",
          "healthzPort": 10248,
          "imageGCHighThresholdPercent": 100,
          "kind": "KubeletConfiguration",
          "port": 10250,
          "readOnlyPort": 0,
          "tlsCertFile": "/state/cluster/kubernetes/x/kubelet-server.crt",
          "tlsPrivateKeyFile": "/state/cluster/kubernetes/x/kubelet-server.key",
          "volumePluginDir": "/state/cluster/kubernetes/kubernetes-worker_kubelet/plugins"
        }
        "#);
    }

    #[test]
    fn containerd_and_kubelet_have_the_same_cgroup_driver() {
        for (driver, in_containerd) in [(CgroupDriver::Cgroupfs, "false"), (CgroupDriver::Systemd, "true")] {
            let (config, containerd) = with_context(|context| {
                let context = ComponentContext { cgroup_driver: driver, ..*context };
                let containerd = containerd::render_component(&context).unwrap();
                (render_config(&context), containerd.files[0].contents.clone())
            });
            let config: serde_json::Value = serde_json::from_str(&config).unwrap();
            assert_eq!(config["cgroupDriver"], driver.as_str());
            assert_eq!(config["cgroupRoot"], "/roleserver-0123456789ab-pods");
            assert!(containerd.contains(&format!("SystemdCgroup = {in_containerd}\n")), "{containerd}");
        }
    }

    #[test]
    fn flags_match_the_kubernetes_version() {
        for (version, runtime, pause) in
            [((1, 23, 17), true, true), ((1, 24, 0), false, true), ((1, 35, 0), false, false)]
        {
            let bundle = bundle_of_version(ReleaseVersion::new(version.0, version.1, version.2));
            let text =
                with_context(|context| lines(&arguments(&ComponentContext { bundle: &bundle, ..*context })));
            assert_eq!(text.contains("--container-runtime=remote"), runtime, "{version:?}");
            assert_eq!(text.contains("--pod-infra-container-image"), pause, "{version:?}");
        }
    }

    #[test]
    fn cluster_dns_is_set_where_a_dns_add_on_exists() {
        use proto::curator::v1::KubernetesAddOn;

        use crate::cluster::kubernetes::setup::{NodeSetup, tests::wire_setup};
        let mut kubernetes_setup = wire_setup();
        let add_on = |name: &str| KubernetesAddOn { name: name.to_owned(), ..Default::default() };
        kubernetes_setup.settings.as_mut().unwrap().add_ons = vec![add_on("net"), add_on(DNS_ADD_ON)];
        let setup = NodeSetup::new(kubernetes_setup).unwrap();
        let config = with_context(|context| render_config(&ComponentContext { setup: &setup, ..*context }));
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["clusterDNS"], json!(["10.96.0.10"]));
    }
}
