//! Shell completions and manual pages of `shepherdctl`: run in a shell, and read from the pages.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shepherd::cli::completions::complete_line;
use shepherd::cli::completions::names::NameEnvironment;
use shepherd::cli::completions::shell::CompletionShell;
use shepherd::cli::completions::words::CompletionRequest;

use crate::harness::aloud::TestResult;
use crate::harness::program::Place;
use crate::harness::shell_completion::{installed_shells, offered};

fn shepherdctl(arguments: &[&str]) -> Result<Output> {
    // No database and no context: none of these commands calls a fleet.
    let program = env!("CARGO_BIN_EXE_shepherdctl");
    Ok(Command::new(program).args(arguments).env_clear().stdin(Stdio::null()).output()?)
}

fn read_stdout(arguments: &[&str]) -> Result<String> {
    let output = shepherdctl(arguments)?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// The commands that a help text lists.
fn commands_in(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    // The description of a command may continue on a line of its own, which is indented further.
    let begun = listed.filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with(' '));
    let words = begun.filter_map(|line| line.split_whitespace().next());
    words.filter(|word| *word != "help").map(str::to_owned).collect()
}

/// Every command with those below it, as `get machines` is.
fn all_commands() -> Result<Vec<Vec<String>>> {
    let mut found = vec![Vec::new()];
    let mut next = 0;
    while let Some(path) = found.get(next).cloned() {
        let mut arguments: Vec<&str> = path.iter().map(String::as_str).collect();
        arguments.push("-h");
        let below = commands_in(&read_stdout(&arguments)?);
        found.extend(below.into_iter().map(|word| [path.clone(), vec![word]].concat()));
        next += 1;
    }
    Ok(found)
}

/// The commands of `shepherdctl` that use a context's API, show the contexts, or explain something.
const THROUGH_THE_API: &[&str] = &[
    "get machines",
    "get sessions",
    "get work",
    "get providers",
    "describe machine",
    "why",
    "timeline",
    "plan",
    "issues",
    "audit",
    "watch",
    "wait machines",
    "wait clusters",
    "wait updates",
    "top",
    "get loops",
    "get approvals",
    "approve",
    "get budgets",
    "get brakes",
    "get clusters",
    "get shepherds",
    "get issues",
    "get tokens",
    "get artefacts",
    "get updates",
    "get policy",
    "get audit",
    "get contexts",
    "describe cluster",
    "describe shepherd",
    "describe session",
    "describe work",
    "describe provider",
    "describe loop",
    "describe budget",
    "describe brake",
    "describe approval",
    "describe issue",
    "describe token",
    "describe artefact",
    "describe update",
    "describe policy",
    "describe audit",
    "describe context",
    "budget set",
    "cluster create",
    "cluster get",
    "cluster describe",
    "cluster scale",
    "cluster declare",
    "cluster undeclare",
    "cluster roles",
    "cluster approve",
    "cluster snapshot",
    "cluster snapshots",
    "cluster restore",
    "cluster credentials issue",
    "cluster credentials get",
    "cluster credentials revoke",
    "cluster kubernetes set",
    "cluster kubernetes remove",
    "cluster kubernetes rotate",
    "cluster kubeconfig",
    "cluster upgrade",
    "cluster delete",
    "artefacts add",
    "artefacts delete",
    "update pause",
    "update resume",
    "update abort",
    "loops pause",
    "loops resume",
    "hold",
    "release",
    "retry",
    "quarantine",
    "label",
    "prioritize",
    "allow host-key",
    "allow signing-keys",
    "tokens create",
    "whoami",
    "contexts",
    "contexts use",
    "contexts delete",
    "explain",
    "version",
    "tokens revoke",
];

