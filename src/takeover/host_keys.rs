//! Which host keys a connection accepts.
//!
//! A host may have several keys and shows the one that both sides prefer. Were
//! all kinds offered every time, a host that gains a better kind would look
//! like another host. So with pinned keys only their kinds are offered, and the
//! host shows the pinned one as long as it has it.

use russh::keys::{Algorithm, EcdsaCurve, PublicKey};

use crate::model::host_key::HostKey;

/// What is known about a host's keys before connecting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKeyExpectation {
    /// Nothing yet: whatever the host shows is returned for pinning.
    PinOnFirstUse,
    /// It must show one of these.
    Pinned(Vec<HostKey>),
}

/// Best first. RSA is left out: its only implementation for this library has an open advisory.
const ACCEPTED: [Algorithm; 4] = [
    Algorithm::Ed25519,
    Algorithm::Ecdsa { curve: EcdsaCurve::NistP256 },
    Algorithm::Ecdsa { curve: EcdsaCurve::NistP384 },
    Algorithm::Ecdsa { curve: EcdsaCurve::NistP521 },
];

impl HostKeyExpectation {
    /// Whether a host that shows `offered` may be talked to.
    #[must_use]
    pub fn accepts(&self, offered: &HostKey) -> bool {
        match self {
            Self::PinOnFirstUse => true,
            Self::Pinned(keys) => keys.contains(offered),
        }
    }

    /// The pinned keys; none on first use.
    #[must_use]
    pub fn pinned(&self) -> &[HostKey] {
        match self {
            Self::PinOnFirstUse => &[],
            Self::Pinned(keys) => keys,
        }
    }

    /// The kinds of keys to offer in the negotiation, best first.
    pub(super) fn algorithms(&self) -> Vec<Algorithm> {
        let pinned: Vec<Algorithm> = ACCEPTED
            .into_iter()
            .filter(|algorithm| self.pinned().iter().any(|key| key.algorithm == algorithm.as_str()))
            .collect();
        // Pinned keys of kinds that this release does not speak: offer all, and refuse what comes.
        if pinned.is_empty() { ACCEPTED.to_vec() } else { pinned }
    }
}

/// Every kind of host key that can be checked.
pub(super) fn all_algorithms() -> Vec<Algorithm> {
    ACCEPTED.to_vec()
}

/// The value that is compared and stored; `None` for a key that cannot be encoded.
pub(super) fn from_public_key(key: &PublicKey) -> Option<HostKey> {
    Some(HostKey { algorithm: key.algorithm().as_str().to_owned(), key: key.to_bytes().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(algorithm: &str, byte: u8) -> HostKey {
        HostKey { algorithm: algorithm.to_owned(), key: vec![byte] }
    }

    #[test]
    fn only_kinds_of_pinned_keys_are_offered() {
        assert_eq!(HostKeyExpectation::PinOnFirstUse.algorithms(), ACCEPTED);
        let pinned = HostKeyExpectation::Pinned(vec![key("ecdsa-sha2-nistp256", 1)]);
        assert_eq!(pinned.algorithms(), [Algorithm::Ecdsa { curve: EcdsaCurve::NistP256 }]);
        let both = HostKeyExpectation::Pinned(vec![key("ecdsa-sha2-nistp384", 1), key("ssh-ed25519", 2)]);
        assert_eq!(both.algorithms(), [Algorithm::Ed25519, Algorithm::Ecdsa { curve: EcdsaCurve::NistP384 }]);
        let unknown = HostKeyExpectation::Pinned(vec![key("ssh-later", 1)]);
        assert_eq!(unknown.algorithms(), ACCEPTED);
    }

    #[test]
    fn a_key_is_accepted_only_when_kind_and_bytes_are_pinned() {
        let pinned = HostKeyExpectation::Pinned(vec![key("ssh-ed25519", 1), key("ssh-ed25519", 2)]);
        assert!(pinned.accepts(&key("ssh-ed25519", 2)));
        assert!(!pinned.accepts(&key("ssh-ed25519", 3)));
        assert!(!pinned.accepts(&key("ecdsa-sha2-nistp256", 2)));
        assert!(
            !HostKeyExpectation::Pinned(vec![]).accepts(&key("ssh-ed25519", 1)),
            "an empty pin is no pin"
        );
    }
}
