//! The words of the tree: no area has more of the private dialect, or of names that say nothing, than its limit.
//!
//! `tools/words` counts, `tests/all/words/` has the lists and the limits. The limits may only fall, until each area is
//! below one word per 1,000 lines and no forbidden name is left.

use std::path::Path;
use std::process::{Command, Output};
use std::{fs, str};

use anyhow::{Context as _, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::source;

fn words(tree: &Path, action: Option<&str>) -> anyhow::Result<Output> {
    let mut tool = Command::new(source::root().join("tools/words"));
    tool.arg("--tree").arg(tree).args(action);
    tool.output().context("starting tools/words")
}

#[test]
fn no_area_exceeds_its_limit_of_dialect_words_and_denied_names() -> TestResult {
    let output = words(source::root(), Some("--check"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A tree with the real lists, an empty exception list, and limits of its own.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(limits: &str) -> anyhow::Result<Self> {
        let tree = Self(tempfile::tempdir()?);
        for list in ["dialect.txt", "denied.txt"] {
            let path = Path::new("tests/all/words").join(list);
            tree.write(path.to_str().context("text")?, &source::read(&path)?)?;
        }
        tree.write("tests/all/words/exceptions.txt", "tests/all/words/dialect.txt: it is the list\n")?;
        tree.write("tests/all/words/limits.txt", limits)?;
        let status = Command::new("git").args(["init", "-q"]).current_dir(tree.0.path()).status()?;
        ensure!(status.success(), "git init: {status}");
        Ok(tree)
    }

    fn write(&self, path: &str, text: &str) -> anyhow::Result<()> {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        Ok(fs::write(path, text)?)
    }

    /// The output of `--check`; `None` if it passes.
    fn complaints(&self) -> anyhow::Result<Option<String>> {
        let output = words(self.0.path(), Some("--check"))?;
        if output.status.success() {
            return Ok(None);
        }
        Ok(Some(String::from_utf8(output.stderr)?))
    }
}

const LIMITS: &str = "# Limits.\nsrc/model 2 0\n";

#[test]
fn planted_words_and_names_exceed_the_limit() -> TestResult {
    for (path, text, area) in [
        ("src/model/told.rs", "//! The status.\n", "src/model has 1 names"),
        ("src/model/status.rs", "pub(crate) struct Told;\n", "src/model has 1 names"),
        ("src/model/status.rs", "enum AllIsSaid {}\n", "src/model has 1 names"),
        ("src/model/status.rs", "fn known() {}\n", "src/model has 1 names"),
        ("src/model/flags.rs", "#[arg(long = \"heard_after\")]\npub after: u8,\n", "src/model has 1 names"),
        (
            "src/model/flags.rs",
            "#[arg(long, value_name = \"[N]\")]\npub anew: bool,\n",
            "src/model has 1 names",
        ),
        ("sql/cluster/told.sql", "SELECT 1\n", "sql has 1 names"),
        (
            "src/model/prose.rs",
            "//! What it was told and asked, whoever heard it.\n",
            "src/model has 6 words",
        ),
        ("docs/prose.md", "It is asked.\n", "docs has 1 words"),
    ] {
        let tree = Tree::new(LIMITS)?;
        tree.write("src/model/mod.rs", "//! Told and asked.\n")?;
        tree.write(path, text)?;
        let complaints = tree.complaints()?.context("it fails")?;
        assert!(complaints.contains(area), "{path}: {text}{complaints}");
    }
    Ok(())
}

#[test]
fn limits_may_only_fall() -> TestResult {
    let tree = Tree::new(LIMITS)?;
    tree.write("src/model/mod.rs", "//! Told once.\nconst KNOWN_HOSTS: u8 = 0;\nfn known_hosts() {}\n")?;
    let complaints = tree.complaints()?.context("a limit that is too high fails")?;
    assert!(complaints.contains("src/model has 1 words") && complaints.contains("--lower"), "{complaints}");
    assert!(words(tree.0.path(), Some("--lower"))?.status.success());
    assert_eq!(tree.complaints()?, None);
    let limits = fs::read_to_string(tree.0.path().join("tests/all/words/limits.txt"))?;
    assert_eq!(limits, "# Limits.\nsrc/model 1 0\n");

    tree.write("src/model/mod.rs", "//! Told, and asked.\n")?;
    assert!(words(tree.0.path(), Some("--lower"))?.status.success());
    assert!(tree.complaints()?.is_some(), "a limit is never raised");
    Ok(())
}

#[test]
fn exception_that_matches_nothing_is_an_error() -> TestResult {
    let tree = Tree::new(LIMITS)?;
    tree.write("tests/all/words/exceptions.txt", "src/model/told.rs Told: it was there once\n")?;
    let complaints = tree.complaints()?.context("it fails")?;
    assert!(complaints.contains("src/model/told.rs Told"), "{complaints}");
    Ok(())
}

#[test]
fn table_has_words_per_thousand_lines() -> TestResult {
    let tree = Tree::new(LIMITS)?;
    tree.write("src/model/mod.rs", &format!("//! Told.\n{}", "\n".repeat(499)))?;
    let output = words(tree.0.path(), None)?;
    let table = str::from_utf8(&output.stdout)?;
    let row: Vec<&str> = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|row| row.first() == Some(&"src/model"))
        .context("a row")?;
    assert_eq!(row, ["src/model", "500", "1", "2.0", "0"]);
    Ok(())
}
