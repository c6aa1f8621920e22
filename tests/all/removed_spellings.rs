//! No file of the tree uses a spelling that is gone: a flag or a command that was renamed.
//!
//! Someone who copies a line from a page, a script or a help text must not get an error. Nothing else notices all of
//! these places, because prose is not run. Dashes and underscores are the same in the table, because `shepherdctl` accepts
//! both. Its flags are written with dashes everywhere, also in recorded outputs. Those of `shepherd` and `roleserver` have
//! underscores.

use std::collections::BTreeSet;
use std::path::Path;

use clap::Command;

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
    removed("--override_limits", "--beyond-limits"),
    removed("--confirm_count", "--yes-count"),
    removed("--i_know", "--confirm"),
    removed("--most", "--max-count"),
    removed("--onto", "--target-machine"),
    removed("--no_storage", "--remove-storage"),
    removed("--second_person", "--require_second_admin"),
    removed("--second_person_good_for", "--approval_ttl"),
    removed("--outward_limit", "--outward_call_timeout"),
    removed("--cluster_snapshots_kept", "--cluster_snapshots_retained"),
    removed("--cluster_snapshot_days", "--cluster_snapshots_retained_daily"),
    removed("tokens get", "get tokens"),
    removed("tokens list", "get tokens"),
    removed("artefacts get", "get artefacts"),
    removed("update get", "get updates"),
    removed("update describe", "describe update"),
    removed("policy get", "get policy"),
    removed_of_ours("--set", "label M KEY=VALUE"),
    removed_of_ours("--file", "--output-file"),
    removed_of_ours("--directory", "--output-dir"),
    removed_of_ours("--give", "--add-role"),
    removed_of_ours("--take", "--remove-role"),
    removed_of_ours("--what", "--keys"),
    removed_of_ours("--after", "--cursor"),
];

/// Files and folders that are searched, apart from the end-to-end tests.
const PLACES: &[&str] = &[
    ".ci",
    "BENCHMARKS.md",
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
    "tests/data",
    "tests/faults",
    "tests/fuzz",
    "tests/security",
    "tests/upgrade",
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
            // A link of recorded hardware leads out of its tree, or nowhere.
            let is_link = entry.file_type()?.is_symlink();
            if !is_link && entry.file_name() != "target" && entry.file_name() != "__pycache__" {
                visit_files(&path.join(entry.file_name()), check)?;
            }
        }
    } else if let Ok(text) = String::from_utf8(std::fs::read(&whole)?) {
        check(&path.display().to_string(), &text);
    }
    Ok(())
}

/// Calls `check` with the path and the text of each file of text in the places that are searched.
fn visit_places(check: &mut impl FnMut(&str, &str)) -> TestResult {
    for place in PLACES {
        visit_files(Path::new(place), check)?;
    }
    for entry in std::fs::read_dir(source::root().join("tests"))? {
        let name = entry?.file_name().display().to_string();
        if name.starts_with("e2e_") {
            visit_files(&Path::new("tests").join(name), check)?;
        }
    }
    Ok(())
}

/// Flags of several words, by their names with underscores.
struct Flags {
    /// Those that `shepherdctl` alone has.
    ours: BTreeSet<String>,
    /// Those that another program has, too.
    shared: BTreeSet<String>,
}

impl Flags {
    /// The flags of the programs.
    fn of_programs() -> Self {
        let (mut ours, mut others) = (BTreeSet::new(), BTreeSet::new());
        add_flags(&shepherd::cli::command::whole_grammar(), &mut ours);
        add_flags(&shepherd::service::flags::build_command(), &mut others);
        add_flags(&shepherd::roleserver::program::build_command(), &mut others);
        let shared: BTreeSet<String> = ours.intersection(&others).cloned().collect();
        ours.retain(|name| !shared.contains(name));
        Self { ours, shared }
    }

    /// The flags of `shepherdctl` in a line that have underscores. A shared one is its flag in its command.
    fn find_underscored<'a>(&self, line: &'a str) -> Vec<&'a str> {
        let is_part = |c: char| c.is_ascii_lowercase() || c == '_' || c == '-';
        let found = line.match_indices("--").filter_map(|(start, dashes)| {
            let name = line[start + dashes.len()..].split(|c| !is_part(c)).next()?;
            let is_command = line[..start].contains("shepherdctl");
            let is_ours = self.ours.contains(name) || (is_command && self.shared.contains(name));
            (is_ours && name.contains('_')).then_some(name)
        });
        found.collect()
    }
}

/// Adds the flags of several words of a command and of those below it.
fn add_flags(command: &Command, names: &mut BTreeSet<String>) {
    let flags = command.get_arguments().filter_map(|flag| flag.get_long());
    names.extend(flags.filter(|name| name.contains(['-', '_'])).map(|name| name.replace('-', "_")));
    for below in command.get_subcommands() {
        add_flags(below, names);
    }
}

/// Files that may have flags of `shepherdctl` with underscores, with the reason.
const UNDERSCORED: &[(&str, &str)] = &[
    ("docs/api.md", "it states that they are accepted"),
    ("crates/cli/src/completions/grammar.rs", "its test begins flags so"),
    ("crates/cli/src/completions/words.rs", "its test types them"),
    ("crates/cli/src/run.rs", "its test types them"),
    ("tests/all/shell.rs", "a flag that is begun so is completed so"),
    ("tests/all/removed_spellings.rs", "its test finds them"),
];

#[test]
fn every_file_has_dashes_in_the_flags_of_shepherdctl() -> TestResult {
    let flags = Flags::of_programs();
    assert!(flags.ours.len() > 25, "{:?}", flags.ours);
    let shared: BTreeSet<String> = ["bmdb_url", "bmdb_dialect"].map(str::to_owned).into();
    assert_eq!(flags.shared, shared);
    let (mut problems, mut used) = (Vec::new(), BTreeSet::new());
    visit_places(&mut |file: &str, text: &str| {
        let is_permitted = UNDERSCORED.iter().any(|(path, _)| *path == file);
        for (number, line) in text.lines().enumerate() {
            for name in flags.find_underscored(line) {
                if is_permitted {
                    used.insert(file.to_owned());
                } else {
                    let dashed = name.replace('_', "-");
                    problems.push(format!("{file}:{}: write --{dashed}", number + 1));
                }
            }
        }
    })?;
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    for (file, _) in UNDERSCORED {
        assert!(used.contains(*file), "{file} needs no exception");
    }
    Ok(())
}

#[test]
fn underscores_are_found_in_the_flags_of_shepherdctl_alone() {
    let flags = Flags::of_programs();
    for (line, expected) in [
        ("hold M --dry_run", &["dry_run"][..]),
        ("`--yes_count=3`, or --save_context home", &["yes_count", "save_context"]),
        ("shepherdctl --bmdb_url postgres://db", &["bmdb_url"]),
        ("hold M --dry-run", &[]),
        ("shepherdctl --bmdb-url postgres://db", &[]),
        // The flags of another program, and what is no flag.
        ("shepherd --bmdb_url postgres://db --ssh_user root", &[]),
        ("--dry_running and dry_run", &[]),
    ] {
        assert_eq!(flags.find_underscored(line), expected, "{line}");
    }
}

#[test]
fn no_file_has_a_spelling_that_is_gone() -> TestResult {
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
    visit_places(&mut check)?;
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
