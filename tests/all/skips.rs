//! Skipped tests: `tools/test` prints each with its reason, and CI allows only those of a list.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::Result;

use crate::harness::aloud::TestResult;
use crate::harness::source;

#[test]
fn skipped_tests_are_counted_and_ci_allows_only_those_of_the_list() -> TestResult {
    let place = tempfile::tempdir()?;
    let output = place.path().join("output");
    let report = |lines: &str, ci: &str| -> Result<Output> {
        fs::write(&output, lines)?;
        let mut script = Command::new("bash");
        script.args(["-c", "set -euo pipefail; source tools/lib/skips.sh; skips_report \"$1\"", "bash"]);
        Ok(script.arg(&output).env("CI", ci).current_dir(source::root()).output()?)
    };
    let listed = source::read(Path::new("tests/all/skipped_in_ci.txt"))?;
    let listed: Vec<&str> = listed.lines().filter(|line| !line.starts_with('#')).collect();
    let of_bundles: Vec<String> =
        listed.iter().map(|test| format!("-- {test}: skipped without a Kubernetes bundle: x\n")).collect();
    let of_bundles = of_bundles.concat();
    let api_server = format!("{of_bundles}test a::b ... -- c::d: skipped without kube-apiserver: x\nok\n");
    let etcdutl = format!("{of_bundles}test a::b ... -- c::d: skipped without etcdutl: x\nok\n");
    // A test that runs in both dialects is skipped twice.
    let line = "-- c::d: skipped without root: x\n";
    let root = format!("{of_bundles}test a::b ... {line}{line}ok\n");
    for (lines, ci, numbers, passes) in [
        (&*of_bundles, "", (0, listed.len(), 0), true),
        (&*of_bundles, "true", (0, listed.len(), 0), true),
        ("", "", (0, 0, 0), true),
        ("", "true", (0, 0, 0), false),
        (&*api_server, "", (1, listed.len(), 0), true),
        (&*api_server, "true", (1, listed.len(), 0), false),
        (&*etcdutl, "", (1, listed.len(), 0), true),
        (&*etcdutl, "true", (1, listed.len(), 0), false),
        (&*root, "", (0, listed.len(), 1), true),
        (&*root, "true", (0, listed.len(), 1), false),
    ] {
        let output = report(lines, ci)?;
        let printed = String::from_utf8(output.stdout.clone())?;
        let expected = format!(
            "{} tests of kube-apiserver skipped\n{} tests of a Kubernetes bundle skipped\n\
             {} other tests skipped\n",
            numbers.0, numbers.1, numbers.2
        );
        assert!(printed.starts_with(&expected), "{output:?}");
        assert_eq!(printed.contains("`make kube-apiserver`"), numbers.0 > 0, "{output:?}");
        assert_eq!(printed.contains("\n    c::d: skipped without root: x\n"), numbers.2 > 0, "{output:?}");
        assert_eq!(output.status.success(), passes, "{output:?}");
        assert_eq!(output.stderr.is_empty(), passes, "{output:?}");
    }
    Ok(())
}
