//! Bundle manifest: programs, add-ons and images of a bundle.
//!
//! A bundle begins with its manifest (`manifest.json`). It contains a format number, the version of Kubernetes, the
//! oldest role server that can run the bundle, and every file with its length and digest. The digest of the bundle
//! covers the manifest, and the manifest covers each file. So unpacked files can be verified after later starts as
//! well, when the archive is long deleted.
//!
//! | path | content |
//! | --- | --- |
//! | `bin/` | programs, each by its own name: they find each other there |
//! | `cni/` | plugins that connect pods to the network |
//! | `add-ons/` | manifests of objects that the bundle wants in the cluster: DNS, a pod network |
//! | `images/` | container images for nodes that cannot reach a registry yet; `pause` holds a pod's namespaces |
//!
//! A bundle may serve only controllers, or only workers. What it lacks is reported when it has to do what it cannot
//! ([`BundleManifest::check_supports`]).
//!
//! Parsing a manifest reports all its problems at once.

use std::fmt;
use std::str::FromStr;

use crate::kubernetes::manifest_parser::{self, truncate};
use crate::kubernetes::version::ReleaseVersion;
use crate::program_versions::version::{ProgramVersion, parse_program_version};
use crate::program_versions::{Program, VersionFinding, find_faults};
use crate::role_declaration::Sha256;

/// Path of the manifest, which is the first file of the archive.
pub const MANIFEST: &str = "manifest.json";
/// Most bytes of a manifest. It lies within the first piece of its artefact, compressed or not.
pub const MAX_MANIFEST_BYTES: u64 = 128 << 10;
/// Most bytes of one file.
pub const MAX_FILE_BYTES: u64 = 1 << 30;
/// Most bytes of all files together.
pub const MAX_BUNDLE_BYTES: u64 = 4 << 30;
/// Most bytes of an add-on's manifest, which is stored in the cluster's etcd.
pub const MAX_ADD_ON_BYTES: u64 = 1 << 20;

/// Name of the kubelet, among programs and among the components that a node reports.
pub const KUBELET: &str = "kubelet";

/// A program of a bundle, or its network plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BundleComponent {
    /// Serves the cluster's objects.
    KubeApiserver,
    /// Makes the cluster match its objects.
    KubeControllerManager,
    /// Chooses nodes for pods.
    KubeScheduler,
    /// Runs the pods of a node.
    Kubelet,
    /// Forwards traffic of services to their pods.
    KubeProxy,
    /// Runs containers for the kubelet.
    Containerd,
    /// Sits between containerd and one pod, and outlives containerd.
    ContainerdShim,
    /// Command line client of containerd, used to import images.
    Ctr,
    /// Starts a container for containerd's shim.
    Runc,
    /// A plugin that connects pods; a bundle has several.
    CniPlugin,
}

const COMPONENTS: [(BundleComponent, &str, &str); 10] = [
    (BundleComponent::KubeApiserver, "kube-apiserver", "bin/kube-apiserver"),
    (BundleComponent::KubeControllerManager, "kube-controller-manager", "bin/kube-controller-manager"),
    (BundleComponent::KubeScheduler, "kube-scheduler", "bin/kube-scheduler"),
    (BundleComponent::Kubelet, KUBELET, "bin/kubelet"),
    (BundleComponent::KubeProxy, "kube-proxy", "bin/kube-proxy"),
    (BundleComponent::Containerd, "containerd", "bin/containerd"),
    // containerd looks for its shim by this name.
    (BundleComponent::ContainerdShim, "containerd-shim", "bin/containerd-shim-runc-v2"),
    (BundleComponent::Ctr, "ctr", "bin/ctr"),
    (BundleComponent::Runc, "runc", "bin/runc"),
    (BundleComponent::CniPlugin, "cni-plugin", "cni/"),
];

impl BundleComponent {
    /// Its path in a bundle; a directory for [`CniPlugin`][Self::CniPlugin].
    #[must_use]
    pub fn path(self) -> &'static str {
        COMPONENTS.iter().find(|(component, ..)| *component == self).map_or("", |(.., path)| path)
    }

    /// Whether its version is the version of Kubernetes.
    #[must_use]
    pub const fn has_kubernetes_version(self) -> bool {
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

impl fmt::Display for BundleComponent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            COMPONENTS.iter().find(|(component, ..)| component == self).map_or("", |(_, name, _)| name),
        )
    }
}

impl FromStr for BundleComponent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        COMPONENTS.iter().find(|(_, name, _)| *name == text).map(|(component, ..)| *component).ok_or_else(
            || {
                let names: Vec<&str> = COMPONENTS.iter().map(|(_, name, _)| *name).collect();
                format!(
                    "{:?} is not a component of a bundle; these are: {}",
                    truncate(text),
                    names.join(", ")
                )
            },
        )
    }
}

/// What a node does for Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KubernetesDuty {
    /// Run the control plane of Kubernetes.
    Controller,
    /// Run pods on the node.
    Worker,
}

