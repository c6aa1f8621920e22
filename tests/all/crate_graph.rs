//! The map of the code, `docs/architecture.md`: its picture and lists show the packages as they are, each dependency
//! that the layers do not imply has its reason there, and what the pages for developers name exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context as _, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::source;
use crate::workspace;

const PAGE: &str = "docs/architecture.md";
const PICTURE: &str = "docs/architecture.svg";

/// Crates, and modules that may become one, each with the dependencies that need no reason in the page. Any of them may
/// depend on those in [`OPEN`], and the root package may depend on every crate.
const IMPLIED: &[(&str, &[&str])] = &[
    ("backoff", &[]),
    ("bmdb", &["model", "proto"]),
    ("cli", &["bmdb", "model", "proto", "server"]),
    ("curator", &["curator-client", "etcd", "model", "proto", "transport"]),
    ("curator-client", &["model", "proto", "transport"]),
    ("etcd", &["proto"]),
    ("model", &["proto"]),
    ("proto", &[]),
    ("reconciler", &["etcd", "proto"]),
    ("roleserver", &["curator", "curator-client", "etcd", "model", "proto", "reconciler", "supervisor"]),
    ("server", &["bmdb", "model", "proto", "transport"]),
    ("simulator", &["curator-client", "model", "proto", "roleserver", "supervisor"]),
    ("supervisor", &[]),
    ("takeover", &["model", "proto"]),
    ("testkit", &["bmdb", "curator", "curator-client", "etcd", "model", "proto"]),
    ("transport", &[]),
];

/// Crates that every crate may depend on.
const OPEN: &[&str] = &["backoff", "trusted-file"];

/// Runs `tools/crate-graph` on a tree.
fn crate_graph(tree: &Path, action: Option<&str>) -> anyhow::Result<Output> {
    let mut tool = Command::new(source::root().join("tools/crate-graph"));
    tool.env("CARGO", env!("CARGO")).arg("--tree").arg(tree).args(action);
    tool.output().context("tools/crate-graph")
}

/// The complaint of `tools/crate-graph --check`; `None` if it passes.
fn complaints(tree: &Path) -> anyhow::Result<Option<String>> {
    let output = crate_graph(tree, Some("--check"))?;
    Ok(if output.status.success() { None } else { Some(String::from_utf8(output.stderr)?) })
}

#[test]
fn picture_and_lists_show_the_packages() -> TestResult {
    assert_eq!(complaints(source::root())?, None);
    Ok(())
}

/// A workspace of three crates: `high` depends on both others, `middle` on `low`, and the tests of `low` on `middle`.
/// Only one of two programs links `high`.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> anyhow::Result<Self> {
        let tree = Self(tempfile::tempdir()?);
        let program = |name: &str| format!("[[bin]]\nname = \"{name}\"\nrequired-features = [\"{name}\"]\n");
        let dependency =
            |name: &str| format!("shepherd-{name} = {{ path = \"crates/{name}\", optional = true }}\n");
        let root = format!(
            "[workspace]\nmembers = [\"crates/*\"]\n[package]\nname = \"shepherd\"\nversion = \"0.1.0\"\n\
             edition = \"2024\"\n[features]\none = [\"dep:shepherd-high\"]\ntwo = [\"dep:shepherd-middle\"]\n{}{}\
             [dependencies]\n{}{}",
            program("one"),
            program("two"),
            dependency("high"),
            dependency("middle")
        );
        tree.write("Cargo.toml", &root)?;
        tree.write("src/lib.rs", "")?;
        for path in ["src/bin/one.rs", "src/bin/two.rs"] {
            tree.write(path, "fn main() {}\n")?;
        }
        tree.write("src/room/mod.rs", "//! The room of [`things`][]. It has more.\n//!\n//! More.\n")?;
        tree.write_crate("low", "", "[dev-dependencies]\nshepherd-middle = { path = \"../middle\" }\n")?;
        tree.write_crate("middle", "shepherd-low = { path = \"../low\" }\n", "")?;
        tree.write_crate(
            "high",
            "shepherd-low = { path = \"../low\" }\nshepherd-middle = { path = \"../middle\" }\n",
            "",
        )?;
        let lists = ["crates", "modules"]
            .map(|list| format!("<!-- {list}: written by tools/crate-graph -->\n<!-- {list}: end -->\n"));
        tree.write(PAGE, &format!("# Map\n\n{}\nText.\n", lists.concat()))?;
        Ok(tree)
    }

    fn write(&self, path: &str, text: &str) -> anyhow::Result<()> {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        Ok(fs::write(path, text)?)
    }

    fn write_crate(&self, name: &str, dependencies: &str, rest: &str) -> anyhow::Result<()> {
        self.write(&format!("crates/{name}/src/lib.rs"), "")?;
        let manifest = format!(
            "[package]\nname = \"shepherd-{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\
             description = \"It is <{name}>.\"\n[dependencies]\n{dependencies}{rest}"
        );
        self.write(&format!("crates/{name}/Cargo.toml"), &manifest)
    }

    fn read(&self, path: &str) -> anyhow::Result<String> {
        fs::read_to_string(self.0.path().join(path)).with_context(|| path.to_owned())
    }

    fn draw(&self) -> anyhow::Result<()> {
        let output = crate_graph(self.0.path(), None)?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}

