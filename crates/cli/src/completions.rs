//! Shell completions, generated from the grammar. So they cannot differ from the program.
//!
//! Nothing here contacts a fleet. A package runs it once at build time.

use clap_complete::Shell;

use crate::command::whole_grammar;

const PROGRAM: &str = "shepherdctl";

/// The completion script for `shell`.
#[must_use]
pub fn completion_script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut whole_grammar(), PROGRAM, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
