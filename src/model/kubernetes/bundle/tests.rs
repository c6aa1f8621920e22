use super::*;

use serde_json::{Value, json};

use crate::model::kubernetes::manifest::MOST_PROBLEMS;

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
        ("/needs_roleserver", json!("new"), "the oldest role server that can run it: \"new\" is no version"),
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
    assert!(said.contains("not for workers: it holds no kubelet, no kube-proxy, no containerd,"), "{said}");
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
