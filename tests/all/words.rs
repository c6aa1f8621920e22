//! The words of the tree: no area has more of the private dialect, or of names that say nothing, than its limit; few doc
//! comments have three words or fewer; and no name of a type is defined again and again.
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
fn tree_keeps_its_limits_of_words_names_comments_and_repeated_types() -> TestResult {
    let output = words(source::root(), Some("--check"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The limits cannot be raised beyond that either.
#[test]
fn each_area_has_less_than_one_word_per_thousand_lines_and_no_forbidden_name() -> TestResult {
    let table = String::from_utf8(words(source::root(), None)?.stdout)?;
    let rows: Vec<Vec<&str>> = table.lines().skip(1).map(|row| row.split_whitespace().collect()).collect();
    assert!(rows.len() > 20, "{table}");
    for row in rows {
        let [area, lines, found, _, names] = row.as_slice() else { panic!("five columns: {row:?}") };
        let (lines, found): (u64, u64) = (lines.parse()?, found.parse()?);
        assert!(
            found == 0 || found * 1000 < lines,
            "{area} has {found} words of the dialect in {lines} lines"
        );
        assert_eq!(*names, "0", "{area} has names that say nothing: tools/words --names");
    }
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
        tree.write("tests/all/words/types.txt", "# Types.\n")?;
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
        ("src/model/told.rs", "//! The status of a machine.\n", "src/model has 1 names"),
        ("src/model/status.rs", "pub(crate) struct Told;\n", "src/model has 1 names"),
        ("src/model/status.rs", "enum AllIsSaid {}\n", "src/model has 1 names"),
        ("src/model/status.rs", "fn known() {}\n", "src/model has 1 names"),
        ("src/model/flags.rs", "#[arg(long = \"heard_after\")]\npub after: u8,\n", "src/model has 1 names"),
        (
            "src/model/flags.rs",
            "#[arg(long, value_name = \"[N]\")]\npub anew: bool,\n",
            "src/model has 1 names",
        ),
        ("src/model/traits.rs", "trait Status {\n    fn heard(&self);\n}\n", "src/model has 1 names"),
        ("src/model/status.rs", "fn r#known() {}\n", "src/model has 1 names"),
        ("sql/cluster/told.sql", "SELECT 1\n", "sql has 1 names"),
        ("sql/told/list.sql", "SELECT 1\n", "sql has 1 names"),
        ("sql/cluster/delete.sql", "WITH gone AS (SELECT 1) SELECT 1\n", "sql has 1 names"),
        ("docs/known.md", "It has a status.\n", "docs has 1 names"),
        ("tests/faults/told.patch", "breaks: a status\n", "tests/faults has 1 names"),
        ("src/model/held/mod.rs", "//! The status of a machine.\n", "src/model has 1 names"),
        ("src/model/status.rs", "mod kept {}\n", "src/model has 1 names"),
        ("src/model/status.rs", "const KEPT: u8 = 0;\n", "src/model has 1 names"),
        ("src/model/status.rs", "pub use status::Status as Kept;\n", "src/model has 1 names"),
        ("src/model/status.rs", "unsafe trait Kept {}\n", "src/model has 1 names"),
        ("src/model/kept/status.rs", "//! The status of a machine.\n", "src/model has 1 names"),
        ("src/model/flags.rs", "Arg::new(FLAG).long(\"kept\")\n", "src/model has 1 names"),
        ("src/model/flags.rs", "const FLAG: &str = \"kept\";\n", "src/model has 1 names"),
        (
            "src/model/prose.rs",
            "//! What it was told and asked, whoever heard it.\n",
            "src/model has 6 words",
        ),
        ("docs/prose.md", "It is asked.\n", "docs has 1 words"),
    ] {
        let tree = Tree::new(LIMITS)?;
        tree.write("src/model/mod.rs", "//! It is told and asked.\n")?;
        tree.write(path, text)?;
        let complaints = tree.complaints()?.context("it fails")?;
        assert!(complaints.contains(area), "{path}: {text}{complaints}");
    }
    Ok(())
}

/// What serde writes, a `json!`, a statement, and each part of a contract.
#[test]
fn planted_keys_and_fields_exceed_the_limit() -> TestResult {
    let derive = "#[derive(Clone, Serialize)]\n#[serde(rename_all = \"snake_case\")]\n";
    for (path, text, name) in [
        ("src/model/a.rs", format!("{derive}struct Status {{\n    pub known: bool,\n}}\n"), "key known"),
        (
            "src/model/a.rs",
            format!(
                "{derive}struct Status {{\n    #[serde(default, rename = \"shown\")]\n    in_sync: bool,\n}}\n"
            ),
            "key shown",
        ),
        ("src/model/a.rs", format!("{derive}enum Status {{ Ready, Held {{ since: u8 }} }}\n"), "key Held"),
        ("src/model/a.rs", format!("{derive}enum Status {{ Ready {{ r#kept: u8 }} }}\n"), "key kept"),
        (
            "src/model/a.rs",
            "fn f() -> Value {\n    json!({ \"at\": 1, \"inner\": { \"seen\": [2] } })\n}\n".to_owned(),
            "key seen",
        ),
        (
            "sql/machine/list.sql",
            "SELECT jsonb_build_object('at', now(), 'wanted', NULL)\n".to_owned(),
            "key wanted",
        ),
        ("proto/a.proto", "message Status {\n  repeated string given = 1;\n}\n".to_owned(), "field given"),
        ("proto/a.proto", "message Status {\n  oneof held {\n  }\n}\n".to_owned(), "oneof held"),
        ("proto/a.proto", "message Known {}\n".to_owned(), "message Known"),
        ("proto/a.proto", "enum State {\n  KNOWN = 0;\n}\n".to_owned(), "value KNOWN"),
        ("proto/a.proto", "service Fleet {\n  rpc Asking(A) returns (B);\n}\n".to_owned(), "method Asking"),
    ] {
        let tree = Tree::new("# Limits.\n")?;
        tree.write("src/model/mod.rs", "struct Plain {\n    known: bool,\n}\n")?;
        assert_eq!(tree.complaints()?, None, "a field that nobody writes is no key");
        tree.write(path, &text)?;
        let complaints = tree.complaints()?.context("it fails")?;
        assert!(complaints.contains("has 1 names on the deny-list"), "{text}{complaints}");
        let names = String::from_utf8(words(tree.0.path(), Some("--names"))?.stdout)?;
        assert!(names.starts_with(path) && names.trim_end().ends_with(name), "{text}{names}");

        tree.write(
            "tests/all/words/exceptions.txt",
            &format!(
                "tests/all/words/dialect.txt: it is the list\ntests/all/words/exceptions.txt: it is the list\n\
                 {path} {}: it is stored\n",
                name.split(' ').next_back().context("a name")?
            ),
        )?;
        assert_eq!(tree.complaints()?, None, "{text} is excepted with a reason");
    }
    Ok(())
}

#[test]
fn planted_short_doc_comments_exceed_the_limit() -> TestResult {
    let tree = Tree::new("# Limits.\ndoc-comments-of-three-words 1\n")?;
    tree.write(
        "src/model/status.rs",
        "//! Which status a machine has.\n\n/// The status.\npub struct Status;\n\n/// Two lines are\n/// one comment.\nfn f() {}\n",
    )?;
    tree.write("src/model/tests.rs", "//! Tests.\n")?;
    assert_eq!(tree.complaints()?, None);
    for planted in ["//! Leases.\n", "const A: u8 = 1;\n\n/// Which.\npub const B: u8 = 2;\n"] {
        tree.write("src/model/lease.rs", planted)?;
        let complaints = tree.complaints()?.context("it fails")?;
        assert!(
            complaints.contains("has 2 doc comments of three words or fewer, and may have 1"),
            "{complaints}"
        );
    }
    assert!(words(tree.0.path(), Some("--lower"))?.status.success());
    assert!(tree.complaints()?.is_some(), "a limit is never raised");

    let many = Tree::new("# Limits.\ndoc-comments-of-three-words 50\n")?;
    many.write("src/model/many.rs", &"/// Which.\npub const A: u8 = 1;\n".repeat(50))?;
    let complaints = many.complaints()?.context("50 are too many for any limit")?;
    assert!(complaints.contains("and may permit 49"), "{complaints}");
    Ok(())
}

#[test]
fn type_that_three_modules_of_a_crate_define_needs_a_reason() -> TestResult {
    let tree = Tree::new("# Limits.\n")?;
    let write = |path: &str, text: &str| tree.write(&format!("crates/one/src/{path}"), text);
    write("a.rs", "#[cfg(test)]\nmod tests;\n\npub struct Request;\n")?;
    write("b.rs", "enum Request {}\n\n#[cfg(test)]\nmod tests {\n    struct Request;\n}\n")?;
    write("a/tests.rs", "struct Request;\n")?;
    tree.write("crates/two/src/lib.rs", "pub type Request = u8;\n")?;
    assert_eq!(tree.complaints()?, None, "tests and another crate do not count");

    for (path, third) in [
        ("c.rs", "pub(crate) type Request = u8;\n"),
        ("b.rs", "enum Request {}\n\npub mod inner {\n    pub struct Request;\n}\n"),
    ] {
        write(path, third)?;
        let complaints = tree.complaints()?.context("it fails")?;
        assert!(
            complaints.contains("crates/one defines a type Request in more than two modules"),
            "{complaints}"
        );
        tree.write("tests/all/words/types.txt", "crates/one Request: each is the request of a contract\n")?;
        assert_eq!(tree.complaints()?, None);

        write(path, "impl Trait for u8 {\n    type Request = u8;\n}\n")?;
        let complaints = tree.complaints()?.context("a reason that nothing needs is an error")?;
        assert!(complaints.contains("types.txt has a reason for Request in crates/one"), "{complaints}");
        tree.write("tests/all/words/types.txt", "# Types.\n")?;
        assert_eq!(tree.complaints()?, None);
        write("b.rs", "enum Request {}\n")?;
    }
    Ok(())
}

#[test]
fn limits_may_only_fall() -> TestResult {
    let tree = Tree::new(LIMITS)?;
    tree.write(
        "src/model/mod.rs",
        "//! It is told once.\nconst KNOWN_HOSTS: u8 = 0;\nfn known_hosts() {}\n",
    )?;
    let complaints = tree.complaints()?.context("a limit that is too high fails")?;
    assert!(complaints.contains("src/model has 1 words") && complaints.contains("--lower"), "{complaints}");
    assert!(words(tree.0.path(), Some("--lower"))?.status.success());
    assert_eq!(tree.complaints()?, None);
    let limits = fs::read_to_string(tree.0.path().join("tests/all/words/limits.txt"))?;
    assert_eq!(limits, "# Limits.\nsrc/model 1 0\n");

    tree.write("src/model/mod.rs", "//! It is told, and asked.\n")?;
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
    tree.write("src/model/mod.rs", &format!("// Told.\n{}", "\n".repeat(499)))?;
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
