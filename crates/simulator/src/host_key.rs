//! SSH host keys of simulated machines, derived from the seed.
//!
//! So none is stored. A machine has one key per generation: the fault that changes a host key increases the generation.

use model::host_key::HostKey;
use russh::keys::ssh_key::private::{Ed25519Keypair, KeypairData};
use russh::keys::{Algorithm, PrivateKey};

use crate::seed::Seed;

/// The host key of a machine in this generation.
pub(crate) fn private_key(
    seed: Seed,
    index: u32,
    generation: u32,
) -> Result<PrivateKey, russh::keys::ssh_key::Error> {
    let pair = Ed25519Keypair::from_seed(&seed.bytes("host key", index, generation.into()));
    PrivateKey::new(KeypairData::Ed25519(pair), "")
}

/// The host key's algorithm and public blob, as the provider vouches for them.
#[must_use]
pub(crate) fn public_key(seed: Seed, index: u32, generation: u32) -> Option<HostKey> {
    let key = private_key(seed, index, generation).ok()?;
    Some(HostKey { algorithm: Algorithm::Ed25519.to_string(), key: key.public_key().to_bytes().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_key_follows_from_seed_machine_and_generation() {
        let key = |seed, index, generation| public_key(Seed(seed), index, generation).unwrap();
        assert_eq!(key(1, 2, 0), key(1, 2, 0));
        assert_ne!(key(1, 2, 0), key(1, 2, 1));
        assert_ne!(key(1, 2, 0), key(1, 3, 0));
        assert_eq!(key(1, 2, 0).algorithm, "ssh-ed25519");
    }
}
