//! The signing keys of a deployment, as its shepherds are configured.
//!
//! A shepherd sends the keys and all rotations to every machine, and verifies with the keys what operators upload. The keys
//! are in files beside the shepherd and not in the bare metal database: a thief of the database cannot choose what machines
//! pin.

use crate::kubernetes::version::ReleaseVersion;
use crate::signed_artefact::signing_key::{KeyId, SigningKey, parse_signing_keys};
use crate::signed_artefact::signing_trust::{KeyRotation, MAX_ROTATIONS, SigningTrust};

/// Keys and rotations. Without keys, nothing is signed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SigningConfiguration {
    keys: Vec<SigningKey>,
    rotations: Vec<KeyRotation>,
    requires_signed_declarations: bool,
}

impl SigningConfiguration {
    /// Parses the content of the file with the keys, if there is one. The error is a sentence.
    pub fn parse(keys: Option<&str>, rotations: Vec<KeyRotation>) -> Result<Self, String> {
        let keys = keys.map(parse_signing_keys).transpose()?.unwrap_or_default();
        if keys.is_empty() && !rotations.is_empty() {
            return Err("a list of new keys needs the present keys beside it".to_owned());
        }
        if rotations.len() > MAX_ROTATIONS {
            return Err(format!(
                "{} lists of new keys are given, and {MAX_ROTATIONS} is the maximum; leave out those that every machine has \
                 applied",
                rotations.len()
            ));
        }
        Ok(Self { keys, rotations, requires_signed_declarations: false })
    }

    /// The same, with whether machines refuse declarations that give root and are not signed.
    #[must_use]
    pub fn with_signed_declarations(self, is_required: bool) -> Self {
        Self { requires_signed_declarations: is_required, ..self }
    }

    /// Whether machines refuse declarations that give root and are not signed.
    #[must_use]
    pub const fn requires_signed_declarations(&self) -> bool {
        self.requires_signed_declarations
    }

    /// Checks that the rotations lead to the present keys: each is signed with a key in the list before it, and the newest
    /// one has the present keys. The error is a sentence.
    pub fn check_rotations(&self) -> Result<(), String> {
        let mut before: Option<&KeyRotation> = None;
        for rotation in self.sorted_rotations() {
            let (version, signed_by) = (rotation.version(), rotation.signature().key_id());
            match before {
                Some(before) if before.version() == version => {
                    return Err(format!(
                        "two lists of new keys have the version {version}, and machines apply one of them; sign each list \
                         with a version of its own"
                    ));
                }
                Some(before) if !rotation.is_signed_by(before.keys()) => {
                    return Err(format!(
                        "the list of new keys with version {version} has no valid signature of a key in the list before it, \
                         {}, and machines that have applied that one ignore it; sign it with one of those keys",
                        before.version()
                    ));
                }
                None if !self.keys_with_id(signed_by).is_empty()
                    && !rotation.is_signed_by(&self.keys_with_id(signed_by)) =>
                {
                    return Err(format!(
                        "the signature of the list of new keys with version {version} is not valid for key {signed_by}; sign \
                         the list again, and change nothing in it afterwards"
                    ));
                }
                _ => {}
            }
            before = Some(rotation);
        }
        match before {
            Some(newest) if !self.trust().has_keys(newest.keys()) => Err(format!(
                "the newest list of new keys, version {}, has other keys than --signing_keys_path: machines that apply it \
                 accept no signature of this shepherd's keys; give both the same keys",
                newest.version()
            )),
            _ => Ok(()),
        }
    }

    /// The first rotation and the key that signed it, if none of the files has that key: only machines can verify it.
    #[must_use]
    pub fn unverified_rotation(&self) -> Option<(ReleaseVersion, KeyId)> {
        let first = self.sorted_rotations().into_iter().next()?;
        let signed_by = first.signature().key_id();
        self.keys_with_id(signed_by).is_empty().then(|| (first.version(), signed_by))
    }

    fn sorted_rotations(&self) -> Vec<&KeyRotation> {
        let mut sorted: Vec<&KeyRotation> = self.rotations.iter().collect();
        sorted.sort_by_key(|rotation| rotation.version());
        sorted
    }

    /// The keys with this id among the present ones and in all lists.
    fn keys_with_id(&self, id: KeyId) -> Vec<SigningKey> {
        let listed = self.rotations.iter().flat_map(KeyRotation::keys);
        self.keys.iter().chain(listed).filter(|key| key.id() == id).cloned().collect()
    }

    /// The present keys; empty if nothing is signed.
    #[must_use]
    pub fn keys(&self) -> &[SigningKey] {
        &self.keys
    }

    /// The line of each key, as messages have it.
    #[must_use]
    pub fn key_lines(&self) -> Vec<String> {
        self.keys.iter().map(|key| key.as_str().to_owned()).collect()
    }

    /// Lists of keys that replace keys that machines may have pinned.
    #[must_use]
    pub fn rotations(&self) -> &[KeyRotation] {
        &self.rotations
    }

    /// The trust with these keys, without lowest versions: each machine has its own.
    #[must_use]
    pub fn trust(&self) -> SigningTrust {
        SigningTrust::pinning(self.keys.clone())
    }
}
