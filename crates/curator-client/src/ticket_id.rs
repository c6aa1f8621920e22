//! The id of a ticket, by which people and records name it.

use std::fmt;
use std::str::FromStr;

/// A ticket's id: 16 hexadecimal digits, no secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId([u8; 8]);

impl TicketId {
    /// The id of the ticket with this hash.
    #[must_use]
    pub fn from_hash(hash: &[u8; 32]) -> Self {
        let mut id = [0; 8];
        id.copy_from_slice(&hash[..8]);
        Self(id)
    }
}

impl fmt::Display for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketId({self})")
    }
}

/// A text that is no ticket id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no ticket: a ticket's name has 16 lower-case hexadecimal digits")]
pub struct InvalidTicketId(String);

impl FromStr for TicketId {
    type Err = InvalidTicketId;

    fn from_str(text: &str) -> Result<Self, InvalidTicketId> {
        // Repeats only a part of it: the text may be the secret, given in place of the id.
        let refused = || InvalidTicketId(text.chars().take(8).collect());
        let mut id = [0; 8];
        hex::decode_to_slice(text, &mut id).map_err(|_| refused())?;
        if Self(id).to_string() == text { Ok(Self(id)) } else { Err(refused()) }
    }
}
