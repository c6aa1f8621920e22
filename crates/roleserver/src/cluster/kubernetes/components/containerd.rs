//! Configuration, CNI network and health check of containerd.
//!
//! containerd starts a shim for each pod, which outlives it: a crash or restart of containerd does not affect pods. It
//! reads none of the keys, so a new generation of keys does not restart it.
//!
//! Pods get addresses from the node's part of the pod range, on a bridge of this node. Traffic to other destinations is
//! masqueraded with the node's address. An add-on that provides another network puts its configuration beside this one,
//! with a file name that sorts first.

use std::fmt::Write as _;
use std::path::PathBuf;

use model::kubernetes::bundle_manifest::{BundleComponent, KubernetesDuty};
use serde_json::json;

use crate::cluster::kubernetes::cgroup_driver::CgroupDriver;
use crate::cluster::kubernetes::components::{
    ComponentContext, SYSTEM_PATH, check_with, render_plain, service_id,
};
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedProbe, RenderedService};
use crate::cluster::services::workdir::WorkdirFile;

/// Service name of containerd.
pub const NAME: &str = "containerd";
/// Prefix of the program names of shims.
pub const SHIM_PREFIX: &str = "containerd-shim";
/// Image that holds the namespaces of a pod.
pub const PAUSE_IMAGE: &str = "pause";
/// CNI configuration of the default network, below the component's directory.
const CNI_CONFIG: &str = "cni/90-pods.conflist";
const CONFIG_FILE: &str = "config.toml";
/// Longest socket path: unix(7) allows 107 bytes, and containerd creates a second socket with a longer name beside it.
const MAX_SOCKET_PATH: usize = 100;

/// Path of the socket that containerd listens on.
#[must_use]
pub fn socket_path(context: &ComponentContext<'_>) -> PathBuf {
    context.component_directory(&service_id(KubernetesDuty::Worker, NAME)).join("socket")
}

/// Name of the pod bridge of this role server's node, 15 characters at most, the limit of an interface name.
#[must_use]
pub fn bridge_name(family: &str) -> String {
    format!("sp-{}", family.rsplit('-').next().unwrap_or_default().chars().take(12).collect::<String>())
}

/// Program, arguments, files and environment that it is started with.
pub fn render_component(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    let own = context.component_directory(&service_id(KubernetesDuty::Worker, NAME));
    let path = context.bundle.bin_directory().display().to_string();
    let files = vec![
        WorkdirFile { path: CONFIG_FILE.to_owned(), contents: render_config(context)?, mode: 0o600 },
        WorkdirFile { path: CNI_CONFIG.to_owned(), contents: render_cni_config(context), mode: 0o600 },
    ];
    let arguments = vec!["--config".to_owned(), own.join(CONFIG_FILE).display().to_string()];
    let mut rendered =
        render_plain(&context.bundle.program_path(BundleComponent::Containerd)?, arguments, files);
    // containerd looks up its shim in `PATH`.
    rendered.environment.insert("PATH".to_owned(), format!("{path}:{SYSTEM_PATH}"));
    Ok(rendered)
}

/// Its configuration file, version 2 (containerd-config.toml(5)).
fn render_config(context: &ComponentContext<'_>) -> Result<String, String> {
    let own = context.component_directory(&service_id(KubernetesDuty::Worker, NAME));
    let socket = socket_path(context);
    if socket.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(format!(
            "the path {} is too long for a socket: {MAX_SOCKET_PATH} bytes is the maximum, so give the role server a \
             shorter state directory",
            socket.display()
        ));
    }
    let (pause, _) = context
        .bundle
        .find_image(PAUSE_IMAGE)
        .ok_or_else(|| format!("its bundle holds no image {PAUSE_IMAGE}"))?;
    let runc = context.bundle.program_path(BundleComponent::Runc)?;
    let file = |name: &str| toml_string(&own.join(name).display().to_string());
    let mut text = String::new();
    let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
    let done = write!(
        text,
        "\
version = 2
root = {root}
state = {state}
[grpc]
address = {socket}
[{cri}]
sandbox_image = {pause}
restrict_oom_score_adj = {restricted}
stream_server_address = \"127.0.0.1\"
netns_mounts_under_state_dir = true
[{cri}.containerd]
default_runtime_name = \"runc\"
[{cri}.containerd.runtimes.runc]
runtime_type = \"io.containerd.runc.v2\"
[{cri}.containerd.runtimes.runc.options]
BinaryName = {runc}
SystemdCgroup = {systemd}
[{cri}.cni]
bin_dir = {plugins}
conf_dir = {network}
",
        root = file("root"),
        state = file("state"),
        socket = toml_string(&socket.display().to_string()),
        pause = toml_string(&pause.reference),
        // Without the capability no process can get a lower OOM score, and runc fails if it has to set one.
        restricted = !context.can_raise_oom_score,
        systemd = context.cgroup_driver == CgroupDriver::Systemd,
        runc = toml_string(&runc.display().to_string()),
        plugins = toml_string(&context.bundle.cni_directory().display().to_string()),
        network = file("cni"),
    );
    done.map_err(|error| error.to_string())?;
    Ok(text)
}

