//! `roleserver`, the program on a machine: calls the library.

use std::process::ExitCode;

use shepherd::roleserver::program;

fn main() -> ExitCode {
    program::run_program()
}
