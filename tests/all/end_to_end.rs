//! The messages of the end-to-end tests for users who cannot run them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::harness::aloud::TestResult;

/// A user who is not root and owns nothing.
const NOBODY: u32 = 65534;

#[test]
fn user_who_is_not_root_reads_why_root_is_needed() -> TestResult {
    for test in [
        "tests/e2e_ssh/run",
        "tests/e2e_cluster/run",
        "tests/e2e_kubernetes/run",
        "tests/e2e_kube_bundle/run",
        "tests/e2e_authority/run",
        "tests/e2e_authority/upgrade",
    ] {
        // Only the files that it reads, in a place that everybody may read, because a home may be closed to others.
        let place = tempfile::tempdir()?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        for file in [
            test,
            "tools/lib/verdict.sh",
            "tools/lib/machines.sh",
            "tools/lib/fleet.sh",
            "tools/lib/oci-image.sh",
            "tests/e2e_authority/lib.sh",
        ] {
            let copy = place.path().join(file);
            fs::create_dir_all(copy.parent().unwrap_or(Path::new("/")))?;
            fs::copy(source.join(file), &copy)?;
        }
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755))?;
        let mut command = if rustix::process::geteuid().is_root() {
            let mut command = Command::new("setpriv");
            command.args([
                format!("--reuid={NOBODY}"),
                format!("--regid={NOBODY}"),
                "--clear-groups".to_owned(),
            ]);
            command.arg("bash");
            command
        } else {
            Command::new("bash")
        };
        let output = command.arg(place.path().join(test)).current_dir("/").output()?;
        let expected = format!(
            "{test} must be root: it makes network and mount namespaces, and a user in one of them\n"
        );
        assert_eq!(
            (output.status.code(), String::from_utf8(output.stderr)?, output.stdout.as_slice()),
            (Some(1), expected, &[][..])
        );
        assert_eq!(fs::read_dir(place.path())?.count(), 2, "nothing was begun");
    }
    Ok(())
}
