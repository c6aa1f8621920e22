//! Logs: fields, not sentences with values in them; text for a terminal, JSON by flag.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::service::flags::LogFormat;

/// Starts logging to standard error. `RUST_LOG` narrows or widens it; `default` counts without.
/// A second call changes nothing.
pub fn start(format: LogFormat, default: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A line that could not be written is reported by `eprintln!`, which panics when standard error is
        // what cannot be written to: a full disk under the log would end whatever task had something to say.
        .log_internal_errors(false);
    let ansi = std::io::stderr().is_terminal();
    // An error means that a subscriber is installed already, as in a test.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(ansi).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
