//! Signed artefacts: who signed a file, what for, and whether a machine or a shepherd accepts it.
//!
//! People sign with the program `minisign`. A signature has two parts. The first covers the BLAKE2b-512 digest of the
//! file. The second covers the first and the *trusted comment*, one line of text that says what the file is:
//!
//! ```text
//! shepherd kind=release name=roleserver version=1.4.0 architecture=x86_64 minimum-version=1.2.0
//! ```
//!
//! A digest in an order proves that a file is the one that somebody ordered. A signature proves more: that the holder of
//! a key made the file for this purpose. A thief of an operator's token, or of the bare metal database, does not have that
//! key.
//!
//! * [`signing_key`][]: public keys, as minisign writes them.
//! * [`signed_fields`][]: the grammar of the trusted comment.
//! * [`signature`][]: signatures, and their verification while the file is read.
//! * [`signing_configuration`][]: the keys of a deployment.
//! * [`signing_trust`][]: the keys that a machine pins, how they rotate, and the lowest versions that it accepts.
//! * [`key_replacement`][]: the order to replace pinned keys after a key was lost.
//! * [`declaration_proof`][]: declarations that give root on nodes.
//!
//! # How a file is accepted
//!
//! 1. [`decide_acceptance`] compares the signature's fields with what is expected, and finds the key. It needs no byte of
//!    the file, so a wrong signature is rejected before a download.
//! 2. [`signature::FileVerification`] verifies both parts while the file is read.
//!
//! Only a file that passed both is used, and the bytes that were verified are the ones that are used.

pub mod declaration_proof;
pub mod key_replacement;
pub mod signature;
pub mod signed_fields;
pub mod signing_configuration;
pub mod signing_key;
pub mod signing_trust;
#[cfg(test)]
mod tests;

use crate::kubernetes::version::ReleaseVersion;
use crate::signed_artefact::signature::ArtefactSignature;
use crate::signed_artefact::signed_fields::{ANY_ARCHITECTURE, ArtefactKind, SignedFields};
use crate::signed_artefact::signing_key::{KeyId, SigningKey};
use crate::signed_artefact::signing_trust::SigningTrust;

/// What a file must be signed as. `None` means that the reader does not know it, and accepts any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedFields {
    /// The kind of file.
    pub kind: ArtefactKind,
    /// The name that it has among files of its kind.
    pub name: Option<String>,
    /// The version in its own content.
    pub version: Option<ReleaseVersion>,
    /// The architecture that it will run on.
    pub architecture: Option<String>,
}

impl ExpectedFields {
    /// A release of the role server for a machine of this architecture.
    #[must_use]
    pub fn release(architecture: &str) -> Self {
        Self {
            kind: ArtefactKind::Release,
            name: Some(RELEASE_NAME.to_owned()),
            version: None,
            architecture: Some(architecture.to_owned()),
        }
    }
}

/// The name in the signature of a release of the role server.
pub const RELEASE_NAME: &str = "roleserver";

/// The beginning of the error of a release that a machine refused because of its signature.
pub const RELEASE_REFUSED: &str = "the release was refused: ";

/// The name under which the lowest accepted version of bundles is stored. The name of a bundle may contain its version, so
/// all bundles have one: their versions are those of Kubernetes.
pub const BUNDLE_NAME: &str = "kubernetes";

/// Why a file is not accepted, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureRejection {
    /// The file has no signature.
    #[error("it is not signed; sign it with minisign, and add it again with its signature")]
    Unsigned,
    /// There is no key to verify a signature with.
    #[error(
        "this shepherd has no signing keys to verify it with; start the shepherds with --signing_keys_path"
    )]
    NoKeys,
    /// None of the pinned keys made the signature.
    #[error("it is signed with key {signed_by}, which is not one of the pinned keys ({pinned})")]
    UnknownKey {
        /// The key in the signature.
        signed_by: KeyId,
        /// The pinned keys, with commas between them.
        pinned: String,
    },
    /// A field of the signature is another one than expected.
    #[error("its signature is for {field} {signed}, and {expected} is expected")]
    OtherField {
        /// Name of the field.
        field: &'static str,
        /// Its value in the signature.
        signed: String,
        /// The value that it must have.
        expected: String,
    },
    /// Its version is lower than the lowest that is accepted.
    #[error("its version is {version}, and {minimum} is the lowest that is accepted")]
    TooOld {
        /// The version in the signature.
        version: ReleaseVersion,
        /// The lowest version that is accepted.
        minimum: ReleaseVersion,
    },
}

