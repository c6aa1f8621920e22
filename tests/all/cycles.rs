//! Files of a crate that import each other in a cycle cannot be read one after the other: no cycle may be larger than
//! its limit in `tests/all/cycles.txt`, and none may be new.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// The complaint of `tools/cycles --check`; `None` if it passes.
fn complaints(tree: &Path) -> anyhow::Result<Option<String>> {
    let tool = source::root().join("tools/cycles");
    let output =
        Command::new(tool).arg("--check").arg("--tree").arg(tree).output().context("tools/cycles")?;
    Ok(if output.status.success() { None } else { Some(String::from_utf8(output.stderr)?) })
}

#[test]
fn import_cycles_stay_within_their_limits() -> TestResult {
    assert_eq!(complaints(source::root())?, None);
    Ok(())
}

/// A tree of these files, with these limits.
fn tree(files: &[(&str, &str)], limits: &str) -> anyhow::Result<tempfile::TempDir> {
    let tree = tempfile::tempdir()?;
    for (path, text) in files.iter().chain(&[("tests/all/cycles.txt", limits)]) {
        let path = tree.path().join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        fs::write(path, text)?;
    }
    let status = Command::new("git").args(["init", "-q"]).current_dir(tree.path()).status()?;
    ensure!(status.success(), "git init: {status}");
    Ok(tree)
}

/// Four files in a circle: by an absolute path, a relative one, a name that the folder exports again, and a path in code.
const CIRCLE: &[(&str, &str)] = &[
    ("crates/one/src/lib.rs", "pub mod a;\npub mod b;\npub mod c;\n"),
    ("crates/one/src/a.rs", "use crate::b::{self, Second};\npub struct First;\n"),
    ("crates/one/src/b.rs", "use super::c::Third;\npub struct Second;\n"),
    ("crates/one/src/c/mod.rs", "mod d;\npub use d::Third;\n"),
    ("crates/one/src/c/d.rs", "pub struct Third(crate::e::Fourth);\n"),
    ("crates/one/src/e.rs", "pub struct Fourth;\nfn first() -> crate::a::First { crate::a::First }\n"),
];

#[test]
fn cycle_of_four_files_is_found_however_they_are_imported() -> TestResult {
    let found = complaints(tree(CIRCLE, "")?.path())?.context("it fails")?;
    assert!(found.contains("crates/one has an import cycle of 4 files, and may have 3"), "{found}");
    assert_eq!(complaints(tree(CIRCLE, "crates/one 4\n")?.path())?, None);
    let found =
        complaints(tree(CIRCLE, "crates/one 5\n")?.path())?.context("a limit that is too high fails")?;
    assert!(found.contains("run tools/cycles --lower"), "{found}");
    Ok(())
}

#[test]
fn tests_and_other_crates_close_no_circle() -> TestResult {
    let mut files = CIRCLE.to_vec();
    files[5].1 = "pub struct Fourth;\n#[cfg(test)]\nmod tests {\n    use crate::a::First;\n}\n";
    assert_eq!(complaints(tree(&files, "")?.path())?, None);
    files[5].1 = "pub struct Fourth;\nuse two::a::First;\n";
    assert_eq!(complaints(tree(&files, "")?.path())?, None);
    Ok(())
}
