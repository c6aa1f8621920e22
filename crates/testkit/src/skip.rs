//! Tests that are skipped because the user who runs them, or the host, lacks something.
//!
//! Each writes one line with the reason, `skipped without THING: REMEDY`. `tools/test` prints these lines at the end of
//! a run. In CI it fails if there is one that `tests/all/skipped_in_ci.txt` does not list (`tools/lib/skips.sh`).

use rustix::process::geteuid;

use crate::aloud::aloud;

/// Whether root runs this test. If not, it is reported as skipped, and has to return.
#[must_use]
pub fn runs_as_root() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        report_skip("root", "run the tests as root");
    }
    is_root
}

/// Reports that this test is skipped because `thing` is missing. `remedy` is what to do about that.
pub fn report_skip(thing: &str, remedy: &str) {
    aloud(&format!("skipped without {thing}: {remedy}"));
}
