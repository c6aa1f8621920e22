//! The packages of the workspace, as `cargo metadata` lists them: each has the settings of the workspace, no check leaves
//! one out, and the tests of each have run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// The package with the fixtures that tests of several packages share.
const KIT: &str = "shepherd-testkit";

/// The settings that each package inherits, besides its lints.
const INHERITED: &[&str] = &["version", "edition", "rust-version", "license", "publish"];

/// A package of the workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    path: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
    test: bool,
}

impl Package {
    /// Targets of a kind: `lib`, `test`.
    fn targets(&self, kind: &str) -> impl Iterator<Item = &Target> {
        self.targets.iter().filter(move |target| target.kind.iter().any(|found| found == kind))
    }

    /// Packages of the workspace that it depends on, without those of its tests, by their short names.
    pub(crate) fn our_dependencies(&self) -> BTreeSet<&str> {
        let ours = self.dependencies.iter().filter(|found| found.path.is_some());
        let needed = ours.filter(|found| found.kind.as_deref() != Some("dev"));
        needed.map(|found| found.name.strip_prefix("shepherd-").unwrap_or(&found.name)).collect()
    }
}

/// All packages of the workspace.
pub(crate) fn packages() -> anyhow::Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"])
        .current_dir(source::root())
        .stdin(Stdio::null())
        .output()
        .context("cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout)?;
    Ok(metadata.packages)
}

/// The settings that a package does not inherit, by its manifest.
fn own_settings(manifest: &toml::Table) -> Vec<&'static str> {
    let inherits =
        |value: Option<&toml::Value>| value.and_then(|value| value.get("workspace")?.as_bool()) == Some(true);
    let package = manifest.get("package");
    let settings = INHERITED.iter().copied();
    let mut own: Vec<_> = settings.filter(|name| !inherits(package.and_then(|it| it.get(name)))).collect();
    if !inherits(manifest.get("lints")) {
        own.push("lints");
    }
    own
}

#[test]
fn each_package_inherits_the_settings_of_the_workspace() -> TestResult {
    let root: toml::Table = source::read(Path::new("Cargo.toml"))?.parse()?;
    let profile = &root["profile"]["dev"];
    assert_eq!(profile["debug"].as_bool(), Some(false), "a build for tests has no debug information");
    let profiles = profile["package"].as_table().context("profiles of packages")?;
    let packages = packages()?;
    let folders = fs::read_dir(source::root().join("crates"))?.count();
    assert_eq!(packages.len(), folders + 1, "each folder of crates is a package: {packages:?}");
    for package in packages {
        let manifest: toml::Table = fs::read_to_string(&package.manifest_path)?.parse()?;
        assert_eq!(own_settings(&manifest), Vec::<&str>::new(), "{}", package.manifest_path.display());
        assert_eq!(profiles.get(&package.name), None, "{} has a profile of its own", package.name);
    }
    Ok(())
}

#[test]
fn setting_that_is_not_inherited_is_found() -> TestResult {
    let manifest = "[package]\nname = \"x\"\nversion = \"1.0.0\"\nedition.workspace = true\n\
                    rust-version.workspace = false\nlicense.workspace = true\n[lints.rust]\nwarnings = \"allow\"\n";
    assert_eq!(
        own_settings(&manifest.parse::<toml::Table>()?),
        ["version", "rust-version", "publish", "lints"]
    );
    Ok(())
}

/// `tools/test` runs the tests of each library, and the integration tests of each package, that `cargo test --workspace`
/// builds. It fails when a package has none.
#[test]
fn tests_of_each_package_are_built() -> TestResult {
    for package in packages()? {
        let mut libraries = package.targets("lib");
        assert!(
            libraries.next().is_some_and(|library| library.test),
            "{} builds no unit tests",
            package.name
        );
        let folder = package.manifest_path.parent().context("a folder")?.join("tests");
        let expected = if folder.is_dir() { vec![("all", true)] } else { Vec::new() };
        let programs: Vec<(&str, bool)> =
            package.targets("test").map(|target| (target.name.as_str(), target.test)).collect();
        assert_eq!(programs, expected, "{}: the tests of {} are one program", package.name, folder.display());
    }
    let script = source::read(Path::new("tools/test"))?;
    assert!(
        script.contains("\ncargo test --workspace --no-run\n"),
        "tools/test builds a part of the workspace"
    );
    Ok(())
}

