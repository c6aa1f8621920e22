//! Shell completions and man pages, generated from the grammar. So they cannot differ from the program.
//!
//! Nothing here contacts a fleet. A package runs it once at build time.

use std::io::Write as _;
use std::path::Path;

use clap_complete::Shell;
use clap_mangen::Man;

use crate::command::grammar;
use crate::error::CliError;
use crate::exit_code::{EXIT_CODE_RULES, EXIT_CODES};

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
    let mut command = grammar().disable_help_subcommand(true);
    command.build();
    write_pages(&command, directory).map_err(|error| failed("write pages of the manual into", &error))?;
    Ok(format!("the pages of the manual are in {}; read one with: man -l FILE\n", directory.display()))
}

/// Writes the page of a command and those of the commands below it.
fn write_pages(command: &clap::Command, directory: &Path) -> std::io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(below, directory)?;
    }
    let path = Man::new(command.clone()).generate_to(directory)?;
    let mut page = std::fs::OpenOptions::new().append(true).open(path)?;
    page.write_all(exit_status_section().as_bytes())
}

/// The section of each page that explains the exit codes.
fn exit_status_section() -> String {
    let rows = EXIT_CODES.iter().map(|(code, meaning)| format!(".TP\n\\fB{code}\\fR\n{meaning}\n"));
    format!(".SH \"EXIT STATUS\"\n{}.PP\n{EXIT_CODE_RULES}\n", rows.collect::<Vec<_>>().concat())
}
