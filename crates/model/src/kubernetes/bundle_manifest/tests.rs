//! Bundle manifests, case by case.

use super::*;

use serde_json::{Value, json};

use crate::kubernetes::manifest_parser::MAX_PROBLEMS;

/// A valid manifest.
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

fn read(value: &Value) -> Result<BundleManifest, ManifestProblems> {
    BundleManifest::parse(&serde_json::to_vec(value).unwrap())
}

/// The problem of the valid manifest with one value changed.
fn problem_of(pointer: &str, value: Value) -> String {
    let mut manifest: Value = serde_json::from_str(TEXT).unwrap();
    *manifest.pointer_mut(pointer).unwrap() = value;
    read(&manifest).unwrap_err().to_string()
}

#[test]
fn manifest_lists_the_bundle_contents() {
    let manifest = BundleManifest::parse(TEXT.as_bytes()).unwrap();
    assert_eq!(
        (manifest.kubernetes, manifest.needs_roleserver),
        (ReleaseVersion::new(1, 20, 2), ReleaseVersion::new(0, 1, 0))
    );
    let paths: Vec<&str> = manifest.files().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["bin/kube-apiserver", "cni/bridge", "add-ons/dns.yaml", "images/pause.tar"]);
    let started: Vec<bool> = manifest.files().map(|file| file.is_program).collect();
    assert_eq!(started, [true, true, false, false]);
    assert_eq!(manifest.total_bytes(), 16);
    assert_eq!(manifest.image("pause").unwrap().reference, "registry.k8s.io/pause:3.2");
    assert!(manifest.program(BundleComponent::Kubelet).is_none());
    for (component, name, _) in COMPONENTS {
        assert_eq!(component.to_string(), name);
        assert_eq!(name.parse(), Ok(component));
    }
}

