//! The keys that a machine pins, how they rotate, and the lowest versions that it accepts.
//!
//! A machine pins the keys that it receives first, at its enrolment or, if it was enrolled before, with the answer to a
//! heartbeat. From then on only a *rotation* replaces them: a list of the new keys that one of the pinned keys signed. The
//! list is a file of public keys, one after the other, and is signed like every other file, as kind `keys`. Its version
//! says which rotation is the newer one, so a rotation that was once valid is not repeated later. The one exception is an
//! [order](super::key_replacement) for keys that are lost.
//!
//! A machine also pins whether [declarations](super::declaration_proof) must be signed. A shepherd switches that on, and only
//! root on the machine switches it off.
//!
//! Rotations form a chain. A machine that was away for two of them applies both, in the order of their versions.

use std::collections::BTreeMap;

use proto::agent::v1 as wire;

use crate::kubernetes::version::ReleaseVersion;
use crate::signed_artefact::signature::ArtefactSignature;
use crate::signed_artefact::signed_fields::{ANY_ARCHITECTURE, ArtefactKind};
use crate::signed_artefact::signing_key::{SigningKey, collect_signing_keys, parse_signing_keys};
use crate::signed_artefact::{ExpectedFields, compare_fields};

/// The name in the signature of a rotation.
pub const ROTATION_NAME: &str = "signing-keys";
/// Most rotations that a shepherd sends.
pub const MAX_ROTATIONS: usize = 32;
/// Largest list of keys in a rotation, in bytes.
pub const MAX_KEY_LIST_BYTES: usize = 8192;

/// The pinned keys and the lowest accepted versions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SigningTrust {
    keys: Vec<SigningKey>,
    /// Version of the rotation that named the keys; `None` for the keys that were pinned first.
    rotation: Option<ReleaseVersion>,
    /// Lowest accepted version of each kind and name.
    minimum_versions: BTreeMap<(ArtefactKind, String), ReleaseVersion>,
    /// Whether declarations that give root must be signed.
    requires_signed_declarations: bool,
}

/// A list of new keys, and its signature with a former key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRotation {
    list: String,
    keys: Vec<SigningKey>,
    signature: ArtefactSignature,
}

impl KeyRotation {
    /// Parses a list of keys and its signature, which is not verified yet. The error is a sentence.
    pub fn parse(list: &str, signature: &str) -> Result<Self, String> {
        if list.len() > MAX_KEY_LIST_BYTES {
            return Err(format!("the list of keys has more than {MAX_KEY_LIST_BYTES} bytes"));
        }
        let keys = parse_signing_keys(list).map_err(|error| format!("the list of keys: {error}"))?;
        let signature = ArtefactSignature::parse(signature).map_err(|error| error.to_string())?;
        let expected = ExpectedFields {
            kind: ArtefactKind::Keys,
            name: Some(ROTATION_NAME.to_owned()),
            version: None,
            architecture: Some(ANY_ARCHITECTURE.to_owned()),
        };
        compare_fields(signature.fields(), &expected)
            .map_err(|error| format!("the list of keys: {error}"))?;
        Ok(Self { list: list.to_owned(), keys, signature })
    }

    /// The list of keys that was signed.
    #[must_use]
    pub fn list(&self) -> &str {
        &self.list
    }

    /// The signature of the list.
    #[must_use]
    pub const fn signature(&self) -> &ArtefactSignature {
        &self.signature
    }

    /// The rotation as a message has it.
    #[must_use]
    pub fn to_wire(&self) -> wire::KeyRotation {
        wire::KeyRotation { list: self.list.clone(), signature: self.signature.as_str().to_owned() }
    }

    /// The keys in the list.
    #[must_use]
    pub fn keys(&self) -> &[SigningKey] {
        &self.keys
    }

    /// Which rotation it is: machines apply rotations in the order of their versions.
    #[must_use]
    pub const fn version(&self) -> ReleaseVersion {
        self.signature.fields().version
    }

    /// Whether one of these keys signed the list.
    pub(super) fn is_signed_by(&self, keys: &[SigningKey]) -> bool {
        keys.iter()
            .filter(|key| key.id() == self.signature.key_id())
            .any(|key| self.signature.verify(key, self.list.as_bytes()).is_ok())
    }
}

impl SigningTrust {
    /// The trust with these keys, and no lowest versions.
    #[must_use]
    pub const fn pinning(keys: Vec<SigningKey>) -> Self {
        Self { keys, rotation: None, minimum_versions: BTreeMap::new(), requires_signed_declarations: false }
    }

    /// Restores the trust from what was stored. The error is a sentence.
    pub fn restore(
        keys: &[String],
        rotation: Option<ReleaseVersion>,
        minimum_versions: BTreeMap<(ArtefactKind, String), ReleaseVersion>,
    ) -> Result<Self, String> {
        let keys =
            if keys.is_empty() { Vec::new() } else { collect_signing_keys(keys.iter().map(String::as_str))? };
        Ok(Self { keys, rotation, minimum_versions, requires_signed_declarations: false })
    }

