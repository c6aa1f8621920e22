//! Promises of the documents: each claim of `docs/security.md`, each key's worst use and each former attack name tests
//! that exist and are not ignored, each key has a worst use, the README names the providers that exist, examples of Kubernetes have versions that were run, `make e2e`
//! runs what its help states, pages name the bound of a revocation that the code has, and a command that would install an
//! operating system states that this release has none.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::curator_client::leader_channel::REVOCATION_BOUND;

use crate::harness::aloud::TestResult;
use crate::harness::source;

const PAGE: &str = "docs/security.md";
const KEYS: &str = "docs/keys.md";
const ATTACKS: &str = "tests/security/README.md";
/// Versions of Kubernetes that the tests run: the bundle's, and that of the API server.
const KUBERNETES_VERSIONS: [&str; 2] = ["1.20.2", "1.36.3"];

/// An item of a list of the page, as one line.
#[derive(Debug, PartialEq, Eq)]
struct Claim {
    line: usize,
    text: String,
}

impl Claim {
    /// Whether it states what is not protected yet.
    fn is_open(&self) -> bool {
        self.text.starts_with("**Open.** ")
    }

    /// The tests that it names after `Test:` or `Tests:`.
    fn tests(&self) -> Vec<&str> {
        let named = self.text.split_once(" Tests: ").or_else(|| self.text.split_once(" Test: "));
        named.map_or_else(Vec::new, |(_, tests)| tests.split('`').skip(1).step_by(2).collect())
    }
}

/// The claims of a page: its list items.
fn claims(page: &str) -> Vec<Claim> {
    let mut claims: Vec<Claim> = Vec::new();
    let mut inside = false;
    for (line, text) in (1..).zip(page.lines()) {
        if let Some(begin) = text.strip_prefix("* ") {
            claims.push(Claim { line, text: begin.to_owned() });
            inside = true;
        } else if let (true, Some(rest), Some(claim)) = (inside, text.strip_prefix("  "), claims.last_mut()) {
            claim.text.push(' ');
            claim.text.push_str(rest);
        } else {
            inside = false;
        }
    }
    claims
}

/// The rows of the tables of a page that have `tests` as their last column, as claims.
fn rows_with_tests(page: &str) -> Vec<Claim> {
    let mut rows = Vec::new();
    let mut inside = false;
    for (line, text) in (1..).zip(page.lines()) {
        let Some(cells) = text.strip_prefix("| ") else {
            inside = false;
            continue;
        };
        let cells: Vec<&str> = cells.trim_end_matches('|').split(" | ").map(str::trim).collect();
        let last = cells.last().copied().unwrap_or_default();
        if last == "tests" {
            inside = true;
        } else if inside && !text.starts_with("| --- ") {
            // A row that is open has the mark in one of its cells.
            let is_open = cells.iter().any(|cell| cell.starts_with("**Open.** "));
            let text = if is_open { "**Open.** ".to_owned() } else { format!("{} Tests: {last}", cells[0]) };
            rows.push(Claim { line, text });
        }
    }
    rows
}

/// The files in which a test with this path may be: `a::b::name` is in `tests/all/a/b.rs`, and `crate/a::b::name` in the
/// integration tests or the sources of that crate.
fn files_of(test: &str) -> Option<Vec<PathBuf>> {
    let (package, path) = test.split_once('/').map_or((None, test), |(package, path)| (Some(package), path));
    let (module, _) = path.rsplit_once("::")?;
    let module = module.replace("::", "/");
    let sources = |folder: &str| {
        ["", "/mod", "/tests"].map(|end| PathBuf::from(format!("{folder}/src/{module}{end}.rs"))).to_vec()
    };
    Some(match package {
        None => vec![format!("tests/all/{module}.rs").into(), format!("tests/all/{module}/mod.rs").into()],
        Some("shepherd") => sources("."),
        Some(name) => {
            let folder = format!("crates/{name}");
            [vec![format!("{folder}/tests/all/{module}.rs").into()], sources(&folder)].concat()
        }
    })
}

