//! `shepherd`, the service: calls the library.

use std::process::ExitCode;

use shepherd::service::program;

fn main() -> ExitCode {
    program::run_program()
}
