//! Kubernetes components: command lines, configuration files, health checks and ports (pure).
//!
//! Each component is a service of its role in the sense of [`services`][crate::cluster::services]: a child of the role
//! server that outlives it, in its own control group and directory. The file of a component has its flags, its
//! configuration and its health check. [`desired`][crate::cluster::kubernetes::desired] defines the dependencies among
//! them.
//!
//! # Ports
//!
//! Only the API server (6443), the kubelet (10250), the controller manager and the scheduler listen at the node's
//! address. This allows several nodes of a test to run on one host. Other nodes connect to 6443, which curators publish
//! to everyone, and to 10250. The remaining ports serve health checks and metrics.
//!
//! # Invariants
//!
//! * The same inputs give the same command line, files and environment. Their digest decides whether a running
//!   component is restarted, together with the digest of the inputs: a change here counts from the component's next
//!   start, and an update of the role server restarts none. A release before digests of the inputs is recognized by what
//!   it rendered: `render_former` of a component leaves out what came later.
//! * No key is in an argument or in a configuration file: they name the files of
//!   [`key_material`][crate::cluster::kubernetes::key_material].
//! * Files that a component reads only once are listed in `read_once`, so that a change restarts it. A component
//!   reloads the others by itself.
//!
//! # Notes for the next implementor
//!
//! A flag that only some versions of Kubernetes have is chosen by the version of the bundle, as [`kubelet`][] does. A
//! new component is a file here, an entry in [`desired`][crate::cluster::kubernetes::desired] and a program of the
//! bundle.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::kubernetes::bundle_manifest::{BundleComponent, KubernetesDuty};
use model::kubernetes::version::ReleaseVersion;
use model::node_role::NodeRole;
use model::role_declaration::ProgramSource;
use model::role_declaration::privileges::Privileges;
use prost::Message as _;
use ring::digest;
use serde_json::json;

use crate::cluster::kubernetes::bundle_store::Bundle;
use crate::cluster::kubernetes::cgroup_driver::CgroupDriver;
use crate::cluster::kubernetes::key_material::{CLIENT_CAS, KeyMaterial, SERVER_CAS};
use crate::cluster::kubernetes::setup::NodeSetup;
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedProbe, RenderedService, ServiceId};
use crate::cluster::services::workdir::WorkdirFile;

pub mod api_server;
pub mod containerd;
pub mod controller_manager;
pub mod kube_proxy;
pub mod kubelet;
pub mod scheduler;

/// Name of the kubeconfig, below the directory of the component that uses it.
pub const KUBECONFIG: &str = "kubeconfig.json";
/// Interval between two health checks of a component.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Time after which a health check has failed.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Consecutive failures that make a component unhealthy.
const FAILURE_THRESHOLD: u32 = 3;
/// Digest of the key material that a component reads once, so that another one restarts it.
const MATERIAL_VARIABLE: &str = "SHEPHERD_MATERIAL";
/// Flags that the controller manager and the scheduler had in no release before digests of the inputs.
const LATER_FLAGS: [&str; 2] = ["--client-ca-file=", "--port="];
/// `PATH` of components, for programs of the node.
const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Ports that the components of a node listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentPorts {
    /// API server, at the node's address.
    pub api_server: u16,
    /// Controller manager, at the node's address.
    pub controller_manager: u16,
    /// Scheduler, at the node's address.
    pub scheduler: u16,
    /// Kubelet API, at the node's address.
    pub kubelet: u16,
    /// Health check of the kubelet, on the loopback address.
    pub kubelet_health: u16,
    /// Health check of kube-proxy, on the loopback address.
    pub proxy_health: u16,
    /// Metrics of kube-proxy, on the loopback address.
    pub proxy_metrics: u16,
    /// Address at which a worker's components connect to the API servers.
    pub load_balancer: SocketAddr,
}

impl Default for ComponentPorts {
    /// The default ports of Kubernetes, and 127.0.0.1:6445 for the load balancer.
    fn default() -> Self {
        Self {
            api_server: 6443,
            controller_manager: 10257,
            scheduler: 10259,
            kubelet: 10250,
            kubelet_health: 10248,
            proxy_health: 10256,
            proxy_metrics: 10249,
            load_balancer: SocketAddr::from((Ipv4Addr::LOCALHOST, 6445)),
        }
    }
}

/// The release that a controller manager or a scheduler is rendered as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenderingRelease {
    /// The release of this role server.
    Present,
    /// One before digests of the inputs. It had fewer flags, and read the authorities of clients from no file.
    Former,
}

