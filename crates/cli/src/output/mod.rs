//! Output formats: text for people, JSON and YAML for programs; standard output and standard error.
//!
//! A command renders its result as text or as JSON ([`Format`][]), and YAML is converted from the JSON ([`yaml`][]).
//! There are no colours, so that output reads the same in a terminal, a file and a chat.

use std::io::Write as _;

use serde::Serialize;

use crate::error::CliError;

pub mod file;
pub mod table;
pub mod yaml;

/// Format of a command's answer, as `--output` selects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people: tables and text.
    Table,
    /// The same, and more columns in lists.
    Wide,
    /// For programs: fields are added, never renamed.
    Json,
    /// The same fields as YAML.
    Yaml,
}

impl Output {
    /// The format in which a command renders its result; YAML is converted from JSON.
    #[must_use]
    pub const fn format(self) -> Format {
        match self {
            Self::Table | Self::Wide => Format::Table,
            Self::Json | Self::Yaml => Format::Json,
        }
    }
}

/// The format in which a command renders its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Tables and text for people.
    Table,
    /// For programs: fields are added, never renamed.
    Json,
}

/// Output of a command as indented JSON.
pub fn format_json(answer: &impl Serialize) -> Result<String, CliError> {
    let mut text = serde_json::to_string_pretty(answer)?;
    text.push('\n');
    Ok(text)
}

/// Writes to standard output. A closed pipe (`| head`) is not an error.
pub fn print_text(text: &str) -> std::io::Result<()> {
    print_chunk(text).map(drop)
}

/// Writes a part of a continuous output, and returns whether standard output is still open.
pub fn print_chunk(text: &str) -> std::io::Result<bool> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a line to standard error.
pub fn print_stderr(sentence: &str) {
    // Ignored: without standard error the exit code still reports the failure.
    let _ = writeln!(std::io::stderr().lock(), "{sentence}");
}
