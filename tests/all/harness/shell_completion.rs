//! Completion of command lines in a shell, after the script of `shepherdctl completions` has registered the program.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::harness::skip::report_skip;

const PROGRAM: &str = env!("CARGO_BIN_EXE_shepherdctl");

/// Calls the function that bash would call, and prints what it offers.
const BASH: &str = r#"
    source "$1"; shift
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
    spec=$(complete -p shepherdctl)
    [[ $spec =~ -F\ ([^ ]+) ]]
    "${BASH_REMATCH[1]}" shepherdctl "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
    printf '%s\n' "${COMPREPLY[@]}"
"#;
/// The same in zsh, with the two functions of its completion system that the script calls.
const ZSH: &str = r#"
    compdef() { completer=$1 }
    _describe() { print -rl -- "${(@P)3}" }
    source "$1"; shift
    words=("$@"); CURRENT=$#
    $completer
"#;
const FISH: &str = "source $argv[1]; complete -C \"$argv[2]\"";

/// The shells of this host that complete lines. Bash is always one; for another one that is missing, the test is reported as
/// skipped.
pub(crate) fn installed_shells() -> Vec<&'static str> {
    let is_installed = |shell: &str| {
        let found = Command::new(shell).args(["-c", "true"]).stdin(Stdio::null()).status();
        found.is_ok_and(|status| status.success())
    };
    let mut shells = vec!["bash"];
    for shell in ["zsh", "fish"] {
        if is_installed(shell) {
            shells.push(shell);
        } else {
            report_skip(shell, &format!("run `tools/need {shell}`"));
        }
    }
    shells
}

/// The words that a shell offers in the place of the last of these words, for a user with this home directory.
pub(crate) fn offered(shell: &str, home: &Path, words: &[&str]) -> anyhow::Result<BTreeSet<String>> {
    let programs = Path::new(PROGRAM).parent().context("a folder")?;
    let run = |program: &str| {
        let mut command = Command::new(program);
        let path = format!("{}:/usr/local/bin:/usr/bin:/bin", programs.display());
        command.env_clear().env("PATH", path).env("HOME", home).stdin(Stdio::null());
        command
    };
    let script = home.join(format!("completion.{shell}"));
    std::fs::write(&script, run("shepherdctl").args(["completions", shell]).output()?.stdout)?;
    let mut command = run(shell);
    match shell {
        "bash" => command.args(["--norc", "--noprofile", "-c", BASH, "bash"]).arg(script).args(words),
        "zsh" => command.args(["-f", "-c", ZSH, "zsh"]).arg(script).args(words),
        _ => command.args(["--no-config", "-c", FISH]).arg(script).arg(words.join(" ")),
    };
    let output = command.output()?;
    ensure!(output.stderr.is_empty(), "{shell}: {words:?}: {output:?}");
    let text = String::from_utf8(output.stdout)?;
    // Zsh and fish get a description behind a candidate.
    let words = text.lines().filter_map(|line| match shell {
        "bash" => Some(line),
        "zsh" => line.split(':').next(),
        _ => line.split('\t').next(),
    });
    Ok(words.filter(|word| !word.is_empty()).map(str::to_owned).collect())
}
