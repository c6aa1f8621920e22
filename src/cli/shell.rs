//! What a shell and a manual say about this program: made from its grammar, so that they cannot differ from it.
//!
//! Nothing here asks a fleet. A package runs it once while it is built.

use std::path::Path;

use clap_complete::Shell;

use crate::cli::error::CliError;
use crate::cli::order_key::grammar;

const PROGRAM: &str = "shepherdctl";

/// The script that makes `shell` complete what somebody begins to type.
#[must_use]
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut grammar(), PROGRAM, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes the pages of the manual into a directory, which is made if it is not there: one for the program and
/// one for each of its commands. Returns a sentence about them.
pub fn manual(directory: &Path) -> Result<String, CliError> {
    let failed = |doing: &str, error: &std::io::Error| {
        CliError::Failed(format!("cannot {doing} {}: {error}", directory.display()))
    };
    std::fs::create_dir_all(directory).map_err(|error| failed("make the directory", &error))?;
    clap_mangen::generate_to(grammar(), directory)
        .map_err(|error| failed("write pages of the manual into", &error))?;
    Ok(format!("the pages of the manual are in {}; read one with: man -l FILE\n", directory.display()))
}
