//! Output on terminals of several widths: no word is split, and no line is wider than the terminal unless one word is. What
//! goes to a file is whole, and has no colours.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::Context as _;
use ratatui::text::Line;
use shepherd::model::shell_words;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::api::same_answers::populate;
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::terminal::run_on_terminal;

const WIDTHS: [u16; 4] = [40, 80, 120, 200];

/// Names of machines that take other columns than they have characters.
const NAMES: [&str; 3] = ["サーバー-東京-0001", "שרת-תל-אביב-2", "serveur-👩‍💻-été-3"];

/// Commands that print lists, pages and sentences; `M` is a machine with such a name.
const LINES: [&str; 31] = [
    "get machines",
    "get machines -o wide",
    "get machines --no-headers",
    "get clusters",
    "get sessions --limit 3",
    "get work --limit 3",
    "get providers",
    "get loops",
    "get budgets",
    "get brakes",
    "get shepherds",
    "get issues",
    "get tokens",
    "get artefacts",
    "get updates",
    "get audit",
    "get contexts",
    "describe machine M",
    "describe cluster ams",
    "describe policy",
    "why M",
    "wait machine M --for phase=Ready --timeout 0",
    "timeline M",
    "plan",
    "top --once",
    "explain",
    "explain silent-agent",
    "hold M --reason changing-a-disk --dry-run",
    "why nobody",
    "get nodes",
    "explain xyzzy",
];

/// Words that a list has only on a terminal, or that depend on when it is printed.
const OTHER_WORDS: [&str; 11] =
    ["machines,", "healthy", "healthy,", "retired", "(not", "shown)", "just", "now", "ago", "at", "once"];

/// The lines of a text that are wider than the terminal, apart from those that cannot be broken: what is behind their indent
/// is one word, or a label of at most half of the terminal and one word.
fn wide_lines(text: &str, columns: u16) -> Vec<&str> {
    let columns = usize::from(columns);
    let is_wide =
        |line: &&str| text_width(line) > columns && !is_one_word(line) && !is_labelled_word(line, columns);
    text.lines().filter(is_wide).collect()
}

/// How many columns of a terminal a text takes.
fn text_width(text: &str) -> usize {
    Line::raw(text).width()
}

/// Whether a text is one word, in a list or in a command that continues. A quoted argument of a command is one word.
fn is_one_word(text: &str) -> bool {
    let text = text.trim().trim_end_matches(" \\");
    let text = text.strip_prefix("* ").or_else(|| text.strip_prefix("- ")).unwrap_or(text);
    let words = text.split_whitespace().filter(|word| *word != "…").count();
    words == 1 || shell_words::split(text).is_some_and(|words| words.len() == 1)
}

fn is_labelled_word(line: &str, columns: usize) -> bool {
    let Some((_, value)) = line.trim().split_once("  ") else { return false };
    let value = value.trim_start();
    text_width(line.trim_end()) - text_width(value) <= columns / 2 && is_one_word(value)
}

/// The words of a text. Numbers depend on when it is printed, and so do the words that have some.
fn words(text: &str) -> BTreeSet<String> {
    let words = text.split_whitespace().map(|word| word.trim_end_matches('…'));
    let words = words.filter(|word| !word.is_empty() && *word != "\\" && !OTHER_WORDS.contains(word));
    words.filter(|word| !word.contains(|c: char| c.is_ascii_digit())).map(str::to_owned).collect()
}

fn words_of(line: &str) -> Vec<&str> {
    line.split(' ').map(|word| if word == "M" { NAMES[0] } else { word }).collect()
}

/// The command, with the environment of a user on a terminal.
fn on_terminal(kim: &Operator<'_>, line: &str) -> Command {
    let mut command = kim.command(&words_of(line));
    command.env_remove("COLUMNS");
    command
}

async fn populated(name: &str) -> anyhow::Result<Api> {
    let api = Api::start(name).await?;
    populate(&api).await?;
    for name in NAMES {
        let machine = provided(&api.pool).await?;
        sqlx::query(
            "UPDATE machine_provided SET provider_id = $2, location = '東京 3F' WHERE machine_id = $1",
        )
        .bind(machine.0)
        .bind(name)
        .execute(&api.pool)
        .await?;
    }
    sqlx::query(
        "UPDATE machine_due SET phase_index = 'NeedsHuman' WHERE phase_index = 'New' AND lane = 'access'",
    )
    .execute(&api.pool)
    .await?;
    Ok(api)
}

