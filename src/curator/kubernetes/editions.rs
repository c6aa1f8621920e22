//! What nodes are told of authorities and keys in one generation.
//!
//! Nodes are told of a new generation one after the other ([`turns`](crate::curator::kubernetes::turns)), and whoever was
//! told of none yet is told the one before again, after each loss of its connection and under each leader. So what was
//! told in former generations is kept beside the keys, in the same record, for as long as a node was told nothing newer.
//! No secret is in it: those a node asks for, and gets them of the present generation
//! ([`rotation`](crate::curator::kubernetes::rotation) says why that is good).

use crate::curator::kubernetes::authority::{KeyError, PublicPoint};
use crate::proto::curator::v1 as wire;

/// Most former generations that are kept. For every kind of key there are two at the most: what was dropped, and what was
/// begun after that.
pub const MOST: usize = 16;

/// What is told in one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edition {
    /// Which one.
    pub generation: u64,
    /// The authorities, in order of their numbers.
    pub authorities: Vec<wire::KubernetesAuthority>,
    /// By what tokens of service accounts are verified, the one that signs first.
    pub service_account_keys: Vec<PublicPoint>,
}

impl Edition {
    /// As it is stored.
    #[must_use]
    pub fn to_wire(&self) -> wire::KubernetesEdition {
        wire::KubernetesEdition {
            generation: self.generation,
            authorities: self.authorities.clone(),
            service_account_keys: self.points(),
        }
    }

    /// Public keys by which tokens are verified, as they are sent.
    #[must_use]
    pub fn points(&self) -> Vec<Vec<u8>> {
        self.service_account_keys.iter().map(|point| point.to_spki()).collect()
    }

    /// Reads what was stored.
    pub fn from_wire(stored: wire::KubernetesEdition) -> Result<Self, KeyError> {
        let points = stored.service_account_keys.iter().map(|der| PublicPoint::from_spki(der));
        Ok(Self {
            generation: stored.generation,
            authorities: stored.authorities,
            service_account_keys: points.collect::<Result<_, _>>()?,
        })
    }
}