/// Whether a Rust file has a test function of this name that is not ignored.
fn has_test(file: &str, name: &str) -> bool {
    let Some((before, _)) = file.split_once(&format!("fn {name}(")) else { return false };
    let attributes = before.rsplit_once("\n\n").map_or(before, |(_, last)| last);
    let is_test = ["#[test]", "#[tokio::test"].iter().any(|attribute| attributes.contains(attribute));
    is_test && !attributes.contains("#[ignore")
}

fn exists(test: &str) -> Result<bool> {
    let files = files_of(test).with_context(|| format!("{test} has no module"))?;
    let (_, name) = test.rsplit_once("::").context("no name")?;
    let read = files.iter().filter_map(|file| source::read(file).ok());
    Ok(read.into_iter().any(|file| has_test(&file, name)))
}

#[test]
fn each_claim_about_security_names_tests_that_exist() -> TestResult {
    let page = source::read(Path::new(PAGE))?;
    let claims = claims(&page);
    let open = claims.iter().filter(|claim| claim.is_open()).count();
    assert!(claims.len() > 30 && open > 2, "{} claims, {open} of them open", claims.len());
    let mut wrong = Vec::new();
    for claim in &claims {
        let tests = claim.tests();
        if tests.is_empty() != claim.is_open() {
            wrong.push(format!("{PAGE}:{}: a claim names a test, and what is open names none", claim.line));
        }
        for test in tests {
            if !exists(test)? {
                wrong.push(format!("{PAGE}:{}: there is no test {test}", claim.line));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    // An attacker about whom nothing is claimed was forgotten.
    let mut without = Vec::new();
    for section in page.split("\n## ").skip(1).filter(|section| !section.starts_with("Assets")) {
        if !section.contains("\n* ") {
            without.push(section.lines().next().unwrap_or_default().to_owned());
        }
    }
    assert_eq!(without, Vec::<String>::new());
    Ok(())
}

#[test]
fn worst_use_of_each_key_and_each_former_attack_name_tests_that_exist() -> TestResult {
    let mut wrong = Vec::new();
    for (page, least) in [(PAGE, 12), (KEYS, 16), (ATTACKS, 5)] {
        let rows = rows_with_tests(&source::read(Path::new(page))?);
        assert!(rows.len() >= least, "{page} has {} rows with tests", rows.len());
        for row in &rows {
            if row.tests().is_empty() != row.is_open() {
                wrong.push(format!("{page}:{}: a row names a test, or is open", row.line));
            }
            for test in row.tests() {
                if !exists(test)? {
                    wrong.push(format!("{page}:{}: there is no test {test}", row.line));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    let page = "| a | b |\n| --- | --- |\n| c | `d` |\n\n| key | use | tests |\n| --- | --- | --- |\n\
                | x | all | `a::b`, `c/d::e` |\n| y | all | |\n| z | **Open.** No | |\n\n| p | `q` |\n";
    let found = rows_with_tests(page);
    let tests: Vec<_> = found.iter().map(|row| (row.line, row.is_open(), row.tests())).collect();
    assert_eq!(tests, [(7, false, vec!["a::b", "c/d::e"]), (8, false, vec![]), (9, true, vec![])]);
    Ok(())
}

#[test]
fn claim_without_a_test_and_test_that_does_not_exist_are_found() -> TestResult {
    let page = "# X\n\n* It cannot. Tests: `a::b`,\n  `c/d::e`.\n* It can, `x::y`.\n* **Open.** Nothing.\n\nText.\n  no item\n";
    let found = claims(page);
    let tests: Vec<_> = found.iter().map(|claim| (claim.line, claim.is_open(), claim.tests())).collect();
    assert_eq!(tests, [(3, false, vec!["a::b", "c/d::e"]), (5, false, vec![]), (6, true, vec![])]);

    let this = "claim_without_a_test_and_test_that_does_not_exist_are_found";
    assert!(exists(&format!("promises::{this}"))?);
    for missing in ["promises::nothing", "nothing::at_all", "promises::claims", "transport/config::nothing"] {
        assert!(!exists(missing)?, "{missing}");
    }
    assert!(exists("transport/config::tls_1_2_is_not_offered")?, "a unit test of a crate");
    for (attributes, counts) in
        [("#[test]", true), ("#[test]\n#[ignore = \"slow\"]", false), ("#[must_use]", false)]
    {
        let file = format!("use a::b;\n\n{attributes}\nfn name() {{}}\n");
        assert_eq!(has_test(&file, "name"), counts, "{attributes}");
    }
    Ok(())
}

/// The first cells of the table with this header. A cell may have several names, and an explanation after a colon.
fn names_in_table<'p>(page: &'p str, header: &str) -> BTreeSet<&'p str> {
    let rows = page.lines().skip_while(|line| !line.starts_with(header)).skip(2);
    let cells = rows.map_while(|row| row.strip_prefix("| ")?.split(" | ").next());
    cells.filter_map(|cell| cell.split(": ").next()).flat_map(|names| names.split(", ")).collect()
}

#[test]
fn each_key_has_a_worst_use() -> TestResult {
    let page = "| key | by |\n| --- | --- |\n| a, b | x |\n| c: d, e | y |\n\n| key | use |\n| --- | --- |\n| f | z |\n";
    assert_eq!(names_in_table(page, "| key | by |"), ["a", "b", "c"].into());
    assert_eq!(names_in_table(page, "| key | use |"), ["f"].into());
    let page = source::read(Path::new(KEYS))?;
    let keys = names_in_table(&page, "| key | algorithm |");
    let used = names_in_table(&page, "| key | worst use |");
    assert!(keys.len() > 25, "{keys:?}");
    let without: Vec<_> = keys.difference(&used).collect();
    assert!(without.is_empty(), "{KEYS}: keys without a worst use: {without:?}");
    Ok(())
}

#[test]
fn tests_that_items_of_other_pages_name_exist() -> TestResult {
    let (mut named, mut wrong) = (0, Vec::new());
    for path in source::files("docs", "md")? {
        for claim in claims(&source::read(&path)?) {
            for test in claim.tests() {
                named += 1;
                if !exists(test)? {
                    wrong.push(format!("{}:{}: there is no test {test}", path.display(), claim.line));
                }
            }
        }
    }
    assert!(named > 100 && wrong.is_empty(), "of {named}:\n{}", wrong.join("\n"));
    Ok(())
}

/// The versions of Kubernetes in a text: `1.2X.Y` and `1.3X.Y`.
fn kubernetes_versions(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
    let is_one = |word: &&str| {
        let parts: Vec<&str> = word.split('.').collect();
        matches!(parts[..], ["1", minor, patch] if !patch.is_empty() && (20..50).contains(&minor.parse().unwrap_or(0)))
    };
    words.map(|word| word.trim_matches('.')).filter(is_one).map(str::to_owned).collect()
}

#[test]
fn examples_of_kubernetes_have_versions_that_were_run() -> TestResult {
    assert_eq!(
        kubernetes_versions("a-1.30.1.tar 'b 1.20.2-b' etcd 3.4.23, 1.5, 1.19.8."),
        ["1.20.2", "1.30.1"].map(str::to_owned).into()
    );
    let mut pages = source::files("docs", "md")?;
    // It names versions because they have a fault.
    pages.retain(|page| !page.ends_with("versions.md"));
    pages.extend(["README.md".into(), "CHANGELOG.md".into()]);
    pages.extend(source::files("crates/cli/src", "rs")?);
    pages.extend(source::files("proto", "proto")?);
    let mut seen = BTreeSet::new();
    for page in pages {
        let text = source::read(&page)?;
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        for line in text.lines().filter(|line| line.to_lowercase().contains("kube")) {
            for version in kubernetes_versions(line) {
                assert!(KUBERNETES_VERSIONS.contains(&version.as_str()), "{}: {line}", page.display());
                seen.insert(version);
            }
        }
    }
    assert_eq!(seen.len(), KUBERNETES_VERSIONS.len(), "{seen:?}");
    Ok(())
}

#[test]
fn end_to_end_tests_that_run_together_are_those_without_kubernetes() -> TestResult {
    let makefile = source::read(Path::new("Makefile"))?;
    let help = |target: &str| {
        let lines = makefile.lines().find_map(|line| line.strip_prefix(target)?.strip_prefix(':'));
        lines.with_context(|| format!("no target {target}"))
    };
    let (together, stated) = help("e2e")?.split_once("##").context("no help of e2e")?;
    assert!(stated.contains("that need no Kubernetes programs"), "{stated}");
    let together: BTreeSet<&str> = together.split_whitespace().collect();
    let mut without = BTreeSet::new();
    for target in makefile.lines().filter_map(|line| line.split_once(':')).map(|(target, _)| target) {
        if target.starts_with("e2e-") && !help(target)?.contains("builds Kubernetes first") {
            without.insert(target);
        }
    }
    assert_eq!(
        together, without,
        "`make e2e` runs the tests that do not state in their help that they build Kubernetes"
    );
    Ok(())
}

/// Each page that names the time within which a revoked curator is followed no more names that of the code.
#[test]
fn pages_name_the_bound_of_a_revocation() -> TestResult {
    assert_eq!(REVOCATION_BOUND, Duration::from_mins(2), "name the other bound in these pages");
    for (page, promise) in [
        (
            "docs/nodes.md",
            "**within two minutes**, or half a minute later if another curator has to lead first",
        ),
        ("docs/keys.md", "within two minutes of the revocation"),
        // A curator that does not answer delays it.
        ("docs/nodes.md", "with the next round, at most 75 seconds later"),
        ("docs/keys.md", "is repeated at most 75 seconds later"),
        (PAGE, "then up to 75 seconds later"),
        (PAGE, "is repeated at most 75 seconds later"),
        (PAGE, "`Credentials.Revoke` of the node: [within two minutes]("),
        (PAGE, "it leads no node that reaches one honest curator after two minutes"),
    ] {
        let text = source::read(Path::new(page))?.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(promise), "{page} does not state: {promise}");
    }
    Ok(())
}

/// The words in backquotes of the sentence that begins with `begin`.
fn quoted_in_sentence<'t>(text: &'t str, begin: &str) -> BTreeSet<&'t str> {
    let sentence = text.split_once(begin).map_or("", |(_, rest)| rest);
    let sentence = sentence.split_once(". ").map_or(sentence, |(sentence, _)| sentence);
    sentence.split('`').skip(1).step_by(2).collect()
}

#[test]
fn providers_of_the_readme_are_those_that_exist() -> TestResult {
    assert_eq!(quoted_in_sentence("A. It has `a`, and `b`. Or `c`. ", "It has "), ["a", "b"].into());
    let mut kinds = BTreeSet::new();
    for path in source::files("src/providers", "rs")? {
        let text = source::read(&path)?;
        let kind =
            text.lines().find_map(|line| line.split_once("const KIND: &str = \"")?.1.strip_suffix("\";"));
        kinds.extend(kind.map(str::to_owned));
    }
    assert_eq!(kinds, ["simulated", "static"].map(str::to_owned).into(), "document a provider that is new");
    let readme = source::read(Path::new("README.md"))?.replace('\n', " ");
    let named = quoted_in_sentence(&readme, "This release has two: ");
    assert_eq!(named.into_iter().map(str::to_owned).collect::<BTreeSet<_>>(), kinds);
    Ok(())
}

#[test]
fn command_that_would_install_is_answered_in_one_sentence() -> TestResult {
    for arguments in [&["install"][..], &["install", "rack1-01", "--reason", "new"]] {
        let program = env!("CARGO_BIN_EXE_shepherdctl");
        let output = Command::new(program).args(arguments).env_clear().stdin(Stdio::null()).output()?;
        let stderr = String::from_utf8(output.stderr)?;
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}: {stderr}");
        assert!(
            stderr.starts_with(
                "shepherdctl: installing an operating system is not available in this release; "
            ) && stderr.lines().count() == 1,
            "{arguments:?}: {stderr}"
        );
    }
    Ok(())
}
