//! Signatures of files, as minisign writes them, and their verification while the file is read.
//!
//! A signature is a file of four lines: a comment that nobody signed, the signature of the file, the trusted comment, and
//! the signature of both. Only signatures of the digest of a file are accepted, which minisign has made by default since
//! 0.10. The older form covers the file itself, which would have to be in memory as a whole.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use minisign_verify::{Signature, StreamVerifier};

use crate::signed_artefact::signed_fields::{FieldsError, SignedFields};
use crate::signed_artefact::signing_key::{KeyId, SigningKey, UNTRUSTED_COMMENT};

/// Largest signature, in bytes.
pub const MAX_SIGNATURE_BYTES: usize = 4096;
/// Bytes of the first part: algorithm, id of the key and signature.
const SIGNATURE_BYTES: usize = 74;
/// Algorithm of a signature of the digest of a file.
const DIGEST_ALGORITHM: [u8; 2] = *b"ED";
/// Algorithm of a signature of the file itself.
const LEGACY_ALGORITHM: [u8; 2] = *b"Ed";
const TRUSTED_COMMENT: &str = "trusted comment: ";

/// A signature that was parsed. It is not verified yet.
#[derive(Clone)]
pub struct ArtefactSignature {
    encoded: String,
    key_id: KeyId,
    fields: SignedFields,
    signature: Signature,
}

impl std::fmt::Debug for ArtefactSignature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArtefactSignature")
            .field("key_id", &self.key_id)
            .field("fields", &self.fields)
            .finish_non_exhaustive()
    }
}

impl PartialEq for ArtefactSignature {
    fn eq(&self, other: &Self) -> bool {
        self.encoded == other.encoded
    }
}

impl Eq for ArtefactSignature {}

/// Why a text is no signature, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureParseError {
    /// It is no file of minisign.
    #[error("the signature is no file that minisign -S wrote")]
    Malformed,
    /// It is of the older form.
    #[error(
        "the signature is of minisign's older form, which covers the file itself; sign the file again with minisign -S -H"
    )]
    Legacy,
    /// The trusted comment does not say what the file is.
    #[error(
        "the trusted comment of the signature {0}; sign the file again with minisign -S -t 'shepherd kind=… name=… version=… \
         architecture=… minimum-version=…'"
    )]
    Fields(#[from] FieldsError),
}

impl ArtefactSignature {
    /// Parses the content of a file that `minisign -S` wrote.
    pub fn parse(text: &str) -> Result<Self, SignatureParseError> {
        let malformed = SignatureParseError::Malformed;
        if text.len() > MAX_SIGNATURE_BYTES {
            return Err(malformed);
        }
        let lines: Vec<&str> = text.lines().collect();
        let [untrusted, signature, trusted, global] = lines.as_slice() else { return Err(malformed) };
        let (true, Some(comment)) =
            (untrusted.starts_with(UNTRUSTED_COMMENT), trusted.strip_prefix(TRUSTED_COMMENT))
        else {
            return Err(malformed);
        };
        // The library accepts more than one encoding of the same bytes.
        let (Ok(bytes), Ok(_)) = (STANDARD.decode(signature), STANDARD.decode(global)) else {
            return Err(malformed);
        };
        if bytes.len() != SIGNATURE_BYTES {
            return Err(malformed);
        }
        if bytes.starts_with(&LEGACY_ALGORITHM) {
            return Err(SignatureParseError::Legacy);
        }
        let (true, Ok(id)) = (bytes.starts_with(&DIGEST_ALGORITHM), <[u8; 8]>::try_from(&bytes[2..10]))
        else {
            return Err(malformed);
        };
        let decoded = Signature::decode(text).map_err(|_| malformed)?;
        let fields: SignedFields = comment.parse()?;
        Ok(Self { encoded: text.to_owned(), key_id: KeyId::from_bytes(id), fields, signature: decoded })
    }

    /// The id of the key that made the signature.
    #[must_use]
    pub const fn key_id(&self) -> KeyId {
        self.key_id
    }

    /// The fields of the trusted comment.
    #[must_use]
    pub const fn fields(&self) -> &SignedFields {
        &self.fields
    }

    /// The text that the signature was parsed from.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.encoded
    }

    /// Verifies a file that is in memory.
    pub fn verify(&self, key: &SigningKey, content: &[u8]) -> Result<(), VerificationError> {
        let mut verification = FileVerification::begin(self, key)?;
        verification.update(content);
        verification.finish()
    }
}

/// The signature does not belong to the file that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its signature is not valid: the file, the trusted comment or the signature was changed, or is of another file"
)]
pub struct VerificationError;

/// Verifies a signature while the file is read, in pieces of any length.
pub struct FileVerification<'s>(StreamVerifier<'s>);

impl<'s> FileVerification<'s> {
    /// Begins before the first byte of the file.
    pub fn begin(signature: &'s ArtefactSignature, key: &'s SigningKey) -> Result<Self, VerificationError> {
        key.public_key().verify_stream(&signature.signature).map(Self).map_err(|_| VerificationError)
    }

    /// Adds the next bytes of the file.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Verifies both parts of the signature after the last byte.
    pub fn finish(mut self) -> Result<(), VerificationError> {
        self.0.finalize().map_err(|_| VerificationError)
    }
}
