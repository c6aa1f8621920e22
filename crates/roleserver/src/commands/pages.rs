//! `roleserver metrics` and `roleserver plan`: print a page of the running role server.

use std::path::Path;
use std::time::Duration;

use crate::cluster::files::ClusterFiles;
use crate::commands::CommandError;
use crate::status_socket;

/// How long an API server may take to list its objects.
const PLAN_TIMEOUT: Duration = Duration::from_mins(1);

/// The metrics as text, in the format of Prometheus.
///
/// Fails if no role server runs: a monitoring system must not read an old page.
pub fn render_metrics(state_directory: &Path) -> Result<String, CommandError> {
    status_socket::read_page(state_directory, status_socket::METRICS_SOCKET).map_err(|error| {
        CommandError::Failed(format!(
            "asking the role server of {} for its metrics failed: {error}; does it run? See: roleserver status",
            state_directory.display()
        ))
    })
}

/// The plan as text: what the reconciler would change, a line for each object. Nothing is changed.
///
/// Fails on a node without a Kubernetes control plane: only there are the credentials to read the objects.
pub fn render_plan(state_directory: &Path) -> Result<String, CommandError> {
    let directory = ClusterFiles::in_state_directory(state_directory).kubernetes_directory();
    status_socket::read_page_within(PLAN_TIMEOUT, &directory, status_socket::PLAN_SOCKET).map_err(|error| {
        CommandError::Failed(format!(
            "asking the role server of {} what it would change in Kubernetes failed: {error}; is this machine a \
             kubernetes-controller, and does its role server run? See: roleserver status",
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
        let error = render_metrics(directory.path()).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("does it run?"), "{error}");
    }

    #[test]
    fn plan_without_a_control_plane_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = render_plan(directory.path()).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("is this machine a kubernetes-controller"), "{error}");
    }
}