#[test]
fn each_problem_is_reported() {
    for (pointer, value, expected) in [
        ("/format", json!(2), "of format 2, and this release reads format 1"),
        ("/format", json!("1"), "invalid type"),
        ("/name", json!("../x"), "its name \"../x\" is no word"),
        ("/name", json!(""), "is no word"),
        ("/kubernetes", json!("1.20"), "the version of Kubernetes: \"1.20\" is not a version"),
        (
            "/needs_roleserver",
            json!("new"),
            "the oldest role server that can run it: \"new\" is not a version",
        ),
        ("/files", json!([]), "it holds no program"),
        (
            "/files/0/component",
            json!("kubectl"),
            "\"kubectl\" is not a component of a bundle; these are: kube-apiserver,",
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
        ("/files/0/size", json!(MAX_FILE_BYTES + 1), "such a file has 1 to 1073741824"),
        ("/files/0/size", json!(-1), "invalid value"),
        ("/files/0/sha256", json!("ab"), "\"ab\" is not a SHA-256 of \"bin/kube-apiserver\""),
        ("/files/0/sha256", json!("AB".repeat(32)), "lower-case"),
        (
            "/add_ons/0/path",
            json!("add-ons/other.yaml"),
            "the add-on \"dns\" lies at add-ons/NAME.yaml with its own name",
        ),
        ("/add_ons/0/size", json!(MAX_ADD_ON_BYTES + 1), "such a file has 1 to 1048576"),
        ("/images/0/name", json!("a/b"), "the image \"a/b\" lies at images/NAME.tar"),
        ("/images/0/reference", json!("x; reboot"), "no reference of an image"),
    ] {
        let text = problem_of(pointer, value);
        assert!(
            text.contains(expected) && text.starts_with("the manifest.json of the bundle is wrong: "),
            "{text}"
        );
    }
    let unknown = problem_of("/files/0", json!({"component": "kubelet", "setuid": true}));
    assert!(unknown.contains("unknown field `setuid`"), "{unknown}");
    assert!(BundleManifest::parse(b"no JSON").unwrap_err().to_string().contains("line 1"));
}

#[test]
fn all_problems_are_reported_up_to_a_limit() {
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
    assert_eq!(problems.len(), MAX_PROBLEMS + 1);
    assert!(problems[MAX_PROBLEMS].starts_with("and ") && problems[2].contains("twice"), "{problems:?}");
    for _ in 0..150 {
        manifest["files"].as_array_mut().unwrap().push(again.clone());
    }
    let text = read(&manifest).unwrap_err().to_string();
    assert!(text.contains("it names 304 files, and 200 is the maximum"), "{text}");
}

#[test]
fn total_file_size_is_bounded() {
    let mut manifest: Value = serde_json::from_str(TEXT).unwrap();
    let plugin = |number: u64| {
        let mut plugin = manifest["files"][1].clone();
        plugin["path"] = json!(format!("cni/plugin-{number}"));
        plugin["size"] = json!(MAX_FILE_BYTES);
        plugin
    };
    let plugins: Vec<Value> = (0..4).map(plugin).collect();
    manifest["files"].as_array_mut().unwrap().extend(plugins);
    let text = read(&manifest).unwrap_err().to_string();
    assert!(text.contains("4294967312 bytes together, and 4294967296 is the maximum"), "{text}");
}

#[test]
fn unsupported_duty_is_reported() {
    let manifest = BundleManifest::parse(TEXT.as_bytes()).unwrap();
    let own = ReleaseVersion::new(0, 1, 0);
    let text = manifest.check_supports(KubernetesDuty::Controller, own).unwrap_err();
    assert_eq!(
        text,
        "bundle test is not for controllers: it holds no kube-controller-manager, no kube-scheduler"
    );
    let text = manifest.check_supports(KubernetesDuty::Worker, own).unwrap_err();
    assert!(text.contains("not for workers: it holds no kubelet, no kube-proxy, no containerd,"), "{text}");
    let text = manifest.check_supports(KubernetesDuty::Controller, ReleaseVersion::new(0, 0, 9)).unwrap_err();
    assert!(text.contains("needs role server 0.1.0 or newer, and this is 0.0.9"), "{text}");
    let mut whole = manifest;
    for component in KubernetesDuty::Controller.required_components() {
        let mut program = whole.programs[0].clone();
        program.component = *component;
        whole.programs.push(program);
    }
    assert_eq!(whole.check_supports(KubernetesDuty::Controller, own), Ok(()));
}

#[test]
fn versions_with_a_published_fault_are_named() {
    let mut manifest = BundleManifest::parse(TEXT.as_bytes()).unwrap();
    let faults = |manifest: &BundleManifest| -> Vec<(String, bool)> {
        manifest.version_faults().iter().map(|found| (found.to_string(), found.is_certain)).collect()
    };
    manifest.kubernetes = ReleaseVersion::new(1, 34, 0);
    assert_eq!(faults(&manifest), []);
    manifest.kubernetes = ReleaseVersion::new(1, 30, 3);
    let program = &mut manifest.programs[1];
    (program.component, program.version) = (BundleComponent::Containerd, "1.6.0~ds1-1".to_owned());
    let found = faults(&manifest);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].0.starts_with("Kubernetes 1.30.3 lets a node delete its own node object"), "{found:?}");
    assert!(found[1].0.starts_with("containerd 1.6.0 lets an image read files of its host"), "{found:?}");
    assert_eq!([found[0].1, found[1].1], [true, false], "the package may have the correction");
    manifest.programs[1].version = "1.6.20~ds1-1+deb12u1".to_owned();
    assert_eq!(faults(&manifest).len(), 1);
    let program = &mut manifest.programs[1];
    (program.component, program.version) = (BundleComponent::Runc, "1.1.11".to_owned());
    let found = faults(&manifest);
    assert!(
        found[1].0.starts_with("runc 1.1.11 lets a container reach the file system of its host"),
        "{found:?}"
    );
    assert!(found.iter().all(|(_, is_certain)| *is_certain), "{found:?}");
}
