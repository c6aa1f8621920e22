//! The signing keys of a deployment, as its shepherds are configured.
//!
//! A shepherd sends the keys and all rotations to every machine, and verifies with the keys what operators upload. The keys
//! are in files beside the shepherd and not in the bare metal database: a thief of the database cannot choose what machines
//! pin.

use crate::signed_artefact::signing_key::{SigningKey, parse_signing_keys};
use crate::signed_artefact::signing_trust::{KeyRotation, MAX_ROTATIONS, SigningTrust};

/// Keys and rotations. Without keys, nothing is signed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SigningConfiguration {
    keys: Vec<SigningKey>,
    rotations: Vec<KeyRotation>,
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
        Ok(Self { keys, rotations })
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
