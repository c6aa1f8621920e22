//! kubelet, which has the node's pods run.
//!
//! It reaches whatever API server answers through the node's own load balancer. The groups of its pods are below one that
//! is this role server's, so that all that is left of pods can be found and ended when the role goes.

use serde_json::json;

use crate::model::kubernetes::bundle::{Component, Duty, KUBELET};
use crate::model::kubernetes::ranges::Ranges;
use crate::model::kubernetes::version::Version;
use crate::roleserver::cluster::kubernetes::components::{Around, KUBECONFIG, check_here, containerd, id};
use crate::roleserver::cluster::kubernetes::groups;
use crate::roleserver::cluster::kubernetes::material::{CLIENTS, SERVERS};
use crate::roleserver::cluster::services::placing::Placed;
use crate::roleserver::cluster::services::wanted::{Check, Rendered};

/// Its name.
pub const NAME: &str = KUBELET;
const CONFIG: &str = "config.json";
/// The add-on by which pods find each other's names.
const DNS: &str = "dns";
/// From this version on there are no other runtimes to choose among, and the flags about that go.
const RUNTIME_IS_CHOSEN: Version = Version::new(1, 24, 0);
/// From this version on containerd is asked which image no pod begins without.
const PAUSE_IS_ASKED_FOR: Version = Version::new(1, 35, 0);

/// What it is started with.
pub fn rendered(around: &Around<'_>) -> Result<Rendered, String> {
    let files = vec![
        around.kubeconfig(around.ports.load_balancer, "kubelet"),
        Placed { path: CONFIG.to_owned(), contents: config(around), mode: 0o600 },
    ];
    let read_once = ["kubelet-server.crt", "kubelet-server.key", CLIENTS, SERVERS];
    around.rendered(Component::Kubelet, arguments(around), files, &read_once)
}

/// Its arguments.
#[must_use]
pub fn arguments(around: &Around<'_>) -> Vec<String> {
    let own = around.own(&id(Duty::Worker, NAME));
    let file = |name: &str| own.join(name).display().to_string();
    let version = around.bundle.manifest.kubernetes;
    let pause = around.bundle.image(containerd::PAUSE).map(|(image, _)| image.reference.clone());
    let mut flags = vec![
        ("cert-dir", file("certificates")),
        ("config", file(CONFIG)),
        ("container-runtime-endpoint", format!("unix://{}", containerd::socket(around).display())),
        ("hostname-override", around.node.to_owned()),
        ("kubeconfig", file(KUBECONFIG)),
        ("node-ip", around.address.to_string()),
        ("root-dir", file("root")),
    ];
    if version < RUNTIME_IS_CHOSEN {
        flags.push(("container-runtime", "remote".to_owned()));
    }
    if let Some(pause) = pause.filter(|_| version < PAUSE_IS_ASKED_FOR) {
        // It is not removed when the disk gets full.
        flags.push(("pod-infra-container-image", pause));
    }
    flags.into_iter().map(|(name, value)| format!("--{name}={value}")).collect()
}

/// Its configuration (`kubelet.config.k8s.io/v1beta1`): JSON, which is YAML.
fn config(around: &Around<'_>) -> String {
    let (material, settings) = (around.material, around.setup.settings());
    let own = around.own(&id(Duty::Worker, NAME));
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": around.address,
        "port": around.ports.kubelet,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": around.ports.kubelet_health,
        "tlsCertFile": material.path("kubelet-server.crt"),
        "tlsPrivateKeyFile": material.path("kubelet-server.key"),
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": material.path(CLIENTS)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}", groups::name(around.family)),
        "failSwapOn": false,
        "clusterDomain": settings.domain,
        "volumePluginDir": own.join("plugins"),
        // What came with the bundle could be fetched from nowhere again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi", "nodefs.available": "5%", "nodefs.inodesFree": "5%", "imagefs.available": "5%",
        },
    });
    let declared = settings.add_ons.iter().map(|add_on| add_on.name.as_str());
    let mut add_ons = declared.chain(around.bundle.add_ons().iter().map(|add_on| add_on.name.as_str()));
    let ranges = Ranges::new(&settings.service_range, &settings.pod_range, settings.node_prefix);
    if add_ons.any(|name| name == DNS)
        && let Ok(ranges) = ranges
    {
        config["clusterDNS"] = json!([ranges.dns()]);
    }
    format!("{config:#}\n")
}

/// How it is seen to be well.
#[must_use]
pub fn looked_at(around: &Around<'_>) -> Check {
    check_here(around.ports.kubelet_health)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::{bundle, lines, with};

    #[test]
    fn kubelet_is_started_so() {
        let arguments = with(|around| lines(&arguments(around)));
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
        insta::assert_snapshot!(with(config), @r#"
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
    fn flags_are_those_that_its_version_knows() {
        for (version, runtime, pause) in
            [((1, 23, 17), true, true), ((1, 24, 0), false, true), ((1, 35, 0), false, false)]
        {
            let mut bundle = bundle();
            let manifest = std::sync::Arc::make_mut(&mut bundle.manifest);
            manifest.kubernetes = Version::new(version.0, version.1, version.2);
            let said = with(|around| lines(&arguments(&Around { bundle: &bundle, ..*around })));
            assert_eq!(said.contains("--container-runtime=remote"), runtime, "{version:?}");
            assert_eq!(said.contains("--pod-infra-container-image"), pause, "{version:?}");
        }
    }

    #[test]
    fn pods_ask_for_names_where_somebody_answers() {
        use crate::proto::curator::v1::KubernetesAddOn;
        use crate::roleserver::cluster::kubernetes::setup::{Setup, tests::said};
        let mut said = said();
        let add_on = |name: &str| KubernetesAddOn { name: name.to_owned(), ..Default::default() };
        said.settings.as_mut().unwrap().add_ons = vec![add_on("net"), add_on(DNS)];
        let setup = Setup::new(said).unwrap();
        let config = with(|around| config(&Around { setup: &setup, ..*around }));
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["clusterDNS"], json!(["10.96.0.10"]));
    }
}
