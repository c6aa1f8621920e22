//! SSH host keys and their fingerprints.
//!
//! A key is pinned in the bare metal database on first use and compared at every later connection. It is a plain value
//! that every module can use. The wire bytes are compared; the fingerprint is for people, written as OpenSSH writes it
//! so that it can be compared with `ssh-keygen -l`.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
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

/// Kinds of host keys that are accepted. `takeover` has the reason why RSA is not among them.
const KINDS: [&str; 4] = ["ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"];

impl HostKey {
    /// Parses a line of a `.pub` file: `ssh-ed25519 AAAA…`, and a comment that is ignored. The error is what was expected
    /// and what was found.
    pub fn parse_line(line: &str) -> Result<Self, String> {
        let expected = "expected a line of ssh-keyscan without its host, like \"ssh-ed25519 AAAA…\"";
        let mut words = line.split_whitespace();
        let (Some(algorithm), Some(text)) = (words.next(), words.next()) else {
            return Err(format!("{expected}, found {} words", line.split_whitespace().count()));
        };
        if !KINDS.contains(&algorithm) {
            return Err(format!("expected a key of kind {}, found another kind", KINDS.join(", ")));
        }
        let key = STANDARD.decode(text).map_err(|error| format!("{expected}, found no base64: {error}"))?;
        // RFC 4253, section 6.6: the key begins with the length and the name of its algorithm.
        let length = u32::try_from(algorithm.len()).unwrap_or(u32::MAX).to_be_bytes();
        let rest = key.strip_prefix(&length).and_then(|rest| rest.strip_prefix(algorithm.as_bytes()));
        if rest.is_none_or(<[u8]>::is_empty) {
            return Err(format!("{expected}, found a key that is not of kind {algorithm}"));
        }
        Ok(Self { algorithm: algorithm.to_owned(), key })
    }

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
    use super::*;

    #[test]
    fn line_of_a_public_key_file_is_parsed() {
        let text = "AAAAC3NzaC1lZDI1NTE5AAAAIGBD9nrIZGWHqbGTXAPdBXYXkXr8ErpFTpDdatgRp/pA";
        for line in [format!("ssh-ed25519 {text}"), format!("  ssh-ed25519  {text} root@rack1\n")] {
            let key = HostKey::parse_line(&line).unwrap();
            assert_eq!(key.to_string(), "ssh-ed25519 SHA256:I8RcJ0KzgRZZf/kx8SGkbZMnvj50/to7+tA4gM9S2QA");
        }
        for (line, part) in [
            (String::new(), "found 0 words"),
            ("ssh-ed25519".to_owned(), "found 1 words"),
            (format!("192.0.2.1 ssh-ed25519 {text}"), "found another kind"),
            (format!("ssh-rsa {text}"), "found another kind"),
            (format!("ecdsa-sha2-nistp256 {text}"), "found a key that is not of kind ecdsa-sha2-nistp256"),
            ("ssh-ed25519 !!".to_owned(), "found no base64"),
            ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5".to_owned(), "found a key that is not of kind ssh-ed25519"),
        ] {
            let problem = HostKey::parse_line(&line).unwrap_err();
            assert!(problem.contains(part), "{line}: {problem}");
        }
    }

    #[test]
    fn the_fingerprint_is_the_one_ssh_keygen_prints() {
        // `ssh-keygen -l` of this key, made for this test.
        let key =
            STANDARD.decode("AAAAC3NzaC1lZDI1NTE5AAAAIGBD9nrIZGWHqbGTXAPdBXYXkXr8ErpFTpDdatgRp/pA").unwrap();
        let key = HostKey { algorithm: "ssh-ed25519".to_owned(), key };
        assert_eq!(key.fingerprint(), "SHA256:I8RcJ0KzgRZZf/kx8SGkbZMnvj50/to7+tA4gM9S2QA");
    }
}