#[test]
fn picture_leaves_out_implied_arrows_and_the_table_does_not() -> TestResult {
    let tree = Tree::new()?;
    tree.draw()?;
    let picture = tree.read(PICTURE)?;
    let described = "high depends on middle; middle depends on low; shepherd depends on high.";
    assert!(picture.contains(described), "{picture}");
    // The root package's arrow, and those of two crates.
    assert_eq!(picture.matches("class=\"arrow\"").count(), 3, "{picture}");
    assert!(picture.contains("It is &lt;low&gt;"), "{picture}");
    let page = tree.read(PAGE)?;
    for row in [
        "| [`high`](../crates/high) | It is <high> | `low`, `middle` | `one` |",
        "| [`low`](../crates/low) | It is <low> | – | `one`, `two` |",
        "| [`middle`](../crates/middle) | It is <middle> | `low` | `one`, `two` |",
        "| [`room`](../src/room) | The room of `things` |",
    ] {
        assert!(page.contains(row), "{row}\n{page}");
    }
    assert!(page.starts_with("# Map\n") && page.ends_with("\nText.\n"), "{page}");
    Ok(())
}

#[test]
fn picture_that_is_out_of_date_is_found() -> TestResult {
    let tree = Tree::new()?;
    let found = complaints(tree.0.path())?.context("there is no picture yet")?;
    assert!(found.contains(PICTURE) && found.contains(PAGE), "{found}");
    tree.draw()?;
    assert_eq!(complaints(tree.0.path())?, None);
    let (picture, page) = (tree.read(PICTURE)?, tree.read(PAGE)?);
    tree.draw()?;
    assert_eq!((tree.read(PICTURE)?, tree.read(PAGE)?), (picture, page), "it draws the same again");

    tree.write_crate("middle", "", "")?;
    let found = complaints(tree.0.path())?.context("a dependency is gone")?;
    assert!(found.contains(PICTURE) && found.contains("Run tools/crate-graph"), "{found}");
    tree.draw()?;
    assert!(tree.read(PICTURE)?.contains("high depends on low, middle"), "its arrow is not implied any more");

    tree.write(PAGE, "# Map\n")?;
    let found = complaints(tree.0.path())?.context("the page has no place for the lists")?;
    assert!(found.contains("<!-- crates: end -->"), "{found}");
    Ok(())
}

/// Names of crates, and pairs of a crate and its dependency, to which a page gives a reason.
fn explained(page: &str) -> BTreeSet<(String, Option<String>)> {
    let section = page.split("\n### Dependencies that need a reason\n").nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    rows.map(|cell| {
        let mut names = cell.split('→').map(|name| name.trim_matches([' ', '`']).to_owned());
        (names.next().unwrap_or_default(), names.next())
    })
    .collect()
}

/// The errors in a page's reasons for these packages.
fn wrong_reasons(packages: &BTreeMap<&str, BTreeSet<&str>>, page: &str) -> Vec<String> {
    let explained = explained(page);
    let mut wrong = Vec::new();
    let mut existing = BTreeSet::new();
    for (package, dependencies) in packages {
        let implied = IMPLIED.iter().find(|(name, _)| name == package).map(|(_, dependencies)| *dependencies);
        let crate_row = ((*package).to_owned(), None);
        if implied.is_none() && !explained.contains(&crate_row) {
            wrong.push(format!("the crate `{package}` has no reason in {PAGE}"));
        }
        existing.insert(crate_row);
        for name in dependencies {
            let row = ((*package).to_owned(), Some((*name).to_owned()));
            let is_implied = OPEN.contains(name) || implied.is_some_and(|implied| implied.contains(name));
            if !is_implied && !explained.contains(&row) {
                wrong.push(format!("the dependency `{package}` → `{name}` has no reason in {PAGE}"));
            }
            existing.insert(row);
        }
    }
    let gone = explained.difference(&existing);
    wrong.extend(gone.map(|row| format!("{PAGE} gives a reason for {row:?}, which does not exist")));
    wrong
}

#[test]
fn each_dependency_that_the_layers_do_not_imply_has_a_reason() -> TestResult {
    let packages = workspace::packages()?;
    let packages: BTreeMap<&str, BTreeSet<&str>> = packages
        .iter()
        .filter_map(|package| Some((package.name.strip_prefix("shepherd-")?, package.our_dependencies())))
        .collect();
    let wrong = wrong_reasons(&packages, &source::read(Path::new(PAGE))?);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Otherwise the dependency could come back without a reason.
    for (name, implied) in IMPLIED {
        let Some(dependencies) = packages.get(name) else { continue };
        let gone: Vec<&str> = implied.iter().copied().filter(|other| !dependencies.contains(other)).collect();
        assert!(gone.is_empty(), "{name} does not depend on {gone:?}: remove them from IMPLIED");
    }
    Ok(())
}

