//! Node ids, derived from the node's public key.
//!
//! A node generates an Ed25519 key for itself, and its id is `node-` with the first 16 bytes of the public half. So ids
//! are unique, although nobody assigns them. A node that lost its state directory is another node, as it should be,
//! because it has forgotten whatever it had promised as an etcd member.
//!
//! The id has half of the key, and the record has all of it. A check of a peer against a record compares whole keys.

use std::fmt;
use std::str::FromStr;

/// The prefix of every node id.
const PREFIX: &str = "node-";
/// How many bytes of the key are in the id.
const ID_BYTES: usize = 16;

/// The public half of an Ed25519 key, 32 bytes.
///
/// It is not checked to be a point of the curve; verifying a signature with it does that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey(pub [u8; 32]);

impl PublicKey {
    /// Takes exactly 32 bytes; the error is a sentence.
    pub fn from_slice(bytes: &[u8]) -> Result<Self, String> {
        let key = bytes.try_into().map_err(|_| {
            format!("a public key has {} bytes, and those of Ed25519 have 32: give the raw key", bytes.len())
        })?;
        Ok(Self(key))
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

/// A node's id: `node-` and 32 lower-case hexadecimal digits.
///
/// It has 37 characters, so it fits in one label of a host name. It is also the name in the node's certificate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId([u8; ID_BYTES]);

impl NodeId {
    /// The id of the node with this key.
    #[must_use]
    pub fn from_key(key: &PublicKey) -> Self {
        let mut id = [0; ID_BYTES];
        id.copy_from_slice(&key.0[..ID_BYTES]);
        Self(id)
    }

    /// A number that is spread evenly over the nodes of a cluster, because keys are random.
    pub(super) const fn evenly_spread(self) -> u32 {
        let [first, second, third, fourth, ..] = self.0;
        u32::from_be_bytes([first, second, third, fourth])
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", hex::encode(self.0))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is no node id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no node id: it is `node-` followed by 32 lower-case hexadecimal digits")]
pub struct InvalidNodeId(String);

impl FromStr for NodeId {
    type Err = InvalidNodeId;

    fn from_str(text: &str) -> Result<Self, InvalidNodeId> {
        // The error repeats the text, so limit its length.
        let refused = || InvalidNodeId(text.chars().take(100).collect());
        let digits = text.strip_prefix(PREFIX).ok_or_else(refused)?;
        // One spelling only: keys in etcd and names in certificates are compared byte by byte.
        if digits.bytes().any(|digit| digit.is_ascii_uppercase()) {
            return Err(refused());
        }
        let mut id = [0; ID_BYTES];
        hex::decode_to_slice(digits, &mut id).map_err(|_| refused())?;
        Ok(Self(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::node_id;

    #[test]
    fn id_is_the_first_half_of_the_key() {
        let mut bytes = [0xab; 32];
        bytes[0] = 0x01;
        let id = NodeId::from_key(&PublicKey(bytes));
        assert_eq!(id.to_string(), "node-01ababababababababababababababab");
        assert_eq!(id.to_string().len(), 37);
        bytes[16] = 0;
        assert_eq!(NodeId::from_key(&PublicKey(bytes)), id, "the other half is not in it");
        bytes[15] = 0;
        assert_ne!(NodeId::from_key(&PublicKey(bytes)), id);
    }

    #[test]
    fn id_has_exactly_one_spelling() {
        let id = node_id(0xcd);
        assert_eq!(id.to_string().parse::<NodeId>().unwrap(), id);
        let digits = "cd".repeat(16);
        for wrong in [
            String::new(),
            "node-".to_owned(),
            digits.clone(),
            format!("node-{}", &digits[1..]),
            format!("node-{digits}0"),
            format!("node-{}", digits.to_uppercase()),
            format!("Node-{digits}"),
            format!("node-{}/", &digits[1..]),
            format!(" node-{digits}"),
        ] {
            let error = wrong.parse::<NodeId>().unwrap_err().to_string();
            assert!(error.contains("32 lower-case hexadecimal digits"), "{wrong}: {error}");
        }
        let long = "x".repeat(1 << 20).parse::<NodeId>().unwrap_err().to_string();
        assert!(long.len() < 300, "{} characters", long.len());
    }

    #[test]
    fn key_has_32_bytes() {
        assert_eq!(PublicKey::from_slice(&[7; 32]).unwrap(), PublicKey([7; 32]));
        for length in [0, 31, 33, 44] {
            let error = PublicKey::from_slice(&vec![0; length]).unwrap_err();
            assert!(error.contains(&format!("{length} bytes")), "{error}");
        }
    }
}
