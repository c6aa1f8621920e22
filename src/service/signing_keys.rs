//! The signing keys of `--signing_keys_path` and `--key_rotation_path`.
//!
//! They are public. A signature is in a file of its own, with the name that minisign gives it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::model::signed_artefact::signature::MAX_SIGNATURE_BYTES;
use crate::model::signed_artefact::signing_configuration::SigningConfiguration;
use crate::model::signed_artefact::signing_trust::{KeyRotation, MAX_KEY_LIST_BYTES};
use crate::service::failure::ExitFailure;
use crate::service::flags::ServiceFlags;

/// Reads the keys and the rotations that the flags name.
pub(super) fn read_signing_keys(flags: &ServiceFlags) -> Result<SigningConfiguration, ExitFailure> {
    let keys = flags.signing_keys_path.as_deref();
    let keys = keys.map(|path| read_text("--signing_keys_path", path, MAX_KEY_LIST_BYTES)).transpose()?;
    let rotations = flags.key_rotation_path.iter().map(|path| read_rotation(path));
    let rotations = rotations.collect::<Result<Vec<_>, _>>()?;
    SigningConfiguration::parse(keys.as_deref(), rotations).map_err(|error| {
        let path = flags.signing_keys_path.as_deref().map(|path| format!(" {}", path.display()));
        ExitFailure::usage(format!("--signing_keys_path{}: {error}", path.unwrap_or_default()))
    })
}

fn read_rotation(path: &Path) -> Result<KeyRotation, ExitFailure> {
    const FLAG: &str = "--key_rotation_path";
    let list = read_text(FLAG, path, MAX_KEY_LIST_BYTES)?;
    let signature = read_text(FLAG, &signature_path(path), MAX_SIGNATURE_BYTES)?;
    KeyRotation::parse(&list, &signature)
        .map_err(|error| ExitFailure::usage(format!("{FLAG} {}: {error}", path.display())))
}

/// The path that minisign gives to the signature of a file.
fn signature_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".minisig");
    name.into()
}

fn read_text(flag: &str, path: &Path, limit: usize) -> Result<String, ExitFailure> {
    let failed = |what: &dyn std::fmt::Display| {
        ExitFailure::usage(format!("{flag}: reading {} failed: {what}", path.display()))
    };
    let length = std::fs::metadata(path).map_err(|error| failed(&error))?.len();
    if length > u64::try_from(limit).unwrap_or(u64::MAX) {
        return Err(failed(&format!("it has more than {limit} bytes")));
    }
    std::fs::read_to_string(path).map_err(|error| failed(&error))
}
