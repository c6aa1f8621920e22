//! The faults that `tools/faults` plants: each of them still applies to the engine as it is, and names an existing test
//! by its package, its test program and its name there, or a script. Whether that test fails takes a build for each, and
//! is not checked here.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// The text after `key: ` at the beginning of a patch.
fn field<'t>(text: &'t str, key: &str) -> Result<&'t str> {
    let found = text.lines().take_while(|line| !line.is_empty());
    found
        .filter_map(|line| line.split_once(": "))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
        .context(key.to_owned())
}

/// The files that may have a module of a test program. Unit tests are in the program `lib`, either in a file of their own or
/// at the end of what they test.
fn test_files(folder: &str, program: &str, module: &str) -> Vec<String> {
    let path = module.replace("::", "/");
    if program != "lib" {
        return vec![format!("{folder}tests/{program}/{path}.rs")];
    }
    let tested = path.strip_suffix("/tests").unwrap_or(&path);
    [format!("{tested}/tests.rs"), format!("{tested}.rs"), format!("{tested}/mod.rs")]
        .map(|file| format!("{folder}src/{file}"))
        .to_vec()
}

#[test]
fn every_planted_fault_applies_and_names_a_test_that_is_there() -> TestResult {
    let output = Command::new("tools/faults").arg("--check").current_dir(source::root()).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut items = Vec::new();
    for path in source::files("tests/faults", "patch")? {
        let text = source::read(&path)?;
        let place = path.display();
        items.push(field(&text, "item").context(place.to_string())?.to_owned());
        // `tools/faults --check` has looked for the script.
        if field(&text, "command").is_ok() {
            continue;
        }
        let test = field(&text, "test").context(place.to_string())?;
        let words: Vec<&str> = test.split(' ').collect();
        let [package, program, test] = words[..] else {
            return Err(anyhow!("{place}: not a package, a test program and a test: {test}").into());
        };
        let folder =
            package.strip_prefix("shepherd-").map_or_else(String::new, |name| format!("crates/{name}/"));
        let (module, name) = test.rsplit_once("::").context(place.to_string())?;
        let files = test_files(&folder, program, module);
        let tests = files.iter().find_map(|file| source::read(file.as_ref()).ok());
        let tests = tests.with_context(|| format!("{place} names {test}, and none of {files:?} exists"))?;
        assert!(tests.contains(&format!("fn {name}(")), "{place} names {test}, which {files:?} has not");
    }
    for item in ["outage", "crash", "frozen", "backup", "upgrade"] {
        assert!(items.iter().any(|found| found.contains(item)), "no fault is planted for {item}: {items:?}");
    }
    Ok(())
}

/// The end-to-end test of Kubernetes builds its other release with this patch. Without this test it would fail after
/// half an hour of building.
#[test]
fn other_release_of_the_kubernetes_test_can_be_made() -> TestResult {
    let patch = "tests/e2e_kubernetes/next.patch";
    let output =
        Command::new("git").args(["apply", "--check", patch]).current_dir(source::root()).output()?;
    assert!(output.status.success(), "{patch}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[test]
fn every_module_of_the_fire_stands_under_a_heading_of_its_long_form() -> TestResult {
    let modules = source::read("tests/all/fire/mod.rs".as_ref())?;
    let modules: Vec<&str> =
        modules.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';')).collect();
    let script = source::read("tools/fire".as_ref())?;
    let (_, headings) = script.split_once("headings=(").context("no headings in tools/fire")?;
    let (headings, _) = headings.split_once("\n)").context("no end of the headings")?;
    let under: Vec<&str> = headings.split(['=', ' ', '"', '\n']).filter(|word| !word.is_empty()).collect();
    assert!(modules.len() > 10, "{modules:?}");
    for module in modules {
        assert!(under.contains(&module), "tools/fire has no heading for {module}: {under:?}");
    }
    Ok(())
}

/// Runs git in a tree.
fn git(tree: &Path, arguments: &[&str]) -> Result<()> {
    let author = ["-c", "user.name=test", "-c", "user.email=test@localhost"];
    let output = Command::new("git").args(author).args(arguments).current_dir(tree).output()?;
    ensure!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[test]
fn patches_are_made_again_after_their_code_has_moved_and_conflicts_are_left() -> TestResult {
    let tree = tempfile::tempdir()?;
    let tree = tree.path();
    let write = |path: &str, text: &str| -> Result<()> {
        let path = tree.join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        Ok(fs::write(path, text)?)
    };
    let code = |first: &str, limit: u32| {
        format!(
            "fn {first}() {{}}\n\nfn limit() -> u32 {{\n    {limit}\n}}\n\nfn last() -> u32 {{\n    limit() + 1\n}}\n"
        )
    };
    let patch = "breaks: The limit is wrong.\nitem: x\ntest: x all x::y\nsays: 4\n\n--- a/src/old.rs\n+++ b/src/old.rs\n\
                 @@ -1,5 +1,5 @@\n fn first() {}\n \n fn limit() -> u32 {\n-    3\n+    4\n }\n";
    let rebase = || -> Result<std::process::Output> {
        let tool = source::root().join("tools/rebase-faults");
        Ok(Command::new(tool).arg("start").current_dir(tree).output()?)
    };
    git(tree, &["init", "-q"])?;
    write("src/old.rs", &code("first", 3))?;
    write("tests/faults/limit.patch", patch)?;
    git(tree, &["apply", "--check", "tests/faults/limit.patch"])?;
    git(tree, &["add", "-A"])?;
    git(tree, &["commit", "-qm", "start"])?;
    git(tree, &["tag", "start"])?;

    git(tree, &["mv", "src/old.rs", "src/new.rs"])?;
    write("src/new.rs", &code("beginning", 3))?;
    git(tree, &["commit", "-qam", "move"])?;
    let output = rebase()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    git(tree, &["apply", "--check", "tests/faults/limit.patch"])?;
    let made = fs::read_to_string(tree.join("tests/faults/limit.patch"))?;
    assert!(
        made.starts_with(
            "breaks: The limit is wrong.\nitem: x\ntest: x all x::y\nsays: 4\n\n--- a/src/new.rs\n"
        ),
        "{made}"
    );
    assert!(made.contains("\n-    3\n+    4\n"), "{made}");

    git(tree, &["commit", "-qam", "made again"])?;
    write("src/new.rs", &code("beginning", 5))?;
    let output = rebase()?;
    let complaint =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && complaint.contains("src/new.rs"), "{complaint}");
    assert_eq!(fs::read_to_string(tree.join("tests/faults/limit.patch"))?, made, "left for a person");
    Ok(())
}