impl KubernetesDuty {
    /// Components that a bundle needs for this duty.
    #[must_use]
    pub const fn required_components(self) -> &'static [BundleComponent] {
        match self {
            Self::Controller => &[
                BundleComponent::KubeApiserver,
                BundleComponent::KubeControllerManager,
                BundleComponent::KubeScheduler,
            ],
            Self::Worker => &[
                BundleComponent::Kubelet,
                BundleComponent::KubeProxy,
                BundleComponent::Containerd,
                BundleComponent::ContainerdShim,
                BundleComponent::Ctr,
                BundleComponent::Runc,
                BundleComponent::CniPlugin,
            ],
        }
    }
}

/// A file of the archive, for any purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleFile {
    /// Path in the archive, and below the directory of the unpacked bundle.
    pub path: String,
    /// Size of the file in bytes.
    pub size: u64,
    /// SHA-256 of the file.
    pub sha256: Sha256,
    /// Whether it is executable.
    pub is_program: bool,
}

/// A program or a plugin of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleProgram {
    /// The component that the file provides.
    pub component: BundleComponent,
    /// Version as its authors write it; for Kubernetes' own programs the bundle's version.
    pub version: String,
    /// Its file in the archive.
    pub file: BundleFile,
}

/// Kubernetes objects that the bundle wants in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleAddOn {
    /// Name of the add-on, for example `dns`.
    pub name: String,
    /// Its file, with manifests of objects.
    pub file: BundleFile,
}

/// A container image of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleImage {
    /// Name of the image in the bundle, for example `pause`.
    pub name: String,
    /// Reference of the image for pods and containerd.
    pub reference: String,
    /// Its file, an archive in the layout of the Open Container Initiative.
    pub file: BundleFile,
}

/// A parsed and validated bundle manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleManifest {
    /// Name of the bundle, for people.
    pub name: String,
    /// Version of Kubernetes in the bundle.
    pub kubernetes: ReleaseVersion,
    /// Oldest release of the role server that can run it.
    pub needs_roleserver: ReleaseVersion,
    /// Programs and plugins, in the order of the archive.
    pub programs: Vec<BundleProgram>,
    /// Add-ons, after the programs in the archive.
    pub add_ons: Vec<BundleAddOn>,
    /// Images, after the add-ons in the archive.
    pub images: Vec<BundleImage>,
}

/// All problems of a manifest, each a sentence without its full stop; at least one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {MANIFEST} of the bundle is wrong: {}", self.0.join("; "))]
pub struct ManifestProblems(pub Vec<String>);

impl BundleManifest {
    /// Parses and validates a manifest.
    pub fn parse(text: &[u8]) -> Result<Self, ManifestProblems> {
        manifest_parser::parse_manifest(text)
    }

    /// All files, in the order of the archive.
    pub fn files(&self) -> impl Iterator<Item = &BundleFile> {
        let programs = self.programs.iter().map(|program| &program.file);
        let add_ons = self.add_ons.iter().map(|add_on| &add_on.file);
        programs.chain(add_ons).chain(self.images.iter().map(|image| &image.file))
    }

    /// Size of all files together in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.files().map(|file| file.size).sum()
    }

    /// The file of a component; the first one if there are several.
    #[must_use]
    pub fn program(&self, component: BundleComponent) -> Option<&BundleProgram> {
        self.programs.iter().find(|program| program.component == component)
    }

    /// The image of that name, if the bundle has it.
    #[must_use]
    pub fn image(&self, name: &str) -> Option<&BundleImage> {
        self.images.iter().find(|image| image.name == name)
    }

    /// The versions of its Kubernetes, its containerd and its runc, as far as it has them.
    #[must_use]
    pub fn program_versions(&self) -> Vec<(Program, ProgramVersion)> {
        let version_of = |component| parse_program_version(&self.program(component)?.version);
        let versions = [
            (Program::Kubernetes, Some(self.kubernetes.into())),
            (Program::Containerd, version_of(BundleComponent::Containerd)),
            (Program::Runc, version_of(BundleComponent::Runc)),
        ];
        versions.into_iter().filter_map(|(program, version)| Some((program, version?))).collect()
    }

    /// The published faults of these versions.
    #[must_use]
    pub fn version_faults(&self) -> Vec<VersionFinding> {
        self.program_versions()
            .into_iter()
            .flat_map(|(program, version)| find_faults(program, version))
            .collect()
    }

    /// Checks that a node with this role server can do this with the bundle; the error is a sentence.
    pub fn check_supports(&self, duty: KubernetesDuty, roleserver: ReleaseVersion) -> Result<(), String> {
        if roleserver < self.needs_roleserver {
            return Err(format!(
                "bundle {} needs role server {} or newer, and this is {roleserver}: update the role server first",
                self.name, self.needs_roleserver
            ));
        }
        let lacks: Vec<String> = duty
            .required_components()
            .iter()
            .filter(|component| self.program(**component).is_none())
            .map(ToString::to_string)
            .collect();
        if lacks.is_empty() {
            return Ok(());
        }
        let nodes = match duty {
            KubernetesDuty::Controller => "controllers",
            KubernetesDuty::Worker => "workers",
        };
        Err(format!("bundle {} is not for {nodes}: it holds no {}", self.name, lacks.join(", no ")))
    }
}

#[cfg(test)]
pub(crate) mod tests;