#[test]
fn line_that_could_be_broken_is_wide() {
    for (line, is_wide) in [
        ("a line that has 40 columns of a terminal", false),
        ("a line that has forty-one columns in all.", true),
        ("サーバー サーバー サーバー サーバー サーバー", true),
        ("    an-address-of-somewhere/that-has-no-space", false),
        ("      'a disk that was never to be in this rack' \\", false),
        ("      hold sim-1 --reason 'it is not in its rack' \\", true),
        ("  label  a-word-that-takes-half-of-the-terminal", false),
        ("  label  a-word-that-takes-most-of-a-terminal it", true),
        ("a-label-of-most-of-the-terminal  several-columns", true),
        ("sim-1  Ready  just-now  a-reason-without-any-space", true),
    ] {
        assert_eq!(!wide_lines(line, 40).is_empty(), is_wide, "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_fits_a_terminal_of_every_width_and_no_word_is_split() -> TestResult {
    let api = populated("api_widths").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    for line in LINES {
        let whole = kim.run_command(&words_of(line)).await?;
        let text = String::from_utf8(whole.stdout)? + &String::from_utf8(whole.stderr)?;
        assert!(!text.is_empty() && !text.contains('\u{1b}'), "{line}: {text}");
        assert!(!line.starts_with("get machines") || !text.contains('…'), "{line} was cut: {text}");
        let known = words(&text);
        for columns in WIDTHS {
            let mut command = on_terminal(&kim, line);
            command.env("NO_COLOR", "1");
            let (code, shown) = run_on_terminal(&command, columns)?;
            assert_eq!(code, whole.status.code(), "{line}: {shown}");
            assert_eq!(wide_lines(&shown, columns), [""; 0], "{line} at {columns}: {shown}");
            let split: Vec<String> = words(&shown).difference(&known).cloned().collect();
            assert_eq!(split, [""; 0], "{line} at {columns}: {shown}");
        }
    }
    Ok(api.stop().await?)
}

/// A wish for no width, and another one, on a terminal and in a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn width_that_the_environment_names_counts_for_a_terminal_alone() -> TestResult {
    let api = populated("api_columns").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    for line in ["get machines -o wide", "why M", "get machines --help", "--color purple"] {
        let widest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap_or_default();
        for (columns, width) in [("0", 80), ("x", 80), ("60", 60)] {
            let (code, shown) = run_on_terminal(on_terminal(&kim, line).env("COLUMNS", columns), 80)?;
            assert_eq!(code, Some(if line.starts_with("--color") { 2 } else { 0 }), "{line}: {shown}");
            assert_eq!(wide_lines(&without_colors(&shown), width), [""; 0], "{line}: {shown}");
            let mut piped = kim.command(&words_of(line));
            let output = piped.env("COLUMNS", columns).output()?;
            assert_eq!(output.status.code(), code, "{line}: {output:?}");
            let text = String::from_utf8(output.stdout)?;
            assert!(!line.ends_with("wide") || widest(&text) > 80, "{line} was cut: {text}");
        }
    }
    Ok(api.stop().await?)
}

fn without_colors(text: &str) -> String {
    text.split('\u{1b}').enumerate().fold(String::new(), |plain, (number, part)| {
        plain + if number == 0 { part } else { part.split_once('m').map_or(part, |(_, rest)| rest) }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn severities_are_coloured_on_a_terminal_and_where_it_is_requested() -> TestResult {
    let api = populated("api_colors").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let red = "\u{1b}[31mNeedsHuman\u{1b}[0m";
    for (flag, no_color, on_a_terminal, in_a_file) in [
        ("", None, true, false),
        ("--color auto", None, true, false),
        ("--color always", Some("1"), true, true),
        ("--color NEVER", None, false, false),
        ("", Some("1"), false, false),
        ("", Some(""), true, false),
    ] {
        let line = format!("get machines {flag}");
        let mut command = on_terminal(&kim, line.trim_end());
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        let (_, shown) = run_on_terminal(&command, 200)?;
        assert_eq!(shown.contains(red), on_a_terminal, "{line}: {shown}");
        assert_eq!(shown.contains('\u{1b}'), on_a_terminal, "{line}: {shown}");
        assert!(without_colors(&shown).contains(" NeedsHuman "), "{line}: {shown}");
        let piped = String::from_utf8(command.output()?.stdout)?;
        assert_eq!(piped.contains(red), in_a_file, "{line}: {piped}");
    }
    let json = kim.ask(&["get", "machines", "-o", "json", "--color", "always"])?;
    assert!(!json.contains('\u{1b}'), "{json}");
    let wrong = kim.run_command(&["get", "machines", "--color", "purple"]).await?;
    let sentence = String::from_utf8(wrong.stderr)?;
    assert_eq!(wrong.status.code(), Some(2), "{sentence}");
    let text = sentence.lines().next().context("a sentence")?;
    assert!(text.contains("--color cannot be \"purple\"; it is one of auto, always, never"), "{text}");
    Ok(api.stop().await?)
}
