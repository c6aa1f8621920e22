//! What the end-to-end tests say to those who cannot run them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::harness::aloud::TestResult;

/// Somebody who is not root and has nothing.
const NOBODY: u32 = 65534;

#[test]
fn who_is_not_root_is_told_why_root_is_needed() -> TestResult {
    // Alone, in a place that everybody may read, because a home may be closed to others.
    let place = tempfile::tempdir()?;
    let script = place.path().join("tests/e2e_ssh/run");
    fs::create_dir_all(script.parent().unwrap_or(Path::new("/")))?;
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e_ssh/run"), &script)?;
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755))?;
    let mut command = if rustix::process::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()]);
        command.arg("bash");
        command
    } else {
        Command::new("bash")
    };
    let said = command.arg(&script).current_dir("/").output()?;
    assert_eq!(
        (said.status.code(), String::from_utf8(said.stderr)?.as_str(), said.stdout.as_slice()),
        (
            Some(1),
            "tests/e2e_ssh/run must be root: it makes network and mount namespaces, and a user in one of them\n",
            &[][..]
        )
    );
    assert_eq!(fs::read_dir(place.path())?.count(), 1, "nothing was begun");
    Ok(())
}