/// A string in TOML syntax: a JSON string is also a TOML string.
fn toml_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The CNI configuration of the default network (CNI specification 0.4.0).
fn render_cni_config(context: &ComponentContext<'_>) -> String {
    let addresses = context.component_directory(&service_id(KubernetesDuty::Worker, NAME)).join("addresses");
    let list = json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": bridge_name(context.instance_name),
                "isGateway": true,
                // Replace an address of another pod range on an existing bridge.
                "forceAddress": true,
                "hairpinMode": true,
                // No other host has a route to pod addresses.
                "ipMasq": true,
                "ipam": {
                    "type": "host-local",
                    "dataDir": addresses,
                    "ranges": [[{"subnet": context.setup.pod_range()}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    format!("{list:#}\n")
}

/// Health check: its socket accepts a connection.
#[must_use]
pub fn health_check(context: &ComponentContext<'_>) -> RenderedHealthCheck {
    check_with(RenderedProbe::Unix(socket_path(context)))
}

/// A one-shot that imports an image of the bundle. Importing an existing image changes nothing.
pub fn render_image_import(context: &ComponentContext<'_>, image: &str) -> Result<RenderedService, String> {
    let (_, archive) =
        context.bundle.find_image(image).ok_or_else(|| format!("its bundle holds no image {image}"))?;
    let socket = socket_path(context).display().to_string();
    let archive = archive.display().to_string();
    let arguments = ["--address", &socket, "--namespace", "k8s.io", "images", "import", &archive];
    let arguments = arguments.into_iter().map(str::to_owned).collect();
    Ok(render_plain(&context.bundle.program_path(BundleComponent::Ctr)?, arguments, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::components::tests::{lines, with_context};

    #[test]
    fn containerd_arguments_match() {
        let started = with_context(|context| render_component(context).unwrap());
        assert_eq!(started.environment["PATH"], format!("/bundle/bin:{SYSTEM_PATH}"));
        insta::assert_snapshot!(lines(&started.arguments), @r#"
        --config
        /state/cluster/kubernetes/kubernetes-worker_containerd/config.toml
        "#);
        insta::assert_snapshot!(started.files[0].contents, @r#"
        version = 2
        root = "/state/cluster/kubernetes/kubernetes-worker_containerd/root"
        state = "/state/cluster/kubernetes/kubernetes-worker_containerd/state"
        [grpc]
        address = "/state/cluster/kubernetes/kubernetes-worker_containerd/socket"
        [plugins."io.containerd.grpc.v1.cri"]
        sandbox_image = "registry.k8s.io/pause:3.2"
        restrict_oom_score_adj = false
        stream_server_address = "127.0.0.1"
        netns_mounts_under_state_dir = true
        [plugins."io.containerd.grpc.v1.cri".containerd]
        default_runtime_name = "runc"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "/bundle/bin/runc"
        SystemdCgroup = false
        [plugins."io.containerd.grpc.v1.cri".cni]
        bin_dir = "/bundle/cni/"
        conf_dir = "/state/cluster/kubernetes/kubernetes-worker_containerd/cni"
        "#);
        insta::assert_snapshot!(started.files[1].contents, @r#"
        {
          "cniVersion": "0.4.0",
          "name": "pods",
          "plugins": [
            {
              "bridge": "sp-0123456789ab",
              "forceAddress": true,
              "hairpinMode": true,
              "ipMasq": true,
              "ipam": {
                "dataDir": "/state/cluster/kubernetes/kubernetes-worker_containerd/addresses",
                "ranges": [
                  [
                    {
                      "subnet": "10.128.3.0/24"
                    }
                  ]
                ],
                "routes": [
                  {
                    "dst": "0.0.0.0/0"
                  }
                ],
                "type": "host-local"
              },
              "isGateway": true,
              "type": "bridge"
            },
            {
              "capabilities": {
                "portMappings": true
              },
              "type": "portmap"
            }
          ]
        }
        "#);
    }

    #[test]
    fn oom_scores_are_restricted_without_the_capability() {
        let reported = |may_raise_scores| {
            with_context(|context| {
                render_config(&ComponentContext { can_raise_oom_score: may_raise_scores, ..*context })
                    .unwrap()
            })
        };
        assert!(reported(false).contains("restrict_oom_score_adj = true"));
        assert!(reported(true).contains("restrict_oom_score_adj = false"));
    }

    #[test]
    fn socket_path_that_is_too_long_is_rejected() {
        let deep = PathBuf::from(format!("/{}", "d".repeat(80)));
        let error = with_context(|context| {
            render_config(&ComponentContext { directory: &deep, ..*context }).unwrap_err()
        });
        assert!(error.contains("shorter state directory"), "{error}");
    }

    #[test]
    fn digest_changes_with_the_pod_range_and_not_with_the_keys() {
        use crate::cluster::kubernetes::key_material::tests::material;
        use crate::cluster::kubernetes::setup::{NodeSetup, tests::wire_setup};
        let plain = with_context(|context| render_component(context).unwrap().digest());
        let mut renewed = material();
        renewed.generation += 1;
        assert_eq!(
            plain,
            with_context(|context| render_component(&ComponentContext { material: &renewed, ..*context })
                .unwrap()
                .digest())
        );
        let mut other = wire_setup();
        other.pod_range = "10.128.4.0/24".to_owned();
        let other = NodeSetup::new(other).unwrap();
        assert_ne!(
            plain,
            with_context(|context| render_component(&ComponentContext { setup: &other, ..*context })
                .unwrap()
                .digest())
        );
    }

    #[test]
    fn image_import_arguments_match() {
        let started = with_context(|context| render_image_import(context, PAUSE_IMAGE).unwrap());
        insta::assert_snapshot!(lines(&started.arguments), @r#"
        --address
        /state/cluster/kubernetes/kubernetes-worker_containerd/socket
        --namespace
        k8s.io
        images
        import
        /bundle/images/pause.tar
        "#);
    }

    #[test]
    fn bridge_has_a_name_that_the_kernel_takes() {
        assert_eq!(bridge_name("roleserver-0123456789ab"), "sp-0123456789ab");
        assert_eq!(bridge_name("roleserver-0123456789ab").len(), 15);
    }
}
