//! Trust bundles: authorities and public keys of one key generation.
//!
//! Nodes are assigned a new generation one after the other ([`key_rollout`](crate::kubernetes::key_rollout)).
//! A node whose turn has not come gets the bundle before again, after each lost connection and from each leader. So the
//! bundles of former generations are stored beside the keys, in the same record, until no node is assigned one of them.
//! A bundle has no secret: nodes request those, and get them in the current generation
//! ([`key_rotation`](crate::kubernetes::key_rotation) explains why that works).

use proto::curator::v1 as wire;

use crate::kubernetes::signer::{P256PublicKey, SignerError};

/// Most former bundles that are stored. For every kind of key there are two at the most: one from before the old key
/// was dropped, and one from before the next rotation began.
pub const MAX_FORMER_BUNDLES: usize = 16;

/// What nodes get in one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustBundle {
    /// The key generation that it belongs to.
    pub generation: u64,
    /// The authorities, in order of their numbers.
    pub authorities: Vec<wire::KubernetesAuthority>,
    /// The public keys that verify service-account tokens; the signing one is first.
    pub service_account_keys: Vec<P256PublicKey>,
}

impl TrustBundle {
    /// The bundle as it is stored.
    #[must_use]
    pub fn to_wire(&self) -> wire::KubernetesTrustBundle {
        wire::KubernetesTrustBundle {
            generation: self.generation,
            authorities: self.authorities.clone(),
            service_account_keys: self.service_account_spkis(),
        }
    }

    /// The public keys that verify service-account tokens, in DER (`SubjectPublicKeyInfo`).
    #[must_use]
    pub fn service_account_spkis(&self) -> Vec<Vec<u8>> {
        self.service_account_keys.iter().map(|point| point.to_spki()).collect()
    }

    /// Reads a stored bundle.
    pub fn from_wire(stored: wire::KubernetesTrustBundle) -> Result<Self, SignerError> {
        let points = stored.service_account_keys.iter().map(|der| P256PublicKey::from_spki(der));
        Ok(Self {
            generation: stored.generation,
            authorities: stored.authorities,
            service_account_keys: points.collect::<Result<_, _>>()?,
        })
    }
}
