//! What each program links, read from `cargo tree`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// Packages of the service alone. A role server that linked them would be larger, and could reach what it must not.
const NOT_ON_A_MACHINE: &[&str] = &["age", "axum", "reqwest", "russh", "sqlx", "sqlx-core", "sqlx-postgres"];
/// Packages that a server of the API needs besides its services.
const LISTENERS: &[&str] = &["axum", "tonic-health", "tonic-reflection"];
/// Packages of a node with Kubernetes: they have thousands of types.
const KUBERNETES: &[&str] = &["k8s-openapi", "kube"];
/// The service's: no other program exports traces.
const TRACES: &[&str] =
    &["opentelemetry", "opentelemetry-proto", "opentelemetry_sdk", "tracing-opentelemetry"];
/// `ring` is the one TLS provider: with two, rustls panics in the first caller that needs the default.
const OTHER_TLS: &[&str] = &["aws-lc-rs", "aws-lc-sys", "native-tls", "openssl", "openssl-sys"];
/// The packages that the role server links.
const RECORD: &str = "tests/all/role_server_packages.txt";
/// The first lines of that file.
const RECORD_HEAD: &str = "\
# Packages that the role server of a release links on x86-64, one in each line. The test
# dependencies::the_role_server_links_the_recorded_packages describes how to change it.
";
/// The build of `tools/roleserver`. Macros and build scripts run in the compiler, so no program links them.
const ROLE_SERVER: &[&str] = &[
    "--no-default-features",
    "--features",
    "roleserver,reconciler",
    "--edges",
    "normal,no-proc-macro",
    "--target",
    "x86_64-unknown-linux-gnu",
];

#[test]
fn the_role_server_links_no_sql_no_http_server_and_no_ssh() -> TestResult {
    let tree = packages(&["--no-default-features", "--features", "roleserver", "--edges", "normal"])?;
    assert!(tree.contains("tonic") && tree.contains("shepherd"), "not a role server: {tree:?}");
    assert_eq!(among(&tree, NOT_ON_A_MACHINE), Vec::<&str>::new());
    Ok(())
}

/// The role server runs on every machine. A package that it gains is uploaded to all of them, and can do there what the
/// role server can. So a package is not gained by accident.
#[test]
fn the_role_server_links_the_recorded_packages() -> TestResult {
    let linked = list_packages(&cargo_tree(ROLE_SERVER)?);
    assert!(linked.contains("shepherd") && linked.contains("kube"), "not a role server: {linked:?}");
    if std::env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
        let lines: Vec<&str> = linked.iter().map(String::as_str).collect();
        std::fs::write(source::root().join(RECORD), format!("{RECORD_HEAD}{}\n", lines.join("\n")))?;
    }
    let record = source::read(Path::new(RECORD))?;
    let recorded: BTreeSet<String> =
        record.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
    assert_eq!(describe_difference(&linked, &recorded), None);
    Ok(())
}

#[test]
fn packages_that_are_added_or_removed_are_named() {
    let tree = "a v1.0.0\nb v1.0.0 (/b)\na v1.0.0 (*)\na v2.0.0\n\n";
    let recorded = BTreeSet::from(["a (2 versions)".to_owned(), "b".to_owned()]);
    assert_eq!(list_packages(tree), recorded);
    assert_eq!(describe_difference(&recorded, &recorded), None);
    let linked = list_packages("c v1.0.0\nb v1.0.0\nd v1.0.0\n");
    let found = describe_difference(&linked, &recorded).unwrap();
    assert!(found.contains("links 3 packages, and"), "{found}");
    assert!(found.contains("records 2: added c, d; removed a (2 versions)."), "{found}");
    let found = describe_difference(&BTreeSet::from(["b".to_owned()]), &recorded).unwrap();
    assert!(found.contains(": added none; removed a (2 versions)."), "{found}");
}

