//! `roleserver plan`: print what the reconciler would change.

use std::path::Path;
use std::time::Duration;

use crate::cluster::files::ClusterFiles;
use crate::commands::CommandError;
use crate::status_socket;

/// How long an API server may take to list its objects.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The plan as text, a line for each object. Nothing is changed.
///
/// Fails on a node without a Kubernetes control plane: only there are the credentials to read the objects.
pub fn render_text(state_directory: &Path) -> Result<String, CommandError> {
    let directory = ClusterFiles::in_state_directory(state_directory).kubernetes_directory();
    status_socket::read_page_within(TIMEOUT, &directory, status_socket::PLAN_SOCKET).map_err(|error| {
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
    fn plan_without_a_control_plane_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = render_text(directory.path()).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("is this machine a kubernetes-controller"), "{error}");
    }
}