    /// The pinned keys; empty if none is pinned.
    #[must_use]
    pub fn keys(&self) -> &[SigningKey] {
        &self.keys
    }

    /// Version of the rotation that named the keys.
    #[must_use]
    pub const fn rotation(&self) -> Option<ReleaseVersion> {
        self.rotation
    }

    /// Lowest accepted version of each kind and name.
    #[must_use]
    pub const fn minimum_versions(&self) -> &BTreeMap<(ArtefactKind, String), ReleaseVersion> {
        &self.minimum_versions
    }

    /// Lowest accepted version of files of this kind and name.
    #[must_use]
    pub fn minimum_version(&self, kind: ArtefactKind, name: &str) -> Option<ReleaseVersion> {
        self.minimum_versions.get(&(kind, name.to_owned())).copied()
    }

    /// The ids of the pinned keys, with commas between them.
    #[must_use]
    pub fn list_key_ids(&self) -> String {
        let ids: Vec<String> = self.keys.iter().map(|key| key.id().to_string()).collect();
        ids.join(", ")
    }

    /// Whether exactly these keys are pinned, in any order.
    #[must_use]
    pub fn has_keys(&self, keys: &[SigningKey]) -> bool {
        self.keys.len() == keys.len() && keys.iter().all(|key| self.keys.contains(key))
    }

    /// The trust after a shepherd sent these keys and rotations. Keys are taken only where none is pinned. A rotation is
    /// applied if a pinned key signed it, and it is newer than the last one.
    #[must_use]
    pub fn with_offer(&self, keys: &[SigningKey], rotations: &[KeyRotation]) -> Self {
        let mut next = self.clone();
        if next.keys.is_empty() {
            // The shepherd's keys are those after all rotations.
            next.keys = keys.to_vec();
            next.rotation = rotations.iter().map(KeyRotation::version).max().filter(|_| !keys.is_empty());
            return next;
        }
        let mut rotations: Vec<&KeyRotation> = rotations.iter().collect();
        rotations.sort_by_key(|rotation| rotation.version());
        for rotation in rotations {
            let is_newer = next.rotation.is_none_or(|last| rotation.version() > last);
            if is_newer && rotation.is_signed_by(&next.keys) {
                next.keys.clone_from(&rotation.keys);
                next.rotation = Some(rotation.version());
            }
        }
        next
    }

    /// The trust with these keys in place of the pinned ones, by an order. Lowest versions stay, and no rotation is applied
    /// that is as old as one of these or as the last one.
    #[must_use]
    pub fn with_replaced_keys(&self, keys: &[SigningKey], rotations: &[KeyRotation]) -> Self {
        let newest = rotations.iter().map(KeyRotation::version).max();
        Self {
            keys: keys.to_vec(),
            rotation: newest.max(self.rotation),
            minimum_versions: self.minimum_versions.clone(),
            requires_signed_declarations: self.requires_signed_declarations,
        }
    }

    /// Whether declarations that give root on the machine must be signed.
    #[must_use]
    pub const fn requires_signed_declarations(&self) -> bool {
        self.requires_signed_declarations
    }

    /// The trust that requires signed declarations, or does not.
    #[must_use]
    pub fn with_signed_declarations(&self, is_required: bool) -> Self {
        Self { requires_signed_declarations: is_required, ..self.clone() }
    }

    /// The trust to store where another process has changed the file from `before` to `stored`. The keys that it pinned stay,
    /// and lowest versions only rise.
    #[must_use]
    pub fn merged_with(&self, before: &Self, stored: &Self) -> Self {
        if stored == before {
            return self.clone();
        }
        let mut next = stored.clone();
        if next.keys.is_empty() {
            next.keys.clone_from(&self.keys);
            next.rotation = self.rotation;
        }
        if stored.requires_signed_declarations == before.requires_signed_declarations {
            next.requires_signed_declarations = self.requires_signed_declarations;
        }
        for ((kind, name), minimum) in &self.minimum_versions {
            next = next.with_minimum(*kind, name, *minimum);
        }
        next
    }

    /// The newer rotations that are not applied, because no pinned key signed them; none if no key is pinned.
    #[must_use]
    pub fn ignored_rotations<'r>(&self, rotations: &'r [KeyRotation]) -> Vec<&'r KeyRotation> {
        let after = self.with_offer(&[], rotations);
        let is_ignored =
            |rotation: &&KeyRotation| after.rotation.is_none_or(|last| rotation.version() > last);
        if after.keys.is_empty() { Vec::new() } else { rotations.iter().filter(is_ignored).collect() }
    }

    /// The trust after a file with this signature proved itself: lower versions than its minimum are not accepted any
    /// more.
    #[must_use]
    pub fn with_minimum(&self, kind: ArtefactKind, name: &str, minimum: ReleaseVersion) -> Self {
        let mut next = self.clone();
        let known = next.minimum_versions.entry((kind, name.to_owned())).or_insert(minimum);
        *known = minimum.max(*known);
        next
    }
}
