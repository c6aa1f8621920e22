//! The components, a file for each: what it is started with, and how it is seen to be well. All of it is pure.
//!
//! Each is a service of the role that it belongs to, in the sense of [`services`][crate::roleserver::cluster::services]:
//! a program beside the role server that outlives it, in a control group and a directory of its own. Who needs whom is said
//! by [`wanted`][crate::roleserver::cluster::kubernetes::wanted].

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use crate::model::declaration::Run;
use crate::model::kubernetes::bundle::{Component, Duty};
use crate::model::role::Role;
use crate::roleserver::cluster::kubernetes::bundles::Bundle;
use crate::roleserver::cluster::kubernetes::material::{Material, SERVERS};
use crate::roleserver::cluster::kubernetes::ports::Ports;
use crate::roleserver::cluster::kubernetes::setup::Setup;
use crate::roleserver::cluster::services::placing::Placed;
use crate::roleserver::cluster::services::wanted::{Check, Id, Probe, Rendered};

pub mod api_server;
pub mod containerd;
pub mod controller_manager;
pub mod kube_proxy;
pub mod kubelet;
pub mod scheduler;

/// Where a kubeconfig is, below the directory of whoever has it.
pub const KUBECONFIG: &str = "kubeconfig.json";
/// Between two looks at a component.
const INTERVAL: Duration = Duration::from_secs(5);
/// After which a look has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// So many in a row make it ill.
const FAILURES: u32 = 3;
/// Where components find programs of the node.
const PATHS: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// What the components of one role are started with.
#[derive(Clone, Copy, Debug)]
pub struct Around<'a> {
    /// What is to run.
    pub setup: &'a Setup,
    /// Keys and certificates.
    pub material: &'a Material,
    /// The programs.
    pub bundle: &'a Bundle,
    /// Where other nodes reach this one.
    pub address: IpAddr,
    /// Where components listen.
    pub ports: &'a Ports,
    /// The socket of this node's etcd.
    pub etcd: &'a Path,
    /// Above the directories of components.
    pub directory: &'a Path,
    /// The name of this node.
    pub node: &'a str,
    /// What tells control groups and devices of this role server from those of another one on this host.
    pub family: &'a str,
    /// Whether it may be said of processes that they are less likely to be killed when memory gets short.
    pub may_raise_scores: bool,
}

impl Around<'_> {
    /// The API server of this node.
    #[must_use]
    pub const fn api_server(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.ports.api_server)
    }

    /// The directory of a component.
    #[must_use]
    pub fn own(&self, id: &Id) -> PathBuf {
        self.directory.join(id.child())
    }

    /// A component of these arguments and files. What it reads once of the material tells it apart.
    pub fn rendered(
        &self,
        component: Component,
        arguments: Vec<String>,
        files: Vec<Placed>,
        read_once: &[&str],
    ) -> Result<Rendered, String> {
        let mut rendered = plain(&self.bundle.program(component)?, arguments, files);
        rendered.environment.insert("SHEPHERD_MATERIAL".to_owned(), self.material.digest(read_once));
        Ok(rendered)
    }

    /// A kubeconfig for whoever asks this server with this pair: JSON, which is YAML.
    #[must_use]
    pub fn kubeconfig(&self, server: SocketAddr, pair: &str) -> Placed {
        let (certificate, key) = self.material.pair(pair);
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "own", "cluster": {
                "server": format!("https://{server}"),
                "certificate-authority": self.material.path(SERVERS),
            }}],
            "users": [{"name": "own", "user": {"client-certificate": certificate, "client-key": key}}],
            "contexts": [{"name": "own", "context": {"cluster": "own", "user": "own"}}],
            "current-context": "own",
        });
        Placed { path: KUBECONFIG.to_owned(), contents: format!("{config:#}\n"), mode: 0o600 }
    }
}

/// A program of these arguments and files that reads nothing of the material.
#[must_use]
pub fn plain(program: &Path, arguments: Vec<String>, files: Vec<Placed>) -> Rendered {
    Rendered {
        run: Run::Path(program.display().to_string()),
        arguments,
        environment: BTreeMap::from([("PATH".to_owned(), PATHS.to_owned())]),
        files,
        user: "root".to_owned(),
    }
}

/// The service of this name of the role that does this.
#[must_use]
pub fn id(duty: Duty, name: &str) -> Id {
    let role = match duty {
        Duty::Controller => Role::KubernetesController,
        Duty::Worker => Role::KubernetesWorker,
    };
    Id { role: role.to_string(), service: name.to_owned() }
}

