//! `roleserver plan`: what a pass over the built-in objects of Kubernetes would change.

use std::path::Path;
use std::time::Duration;

use crate::roleserver::cluster::files::Files;
use crate::roleserver::commands::CommandError;
use crate::roleserver::told;

/// How long an API server may take to say what there is.
const PATIENCE: Duration = Duration::from_mins(1);

/// The plan as text, a line for each object. Nothing is changed.
///
/// Fails where no control plane of Kubernetes runs: nobody else could ask for its objects.
pub fn text(state_directory: &Path) -> Result<String, CommandError> {
    let directory = Files::of(state_directory).kubernetes();
    told::ask_within(PATIENCE, &directory, told::PLAN).map_err(|error| {
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
    fn where_no_control_plane_runs_it_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let error = text(directory.path()).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("is this machine a kubernetes-controller"), "{error}");
    }
}
