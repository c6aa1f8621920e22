//! Habits of kubectl and systemctl: the lines of `tests/data/habits/lines.txt`.
//!
//! The list is fixed. Lines that are expected to work are run on a fleet in `tests/all/api/habits.rs`. The others end with
//! exit code 2 and name the command of `shepherdctl`, with the names that the line has.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use shepherd::model::shell_words;

use crate::harness::aloud::TestResult;
use crate::harness::source;

const LINES: &str = "tests/data/habits/lines.txt";
/// Names of a machine and of a cluster, a context or an update in the lines.
const OWN_WORDS: [&str; 2] = ["sim-0007", "prod"];

/// The lines, each with whether it is expected to work as it is typed.
pub(crate) fn read_lines() -> anyhow::Result<Vec<(String, bool)>> {
    let text = source::read(Path::new(LINES))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (typed, expected) = line.split_once("  # ").with_context(|| line.to_owned())?;
            let works = expected.starts_with("works: ");
            ensure!(works || expected.starts_with("names: "), "{line}");
            Ok((typed.trim().to_owned(), works))
        })
        .collect()
}

/// The command that the error names in place of a line, in the sentence or below it. It has the names of the line.
pub(crate) fn find_named_command(line: &str, stderr: &str) -> anyhow::Result<String> {
    let stderr = stderr.trim_end();
    let named = stderr.split_once(", run: ").or_else(|| stderr.split_once(", run the line below\n  "));
    let named = named.map(|(_, command)| command);
    let named = named.filter(|command| command.starts_with("shepherdctl ") && !command.contains('\n'));
    let command = named.with_context(|| format!("{line} is answered with {stderr}"))?;
    let typed: Vec<&str> = line.split(' ').collect();
    for own in OWN_WORDS.iter().filter(|own| typed.contains(own)) {
        ensure!(command.split(' ').any(|word| word == *own), "{line} is answered without {own}: {command}");
    }
    Ok(command.to_owned())
}

#[test]
fn list_has_sixty_lines_of_which_most_are_expected_to_work() -> TestResult {
    let lines = read_lines()?;
    let works = lines.iter().filter(|(_, works)| *works).count();
    assert!(lines.len() == 60 && works >= 45, "{} lines, {works} expected to work", lines.len());
    Ok(())
}

#[test]
fn line_that_does_not_work_names_a_command() -> TestResult {
    let mut tried = 0;
    for (line, _) in read_lines()?.into_iter().filter(|(_, works)| !works) {
        let words = shell_words::split(&line).with_context(|| line.clone())?;
        let output = Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
            .args(words)
            .env_clear()
            .stdin(Stdio::null())
            .output()?;
        let stderr = String::from_utf8(output.stderr)?;
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{line}: {stderr}");
        let command = find_named_command(&line, &stderr)?;
        let expected = match line.as_str() {
            "get machines -l row=7" => "shepherdctl get machines -l label.row=7",
            "cordon sim-0007" => "shepherdctl hold sim-0007 --reason TEXT",
            "uncordon sim-0007" => "shepherdctl release sim-0007",
            "delete machine sim-0007" => "shepherdctl retire sim-0007 --reason TEXT",
            _ => command.as_str(),
        };
        assert_eq!(command, expected, "{line}");
        tried += 1;
    }
    assert!(tried > 10, "only {tried} lines were tried");
    Ok(())
}