/// A look at a component by TLS.
#[must_use]
pub fn check(at: SocketAddr, path: &str, shown: Option<(PathBuf, PathBuf)>) -> Check {
    by(Probe::Https { at, path: path.to_owned(), shown })
}

/// A look at a component of the node itself, which answers nobody else.
#[must_use]
pub fn check_here(port: u16) -> Check {
    by(Probe::Http { port, path: "/healthz".to_owned() })
}

/// A look at a component by this.
#[must_use]
pub const fn by(probe: Probe) -> Check {
    Check { probe, interval: INTERVAL, timeout: TIMEOUT, failures: FAILURES }
}

/// Flags as components take them: `--name=value`.
#[must_use]
pub fn flags<const N: usize>(flags: [(&str, &str); N]) -> Vec<String> {
    flags.into_iter().map(|(name, value)| format!("--{name}={value}")).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::declaration::Sha256;
    use crate::model::kubernetes::bundle::{File, Image, Manifest, Program};
    use crate::model::kubernetes::version::Version;
    use crate::roleserver::cluster::kubernetes::material::tests::material;
    use crate::roleserver::cluster::kubernetes::setup::tests::setup;

    pub(in crate::roleserver::cluster::kubernetes) fn bundle() -> Bundle {
        let component = |component: Component| Program {
            component,
            version: "1.20.2".to_owned(),
            file: File {
                path: component.path().to_owned(),
                size: 1,
                sha256: Sha256([1; 32]),
                is_program: true,
            },
        };
        let programs = Duty::Controller.components().iter().chain(Duty::Worker.components());
        Bundle {
            digest: Sha256([0xab; 32]),
            manifest: Arc::new(Manifest {
                name: "test".to_owned(),
                kubernetes: Version::new(1, 20, 2),
                needs_roleserver: Version::new(0, 1, 0),
                programs: programs.map(|program| component(*program)).collect(),
                add_ons: Vec::new(),
                images: vec![Image {
                    name: containerd::PAUSE.to_owned(),
                    reference: "registry.k8s.io/pause:3.2".to_owned(),
                    file: File {
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

    /// What components of a test are started with.
    pub(in crate::roleserver::cluster::kubernetes) fn with<T>(look: impl FnOnce(&Around<'_>) -> T) -> T {
        let (setup, material, bundle, ports) = (setup(), material(), bundle(), Ports::default());
        look(&Around {
            setup: &setup,
            material: &material,
            bundle: &bundle,
            address: "10.0.0.7".parse().unwrap(),
            ports: &ports,
            etcd: Path::new("/state/cluster/etcd/client:1"),
            directory: Path::new("/state/cluster/kubernetes"),
            node: "node-00112233445566778899aabbccddeeff",
            family: "roleserver-0123456789ab",
            may_raise_scores: true,
        })
    }

    /// Arguments, one a line, as a person reads them.
    pub(in crate::roleserver::cluster::kubernetes) fn lines(arguments: &[String]) -> String {
        arguments.join("\n")
    }

    #[test]
    fn kubeconfig_names_files_that_are_replaced_in_place_and_holds_no_key() {
        let placed = with(|around| around.kubeconfig(around.api_server(), "scheduler"));
        assert_eq!((placed.path.as_str(), placed.mode), (KUBECONFIG, 0o600));
        let read: serde_json::Value = serde_json::from_str(&placed.contents).unwrap();
        assert_eq!(read["clusters"][0]["cluster"]["server"], "https://10.0.0.7:6443");
        assert_eq!(read["users"][0]["user"]["client-key"], "/state/cluster/kubernetes/x/scheduler.key");
    }

    #[test]
    fn component_is_another_when_its_bundle_or_what_it_reads_once_is() {
        let digest = |change: fn(&mut Bundle, &mut Material)| {
            let (mut bundle, mut material) = (bundle(), material());
            change(&mut bundle, &mut material);
            with(|around| {
                let around = Around { bundle: &bundle, material: &material, ..*around };
                around.rendered(Component::KubeScheduler, Vec::new(), Vec::new(), &[]).unwrap().digest()
            })
        };
        let plain = digest(|_, _| {});
        assert_eq!(plain, digest(|_, _| {}));
        assert_ne!(plain, digest(|bundle, _| bundle.directory = "/other".into()));
        assert_ne!(plain, digest(|_, material| material.generation = 4));
    }
}
