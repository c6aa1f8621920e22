//! What a bundle says that it holds.
//!
//! A bundle begins with its manifest (`manifest.json`): a number for the format, the version of Kubernetes, the oldest role
//! server that knows what to do with it, and every file with its length and digest. The digest of the bundle as a whole vouches
//! for the manifest, and the manifest for each file, so that what was unpacked can be verified in later lives as well, when the
//! archive is long gone.
//!
//! | where | what |
//! | --- | --- |
//! | `bin/` | programs, each by its own name: they find each other there |
//! | `cni/` | plugins that connect pods to the network |
//! | `add-ons/` | manifests of objects that the bundle wants in the cluster: DNS, a pod network |
//! | `images/` | container images that a node has before it can reach any registry; `pause` holds the namespaces of a pod |
//!
//! A bundle may serve controllers alone, or workers alone. What it lacks is said when it is asked to do what it cannot
//! ([`Manifest::check`]).
//!
//! Whoever reads a manifest hears everything that is wrong with it at once.

use std::fmt;
use std::str::FromStr;

use crate::model::declaration::Sha256;
use crate::model::kubernetes::manifest::{self, shown};
use crate::model::kubernetes::version::Version;

/// The path of the manifest, which is the first file of the archive.
pub const MANIFEST: &str = "manifest.json";
/// Most bytes of a manifest. It lies within the first piece of its artefact, compressed or not.
pub const LARGEST_MANIFEST: u64 = 128 << 10;
/// Most bytes of one file.
pub const LARGEST_FILE: u64 = 1 << 30;
/// Most bytes of all files.
pub const LARGEST: u64 = 4 << 30;
/// Most bytes of an add-on's manifest, which is kept in etcd for the cluster.
pub const LARGEST_ADD_ON: u64 = 1 << 20;

/// The kubelet's name, among programs and among the components that a node reports.
pub const KUBELET: &str = "kubelet";

/// A program of a bundle, or the plugins for networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// Answers for the cluster's objects.
    KubeApiserver,
    /// Makes what is true what objects say.
    KubeControllerManager,
    /// Chooses nodes for pods.
    KubeScheduler,
    /// Has a node's pods run.
    Kubelet,
    /// Brings what is sent to a service to its pods.
    KubeProxy,
    /// Runs containers for the kubelet.
    Containerd,
    /// Stands between containerd and one pod, and outlives the former.
    ContainerdShim,
    /// Talks to containerd: imports images.
    Ctr,
    /// Starts a container.
    Runc,
    /// A plugin that connects pods; a bundle has several.
    CniPlugin,
}

const COMPONENTS: [(Component, &str, &str); 10] = [
    (Component::KubeApiserver, "kube-apiserver", "bin/kube-apiserver"),
    (Component::KubeControllerManager, "kube-controller-manager", "bin/kube-controller-manager"),
    (Component::KubeScheduler, "kube-scheduler", "bin/kube-scheduler"),
    (Component::Kubelet, KUBELET, "bin/kubelet"),
    (Component::KubeProxy, "kube-proxy", "bin/kube-proxy"),
    (Component::Containerd, "containerd", "bin/containerd"),
    // containerd looks for it by this name.
    (Component::ContainerdShim, "containerd-shim", "bin/containerd-shim-runc-v2"),
    (Component::Ctr, "ctr", "bin/ctr"),
    (Component::Runc, "runc", "bin/runc"),
    (Component::CniPlugin, "cni-plugin", "cni/"),
];

impl Component {
    /// Where it is in a bundle; a directory for [`CniPlugin`][Self::CniPlugin].
    #[must_use]
    pub fn path(self) -> &'static str {
        COMPONENTS.iter().find(|(component, ..)| *component == self).map_or("", |(.., path)| path)
    }

    /// Whether its version is that of Kubernetes.
    #[must_use]
    pub const fn is_of_kubernetes(self) -> bool {
        matches!(
            self,
            Self::KubeApiserver
                | Self::KubeControllerManager
                | Self::KubeScheduler
                | Self::Kubelet
                | Self::KubeProxy
        )
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            COMPONENTS.iter().find(|(component, ..)| component == self).map_or("", |(_, name, _)| name),
        )
    }
}