/// Nobody would notice a package that `tools/test` leaves out. So `tools/test` records which tests it starts, and
/// starts these last.
#[test]
fn tests_of_each_package_have_run() -> TestResult {
    // Without the variable, only these tests are run.
    let Some(path) = env::var_os("SHEPHERD_TEST_RAN") else { return Ok(()) };
    let ran = fs::read_to_string(path)?;
    let ran: BTreeSet<&str> = ran.lines().collect();
    let mut expected = BTreeSet::new();
    for package in packages()? {
        expected.insert(format!("{} unit", package.name));
        expected.extend(package.targets("test").map(|target| format!("{} {}", package.name, target.name)));
    }
    assert!(expected.len() > 20, "{expected:?}");
    let missing: Vec<&String> = expected.iter().filter(|name| !ran.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "tools/test did not run {missing:?}");
    Ok(())
}

/// Only tests link the fixtures of tests.
#[test]
fn testkit_is_a_dependency_of_tests_only() -> TestResult {
    let packages = packages()?;
    let uses_kit = |package: &Package| {
        let dependencies = &package.dependencies;
        dependencies.iter().any(|found| found.name == KIT && found.kind.as_deref() == Some("dev"))
    };
    assert!(packages.iter().any(uses_kit), "no package names {KIT}");
    for package in &packages {
        assert!(!package.our_dependencies().contains("testkit"), "{} links {KIT}", package.name);
    }
    Ok(())
}

/// Calls of cargo that check code, in lines of a script: each with whether it names packages.
fn checking_calls(script: &str) -> Vec<(String, bool)> {
    let script = script.replace("\\\n", " ");
    let lines = script.lines().filter(|line| !line.trim_start().starts_with('#'));
    lines
        .flat_map(|line| line.match_indices("cargo ").map(move |(at, _)| &line[at..]))
        .filter_map(|call| {
            let command = call.split_whitespace().nth(1)?;
            let selects = |flag: &str| call.split_whitespace().any(|word| word == flag);
            let named = match command {
                "check" | "clippy" | "doc" | "test" => selects("--workspace") || selects("--package"),
                // It has no other flag for the same.
                "fmt" => selects("--all"),
                _ => return None,
            };
            Some((call.to_owned(), named))
        })
        .collect()
}

#[test]
fn every_check_names_its_packages() -> TestResult {
    let mut scripts = vec![PathBuf::from("Makefile"), PathBuf::from(".ci/run")];
    scripts.extend(source::files("tools/lib", "sh")?);
    for entry in fs::read_dir(source::root().join("tools"))? {
        let path = entry?.path();
        if path.is_file() {
            scripts.push(path.strip_prefix(source::root())?.to_owned());
        }
    }
    let mut calls = Vec::new();
    for script in scripts {
        let found = checking_calls(&source::read(&script)?);
        calls.extend(found.into_iter().map(|(call, named)| (format!("{}: {call}", script.display()), named)));
    }
    assert!(calls.len() > 10, "{calls:?}");
    calls.retain(|(_, named)| !named);
    assert!(calls.is_empty(), "these check the root package alone; say --workspace or --package: {calls:#?}");
    Ok(())
}

#[test]
fn check_of_the_root_package_alone_is_found() {
    let script = "# cargo test\ncargo build --bins\n\tcargo fmt --check\nif cargo test --quiet \\\n    --package x; then\n\
                  check cargo clippy --workspace-x\n";
    let named: Vec<bool> = checking_calls(script).into_iter().map(|(_, named)| named).collect();
    assert_eq!(named, [false, true, false]);
}
