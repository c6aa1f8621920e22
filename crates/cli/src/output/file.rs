//! Files that commands write: completely or not at all, certificates and keys as PEM.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

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

/// Encodes DER as PEM with this label.
#[must_use]
pub(crate) fn encode_pem(label: &str, der: &[u8]) -> String {
    let encoded = STANDARD.encode(der);
    let lines: Vec<&str> =
        encoded.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    #[test]
    fn encoded_pem_is_parsed_by_a_library() {
        for der in [vec![], vec![7; 48], vec![7; 49], (0..=255).collect::<Vec<u8>>()] {
            let written = encode_pem("CERTIFICATE", &der);
            assert!(written.lines().all(|line| line.len() <= 64), "{written}");
            let read = CertificateDer::from_pem_slice(written.as_bytes()).unwrap();
            assert_eq!(read.as_ref(), der);
        }
    }
}