/// Decides whether a file with this signature may be used, if the signature is valid: returns the pinned key to verify it
/// with. `Ok(None)`: no key is pinned, so files need no signature.
pub fn decide_acceptance<'t>(
    signature: Option<&ArtefactSignature>,
    expected: &ExpectedFields,
    trust: &'t SigningTrust,
) -> Result<Option<&'t SigningKey>, SignatureRejection> {
    if trust.keys().is_empty() {
        return Ok(None);
    }
    let signature = signature.ok_or(SignatureRejection::Unsigned)?;
    let key = trust.keys().iter().find(|key| key.id() == signature.key_id());
    let key = key.ok_or_else(|| SignatureRejection::UnknownKey {
        signed_by: signature.key_id(),
        pinned: trust.list_key_ids(),
    })?;
    let fields = signature.fields();
    compare_fields(fields, expected)?;
    let name = if fields.kind == ArtefactKind::Bundle { BUNDLE_NAME } else { fields.name.as_str() };
    match trust.minimum_version(fields.kind, name) {
        Some(minimum) if fields.version < minimum => {
            Err(SignatureRejection::TooOld { version: fields.version, minimum })
        }
        _ => Ok(Some(key)),
    }
}

/// Decides whether a shepherd takes a file with this signature, before it reads the file: returns the key to verify it
/// with.
pub fn decide_upload<'t>(
    signature: &ArtefactSignature,
    trust: &'t SigningTrust,
) -> Result<&'t SigningKey, SignatureRejection> {
    let kind = signature.fields().kind;
    if kind == ArtefactKind::Keys {
        return Err(SignatureRejection::OtherField {
            field: "kind",
            signed: kind.to_string(),
            expected: "release, bundle, image or declaration".to_owned(),
        });
    }
    let name = (kind == ArtefactKind::Release).then(|| RELEASE_NAME.to_owned());
    let expected = ExpectedFields { kind, name, version: None, architecture: None };
    decide_acceptance(Some(signature), &expected, trust)?.ok_or(SignatureRejection::NoKeys)
}

/// Decides whether a shepherd with these keys assigns a bundle with this signature to a cluster. A shepherd verified the
/// signature when the bundle was added. The error is a sentence.
pub fn decide_assignment(
    signature: Option<&str>,
    trust: &SigningTrust,
    allows_unsigned: bool,
) -> Result<(), String> {
    if allows_unsigned {
        return Ok(());
    }
    let signature = signature.map(ArtefactSignature::parse).transpose().map_err(|error| error.to_string())?;
    let expected =
        ExpectedFields { kind: ArtefactKind::Bundle, name: None, version: None, architecture: None };
    decide_acceptance(signature.as_ref(), &expected, trust).map(drop).map_err(|error| error.to_string())
}

/// Compares a signature with the content of its file: the name and version of a bundle of Kubernetes, or `None` for every
/// other file.
pub fn compare_content(
    signed: &SignedFields,
    bundle: Option<(&str, ReleaseVersion)>,
) -> Result<(), SignatureRejection> {
    let (kind, name, version) = match bundle {
        Some((name, version)) => (ArtefactKind::Bundle, Some(name.to_owned()), Some(version)),
        // A file that is no bundle cannot be signed as one.
        None if signed.kind == ArtefactKind::Bundle => (ArtefactKind::Release, None, None),
        None => (signed.kind, None, None),
    };
    compare_fields(signed, &ExpectedFields { kind, name, version, architecture: None })
}

/// Compares all fields of a signature with the expected ones.
pub fn compare_fields(signed: &SignedFields, expected: &ExpectedFields) -> Result<(), SignatureRejection> {
    let other = |field, signed: String, expected: String| {
        Err(SignatureRejection::OtherField { field, signed, expected })
    };
    if signed.kind != expected.kind {
        return other("kind", signed.kind.to_string(), expected.kind.to_string());
    }
    if let Some(name) = expected.name.as_ref().filter(|name| **name != signed.name) {
        return other("name", signed.name.clone(), name.clone());
    }
    if let Some(version) = expected.version.filter(|version| *version != signed.version) {
        return other("version", signed.version.to_string(), version.to_string());
    }
    let fits =
        |machine: &&String| signed.architecture != ANY_ARCHITECTURE && **machine != signed.architecture;
    if let Some(architecture) = expected.architecture.as_ref().filter(fits) {
        return other("architecture", signed.architecture.clone(), architecture.clone());
    }
    Ok(())
}
