//! `roleserver`, the program on a machine: calls the library.

use std::hint::black_box;
use std::process::ExitCode;

use shepherd::model::program_mark::ROLE_SERVER_MARK;
use shepherd::roleserver::program;

fn main() -> ExitCode {
    // The mark must be in this program, and nothing reads it here.
    black_box(&ROLE_SERVER_MARK);
    program::run_program()
}