impl FromStr for Component {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        COMPONENTS.iter().find(|(_, name, _)| *name == text).map(|(component, ..)| *component).ok_or_else(
            || {
                let names: Vec<&str> = COMPONENTS.iter().map(|(_, name, _)| *name).collect();
                format!("{:?} is no component of a bundle; these are: {}", shown(text), names.join(", "))
            },
        )
    }
}

/// What a node does of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// The control plane.
    Controller,
    /// Pods.
    Worker,
}

impl Duty {
    /// What it takes.
    #[must_use]
    pub const fn components(self) -> &'static [Component] {
        match self {
            Self::Controller => {
                &[Component::KubeApiserver, Component::KubeControllerManager, Component::KubeScheduler]
            }
            Self::Worker => &[
                Component::Kubelet,
                Component::KubeProxy,
                Component::Containerd,
                Component::ContainerdShim,
                Component::Ctr,
                Component::Runc,
                Component::CniPlugin,
            ],
        }
    }
}

/// A file of the archive, whatever it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path in the archive, and below the directory of the bundle.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Its digest.
    pub sha256: Sha256,
    /// Whether it is started.
    pub is_program: bool,
}

/// A program or a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// What it is.
    pub component: Component,
    /// Its version, as its makers write it; for Kubernetes' own programs that of the bundle.
    pub version: String,
    /// Its file.
    pub file: File,
}

/// Objects that the bundle wants in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddOn {
    /// What it is called: `dns`, for example.
    pub name: String,
    /// Its file, which holds manifests of objects.
    pub file: File,
}

/// A container image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// What it is called here: `pause`, for example.
    pub name: String,
    /// What pods and containerd call it.
    pub reference: String,
    /// Its file, an archive in the layout of the Open Container Initiative.
    pub file: File,
}

/// What a bundle says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// What people call it.
    pub name: String,
    /// The version of Kubernetes.
    pub kubernetes: Version,
    /// The oldest release of the role server that can run it.
    pub needs_roleserver: Version,
    /// Programs and plugins.
    pub programs: Vec<Program>,
    /// Add-ons.
    pub add_ons: Vec<AddOn>,
    /// Images.
    pub images: Vec<Image>,
}

/// Everything that is wrong with a manifest, each a sentence without its full stop; one at least.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {MANIFEST} of the bundle is wrong: {}", self.0.join("; "))]
pub struct Problems(pub Vec<String>);

impl Manifest {
    /// Reads a manifest.
    pub fn read(text: &[u8]) -> Result<Self, Problems> {
        manifest::read(text)
    }

    /// All files, in the order of the archive.
    pub fn files(&self) -> impl Iterator<Item = &File> {
        let programs = self.programs.iter().map(|program| &program.file);
        let add_ons = self.add_ons.iter().map(|add_on| &add_on.file);
        programs.chain(add_ons).chain(self.images.iter().map(|image| &image.file))
    }

    /// Bytes of all files.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.files().map(|file| file.size).sum()
    }

    /// The file of a component; the first of several.
    #[must_use]
    pub fn program(&self, component: Component) -> Option<&Program> {
        self.programs.iter().find(|program| program.component == component)
    }

    /// The image of that name.
    #[must_use]
    pub fn image(&self, name: &str) -> Option<&Image> {
        self.images.iter().find(|image| image.name == name)
    }

    /// Whether a node with a role server of this release can do this with it; if not, a sentence.
    pub fn check(&self, duty: Duty, roleserver: Version) -> Result<(), String> {
        if roleserver < self.needs_roleserver {
            return Err(format!(
                "bundle {} needs role server {} or newer, and this is {roleserver}: update the role server first",
                self.name, self.needs_roleserver
            ));
        }
        let lacks: Vec<String> = duty
            .components()
            .iter()
            .filter(|component| self.program(**component).is_none())
            .map(ToString::to_string)
            .collect();
        if lacks.is_empty() {
            return Ok(());
        }
        let whom = match duty {
            Duty::Controller => "controllers",
            Duty::Worker => "workers",
        };
        Err(format!("bundle {} is not for {whom}: it holds no {}", self.name, lacks.join(", no ")))
    }
}

#[cfg(test)]
pub(crate) mod tests;
