//! `roleserver metrics`: print the metrics of the running role server.

use std::path::Path;

use crate::commands::CommandError;
use crate::status_socket;

/// The metrics as text, in the format of Prometheus.
///
/// Fails if no role server runs: a monitoring system must not read an old page.
pub fn render_text(state_directory: &Path) -> Result<String, CommandError> {
    status_socket::read_page(state_directory, status_socket::METRICS_SOCKET).map_err(|error| {
        CommandError::Failed(format!(
            "asking the role server of {} for its metrics failed: {error}; does it run? See: roleserver status",
            state_directory.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_a_stopped_role_server_are_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = render_text(directory.path()).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("does it run?"), "{error}");
    }
}
