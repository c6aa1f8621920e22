//! `roleserver metrics`: what the role server that runs on this machine counts.

use std::path::Path;

use crate::roleserver::commands::CommandError;
use crate::roleserver::told;

/// The metrics as text, in the format of Prometheus.
///
/// Fails where no role server runs: whoever monitors it must not read an old page.
pub fn text(state_directory: &Path) -> Result<String, CommandError> {
    told::ask(state_directory, told::METRICS).map_err(|error| {
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
    fn where_nothing_runs_it_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let error = text(directory.path()).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.to_string().contains("does it run?"), "{error}");
    }
}
