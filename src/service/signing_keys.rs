//! The signing keys of `--signing_keys_path` and `--key_rotation_path`.
//!
//! They are public. A signature is in a file of its own, with the name that minisign gives it.

use std::path::{Path, PathBuf};

use trusted_file::unchangeable_path::{ChangeableError, FileUse, check_unchangeable};

use crate::manager::agent_file::signature_path;
use crate::model::signed_artefact::signature::MAX_SIGNATURE_BYTES;
use crate::model::signed_artefact::signing_configuration::SigningConfiguration;
use crate::model::signed_artefact::signing_trust::{KeyRotation, MAX_KEY_LIST_BYTES};
use crate::model::text_file::decode_text;
use crate::service::failure::ExitFailure;

/// Reads the keys and the rotations in these files.
pub(super) fn read_signing_keys(
    keys_path: Option<&Path>,
    rotation_paths: &[PathBuf],
) -> Result<SigningConfiguration, ExitFailure> {
    let keys = keys_path
        .map(|path| read_trusted_text("--signing_keys_path", path, MAX_KEY_LIST_BYTES))
        .transpose()?;
    let rotations = rotation_paths.iter().map(|path| read_rotation(path));
    let rotations = rotations.collect::<Result<Vec<_>, _>>()?;
    let signing = SigningConfiguration::parse(keys.as_deref(), rotations).map_err(|error| {
        let path = keys_path.map(|path| format!(" {}", path.display()));
        ExitFailure::usage(format!("--signing_keys_path{}: {error}", path.unwrap_or_default()))
    })?;
    let checked = signing.check_rotations();
    checked.map_err(|error| ExitFailure::usage(format!("--key_rotation_path: {error}")))?;
    Ok(signing)
}

/// What `--check` prints of the keys, as phrases.
pub(super) fn describe_signing_keys(signing: &SigningConfiguration) -> Vec<String> {
    if signing.keys().is_empty() {
        return Vec::new();
    }
    let mut found = vec![format!("the signing keys {}", signing.trust().list_key_ids())];
    if signing.requires_signed_declarations() {
        found.push("machines refuse declared roles that give root and are not signed".to_owned());
    }
    if let Some((version, key)) = signing.unverified_rotation() {
        found.push(format!(
            "a list of new keys with version {version}, signed with key {key}; only machines that have that key can verify it"
        ));
    }
    found
}

fn read_rotation(path: &Path) -> Result<KeyRotation, ExitFailure> {
    const FLAG: &str = "--key_rotation_path";
    let list = read_trusted_text(FLAG, path, MAX_KEY_LIST_BYTES)?;
    // Its content is verified.
    let signature = read_text(FLAG, &signature_path(path), MAX_SIGNATURE_BYTES)?;
    KeyRotation::parse(&list, &signature)
        .map_err(|error| ExitFailure::usage(format!("{FLAG} {}: {error}", path.display())))
}

/// Reads a text file that machines trust, after a check that nobody else can change it. `flag` names it.
fn read_trusted_text(flag: &str, path: &Path, limit: usize) -> Result<String, ExitFailure> {
    check_unchangeable(path, FileUse::Configuration).map_err(|error| {
        let shown = path.display();
        ExitFailure::usage(match error {
            ChangeableError::Read { source, .. } => format!("{flag}: reading {shown} failed: {source}"),
            other => format!("{flag} {shown} cannot be trusted: {other}"),
        })
    })?;
    read_text(flag, path, limit)
}

/// Reads a text file of at most `limit` bytes, which `flag` names.
fn read_text(flag: &str, path: &Path, limit: usize) -> Result<String, ExitFailure> {
    let failed = |what: &dyn std::fmt::Display| {
        ExitFailure::usage(format!("{flag}: reading {} failed: {what}", path.display()))
    };
    let length = std::fs::metadata(path).map_err(|error| failed(&error))?.len();
    if length > u64::try_from(limit).unwrap_or(u64::MAX) {
        return Err(failed(&format!("it has more than {limit} bytes")));
    }
    let content = std::fs::read(path).map_err(|error| failed(&error))?;
    decode_text(&content).map(str::to_owned).map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST_KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    /// The second key, and the list of it that the first key signed.
    const KEYS: &str = "untrusted comment: minisign public key 0002020202020202\nRWQCAgICAgICAIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU\n";
    const SIGNATURE: &str = concat!(
        "untrusted comment: signature from minisign secret key\n",
        "RUQBAQEBAQEBAHO+H3MGQSh80SEL/Zh/rvuP1eSuOVFOzBzHzAo9ktrhGLrOPDzbvUH2KDjgBAAijUZxwo6Oo8yGmOgt2Pz5Ug4=\n",
        "trusted comment: shepherd kind=keys name=signing-keys version=2.0.0 architecture=any minimum-version=1.0.0\n",
        "Tf+pEPmacpP4Q904ZygJ9Kf0+28JFFJDu4UOA9/CQU9hbR5GcjCp827674fEuQkoi3kVZX7JDPGkZEw4vRZ1Dw==\n",
    );

    #[test]
    fn keys_and_rotations_are_read_from_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (keys, rotation) = (path("keys"), path("rotation"));
        let read = |keys: Option<&Path>, rotations: &[PathBuf]| {
            read_signing_keys(keys, rotations).map_err(|failure| failure.message)
        };
        let read_both = || read(Some(&keys), std::slice::from_ref(&rotation));
        assert_eq!(read(None, &[]), Ok(SigningConfiguration::default()));
        assert!(read_both().unwrap_err().starts_with("--signing_keys_path: reading "));
        std::fs::write(&keys, KEYS).unwrap();
        std::fs::write(&rotation, KEYS).unwrap();
        let error = read_both().unwrap_err();
        assert!(
            error.starts_with("--key_rotation_path: reading ") && error.contains("rotation.minisig"),
            "{error}"
        );
        // A mark in front is passed over, as in every text file.
        std::fs::write(path("rotation.minisig"), format!("\u{feff}{SIGNATURE}")).unwrap();
        let configured = read_both().unwrap();
        assert_eq!((configured.keys().len(), configured.rotations().len()), (1, 1));
        let found = describe_signing_keys(&configured);
        assert_eq!(found[0], "the signing keys 0002020202020202");
        assert!(found[1].contains("version 2.0.0, signed with key 0001010101010101"), "{found:?}");
        let strict = describe_signing_keys(&configured.with_signed_declarations(true));
        assert_eq!(strict[1], "machines refuse declared roles that give root and are not signed");
        assert!(describe_signing_keys(&SigningConfiguration::default()).is_empty());
        std::fs::write(&keys, FIRST_KEY).unwrap();
        let error = read_both().unwrap_err();
        assert!(error.starts_with("--key_rotation_path: ") && error.contains("has other keys"), "{error}");
        let error = read(None, std::slice::from_ref(&rotation)).unwrap_err();
        assert!(error.contains("needs the present keys beside it"), "{error}");
        std::fs::write(&keys, "a".repeat(MAX_KEY_LIST_BYTES + 1)).unwrap();
        assert!(read_both().unwrap_err().contains("it has more than 8192 bytes"));
    }
}