#[test]
fn dependency_without_a_reason_is_found() {
    let packages = BTreeMap::from([
        ("model", BTreeSet::from(["proto", "backoff"])),
        ("etcd", BTreeSet::from(["model"])),
        ("kitchen", BTreeSet::from(["sink"])),
    ]);
    let page = |rows: &str| {
        format!("# Map\n\n### Dependencies that need a reason\n\n{rows}\n## Next\n\n| `x` | y |\n")
    };
    assert_eq!(
        wrong_reasons(&packages, &page("| `model` → `proto` | why |\n| `model` → `etcd` | why |\n")),
        [
            "the dependency `etcd` → `model` has no reason in docs/architecture.md",
            "the crate `kitchen` has no reason in docs/architecture.md",
            "the dependency `kitchen` → `sink` has no reason in docs/architecture.md",
            "docs/architecture.md gives a reason for (\"model\", Some(\"etcd\")), which does not exist",
        ]
    );
    let all = "| `etcd` → `model` | why |\n| `kitchen` | why |\n| `kitchen` → `sink` | why |\n";
    assert_eq!(wrong_reasons(&packages, &page(all)), Vec::<String>::new());
}

/// Folders of the tree with files that pages name.
const FOLDERS: [&str; 11] =
    [".ci", "benches", "contrib", "crates", "docs", "migrations", "proto", "sql", "src", "tests", "tools"];

/// The names between backticks in a page, without its blocks of code.
#[derive(Default)]
struct Names<'a> {
    paths: BTreeSet<&'a str>,
    functions: BTreeSet<&'a str>,
    types: BTreeSet<&'a str>,
}

impl<'a> Names<'a> {
    fn of(page: &'a str) -> Self {
        let mut names = Self::default();
        let text = page.split("\n```").step_by(2);
        for name in text.flat_map(|text| text.split('`').skip(1).step_by(2)) {
            let consists_of = |others: &str| {
                name.chars().all(|letter| letter.is_ascii_alphanumeric() || others.contains(letter))
            };
            let is_path = name.split_once('/').is_some_and(|(folder, _)| FOLDERS.contains(&folder));
            if is_path && consists_of("/._-") {
                // A capitalized part is a name that the reader chooses.
                if !name.contains("NNNN") && !name.contains("NAME") {
                    names.paths.insert(name);
                }
            } else if let Some(function) = name.strip_suffix("()") {
                names.functions.insert(function.rsplit("::").next().unwrap_or(function));
            } else if consists_of("_") && name.starts_with(|letter: char| letter.is_ascii_uppercase()) {
                names.types.insert(name);
            }
        }
        names
    }
}

/// The words that follow one of these keywords.
fn defined<'a>(words: &[&'a str], keywords: &[&str]) -> BTreeSet<&'a str> {
    words.windows(2).filter(|pair| keywords.contains(&pair[0])).map(|pair| pair[1]).collect()
}

#[test]
fn what_pages_for_developers_name_exists() -> TestResult {
    let mut missing = Vec::new();
    for page in [PAGE, "CONTRIBUTING.md", "SECURITY.md"] {
        let text = source::read(Path::new(page))?;
        let paths = Names::of(&text).paths;
        assert!(paths.len() > 1, "{page} names paths: {paths:?}");
        let missing_paths = paths.into_iter().filter(|path| !source::root().join(path).exists());
        missing.extend(missing_paths.map(|path| format!("{page}: {path} does not exist")));
    }

    let mut code = String::new();
    for path in source::rust_files()? {
        code.push_str(&source::take_apart(&source::read(&path)?).code);
    }
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    let words: Vec<&str> =
        code.split(|letter: char| !is_part(letter)).filter(|word| !word.is_empty()).collect();
    let page = source::read(Path::new(PAGE))?;
    let names = Names::of(&page);
    assert!(names.functions.len() > 20 && names.types.len() > 5, "{:?} {:?}", names.functions, names.types);
    let functions = defined(&words, &["fn"]);
    missing.extend(names.functions.difference(&functions).map(|name| format!("{PAGE}: no fn {name}")));
    let types = defined(&words, &["struct", "enum", "trait", "type"]);
    // Variants of `Process`.
    let processes = BTreeSet::from(["AgentStart", "Power", "Recovery", "Retirement", "Update"]);
    let named_types = names.types.difference(&processes).filter(|name| !types.contains(*name));
    missing.extend(named_types.map(|name| format!("{PAGE}: no type {name}")));
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    Ok(())
}

#[test]
fn names_between_backticks_are_distinguished() {
    let names = Names::of(
        "`src/a/b.rs` and `tests/NAME.rs`, `f()` and `Type::g()`, `Type`, `a word`, `--flag`, `sql/<x>/y.sql`\n\
         ```\n`src/gone.rs`\n```\n`tools/x`\n",
    );
    assert_eq!(names.paths, BTreeSet::from(["src/a/b.rs", "tools/x"]));
    assert_eq!(names.functions, BTreeSet::from(["f", "g"]));
    assert_eq!(names.types, BTreeSet::from(["Type"]));
}