#[test]
fn only_a_role_server_with_the_reconciler_speaks_to_kubernetes() -> TestResult {
    let node =
        packages(&["--no-default-features", "--features", "roleserver,reconciler", "--edges", "normal"])?;
    assert_eq!(among(&node, KUBERNETES), KUBERNETES);
    assert_eq!(among(&node, NOT_ON_A_MACHINE), Vec::<&str>::new());
    let demo =
        packages(&["--no-default-features", "--features", "shepherd,roleserver", "--edges", "normal"])?;
    assert_eq!(among(&demo, KUBERNETES), Vec::<&str>::new());
    let operators = packages(&["--no-default-features", "--features", "shepherdctl", "--edges", "normal"])?;
    assert_eq!(among(&operators, KUBERNETES), Vec::<&str>::new());
    Ok(())
}

/// The services of the API run in `shepherdctl`, and what listens does not.
#[test]
fn the_command_line_links_no_listener() -> TestResult {
    let tree = packages(&["--no-default-features", "--features", "shepherdctl", "--edges", "normal"])?;
    assert!(tree.contains("tonic") && tree.contains("sqlx"), "not a command line: {tree:?}");
    assert_eq!(among(&tree, LISTENERS), Vec::<&str>::new());
    assert_eq!(among(&packages(&["--edges", "normal"])?, LISTENERS), LISTENERS);
    Ok(())
}

#[test]
fn the_service_links_what_the_role_server_must_not() -> TestResult {
    // Otherwise the names above are wrong, and the test above cannot fail.
    let tree = packages(&["--edges", "normal"])?;
    assert_eq!(among(&tree, NOT_ON_A_MACHINE), NOT_ON_A_MACHINE);
    Ok(())
}

#[test]
fn only_the_service_links_what_exports_traces() -> TestResult {
    for program in ["roleserver,reconciler", "shepherdctl"] {
        let tree = packages(&["--no-default-features", "--features", program, "--edges", "normal"])?;
        assert_eq!(among(&tree, TRACES), Vec::<&str>::new(), "{program}");
    }
    let service =
        packages(&["--no-default-features", "--features", "shepherd,roleserver", "--edges", "normal"])?;
    assert_eq!(among(&service, TRACES), TRACES);
    Ok(())
}

#[test]
fn the_whole_tree_has_one_tls_provider() -> TestResult {
    let tree = packages(&["--workspace", "--all-features", "--edges", "all"])?;
    assert!(tree.contains("ring") && tree.contains("rustls"), "no TLS at all: {tree:?}");
    assert_eq!(among(&tree, OTHER_TLS), Vec::<&str>::new());
    Ok(())
}

fn among<'a>(tree: &BTreeSet<String>, names: &[&'a str]) -> Vec<&'a str> {
    names.iter().copied().filter(|name| tree.contains(*name)).collect()
}

/// A sentence about the packages that are not recorded as they are linked; `None` if all are.
fn describe_difference(linked: &BTreeSet<String>, recorded: &BTreeSet<String>) -> Option<String> {
    if linked == recorded {
        return None;
    }
    let list = |names: Vec<&str>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let added = list(linked.difference(recorded).map(String::as_str).collect());
    let removed = list(recorded.difference(linked).map(String::as_str).collect());
    Some(format!(
        "the role server links {} packages, and {RECORD} records {}: added {added}; removed {removed}. If that is \
         meant, record them with INSTA_UPDATE=always, and give the reason in the commit",
        linked.len(),
        recorded.len(),
    ))
}

/// The names of the packages of a tree, each with the number of its versions if there are several.
fn list_packages(tree: &str) -> BTreeSet<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in tree.lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            versions.entry(name).or_default().insert(version);
        }
    }
    let lines = versions.into_iter().map(|(name, versions)| match versions.len() {
        1 => name.to_owned(),
        count => format!("{name} ({count} versions)"),
    });
    lines.collect()
}

fn packages(arguments: &[&str]) -> anyhow::Result<BTreeSet<String>> {
    let tree = cargo_tree(arguments)?;
    Ok(tree.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}

/// The packages of `cargo tree`, one in each line: its name, its version, and more.
fn cargo_tree(arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p}"])
        .args(arguments)
        .current_dir(source::root())
        .stdin(Stdio::null())
        .output()
        .context("cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}