/// What the components of one role are rendered from.
#[derive(Clone, Copy, Debug)]
pub struct ComponentContext<'a> {
    /// The Kubernetes setup of this node.
    pub setup: &'a NodeSetup,
    /// Key material of the role.
    pub material: &'a KeyMaterial,
    /// The bundle with the programs.
    pub bundle: &'a Bundle,
    /// Address at which other nodes connect to this one.
    pub address: IpAddr,
    /// Listen ports of all components.
    pub ports: &'a ComponentPorts,
    /// Path of the client socket of this node's etcd.
    pub etcd: &'a Path,
    /// Parent of the directories of components.
    pub directory: &'a Path,
    /// Name of this node in Kubernetes.
    pub node: &'a str,
    /// Name that distinguishes control groups and devices of this role server from those of another one on this host.
    pub instance_name: &'a str,
    /// Whether processes may get a lower OOM score (`CAP_SYS_RESOURCE`).
    pub can_raise_oom_score: bool,
    /// What makes the control groups of pods.
    pub cgroup_driver: CgroupDriver,
}

impl ComponentContext<'_> {
    /// Address and port of this node's API server.
    #[must_use]
    pub const fn api_server(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.ports.api_server)
    }

    /// Path of a component's directory.
    #[must_use]
    pub fn component_directory(&self, id: &ServiceId) -> PathBuf {
        self.directory.join(id.child_name())
    }

    /// A component with these arguments and files. The digest of the material in `read_once` is part of its
    /// environment.
    pub fn render_component(
        &self,
        component: BundleComponent,
        arguments: Vec<String>,
        files: Vec<WorkdirFile>,
        read_once: &[&str],
    ) -> Result<RenderedService, String> {
        let mut rendered = render_plain(&self.bundle.program_path(component)?, arguments, files);
        rendered.environment.insert(MATERIAL_VARIABLE.to_owned(), self.material.digest(read_once));
        Ok(rendered)
    }

    /// The controller manager or the scheduler as `release` renders it. `arguments` and `read_once` are the present ones.
    pub fn render_for(
        &self,
        release: RenderingRelease,
        component: BundleComponent,
        mut arguments: Vec<String>,
        files: Vec<WorkdirFile>,
        read_once: &[&str],
    ) -> Result<RenderedService, String> {
        let mut read_once = read_once.to_vec();
        if release == RenderingRelease::Former {
            arguments.retain(|argument| !LATER_FLAGS.iter().any(|flag| argument.starts_with(flag)));
            read_once.retain(|file| *file != CLIENT_CAS);
        }
        self.render_component(component, arguments, files, &read_once)
    }

    /// Digest of what a component is rendered from, without what this release makes of it: the settings, the bundle, the
    /// key material that is read once, and the facts of the node.
    #[must_use]
    pub fn declaration_digest(&self, rendered: &RenderedService) -> String {
        let ComponentPorts { api_server, controller_manager, scheduler, kubelet, .. } = self.ports;
        let ComponentPorts { kubelet_health, proxy_health, proxy_metrics, load_balancer, .. } = self.ports;
        let cluster = (
            hex::encode(self.setup.settings().encode_to_vec()),
            self.setup.pod_range(),
            hex::encode(self.bundle.digest.0),
            rendered.environment.get(MATERIAL_VARIABLE),
        );
        let ports = (
            [api_server, controller_manager, scheduler, kubelet, kubelet_health, proxy_health, proxy_metrics],
            load_balancer,
        );
        // containerd and the kubelet must never run with different drivers.
        let driver = self.cgroup_driver.as_str();
        let node = (self.address, self.node, self.instance_name, self.can_raise_oom_score, driver);
        let declared = (cluster, ports, node, self.etcd, self.directory);
        // These are strings and numbers alone, but a path need not be UTF-8.
        let bytes = serde_json::to_vec(&declared).unwrap_or_else(|_| format!("{declared:?}").into_bytes());
        hex::encode(digest::digest(&digest::SHA256, &bytes))
    }

    /// A kubeconfig for `server` with the certificate and key named `pair`: JSON, which is also YAML.
    #[must_use]
    pub fn kubeconfig(&self, server: SocketAddr, pair: &str) -> WorkdirFile {
        let (certificate, key) = self.material.certificate_and_key(pair);
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "own", "cluster": {
                "server": format!("https://{server}"),
                "certificate-authority": self.material.file_path(SERVER_CAS),
            }}],
            "users": [{"name": "own", "user": {"client-certificate": certificate, "client-key": key}}],
            "contexts": [{"name": "own", "context": {"cluster": "own", "user": "own"}}],
            "current-context": "own",
        });
        WorkdirFile { path: KUBECONFIG.to_owned(), contents: format!("{config:#}\n"), mode: 0o600 }
    }
}

