//! Shell completions and man pages, generated from the grammar. So they cannot differ from the program.
//!
//! Nothing here contacts a fleet. A package runs it once at build time.

use std::path::Path;

use clap_complete::Shell;

use crate::command::grammar;
use crate::error::CliError;

const PROGRAM: &str = "shepherdctl";

/// The completion script for `shell`.
#[must_use]
pub fn completion_script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut grammar(), PROGRAM, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes the man pages into a directory: one for the program and one for each command. Creates the directory if it
/// does not exist. Returns a message that names the directory.
pub fn write_man_pages(directory: &Path) -> Result<String, CliError> {
    let failed = |doing: &str, error: &std::io::Error| {
        CliError::Failed(format!("cannot {doing} {}: {error}", directory.display()))
    };
    std::fs::create_dir_all(directory).map_err(|error| failed("make the directory", &error))?;
    clap_mangen::generate_to(grammar(), directory)
        .map_err(|error| failed("write pages of the manual into", &error))?;
    Ok(format!("the pages of the manual are in {}; read one with: man -l FILE\n", directory.display()))
}
