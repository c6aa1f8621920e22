//! `shepherdctl`, the operators' command line: calls the library.

use std::process::ExitCode;

use shepherd::cli::manual::ManualProgram;
use shepherd::cli::run::run_program;

fn main() -> ExitCode {
    run_program(other_programs)
}

/// The programs that are built with this one, for the pages of the manual.
#[cfg(feature = "shepherd")]
fn other_programs() -> Vec<ManualProgram> {
    vec![
        ManualProgram::service(shepherd::service::flags::build_command()),
        ManualProgram::role_server(shepherd::roleserver::program::build_command()),
    ]
}

#[cfg(not(feature = "shepherd"))]
fn other_programs() -> Vec<ManualProgram> {
    Vec::new()
}
