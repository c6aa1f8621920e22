//! SSH host keys of simulated machines.
//!
//! Drawn from the seed, so none is stored. A machine has a row of them, one a
//! generation: the fault that changes a host key moves it to the next.

use russh::keys::ssh_key::private::{Ed25519Keypair, KeypairData};
use russh::keys::{Algorithm, PrivateKey};

use crate::model::host_key::HostKey;
use crate::simulator::seed::Seed;

/// The host key a machine presents, of the generation given.
pub fn private(seed: Seed, index: u32, generation: u32) -> Result<PrivateKey, russh::keys::ssh_key::Error> {
    let pair = Ed25519Keypair::from_seed(&seed.bytes("host key", index, generation.into()));
    PrivateKey::new(KeypairData::Ed25519(pair), "")
}

/// The host key's algorithm and public blob, as a provider vouches for it.
#[must_use]
pub fn public(seed: Seed, index: u32, generation: u32) -> Option<HostKey> {
    let key = private(seed, index, generation).ok()?;
    Some(HostKey { algorithm: Algorithm::Ed25519.to_string(), key: key.public_key().to_bytes().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_key_follows_from_seed_machine_and_generation() {
        let key = |seed, index, generation| public(Seed(seed), index, generation).unwrap();
        assert_eq!(key(1, 2, 0), key(1, 2, 0));
        assert_ne!(key(1, 2, 0), key(1, 2, 1));
        assert_ne!(key(1, 2, 0), key(1, 3, 0));
        assert_eq!(key(1, 2, 0).algorithm, "ssh-ed25519");
    }
}
