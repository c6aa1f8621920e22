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

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

use crate::model::declaration::Sha256;
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
/// Most files.
const MOST_FILES: usize = 200;
/// The format that this program reads.
const FORMAT: u64 = 1;
/// Longest name of a bundle, of anything in it, and of a version.
const LONGEST_NAME: usize = 80;
/// Most problems that are told at once.
const MOST_PROBLEMS: usize = 20;

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
    (Component::Kubelet, "kubelet", "bin/kubelet"),
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
        let one = |problem: String| Problems(vec![problem]);
        // First of all the format: what a later one writes, this program need not understand to say so.
        let Format { format } = serde_json::from_slice(text).map_err(|error| one(no_manifest(&error)))?;
        if format != FORMAT {
            return Err(one(format!(
                "it is of format {format}, and this release reads format {FORMAT}: a bundle for another release of the role server"
            )));
        }
        let said: Said = serde_json::from_slice(text).map_err(|error| one(no_manifest(&error)))?;
        said.checked()
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

#[derive(Deserialize)]
struct Format {
    format: u64,
}

/// A manifest as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    #[serde(rename = "format")]
    _format: u64,
    name: String,
    kubernetes: String,
    needs_roleserver: String,
    files: Vec<SaidProgram>,
    #[serde(default)]
    add_ons: Vec<SaidAddOn>,
    #[serde(default)]
    images: Vec<SaidImage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SaidProgram {
    component: String,
    path: String,
    version: String,
    sha256: String,
    size: u64,
    mode: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SaidAddOn {
    name: String,
    path: String,
    sha256: String,
    size: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SaidImage {
    name: String,
    reference: String,
    path: String,
    sha256: String,
    size: u64,
}

impl Said {
    fn checked(self) -> Result<Manifest, Problems> {
        let mut wrong = Wrong::default();
        if !is_word(&self.name) {
            wrong.say(format!(
                "its name {:?} is no word of letters, digits, `.`, `-`, `_` and `+`",
                shown(&self.name)
            ));
        }
        let kubernetes = wrong.unless(self.kubernetes.parse::<Version>(), "the version of Kubernetes");
        let needs_roleserver =
            wrong.unless(self.needs_roleserver.parse::<Version>(), "the oldest role server that can run it");
        let count = self.files.len() + self.add_ons.len() + self.images.len();
        if self.files.is_empty() {
            wrong.say("it holds no program".to_owned());
        }
        if count > MOST_FILES {
            wrong.say(format!("it names {count} files, and {MOST_FILES} are the most"));
            return Err(wrong.problems());
        }

        let mut programs = Vec::new();
        let mut components = BTreeSet::new();
        for said in self.files {
            let Some(component) = wrong.unless(said.component.parse::<Component>(), "a file") else {
                continue;
            };
            let path = component.path();
            let fits = if path.ends_with('/') { is_below(&said.path, path, "") } else { said.path == path };
            if !fits {
                let whither = if path.ends_with('/') { format!("{path}NAME") } else { path.to_owned() };
                wrong.say(format!("a {component} lies at {whither}, and not at {:?}", shown(&said.path)));
            }
            if component != Component::CniPlugin && !components.insert(component) {
                wrong.say(format!("it names two programs for {component}"));
            }
            if said.mode != "0755" {
                wrong.say(format!(
                    "the mode of {:?} is 0755, and not {:?}",
                    shown(&said.path),
                    shown(&said.mode)
                ));
            }
            if !is_word(&said.version) {
                wrong.say(format!(
                    "the version {:?} of {:?} is no word",
                    shown(&said.version),
                    shown(&said.path)
                ));
            } else if let Some(kubernetes) = kubernetes
                && component.is_of_kubernetes()
                && said.version.parse() != Ok(kubernetes)
            {
                wrong.say(format!(
                    "its {component} is of version {}, and the bundle of {kubernetes}",
                    said.version
                ));
            }
            if let Some(file) = wrong.file(said.path, said.size, &said.sha256, LARGEST_FILE, true) {
                programs.push(Program { component, version: said.version, file });
            }
        }
        let mut add_ons = Vec::new();
        for said in self.add_ons {
            wrong.named("add-on", &said.name, &said.path, "add-ons/", ".yaml");
            if let Some(file) = wrong.file(said.path, said.size, &said.sha256, LARGEST_ADD_ON, false) {
                add_ons.push(AddOn { name: said.name, file });
            }
        }
        let mut images = Vec::new();
        for said in self.images {
            wrong.named("image", &said.name, &said.path, "images/", ".tar");
            if !is_reference(&said.reference) {
                wrong.say(format!("{:?} is no reference of an image", shown(&said.reference)));
            }
            if let Some(file) = wrong.file(said.path, said.size, &said.sha256, LARGEST_FILE, false) {
                images.push(Image { name: said.name, reference: said.reference, file });
            }
        }
        if wrong.bytes > LARGEST {
            wrong.say(format!("its files have {} bytes together, and {LARGEST} are the most", wrong.bytes));
        }
        match (kubernetes, needs_roleserver) {
            (Some(kubernetes), Some(needs_roleserver)) if wrong.problems.is_empty() => {
                Ok(Manifest { name: self.name, kubernetes, needs_roleserver, programs, add_ons, images })
            }
            _ => Err(wrong.problems()),
        }
    }
}

/// What was found wrong so far, and what has to be known of all files together.
#[derive(Default)]
struct Wrong {
    problems: Vec<String>,
    paths: BTreeSet<String>,
    bytes: u64,
}

impl Wrong {
    fn say(&mut self, problem: String) {
        self.problems.push(problem);
    }

    fn problems(mut self) -> Problems {
        let more = self.problems.len().saturating_sub(MOST_PROBLEMS);
        self.problems.truncate(MOST_PROBLEMS);
        if more > 0 {
            self.problems.push(format!("and {more} more"));
        }
        Problems(self.problems)
    }

    fn unless<T>(&mut self, read: Result<T, impl fmt::Display>, what: &str) -> Option<T> {
        read.map_err(|error| self.say(format!("{what}: {error}"))).ok()
    }

    /// What is called by a name lies at a path that follows from it.
    fn named(&mut self, what: &str, name: &str, path: &str, directory: &str, ending: &str) {
        if !is_word(name)
            || path.strip_prefix(directory).and_then(|rest| rest.strip_suffix(ending)) != Some(name)
        {
            self.say(format!(
                "the {what} {:?} lies at {directory}NAME{ending} with its own name, and not at {:?}",
                shown(name),
                shown(path)
            ));
        }
    }

    fn file(
        &mut self,
        path: String,
        size: u64,
        sha256: &str,
        largest: u64,
        is_program: bool,
    ) -> Option<File> {
        self.bytes = self.bytes.saturating_add(size);
        if !(1..=largest).contains(&size) {
            self.say(format!("{:?} has {size} bytes, and such a file has 1 to {largest}", shown(&path)));
        }
        if !self.paths.insert(path.clone()) {
            self.say(format!("it names {:?} twice", shown(&path)));
        }
        let mut digest = [0; 32];
        if hex::decode_to_slice(sha256, &mut digest).is_err() || hex::encode(digest) != sha256 {
            self.say(format!(
                "{:?} is no SHA-256 of {:?}: it has 64 lower-case hexadecimal digits",
                shown(sha256),
                shown(&path)
            ));
            return None;
        }
        Some(File { path, size, sha256: Sha256(digest), is_program })
    }
}

/// Where it is wrong, and what serde makes of it, which shows no more than a word of the text.
fn no_manifest(error: &serde_json::Error) -> String {
    error.to_string().chars().take(300).collect()
}

/// The beginning of what somebody wrote.
fn shown(text: &str) -> String {
    text.chars().take(100).collect()
}

/// A name: no path, nothing hidden, nothing that a shell or a page would take for more than it is.
fn is_word(text: &str) -> bool {
    (1..=LONGEST_NAME).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+' | '~'))
}

fn is_below(path: &str, directory: &str, ending: &str) -> bool {
    path.strip_prefix(directory).and_then(|rest| rest.strip_suffix(ending)).is_some_and(is_word)
}

/// `registry/name:tag`, as far as it matters that it is one harmless word.
fn is_reference(text: &str) -> bool {
    (1..=200).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '/' | ':' | '@'))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    use serde_json::{Value, json};

    /// A good manifest.
    pub(crate) const TEXT: &str = r#"{
        "format": 1, "name": "test", "kubernetes": "1.20.2", "needs_roleserver": "0.1.0",
        "files": [
            {"component": "kube-apiserver", "path": "bin/kube-apiserver", "version": "1.20.2", "size": 3, "mode": "0755",
             "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
            {"component": "cni-plugin", "path": "cni/bridge", "version": "1.1.1+ds1-3~deb12u1", "size": 7, "mode": "0755",
             "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
        ],
        "add_ons": [
            {"name": "dns", "path": "add-ons/dns.yaml", "size": 3,
             "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
        ],
        "images": [
            {"name": "pause", "reference": "registry.k8s.io/pause:3.2", "path": "images/pause.tar", "size": 3,
             "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
        ]
    }"#;

    fn read(value: &Value) -> Result<Manifest, Problems> {
        Manifest::read(&serde_json::to_vec(value).unwrap())
    }

    /// What is said of the good one with one thing changed.
    fn said(pointer: &str, value: Value) -> String {
        let mut manifest: Value = serde_json::from_str(TEXT).unwrap();
        *manifest.pointer_mut(pointer).unwrap() = value;
        read(&manifest).unwrap_err().to_string()
    }

    #[test]
    fn manifest_says_what_a_bundle_holds() {
        let manifest = Manifest::read(TEXT.as_bytes()).unwrap();
        assert_eq!(
            (manifest.kubernetes, manifest.needs_roleserver),
            (Version::new(1, 20, 2), Version::new(0, 1, 0))
        );
        let paths: Vec<&str> = manifest.files().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["bin/kube-apiserver", "cni/bridge", "add-ons/dns.yaml", "images/pause.tar"]);
        let started: Vec<bool> = manifest.files().map(|file| file.is_program).collect();
        assert_eq!(started, [true, true, false, false]);
        assert_eq!(manifest.size(), 16);
        assert_eq!(manifest.image("pause").unwrap().reference, "registry.k8s.io/pause:3.2");
        assert!(manifest.program(Component::Kubelet).is_none());
        for (component, name, _) in COMPONENTS {
            assert_eq!(component.to_string(), name);
            assert_eq!(name.parse(), Ok(component));
        }
    }

    #[test]
    fn each_thing_that_is_wrong_is_said() {
        for (pointer, value, expected) in [
            ("/format", json!(2), "of format 2, and this release reads format 1"),
            ("/format", json!("1"), "invalid type"),
            ("/name", json!("../x"), "its name \"../x\" is no word"),
            ("/name", json!(""), "is no word"),
            ("/kubernetes", json!("1.20"), "the version of Kubernetes: \"1.20\" is no version"),
            (
                "/needs_roleserver",
                json!("new"),
                "the oldest role server that can run it: \"new\" is no version",
            ),
            ("/files", json!([]), "it holds no program"),
            (
                "/files/0/component",
                json!("kubectl"),
                "\"kubectl\" is no component of a bundle; these are: kube-apiserver,",
            ),
            ("/files/0/path", json!("bin/../bin/kube-apiserver"), "lies at bin/kube-apiserver, and not at"),
            ("/files/0/path", json!("/bin/kube-apiserver"), "lies at bin/kube-apiserver"),
            ("/files/1/path", json!("cni/../bin/sh"), "a cni-plugin lies at cni/NAME, and not at"),
            ("/files/1/path", json!("cni/.hidden"), "a cni-plugin lies at cni/NAME"),
            ("/files/1/path", json!("cni/"), "a cni-plugin lies at cni/NAME"),
            ("/files/0/mode", json!("4755"), "is 0755, and not \"4755\""),
            (
                "/files/0/version",
                json!("1.20.3"),
                "its kube-apiserver is of version 1.20.3, and the bundle of 1.20.2",
            ),
            ("/files/1/version", json!("1 2"), "is no word"),
            ("/files/0/size", json!(0), "has 0 bytes"),
            ("/files/0/size", json!(LARGEST_FILE + 1), "such a file has 1 to 1073741824"),
            ("/files/0/size", json!(-1), "invalid value"),
            ("/files/0/sha256", json!("ab"), "\"ab\" is no SHA-256 of \"bin/kube-apiserver\""),
            ("/files/0/sha256", json!("AB".repeat(32)), "lower-case"),
            (
                "/add_ons/0/path",
                json!("add-ons/other.yaml"),
                "the add-on \"dns\" lies at add-ons/NAME.yaml with its own name",
            ),
            ("/add_ons/0/size", json!(LARGEST_ADD_ON + 1), "such a file has 1 to 1048576"),
            ("/images/0/name", json!("a/b"), "the image \"a/b\" lies at images/NAME.tar"),
            ("/images/0/reference", json!("x; reboot"), "no reference of an image"),
        ] {
            let said = said(pointer, value);
            assert!(
                said.contains(expected) && said.starts_with("the manifest.json of the bundle is wrong: "),
                "{said}"
            );
        }
        let unknown = said("/files/0", json!({"component": "kubelet", "setuid": true}));
        assert!(unknown.contains("unknown field `setuid`"), "{unknown}");
        assert!(Manifest::read(b"no JSON").unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn everything_that_is_wrong_is_said_at_once_and_not_without_end() {
        let mut manifest: Value = serde_json::from_str(TEXT).unwrap();
        manifest["kubernetes"] = json!("x");
        manifest["files"][0]["mode"] = json!("0777");
        manifest["images"][0]["reference"] = json!("");
        assert_eq!(read(&manifest).unwrap_err().0.len(), 3);
        let again = manifest["files"][1].clone();
        for _ in 0..150 {
            manifest["files"].as_array_mut().unwrap().push(again.clone());
        }
        let problems = read(&manifest).unwrap_err().0;
        assert_eq!(problems.len(), MOST_PROBLEMS + 1);
        assert!(problems[MOST_PROBLEMS].starts_with("and ") && problems[2].contains("twice"), "{problems:?}");
        for _ in 0..150 {
            manifest["files"].as_array_mut().unwrap().push(again.clone());
        }
        let said = read(&manifest).unwrap_err().to_string();
        assert!(said.contains("it names 304 files, and 200 are the most"), "{said}");
    }

    #[test]
    fn files_have_a_bound_together() {
        let mut manifest: Value = serde_json::from_str(TEXT).unwrap();
        let plugin = |number: u64| {
            let mut plugin = manifest["files"][1].clone();
            plugin["path"] = json!(format!("cni/plugin-{number}"));
            plugin["size"] = json!(LARGEST_FILE);
            plugin
        };
        let plugins: Vec<Value> = (0..4).map(plugin).collect();
        manifest["files"].as_array_mut().unwrap().extend(plugins);
        let said = read(&manifest).unwrap_err().to_string();
        assert!(said.contains("4294967312 bytes together, and 4294967296 are the most"), "{said}");
    }

    #[test]
    fn bundle_says_for_whom_it_is_not() {
        let manifest = Manifest::read(TEXT.as_bytes()).unwrap();
        let own = Version::new(0, 1, 0);
        let said = manifest.check(Duty::Controller, own).unwrap_err();
        assert_eq!(
            said,
            "bundle test is not for controllers: it holds no kube-controller-manager, no kube-scheduler"
        );
        let said = manifest.check(Duty::Worker, own).unwrap_err();
        assert!(
            said.contains("not for workers: it holds no kubelet, no kube-proxy, no containerd,"),
            "{said}"
        );
        let said = manifest.check(Duty::Controller, Version::new(0, 0, 9)).unwrap_err();
        assert!(said.contains("needs role server 0.1.0 or newer, and this is 0.0.9"), "{said}");
        let mut whole = manifest;
        for component in Duty::Controller.components() {
            let mut program = whole.programs[0].clone();
            program.component = *component;
            whole.programs.push(program);
        }
        assert_eq!(whole.check(Duty::Controller, own), Ok(()));
    }
}
