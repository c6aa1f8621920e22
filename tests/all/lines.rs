//! `tools/lines` counts lines of code: neither comments, nor blank lines, nor tests.

use std::fs;
use std::process::Command;

use anyhow::Context as _;

use crate::harness::aloud::TestResult;
use crate::harness::source;

#[test]
fn comments_blank_lines_and_tests_are_not_counted() -> TestResult {
    let tree = tempfile::tempdir()?;
    let write = |path: &str, text: &str| -> anyhow::Result<()> {
        let path = tree.path().join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        Ok(fs::write(path, text)?)
    };
    write("src/lib.rs", "//! Docs.\n\nmod room;\n")?;
    write(
        "src/room/mod.rs",
        "/* a\n   comment */\nconst URL: &str = \"http://x/{\";\n\n#[cfg(test)]\nconst ONLY: u8 = 1;\n\
         #[cfg(all(test, unix))]\nmod tests {\n    const BRACE: char = '}';\n    const TEXT: &str = \"}\";\n}\nfn last() {}\n",
    )?;
    write("src/room/tests.rs", "fn left_out() {}\n")?;
    write("crates/one/src/lib.rs", "fn one() {\n    // Nothing.\n}\n")?;
    write("crates/one/build.rs", "fn main() {}\n")?;
    write("crates/one/tests/all/main.rs", "fn left_out() {}\n")?;
    write("crates/testkit/src/lib.rs", "fn left_out() {}\n")?;
    for arguments in [["init", "-q"], ["add", "-A"]] {
        let status = Command::new("git").args(arguments).current_dir(tree.path()).status()?;
        assert!(status.success(), "git {arguments:?}: {status}");
    }
    let tool = source::root().join("tools/lines");
    let output = Command::new(tool).arg("--tree").arg(tree.path()).output()?;
    let printed = String::from_utf8(output.stdout)?;
    let rows: Vec<Vec<&str>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected: [&[&str]; 4] =
        [&["crates/one", "2"], &["src", "1"], &["src/room", "2"], &["in", "all", "5"]];
    assert_eq!(rows, expected, "{printed}");
    Ok(())
}