/// A program with these arguments and files that uses no key material.
#[must_use]
pub fn render_plain(program: &Path, arguments: Vec<String>, files: Vec<WorkdirFile>) -> RenderedService {
    RenderedService {
        run: ProgramSource::Path(program.display().to_string()),
        arguments,
        environment: BTreeMap::from([("PATH".to_owned(), SYSTEM_PATH.to_owned())]),
        files,
        user: "root".to_owned(),
        privileges: Privileges::default(),
    }
}

/// The ID of the service with this name in the role of this duty.
#[must_use]
pub fn service_id(duty: KubernetesDuty, name: &str) -> ServiceId {
    let role = match duty {
        KubernetesDuty::Controller => NodeRole::KubernetesController,
        KubernetesDuty::Worker => NodeRole::KubernetesWorker,
    };
    ServiceId { role: role.to_string(), service: name.to_owned() }
}

/// A health check over HTTPS, with a client certificate if `shown` has one.
#[must_use]
pub fn https_check(at: SocketAddr, path: &str, shown: Option<(PathBuf, PathBuf)>) -> RenderedHealthCheck {
    check_with(RenderedProbe::Https { at, path: path.to_owned(), client_certificate: shown })
}

/// A health check over HTTP on the loopback address.
#[must_use]
pub fn local_check(port: u16) -> RenderedHealthCheck {
    let addresses = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port))];
    check_with(RenderedProbe::Http { addresses, path: "/healthz".to_owned() })
}

/// A health check with this probe, and the usual interval, timeout and threshold.
#[must_use]
pub const fn check_with(probe: RenderedProbe) -> RenderedHealthCheck {
    RenderedHealthCheck {
        probe,
        interval: CHECK_INTERVAL,
        timeout: CHECK_TIMEOUT,
        failures: FAILURE_THRESHOLD,
    }
}

/// Flags in the form that components accept: `--name=value`.
#[must_use]
pub fn format_flags<const N: usize>(flags: [(&str, &str); N]) -> Vec<String> {
    flags.into_iter().map(|(name, value)| format!("--{name}={value}")).collect()
}

/// The first version in which the controller manager and the scheduler have no port without TLS.
const PLAIN_PORT_REMOVED: ReleaseVersion = ReleaseVersion::new(1, 24, 0);

