//! Searches the tree as a newcomer does: the obvious term leads to the file that has the answer.
//!
//! `tests/all/questions/list.txt` has the questions. A search is one `grep` over `crates`, `src` and `sql`, and succeeds
//! when it finds the right file among at most [`MOST`].

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// How many files a search may find.
const MOST: usize = 10;
/// How many questions there are.
const QUESTIONS: usize = 40;

struct Question<'a> {
    found: bool,
    text: &'a str,
    term: &'a str,
    file: &'a str,
}

fn questions(list: &str) -> anyhow::Result<Vec<Question<'_>>> {
    let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let parts: Vec<&str> = line.split(" | ").collect();
            let [state, text, term, file] = parts[..] else { anyhow::bail!("four parts are needed: {line}") };
            ensure!(["found", "open"].contains(&state), "neither found nor open: {line}");
            Ok(Question { found: state == "found", text, term, file })
        })
        .collect()
}

/// Files below the root that contain the term, as `grep` finds them.
fn search(root: &Path, term: &str) -> anyhow::Result<Vec<String>> {
    let folders = ["crates", "src", "sql"].into_iter().filter(|folder| root.join(folder).is_dir());
    let mut grep = Command::new("grep");
    grep.args(["-rliE", "-e", term]).args(folders).current_dir(root);
    let output = grep.output().context("starting grep")?;
    ensure!(
        matches!(output.status.code(), Some(0 | 1)),
        "grep {term}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
}

fn succeeds(files: &[String], right: &str) -> bool {
    files.len() <= MOST && files.iter().any(|file| file == right)
}

#[test]
fn obvious_terms_lead_to_the_right_files() -> TestResult {
    let list = source::read(Path::new("tests/all/questions/list.txt"))?;
    let questions = questions(&list)?;
    assert_eq!(questions.len(), QUESTIONS);
    let mut wrong = Vec::new();
    for question in &questions {
        let Question { text, term, file, .. } = question;
        assert!(source::root().join(file).is_file(), "{text} {file} does not exist");
        let files = search(source::root(), term)?;
        match (question.found, succeeds(&files, file)) {
            (true, false) => wrong.push(format!("{text} `{term}` is in {} files: {files:?}", files.len())),
            (false, true) => wrong.push(format!("{text} `{term}` leads to {file}: mark it as found")),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn search_fails_with_too_many_files_or_without_the_right_one() -> TestResult {
    let tree = tempfile::tempdir()?;
    std::fs::create_dir_all(tree.path().join("src"))?;
    for number in 0..=MOST {
        std::fs::write(tree.path().join(format!("src/{number}.rs")), "// Circuit Breaker\n")?;
    }
    std::fs::write(tree.path().join("src/right.rs"), "// half-open probe\n")?;
    let (many, one) = (search(tree.path(), "circuit breaker")?, search(tree.path(), "half-?open")?);
    assert!(many.len() == MOST + 1 && !succeeds(&many, "src/0.rs"));
    assert!(succeeds(&one, "src/right.rs") && !succeeds(&one, "src/0.rs"));
    assert!(search(tree.path(), "nowhere")?.is_empty());
    Ok(())
}