#[test]
fn help_has_examples_that_are_commands_and_says_the_exit_codes() -> TestResult {
    for command in THROUGH_THE_API {
        let words: Vec<&str> = command.split(' ').collect();
        let help = read_stdout(&[&words[..], &["--help"]].concat())?;
        let examples = help.lines().skip_while(|line| !line.starts_with("Example")).skip(1);
        let examples: Vec<&str> = examples.map(str::trim).take_while(|line| !line.is_empty()).collect();
        assert!(!examples.is_empty(), "{command} has no example");
        for example in examples {
            let begins = format!("shepherdctl {command}");
            assert!(example.starts_with(&begins) && example.len() <= 98, "{command}: {example}");
        }
    }
    let options = read_stdout(&["options"])?;
    for flag in ["--bmdb-url", "--bmdb-dialect", "--direct", "--context", "--output", "--color"] {
        assert!(options.contains(flag), "{flag}: {options}");
        for arguments in [&["--help"][..], &["get", "machines", "--help"], &["hold", "-h"]] {
            let help = read_stdout(arguments)?;
            let lists = help
                .lines()
                .any(|line| line.trim_start().trim_start_matches("-o, ").starts_with(&format!("{flag} ")));
            assert!(!lists && help.contains("`shepherdctl options` lists the flags"), "{flag}: {help}");
        }
    }
    let help = read_stdout(&["--help"])?;
    for line in
        ["Exit status:\n", "  1        failed, or without effect\n", "A dry run exits as the order would."]
    {
        assert!(help.contains(line), "{line}: {help}");
    }
    Ok(())
}

#[test]
fn shells_complete_what_is_typed() -> TestResult {
    let place = Place::new()?;
    let home = place.path("home");
    for shell in installed_shells() {
        for (words, expected) in [
            (&["shepherdctl", "wh"][..], &["whoami", "why"][..]),
            (&["shepherdctl", "get", "mach"], &["machines"]),
            (&["shepherdctl", "describe", "mach"], &["machine"]),
            (&["shepherdctl", "get", "machines", "--ph"], &["--phase"]),
            (&["shepherdctl", "get", "machines", "--no-h"], &["--no-headers"]),
            (&["shepherdctl", "get", "machines", "--no_h"], &["--no_headers"]),
            (&["shepherdctl", "get", "machines", "--phase", "Needs"], &["NeedsHuman"]),
            (&["shepherdctl", "get", "machines", "-o", "ya"], &["yaml"]),
            (&["shepherdctl", "completions", "f"], &["fish"]),
            (&["shepherdctl", "nothing-begins-so"], &[]),
            // There is no context, so there are no names.
            (&["shepherdctl", "why", ""], &[]),
            (&["shepherdctl", "contexts", "use", ""], &[]),
        ] {
            let expected: BTreeSet<String> = expected.iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(offered(shell, &home, words)?, expected, "{shell}: {words:?}");
        }
        let first = offered(shell, &home, &["shepherdctl", ""])?;
        for command in commands_in(&read_stdout(&["-h"])?) {
            assert!(first.contains(&command), "{shell}: {command} is not offered: {first:?}");
        }
    }
    // Bash makes words of the equals sign.
    let split = ["shepherdctl", "get", "machines", "--phase", "=", "Needs"];
    assert_eq!(offered("bash", &home, &split)?, BTreeSet::from(["NeedsHuman".to_owned()]));
    Ok(())
}

#[test]
fn every_command_is_completed() -> TestResult {
    let commands = all_commands()?;
    assert!(commands.len() > 20, "{commands:?}");
    for path in commands.iter().filter(|path| !path.is_empty()) {
        let arguments =
            ["shepherdctl", "--", "shepherdctl"].into_iter().chain(path.iter().map(String::as_str));
        let arguments = arguments.map(OsString::from);
        let request = CompletionRequest::from_arguments(CompletionShell::Bash, arguments, None, None)
            .context("a request")?;
        let nothing = NameEnvironment::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let text = runtime.block_on(complete_line(&request, &nothing, Duration::ZERO));
        let last = path.last().context("a command")?;
        assert!(text.lines().any(|word| word == last), "{path:?}: {text}");
    }
    Ok(())
}

