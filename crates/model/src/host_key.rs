//! SSH host keys and their fingerprints.
//!
//! A key is pinned in the bare metal database on first use and compared at every later connection. It is a plain value
//! that every module can use. The wire bytes are compared; the fingerprint is for people, written as OpenSSH writes it
//! so that it can be compared with `ssh-keygen -l`.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// A public host key.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostKey {
    /// Name of the algorithm as SSH writes it: `ssh-ed25519`, `ecdsa-sha2-nistp256`, ….
    pub algorithm: String,
    /// The key in SSH's wire format (RFC 4253, section 6.6), the algorithm's name included.
    pub key: Vec<u8>,
}

/// The pinned host key of a machine, and another one that was rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedHostKey {
    /// The key that is trusted.
    pub key: HostKey,
    /// Why it is trusted: `first-use`, `provider` or `allowed`.
    pub source: String,
    /// When the key was pinned.
    pub pinned_at: Timestamp,
    /// Another key that was offered and rejected since then, and when.
    pub rejected: Option<(HostKey, Timestamp)>,
}

impl HostKey {
    /// The fingerprint as OpenSSH prints it: `SHA256:` and unpadded base64.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, &self.key);
        format!("SHA256:{}", STANDARD_NO_PAD.encode(digest))
    }
}

impl fmt::Display for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.algorithm, self.fingerprint())
    }
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKey({self})")
    }
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn the_fingerprint_is_the_one_ssh_keygen_prints() {
        // `ssh-keygen -l` of this key, made for this test.
        let key =
            STANDARD.decode("AAAAC3NzaC1lZDI1NTE5AAAAIGBD9nrIZGWHqbGTXAPdBXYXkXr8ErpFTpDdatgRp/pA").unwrap();
        let key = HostKey { algorithm: "ssh-ed25519".to_owned(), key };
        assert_eq!(key.fingerprint(), "SHA256:I8RcJ0KzgRZZf/kx8SGkbZMnvj50/to7+tA4gM9S2QA");
    }
}
