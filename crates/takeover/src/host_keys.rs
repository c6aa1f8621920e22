//! SSH host key pinning: which key a host may present, and which algorithms are offered to it.
//!
//! A machine without a pinned host key is trusted on first use: its key is accepted and returned, and the caller pins
//! it.
//!
//! A host may have several keys and presents the one that both sides prefer. If all kinds were offered every time, a
//! host that gains a better kind would look like another host. So with pinned keys only their kinds are offered, and
//! the host presents the pinned one as long as it has it.

use russh::keys::{Algorithm, EcdsaCurve, PublicKey};

use model::host_key::HostKey;

/// What is known about a host's keys before connecting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKeyExpectation {
    /// No key is known: the presented key is accepted and returned for pinning.
    PinOnFirstUse,
    /// The host must present one of these keys.
    Pinned(Vec<HostKey>),
}

/// Best first. RSA is left out: its only implementation for this library has an open advisory.
const ACCEPTED_ALGORITHMS: [Algorithm; 4] = [
    Algorithm::Ed25519,
    Algorithm::Ecdsa { curve: EcdsaCurve::NistP256 },
    Algorithm::Ecdsa { curve: EcdsaCurve::NistP384 },
    Algorithm::Ecdsa { curve: EcdsaCurve::NistP521 },
];

impl HostKeyExpectation {
    /// Whether a host that presents `offered` may be connected to.
    #[must_use]
    pub fn accepts(&self, offered: &HostKey) -> bool {
        match self {
            Self::PinOnFirstUse => true,
            Self::Pinned(keys) => keys.contains(offered),
        }
    }

    /// The pinned keys; empty on first use.
    #[must_use]
    pub fn pinned(&self) -> &[HostKey] {
        match self {
            Self::PinOnFirstUse => &[],
            Self::Pinned(keys) => keys,
        }
    }

    /// The key algorithms to offer in the negotiation, best first.
    pub(super) fn offered_algorithms(&self) -> Vec<Algorithm> {
        let pinned: Vec<Algorithm> = ACCEPTED_ALGORITHMS
            .into_iter()
            .filter(|algorithm| self.pinned().iter().any(|key| key.algorithm == algorithm.as_str()))
            .collect();
        // Pinned keys of kinds that this release does not support: offer all kinds, and reject the presented key.
        if pinned.is_empty() { ACCEPTED_ALGORITHMS.to_vec() } else { pinned }
    }
}

/// Every kind of host key that can be checked.
pub(super) fn all_algorithms() -> Vec<Algorithm> {
    ACCEPTED_ALGORITHMS.to_vec()
}

/// The form of a key that is compared and stored; `None` for a key that cannot be encoded.
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
    fn only_algorithms_of_pinned_keys_are_offered() {
        assert_eq!(HostKeyExpectation::PinOnFirstUse.offered_algorithms(), ACCEPTED_ALGORITHMS);
        let pinned = HostKeyExpectation::Pinned(vec![key("ecdsa-sha2-nistp256", 1)]);
        assert_eq!(pinned.offered_algorithms(), [Algorithm::Ecdsa { curve: EcdsaCurve::NistP256 }]);
        let both = HostKeyExpectation::Pinned(vec![key("ecdsa-sha2-nistp384", 1), key("ssh-ed25519", 2)]);
        assert_eq!(
            both.offered_algorithms(),
            [Algorithm::Ed25519, Algorithm::Ecdsa { curve: EcdsaCurve::NistP384 }]
        );
        let unknown = HostKeyExpectation::Pinned(vec![key("ssh-later", 1)]);
        assert_eq!(unknown.offered_algorithms(), ACCEPTED_ALGORITHMS);
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
