//! containerd, which runs containers for the kubelet, and what connects these to the network.
//!
//! What it starts for a pod, a shim, outlives it: pods notice nothing when it crashes or is started again. It needs none of
//! the keys, and so another generation of them lets it run on.
//!
//! Pods get their addresses from the node's own part of the range, at a bridge of the node's. What they send elsewhere has
//! the node's address. Where another network is wanted an add-on puts its own configuration beside this one, under a name
//! that comes before it.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;

use crate::model::kubernetes::bundle::{Component, Duty};
use crate::roleserver::cluster::kubernetes::components::{Around, PATHS, by, id, plain};
use crate::roleserver::cluster::services::placing::Placed;
use crate::roleserver::cluster::services::wanted::{Check, Probe, Rendered};

/// Its name.
pub const NAME: &str = "containerd";
/// What the names of shims begin with.
pub const SHIM: &str = "containerd-shim";
/// The image that holds the namespaces of a pod.
pub const PAUSE: &str = "pause";
/// Where pods are connected by default.
const NETWORK: &str = "cni/90-pods.conflist";
const CONFIG: &str = "config.toml";
/// The longest path of a socket is 107 bytes (unix(7)), and containerd makes another one beside it that is longer.
const LONGEST_SOCKET: usize = 100;

/// Where it listens.
#[must_use]
pub fn socket(around: &Around<'_>) -> PathBuf {
    around.own(&id(Duty::Worker, NAME)).join("socket")
}

/// The bridge of the pods of this role server's node: 15 letters, as many as the name of one can have.
#[must_use]
pub fn bridge(family: &str) -> String {
    format!("sp-{}", family.rsplit('-').next().unwrap_or_default().chars().take(12).collect::<String>())
}

/// What it is started with.
pub fn rendered(around: &Around<'_>) -> Result<Rendered, String> {
    let own = around.own(&id(Duty::Worker, NAME));
    let path = around.bundle.programs().display().to_string();
    let files = vec![
        Placed { path: CONFIG.to_owned(), contents: config(around)?, mode: 0o600 },
        Placed { path: NETWORK.to_owned(), contents: network(around), mode: 0o600 },
    ];
    let arguments = vec!["--config".to_owned(), own.join(CONFIG).display().to_string()];
    let mut rendered = plain(&around.bundle.program(Component::Containerd)?, arguments, files);
    // It finds its shim there.
    rendered.environment.insert("PATH".to_owned(), format!("{path}:{PATHS}"));
    Ok(rendered)
}

/// Its configuration, of version 2 (containerd-config.toml(5)).
fn config(around: &Around<'_>) -> Result<String, String> {
    let own = around.own(&id(Duty::Worker, NAME));
    let socket = socket(around);
    if socket.as_os_str().len() > LONGEST_SOCKET {
        return Err(format!(
            "the path {} is too long for a socket: {LONGEST_SOCKET} bytes are the most, so give the role server a \
             shorter state directory",
            socket.display()
        ));
    }
    let (pause, _) =
        around.bundle.image(PAUSE).ok_or_else(|| format!("its bundle holds no image {PAUSE}"))?;
    let runc = around.bundle.program(Component::Runc)?;
    let file = |name: &str| toml(&own.join(name).display().to_string());
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
SystemdCgroup = false
[{cri}.cni]
bin_dir = {plugins}
conf_dir = {network}
",
        root = file("root"),
        state = file("state"),
        socket = toml(&socket.display().to_string()),
        pause = toml(&pause.reference),
        // Without that capability nothing can be made less likely to be killed, and runc fails if it is told to.
        restricted = !around.may_raise_scores,
        runc = toml(&runc.display().to_string()),
        plugins = toml(&around.bundle.plugins().display().to_string()),
        network = file("cni"),
    );
    done.map_err(|error| error.to_string())?;
    Ok(text)
}

/// A text as TOML has it: JSON's way of writing one is one of its own.
fn toml(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// How pods are connected (the specification of CNI, 0.4.0).
fn network(around: &Around<'_>) -> String {
    let addresses = around.own(&id(Duty::Worker, NAME)).join("addresses");
    let list = json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": bridge(around.family),
                "isGateway": true,
                // One that is left of another range is changed.
                "forceAddress": true,
                "hairpinMode": true,
                // Nobody else has a route to them.
                "ipMasq": true,
                "ipam": {
                    "type": "host-local",
                    "dataDir": addresses,
                    "ranges": [[{"subnet": around.setup.pod_range()}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    format!("{list:#}\n")
}

/// How it is seen to be well: its socket takes connections.
#[must_use]
pub fn looked_at(around: &Around<'_>) -> Check {
    by(Probe::Unix(socket(around)))
}

/// What imports an image of the bundle, and ends. Importing one that is there changes nothing.
pub fn import(around: &Around<'_>, image: &str) -> Result<Rendered, String> {
    let (_, archive) =
        around.bundle.image(image).ok_or_else(|| format!("its bundle holds no image {image}"))?;
    let socket = socket(around).display().to_string();
    let archive = archive.display().to_string();
    let arguments = ["--address", &socket, "--namespace", "k8s.io", "images", "import", &archive];
    let arguments = arguments.into_iter().map(str::to_owned).collect();
    Ok(plain(&around.bundle.program(Component::Ctr)?, arguments, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::{lines, with};

    #[test]
    fn containerd_is_started_so() {
        let started = with(|around| rendered(around).unwrap());
        assert_eq!(started.environment["PATH"], format!("/bundle/bin:{PATHS}"));
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
    fn scores_are_restricted_where_nobody_may_raise_them() {
        let said = |may_raise_scores| with(|around| config(&Around { may_raise_scores, ..*around }).unwrap());
        assert!(said(false).contains("restrict_oom_score_adj = true"));
        assert!(said(true).contains("restrict_oom_score_adj = false"));
    }

    #[test]
    fn socket_that_nobody_could_open_is_told_before_it_is_tried() {
        let deep = PathBuf::from(format!("/{}", "d".repeat(80)));
        let error = with(|around| config(&Around { directory: &deep, ..*around }).unwrap_err());
        assert!(error.contains("shorter state directory"), "{error}");
    }

    #[test]
    fn another_generation_of_keys_leaves_it_as_it_is_and_another_range_does_not() {
        use crate::roleserver::cluster::kubernetes::material::tests::material;
        use crate::roleserver::cluster::kubernetes::setup::{Setup, tests::said};
        let plain = with(|around| rendered(around).unwrap().digest());
        let mut renewed = material();
        renewed.generation += 1;
        assert_eq!(
            plain,
            with(|around| rendered(&Around { material: &renewed, ..*around }).unwrap().digest())
        );
        let mut other = said();
        other.pod_range = "10.128.4.0/24".to_owned();
        let other = Setup::new(other).unwrap();
        assert_ne!(plain, with(|around| rendered(&Around { setup: &other, ..*around }).unwrap().digest()));
    }

    #[test]
    fn image_is_imported_so() {
        let started = with(|around| import(around, PAUSE).unwrap());
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
        assert_eq!(bridge("roleserver-0123456789ab"), "sp-0123456789ab");
        assert_eq!(bridge("roleserver-0123456789ab").len(), 15);
    }
}
