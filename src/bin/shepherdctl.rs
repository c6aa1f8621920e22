//! `shepherdctl`, the operators' command line: calls the library.

use std::process::ExitCode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // One provider of cryptography in the process, for the clients that ask for a default.
    let _ = rustls::crypto::ring::default_provider().install_default();
    ExitCode::from(shepherd::cli::run::run(std::env::args_os()).await)
}
