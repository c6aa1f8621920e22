//! No file of the tree uses a spelling that is gone: a flag or a command that was renamed.
//!
//! Someone who copies a line from a page, a script or a help text must not get an error. Nothing else notices all of
//! these places, because prose is not run. Dashes and underscores are the same here, because `shepherdctl` accepts both.

use std::path::Path;

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// A spelling that is gone.
struct Removed {
    /// The flag or the words.
    spelling: &'static str,
    /// What to write in its place.
    replacement: &'static str,
    /// Whether only lines with `shepherdctl` count, because other programs have such a flag.
    only_ours: bool,
}

const fn removed(spelling: &'static str, replacement: &'static str) -> Removed {
    Removed { spelling, replacement, only_ours: false }
}

const fn removed_of_ours(spelling: &'static str, replacement: &'static str) -> Removed {
    Removed { spelling, replacement, only_ours: true }
}

const REMOVED: &[Removed] = &[
    removed("--tag", "--fact"),
    removed("--select", "--selector"),
    removed("unlabel", "label M KEY-"),
    removed("--expires_after", "--until"),
    removed("--lifetime", "--until"),
    removed("--override_limits", "--beyond_limits"),
    removed("--confirm_count", "--yes_count"),
    removed("--i_know", "--confirm"),
    removed("--most", "--max_count"),
    removed("--onto", "--target_machine"),
    removed("--no_storage", "--remove_storage"),
    removed("--second_person", "--require_second_admin"),
    removed("--second_person_good_for", "--approval_ttl"),
    removed("--outward_limit", "--outward_call_timeout"),
    removed("--cluster_snapshots_kept", "--cluster_snapshots_retained"),
    removed("--cluster_snapshot_days", "--cluster_snapshots_retained_daily"),
    removed("tokens get", "get tokens"),
    removed("artefacts get", "get artefacts"),
    removed("update get", "get updates"),
    removed("update describe", "describe update"),
    removed("policy get", "get policy"),
    removed_of_ours("--set", "label M KEY=VALUE"),
    removed_of_ours("--file", "--output_file"),
    removed_of_ours("--directory", "--output_dir"),
    removed_of_ours("--give", "--add_role"),
    removed_of_ours("--take", "--remove_role"),
    removed_of_ours("--what", "--keys"),
    removed_of_ours("--after", "--cursor"),
];

/// Files and folders that are searched, apart from the end-to-end tests.
const PLACES: &[&str] = &[
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "Makefile",
    "benches",
    "contrib",
    "crates",
    "docs",
    "proto",
    "src",
    "tests/all",
    "tests/faults",
    "tools",
];

/// Files that may have some spellings, with the reason. An empty list permits all.
const EXCEPTIONS: &[(&str, &[&str], &str)] = &[
    ("CHANGELOG.md", &[], "it says what was renamed"),
    ("tests/all/removed_spellings.rs", &[], "it has the table"),
    (
        "crates/cli/src/suggestions.rs",
        &["tokens get", "update describe", "policy get"],
        "its test types them, and gets the command of today",
    ),
];

fn exception_for(file: &str) -> Option<&'static [&'static str]> {
    EXCEPTIONS.iter().find(|(path, ..)| *path == file).map(|(_, spellings, _)| *spellings)
}

/// Whether a line has the words as words of their own: no part of a longer one.
fn has_words(line: &str, words: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '-';
    line.match_indices(words).any(|(start, _)| {
        let (before, after) = (&line[..start], &line[start + words.len()..]);
        !before.ends_with(is_part) && !after.starts_with(is_part)
    })
}

/// The spellings in a line that are gone.
fn find_removed(line: &str) -> impl Iterator<Item = &'static Removed> {
    let line = line.replace('_', "-");
    let is_ours = line.contains("shepherdctl");
    REMOVED.iter().filter(move |removed| {
        (is_ours || !removed.only_ours) && has_words(&line, &removed.spelling.replace('_', "-"))
    })
}

/// Calls `check` with the path and the text of each file of text below `path`.
fn visit_files(path: &Path, check: &mut impl FnMut(&str, &str)) -> TestResult {
    let whole = source::root().join(path);
    if whole.is_dir() {
        for entry in std::fs::read_dir(&whole)? {
            let entry = entry?;
            if entry.file_name() != "target" && entry.file_name() != "__pycache__" {
                visit_files(&path.join(entry.file_name()), check)?;
            }
        }
    } else if let Ok(text) = String::from_utf8(std::fs::read(&whole)?) {
        check(&path.display().to_string(), &text);
    }
    Ok(())
}

#[test]
fn no_file_has_a_spelling_that_is_gone() -> TestResult {
    let mut places: Vec<String> = PLACES.iter().map(|place| (*place).to_owned()).collect();
    for entry in std::fs::read_dir(source::root().join("tests"))? {
        let name = entry?.file_name().display().to_string();
        if name.starts_with("e2e_") {
            places.push(format!("tests/{name}"));
        }
    }
    let (mut problems, mut used, mut files) = (Vec::new(), Vec::new(), 0);
    let mut check = |file: &str, text: &str| {
        files += 1;
        let permitted = exception_for(file);
        for (number, line) in text.lines().enumerate() {
            for removed in find_removed(line) {
                let (spelling, replacement) = (removed.spelling, removed.replacement);
                match permitted {
                    Some(spellings) if spellings.is_empty() || spellings.contains(&spelling) => {
                        used.push((file.to_owned(), spelling));
                    }
                    _ => problems
                        .push(format!("{file}:{}: {spelling} is gone; write {replacement}", number + 1)),
                }
            }
        }
    };
    for place in &places {
        visit_files(Path::new(place), &mut check)?;
    }
    assert!(files > 1000, "{files} files were read");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    for (file, spellings, _) in EXCEPTIONS {
        assert!(used.iter().any(|(path, _)| path == file), "{file} needs no exception");
        for spelling in *spellings {
            let is_used = used.iter().any(|(path, found)| path == file && found == spelling);
            assert!(is_used, "{file} needs no exception for {spelling}");
        }
    }
    Ok(())
}

#[test]
fn spelling_is_found_as_a_word_of_its_own() {
    for (line, expected) in [
        ("shepherdctl tokens create lee --expires_after 90d", Some("--expires_after")),
        ("write `--expires-after=90d`", Some("--expires_after")),
        ("shepherdctl label sim-1 --set a=b", Some("--set")),
        ("shepherdctl unlabel sim-1 --key a", Some("unlabel")),
        ("shepherdctl tokens get", Some("tokens get")),
        // Other words, and the flags of other programs.
        ("string expires_after = 5;", None),
        ("git tag --tags", None),
        ("shepherdctl get machines --selector a=b", None),
        ("an unlabelled machine", None),
        ("tar --directory x --file y", None),
        ("get the tokens", None),
    ] {
        let found = find_removed(line).next().map(|removed| removed.spelling);
        assert_eq!(found, expected, "{line}");
    }
}
