//! `shepherdctl`, the operators' command line: calls the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    shepherd::cli::run::run_program()
}
