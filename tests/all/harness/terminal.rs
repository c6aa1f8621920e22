//! The output of a program that ends, as a terminal of some width gets it: without an emulator, so that a line which is
//! too wide stays one line.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use shepherd::model::shell_words::quote_if_needed;

/// Runs a program on a terminal of its own. Returns its exit code, and what it writes to both of its outputs.
pub(crate) fn run_on_terminal(command: &Command, columns: u16) -> Result<(Option<i32>, String)> {
    let text = |text: &std::ffi::OsStr| text.to_str().map(str::to_owned).context("a word that is no text");
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|part| Ok(quote_if_needed(&text(part)?))).collect::<Result<Vec<_>>>()?;
    let line = format!("stty rows 40 cols {columns}; exec {}", words.join(" "));
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    script.env("SHELL", "/bin/sh").env("TERM", "xterm-256color").env_remove("NO_COLOR").env_remove("COLUMNS");
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    script.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = script.spawn().context("starting script, which Debian has in bsdutils")?;
    // It ends with its input.
    let keyboard = child.stdin.take();
    let output = child.wait_with_output()?;
    drop(keyboard);
    Ok((output.status.code(), String::from_utf8(output.stdout)?.replace('\r', "")))
}
