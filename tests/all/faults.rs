//! The faults that `tools/faults` plants: each of them still applies to the engine as it is, and names a test
//! that is there. Whether that test turns red takes a build for each, and is not looked at here.

use std::process::Command;

use anyhow::{Context as _, Result};

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// What stands behind `key: ` at the beginning of a patch.
fn field<'t>(text: &'t str, key: &str) -> Result<&'t str> {
    let found = text.lines().take_while(|line| !line.is_empty());
    found
        .filter_map(|line| line.split_once(": "))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
        .context(key.to_owned())
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
        let test = field(&text, "test").context(place.to_string())?;
        let (module, name) = test.rsplit_once("::").context(place.to_string())?;
        let file = format!("tests/all/{}.rs", module.replace("::", "/"));
        let tests = source::read(file.as_ref())?;
        assert!(tests.contains(&format!("fn {name}(")), "{place} names {test}, which {file} has not");
    }
    for item in ["outage", "crash", "frozen", "backup", "upgrade"] {
        assert!(items.iter().any(|found| found.contains(item)), "no fault is planted for {item}: {items:?}");
    }
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
