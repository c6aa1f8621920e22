//! Public keys of signatures, as minisign writes them.
//!
//! minisign writes a public key as two lines, a comment and the key:
//!
//! ```text
//! untrusted comment: minisign public key 0001010101010101
//! RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c
//! ```
//!
//! A list of keys is such files one after the other. Nobody signed the comments, so they are not read.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use minisign_verify::PublicKey;

/// Beginning of the line that nobody signed.
pub(super) const UNTRUSTED_COMMENT: &str = "untrusted comment:";
/// Bytes of an encoded key: algorithm, id and key.
const KEY_BYTES: usize = 42;
/// Algorithm of a key: Ed25519.
const KEY_ALGORITHM: [u8; 2] = *b"Ed";
/// Most keys that may be pinned at a time.
pub const MAX_KEYS: usize = 16;

/// Identifies a key. It is not secret, and nothing but a name: two keys can have the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId([u8; 8]);

impl KeyId {
    /// The id with these bytes, in the order in which a key or a signature has them.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for KeyId {
    /// Writes the id as minisign prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016X}", u64::from_le_bytes(self.0))
    }
}

/// A public key that signatures are verified with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SigningKey {
    encoded: String,
    id: KeyId,
    key: PublicKey,
}

impl SigningKey {
    /// Parses the line of the key, without its comment. The error is a sentence.
    pub fn parse(line: &str) -> Result<Self, String> {
        let invalid = || {
            let shown: String = line.chars().take(60).collect();
            format!(
                "{shown:?} is no public key of minisign; give the second line of a file that minisign -G wrote, which \
                 begins with RW"
            )
        };
        let bytes = STANDARD.decode(line).map_err(|_| invalid())?;
        if bytes.len() != KEY_BYTES || !bytes.starts_with(&KEY_ALGORITHM) {
            return Err(invalid());
        }
        let id: [u8; 8] = bytes[2..10].try_into().map_err(|_| invalid())?;
        let key = PublicKey::from_base64(line).map_err(|_| invalid())?;
        Ok(Self { encoded: line.to_owned(), id: KeyId(id), key })
    }

    /// The id of the key.
    #[must_use]
    pub const fn id(&self) -> KeyId {
        self.id
    }

    /// The line that the key was parsed from.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.encoded
    }

    /// The key for the library that verifies signatures.
    pub(super) const fn public_key(&self) -> &PublicKey {
        &self.key
    }
}

/// Parses a list of keys: lines with a key each, lines with comments, and empty lines. The error is a sentence.
pub fn parse_signing_keys(text: &str) -> Result<Vec<SigningKey>, String> {
    let lines = text.lines().map(str::trim_end);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with(UNTRUSTED_COMMENT));
    collect_signing_keys(lines)
}

/// Collects keys, each from its line, without doubled ones. The error is a sentence.
pub fn collect_signing_keys<'l>(lines: impl IntoIterator<Item = &'l str>) -> Result<Vec<SigningKey>, String> {
    let mut keys: Vec<SigningKey> = Vec::new();
    for line in lines {
        let key = SigningKey::parse(line)?;
        if keys.iter().any(|other| other.id == key.id && other.key != key.key) {
            return Err(format!("two keys have the id {}; leave one of them out", key.id));
        }
        if keys.iter().all(|other| other.id != key.id) {
            keys.push(key);
        }
    }
    if keys.is_empty() {
        return Err("it has no public key of minisign; minisign -G writes one".to_owned());
    }
    if keys.len() > MAX_KEYS {
        return Err(format!("it has {} keys, and {MAX_KEYS} is the maximum", keys.len()));
    }
    Ok(keys)
}
