//! Files that commands write: completely or not at all.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::error::CliError;

/// Writes a file atomically: completely or not at all.
pub fn write_file_atomic(path: &Path, bytes: &[u8], mode: u32) -> Result<(), CliError> {
    let failed =
        |error: std::io::Error| CliError::Failed(format!("cannot write {}: {error}", path.display()));
    create_parent_dir(path)?;
    let next = path.with_extension("next");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&next)
        .map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)?;
    std::fs::rename(&next, path).map_err(failed)
}

pub(crate) fn create_parent_dir(path: &Path) -> Result<(), CliError> {
    let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) else {
        return Ok(());
    };
    std::fs::create_dir_all(directory).map_err(|error| {
        CliError::Failed(format!("cannot make the directory {}: {error}", directory.display()))
    })
}