/// Closes the port without TLS of the controller manager and the scheduler. Before it was removed, it listened on all
/// addresses by default, and served metrics and the configuration to everyone.
#[must_use]
pub fn close_plain_port(mut arguments: Vec<String>, version: ReleaseVersion) -> Vec<String> {
    if version < PLAIN_PORT_REMOVED {
        arguments.push("--port=0".to_owned());
    }
    arguments
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use model::kubernetes::bundle_manifest::{BundleFile, BundleImage, BundleManifest, BundleProgram};
    use model::role_declaration::Sha256;

    use super::*;
    use crate::cluster::kubernetes::key_material::tests::material;
    use crate::cluster::kubernetes::setup::tests::setup;

    pub(in crate::cluster::kubernetes) fn bundle() -> Bundle {
        let component = |component: BundleComponent| BundleProgram {
            component,
            version: "1.20.2".to_owned(),
            file: BundleFile {
                path: component.path().to_owned(),
                size: 1,
                sha256: Sha256([1; 32]),
                is_program: true,
            },
        };
        let programs = KubernetesDuty::Controller
            .required_components()
            .iter()
            .chain(KubernetesDuty::Worker.required_components());
        Bundle {
            digest: Sha256([0xab; 32]),
            manifest: Arc::new(BundleManifest {
                name: "test".to_owned(),
                kubernetes: ReleaseVersion::new(1, 20, 2),
                needs_roleserver: ReleaseVersion::new(0, 1, 0),
                programs: programs.map(|program| component(*program)).collect(),
                add_ons: Vec::new(),
                images: vec![BundleImage {
                    name: containerd::PAUSE_IMAGE.to_owned(),
                    reference: "registry.k8s.io/pause:3.2".to_owned(),
                    file: BundleFile {
                        path: "images/pause.tar".to_owned(),
                        size: 1,
                        sha256: Sha256([1; 32]),
                        is_program: false,
                    },
                }],
            }),
            directory: "/bundle".into(),
        }
    }

    /// The same bundle with this version of Kubernetes.
    pub(in crate::cluster::kubernetes) fn bundle_of_version(version: ReleaseVersion) -> Bundle {
        let mut bundle = bundle();
        Arc::make_mut(&mut bundle.manifest).kubernetes = version;
        bundle
    }

    /// Calls `look` with a context for tests.
    pub(in crate::cluster::kubernetes) fn with_context<T>(
        look: impl FnOnce(&ComponentContext<'_>) -> T,
    ) -> T {
        let (setup, material, bundle, ports) = (setup(), material(), bundle(), ComponentPorts::default());
        look(&ComponentContext {
            setup: &setup,
            material: &material,
            bundle: &bundle,
            address: "10.0.0.7".parse().unwrap(),
            ports: &ports,
            etcd: Path::new("/state/cluster/etcd/client:1"),
            directory: Path::new("/state/cluster/kubernetes"),
            node: "node-00112233445566778899aabbccddeeff",
            instance_name: "roleserver-0123456789ab",
            can_raise_oom_score: true,
            cgroup_driver: CgroupDriver::Cgroupfs,
        })
    }

    /// The arguments as text, one per line.
    pub(in crate::cluster::kubernetes) fn lines(arguments: &[String]) -> String {
        arguments.join("\n")
    }

    /// Checks two renderings of one component. A release before digests of the inputs neither had these flags nor
    /// restarted the component for other authorities of clients.
    pub(in crate::cluster::kubernetes) fn assert_former_is_without_later_flags(
        present: &RenderedService,
        former: &RenderedService,
    ) {
        let later = ["--client-ca-file=/state/cluster/kubernetes/x/clients.crt", "--port=0"];
        assert!(later.iter().all(|flag| present.arguments.iter().any(|argument| argument == flag)));
        let common = present.arguments.iter().filter(|one| !later.contains(&one.as_str()));
        assert!(former.arguments.iter().eq(common), "{:?}", former.arguments);
        assert_eq!(former.files, present.files);
        assert_ne!(former.environment, present.environment);
    }

    #[test]
    fn kubeconfig_names_key_files_and_holds_no_key() {
        let placed = with_context(|context| context.kubeconfig(context.api_server(), "scheduler"));
        assert_eq!((placed.path.as_str(), placed.mode), (KUBECONFIG, 0o600));
        let read: serde_json::Value = serde_json::from_str(&placed.contents).unwrap();
        assert_eq!(read["clusters"][0]["cluster"]["server"], "https://10.0.0.7:6443");
        assert_eq!(read["users"][0]["user"]["client-key"], "/state/cluster/kubernetes/x/scheduler.key");
    }

    #[test]
    fn declaration_digest_changes_with_the_inputs_and_not_with_the_rendering() {
        let digest = |change: fn(&mut Bundle, &mut KeyMaterial), flag: &str| {
            let (mut bundle, mut material) = (bundle(), material());
            change(&mut bundle, &mut material);
            with_context(|context| {
                let context = ComponentContext { bundle: &bundle, material: &material, ..*context };
                let (scheduler, flags) = (BundleComponent::KubeScheduler, vec![flag.to_owned()]);
                let rendered = context.render_component(scheduler, flags, Vec::new(), &[]).unwrap();
                context.declaration_digest(&rendered)
            })
        };
        let plain = digest(|_, _| {}, "--a");
        assert_eq!(plain, digest(|_, _| {}, "--b"), "the release chooses its flags");
        assert_ne!(plain, digest(|bundle, _| bundle.digest = Sha256([9; 32]), "--a"));
        assert_ne!(plain, digest(|_, material| material.generation = 4, "--a"));
        let with_driver = |cgroup_driver| {
            with_context(|context| {
                let context = ComponentContext { cgroup_driver, ..*context };
                context.declaration_digest(&render_plain(Path::new("/kubelet"), Vec::new(), Vec::new()))
            })
        };
        let (one, other) = (with_driver(CgroupDriver::Cgroupfs), with_driver(CgroupDriver::Systemd));
        assert_ne!(one, other, "a component that goes on would not fit the other one");
    }

    #[test]
    fn digest_changes_with_the_bundle_and_files_that_are_read_once() {
        let digest = |change: fn(&mut Bundle, &mut KeyMaterial)| {
            let (mut bundle, mut material) = (bundle(), material());
            change(&mut bundle, &mut material);
            with_context(|context| {
                let context = ComponentContext { bundle: &bundle, material: &material, ..*context };
                context
                    .render_component(BundleComponent::KubeScheduler, Vec::new(), Vec::new(), &[])
                    .unwrap()
                    .digest()
            })
        };
        let plain = digest(|_, _| {});
        assert_eq!(plain, digest(|_, _| {}));
        assert_ne!(plain, digest(|bundle, _| bundle.directory = "/other".into()));
        assert_ne!(plain, digest(|_, material| material.generation = 4));
    }
}