#[test]
fn script_is_printed_for_each_shell() -> TestResult {
    for shell in ["bash", "zsh", "fish"] {
        let script = read_stdout(&["completions", shell])?;
        assert!(script.contains("COMPLETE=") && script.lines().count() < 60, "{shell}: {script}");
    }
    // As kubectl has it.
    assert_eq!(read_stdout(&["completion", "bash"])?, read_stdout(&["completions", "bash"])?);
    let wrong = shepherdctl(&["completions", "csh"])?;
    assert_eq!(wrong.status.code(), Some(2));
    Ok(())
}

#[test]
fn variable_of_completion_changes_no_command() -> TestResult {
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shepherdctl"));
        command.args(arguments).env_clear().env("COMPLETE", "bash").stdin(Stdio::null()).output()
    };
    let options = run(&["options"])?;
    assert_eq!(String::from_utf8(options.stdout)?, read_stdout(&["options"])?);
    let order = run(&["hold", "sim-0007", "--reason", "a disk"])?;
    assert_eq!(
        (order.status.code(), order.stdout.len()),
        (Some(2), 0),
        "no order is reported as done: {order:?}"
    );
    let completed = run(&["--", "shepherdctl", "opt"])?;
    assert_eq!((completed.status.code(), &*completed.stdout), (Some(0), &b"options"[..]));
    Ok(())
}

#[test]
fn manual_has_a_page_for_every_command() -> TestResult {
    let place = Place::new()?;
    let directory = place.path("man");
    let text = directory.to_str().context("a path in UTF-8")?;
    // Twice: a package that is built again overwrites the existing pages.
    for _ in 0..2 {
        assert!(read_stdout(&["manual", text])?.contains(text));
    }
    let commands = all_commands()?;
    for path in &commands {
        let name = [vec!["shepherdctl".to_owned()], path.clone()].concat().join("-");
        let file = directory.join(format!("man1/{name}.1"));
        let page = std::fs::read_to_string(file).context(name.clone())?;
        assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"), "{name}");
        assert!(page.contains(".SH \"SEE ALSO\"\n") && !page.contains("EXTRA"), "{name}");
        let (_, codes) = page.split_once(".SH \"EXIT STATUS\"\n").context(name.clone())?;
        assert!(codes.contains("refused: a person must decide"), "{name}: {codes}");
    }
    let hold = std::fs::read_to_string(directory.join("man1/shepherdctl-hold.1"))?;
    assert!(hold.contains("Stop work on machines until they are released"), "{hold}");
    for command in THROUGH_THE_API {
        let file = format!("man1/shepherdctl-{}.1", command.replace(' ', "-"));
        let page = std::fs::read_to_string(directory.join(file))?;
        assert!(page.contains(".SH EXAMPLES\n"), "{command} has no example: {page}");
    }
    for (file, expected) in [
        ("man1/shepherd.1", "agent_executable_path"),
        ("man1/shepherd-demo.1", "fleet in a box"),
        ("man8/roleserver.8", ".SH EXAMPLES\n"),
        ("man8/roleserver-enroll.8", "the request is refused"),
        ("man5/shepherd.toml.5", "\\fBagent_executable_path\\fR\n"),
    ] {
        let page = std::fs::read_to_string(directory.join(file)).context(file)?;
        assert!(page.contains(expected) && page.contains(".SH \"SEE ALSO\"\n"), "{file}: {page}");
    }

    let file = place.write("file", "")?;
    let refused = shepherdctl(&["manual", file.to_str().context("a path in UTF-8")?])?;
    assert_eq!(refused.status.code(), Some(1));
    let sentence = String::from_utf8(refused.stderr)?;
    assert!(sentence.starts_with("shepherdctl: cannot make the directory "), "{sentence}");
    Ok(())
}
