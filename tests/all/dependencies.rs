//! What each program links, read from `cargo tree`.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// Packages of the service alone. A role server that linked them would be larger, and could reach what it must not.
const NOT_ON_A_MACHINE: &[&str] = &["age", "axum", "reqwest", "russh", "sqlx", "sqlx-core", "sqlx-postgres"];
/// Packages that a server of the API needs besides its services.
const LISTENERS: &[&str] = &["axum", "prost-reflect", "tonic-health", "tonic-reflection"];
/// Packages of a node with Kubernetes: they have thousands of types.
const KUBERNETES: &[&str] = &["k8s-openapi", "kube"];
/// The service's: no other program exports traces.
const TRACES: &[&str] =
    &["opentelemetry", "opentelemetry-proto", "opentelemetry_sdk", "tracing-opentelemetry"];
/// `ring` is the one TLS provider: with two, rustls panics in the first caller that needs the default.
const OTHER_TLS: &[&str] = &["aws-lc-rs", "aws-lc-sys", "native-tls", "openssl", "openssl-sys"];

#[test]
fn the_role_server_links_no_sql_no_http_server_and_no_ssh() -> TestResult {
    let tree = packages(&["--no-default-features", "--features", "roleserver", "--edges", "normal"])?;
    assert!(tree.contains("tonic") && tree.contains("shepherd"), "not a role server: {tree:?}");
    assert_eq!(among(&tree, NOT_ON_A_MACHINE), Vec::<&str>::new());
    Ok(())
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

fn packages(arguments: &[&str]) -> anyhow::Result<BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p}"])
        .args(arguments)
        .current_dir(source::root())
        .stdin(Stdio::null())
        .output()
        .context("cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect())
}
