//! Registration tickets: which machines may ask to become nodes.
//!
//! A ticket is 32 random bytes that whoever has them may register with, until it expires, is used up, or is
//! revoked. The cluster keeps a hash alone, so that a snapshot of etcd lets nobody in. The first bytes of the
//! hash are the ticket's name: they find it, and the rest is then compared in constant time.
//!
//! A node whose answer was lost asks again with the same key and the same ticket. That is no second use, and
//! it is granted even when the ticket has expired or was used up since: the node is registered, and only
//! wants to hear it. A ticket that was revoked is good for nothing at all, because somebody who should not
//! have it may have it.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use prost::Message as _;
use ring::digest::{SHA256, digest};
use tonic::Code;

use crate::curator::node_id::NodeId;
use crate::etcd::key_space::TICKETS;
use crate::etcd::record::{self, RecordError, moment};
use crate::model::time::{Timestamp, after};
use crate::proto::curator::v1 as wire;

/// Longest text that says what a ticket is for, in bytes.
const LONGEST_PURPOSE: usize = 200;
/// Most nodes that a counted ticket is good for; each is kept in its record.
const MOST_USES: u32 = 10_000;

/// What lets a machine in. Its `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Takes 32 bytes that were drawn at random.
    #[must_use]
    pub const fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// Takes what a machine offers; the error is a sentence and shows nothing of it.
    pub fn from_slice(bytes: &[u8]) -> Result<Self, String> {
        let bytes = bytes.try_into().map_err(|_| {
            format!("the ticket has {} bytes, and tickets have 32: give all of it", bytes.len())
        })?;
        Ok(Self(bytes))
    }

    /// The bytes, to be said once.
    #[must_use]
    pub const fn reveal(&self) -> &[u8; 32] {
        &self.0
    }

    /// The name of the ticket it belongs to, if any does.
    #[must_use]
    pub fn id(&self) -> TicketId {
        TicketId::of(&self.sha256())
    }

    fn sha256(&self) -> [u8; 32] {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, &self.0).as_ref());
        hash
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A ticket's name: 16 hexadecimal digits, no secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId([u8; 8]);

impl TicketId {
    fn of(hash: &[u8; 32]) -> Self {
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

/// A text that names no ticket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no ticket: a ticket's name has 16 lower-case hexadecimal digits")]
pub struct NoTicketId(String);

impl FromStr for TicketId {
    type Err = NoTicketId;

    fn from_str(text: &str) -> Result<Self, NoTicketId> {
        // Not all of it: somebody may have taken the secret for the name.
        let refused = || NoTicketId(text.chars().take(8).collect());
        let mut id = [0; 8];
        hex::decode_to_slice(text, &mut id).map_err(|_| refused())?;
        if Self(id).to_string() == text { Ok(Self(id)) } else { Err(refused()) }
    }
}

/// What is kept of a ticket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ticket {
    hash: [u8; 32],
    /// When it was made.
    pub created_at: Timestamp,
    /// Who made it.
    pub created_by: String,
    /// From when on it is refused.
    pub expires_at: Timestamp,
    /// When it was revoked, if it was.
    pub revoked_at: Option<Timestamp>,
    /// How many different nodes may register with it; none is any number.
    pub uses: Option<u32>,
    /// Nodes that registered with it; kept only where uses are counted.
    pub used_by: BTreeSet<NodeId>,
    /// What it is for.
    pub purpose: String,
}

/// What a ticket is to be good for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Who makes it.
    pub created_by: String,
    /// How long.
    pub lifetime: Duration,
    /// For how many different nodes; none is any number.
    pub uses: Option<u32>,
    /// What it is for.
    pub purpose: String,
}

/// Why a ticket does not let a machine in, or is none that could.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No ticket has this secret.
    #[error("the ticket is unknown to this cluster: ask an owner for another one")]
    Unknown,
    /// It expired.
    #[error("ticket {ticket} expired at {at}: ask an owner for another one")]
    Expired {
        /// Its name.
        ticket: TicketId,
        /// When.
        at: Timestamp,
    },
    /// It was revoked.
    #[error("ticket {ticket} was revoked at {at}: ask an owner for another one")]
    Revoked {
        /// Its name.
        ticket: TicketId,
        /// When.
        at: Timestamp,
    },
    /// So many nodes have registered with it as may.
    #[error(
        "ticket {ticket} is used up, {uses} other nodes have registered with it: ask an owner for another one"
    )]
    UsedUp {
        /// Its name.
        ticket: TicketId,
        /// How many.
        uses: u32,
    },
    /// Nobody could use such a ticket.
    #[error("no ticket was made: {0}")]
    Useless(String),
}

impl Refusal {
    /// The code it is answered with.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Useless(_) => Code::InvalidArgument,
            _ => Code::PermissionDenied,
        }
    }
}

impl Ticket {
    /// Makes a ticket at `now`.
    pub fn new(secret: &Secret, wanted: Wanted, now: Timestamp) -> Result<Self, Refusal> {
        if wanted.lifetime.is_zero() {
            return Err(Refusal::Useless("it would expire at once; say how long it is good for".to_owned()));
        }
        if wanted.uses == Some(0) {
            return Err(Refusal::Useless(
                "it would be good for no node; leave uses out for any number".to_owned(),
            ));
        }
        if let Some(uses) = wanted.uses.filter(|uses| *uses > MOST_USES) {
            let sentence =
                format!("it would count {uses} nodes, and {MOST_USES} can be counted; leave uses out");
            return Err(Refusal::Useless(sentence));
        }
        if wanted.purpose.len() > LONGEST_PURPOSE {
            let length = wanted.purpose.len();
            let sentence = format!("its purpose has {length} bytes, and {LONGEST_PURPOSE} are enough");
            return Err(Refusal::Useless(sentence));
        }
        Ok(Self {
            hash: secret.sha256(),
            created_at: now,
            created_by: wanted.created_by,
            expires_at: after(now, wanted.lifetime),
            revoked_at: None,
            uses: wanted.uses,
            used_by: BTreeSet::new(),
            purpose: wanted.purpose,
        })
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> TicketId {
        TicketId::of(&self.hash)
    }

    /// The ticket as it is to be kept once `node` has registered with `secret` at `now`.
    ///
    /// `registered` is whether the node's record says that it did so before. The result goes into the
    /// transaction that writes the record, or a ticket could be used more often than it says.
    pub fn redeem(
        &self,
        secret: &Secret,
        node: NodeId,
        registered: bool,
        now: Timestamp,
    ) -> Result<Self, Refusal> {
        if !same(&self.hash, &secret.sha256()) {
            return Err(Refusal::Unknown);
        }
        let ticket = self.id();
        if let Some(at) = self.revoked_at {
            return Err(Refusal::Revoked { ticket, at });
        }
        if registered || self.used_by.contains(&node) && now < self.expires_at {
            return Ok(self.clone());
        }
        if now >= self.expires_at {
            return Err(Refusal::Expired { ticket, at: self.expires_at });
        }
        let mut redeemed = self.clone();
        if let Some(uses) = self.uses {
            if self.used_by.len() >= uses as usize {
                return Err(Refusal::UsedUp { ticket, uses });
            }
            redeemed.used_by.insert(node);
        }
        Ok(redeemed)
    }

    /// The ticket once it is revoked; one that was revoked before keeps its time.
    #[must_use]
    pub fn revoked(mut self, now: Timestamp) -> Self {
        self.revoked_at.get_or_insert(now);
        self
    }

    /// As owners see it.
    #[must_use]
    pub fn to_wire(&self) -> wire::Ticket {
        wire::Ticket {
            ticket_id: self.id().to_string(),
            created_at_ms: self.created_at.timestamp_millis(),
            created_by: self.created_by.clone(),
            expires_at_ms: self.expires_at.timestamp_millis(),
            revoked_at_ms: self.revoked_at.map(|at| at.timestamp_millis()),
            uses: self.uses,
            used_by: self.used_by.iter().map(ToString::to_string).collect(),
            purpose: self.purpose.clone(),
        }
    }

    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        wire::TicketRecord {
            format: record::FORMAT,
            secret_sha256: self.hash.to_vec(),
            created_at_ms: self.created_at.timestamp_millis(),
            created_by: self.created_by.clone(),
            expires_at_ms: self.expires_at.timestamp_millis(),
            revoked_at_ms: self.revoked_at.map(|at| at.timestamp_millis()),
            uses: self.uses,
            used_by: self.used_by.iter().map(ToString::to_string).collect(),
            purpose: self.purpose.clone(),
        }
        .encode_to_vec()
    }

    /// Reads what is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let id = TICKETS.id(key).map_err(|error| fault(error.to_string()))?;
        let record = record::decode(key, bytes, |record: &wire::TicketRecord| record.format)?;
        let hash: [u8; 32] =
            record.secret_sha256.as_slice().try_into().map_err(|_| {
                fault(format!("its hash has {} bytes and not 32", record.secret_sha256.len()))
            })?;
        let used_by = record
            .used_by
            .iter()
            .map(|node| node.parse::<NodeId>().map_err(|error| RecordError::new(key, error.to_string())));
        let ticket = Self {
            hash,
            created_at: moment("created_at", record.created_at_ms).map_err(fault)?,
            created_by: record.created_by,
            expires_at: moment("expires_at", record.expires_at_ms).map_err(fault)?,
            revoked_at: record.revoked_at_ms.map(|at| moment("revoked_at", at)).transpose().map_err(fault)?,
            uses: record.uses,
            used_by: used_by.collect::<Result<_, _>>()?,
            purpose: record.purpose,
        };
        if ticket.id().to_string() == id {
            Ok(ticket)
        } else {
            Err(fault(format!("it is that of {}", ticket.id())))
        }
    }
}

/// Compares in a time that does not tell where two hashes differ.
fn same(one: &[u8; 32], other: &[u8; 32]) -> bool {
    let difference = one.iter().zip(other).fold(0, |difference, (one, other)| difference | (one ^ other));
    // Without it, the compiler may leave the loop at the first difference.
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::node::tests::at;
    use crate::curator::node_id::tests::node_id;

    const SECRET: Secret = Secret::new([7; 32]);

    fn ticket(uses: Option<u32>) -> Ticket {
        let wanted = Wanted {
            created_by: "kim".to_owned(),
            lifetime: Duration::from_secs(100),
            uses,
            purpose: "row 7".to_owned(),
        };
        Ticket::new(&SECRET, wanted, at(0)).unwrap()
    }

    #[test]
    fn ticket_lets_in_whoever_has_it_until_it_expires() {
        let ticket = ticket(None);
        assert_eq!(ticket.redeem(&SECRET, node_id(1), false, at(99)).unwrap(), ticket, "nothing is counted");
        let refusal = ticket.redeem(&SECRET, node_id(1), false, at(100)).unwrap_err();
        assert_eq!(refusal, Refusal::Expired { ticket: ticket.id(), at: at(100) });
        assert_eq!(refusal.code(), Code::PermissionDenied);
    }

    #[test]
    fn another_secret_is_refused_wherever_it_differs() {
        let ticket = ticket(None);
        for place in 0..32 {
            let mut bytes = *SECRET.reveal();
            bytes[place] ^= 1;
            let refusal = ticket.redeem(&Secret::new(bytes), node_id(1), true, at(1)).unwrap_err();
            assert_eq!(refusal, Refusal::Unknown, "byte {place}");
        }
    }

    #[test]
    fn hashes_are_the_same_only_in_every_byte() {
        for place in 0..32 {
            let mut other = [9; 32];
            other[place] ^= 0x80;
            assert!(!same(&[9; 32], &other), "byte {place}");
        }
        assert!(same(&[9; 32], &[9; 32]));
    }

    #[test]
    fn counted_ticket_lets_in_so_many_nodes_and_each_as_often_as_it_asks() {
        let once = ticket(Some(2)).redeem(&SECRET, node_id(1), false, at(1)).unwrap();
        let again = once.redeem(&SECRET, node_id(1), false, at(2)).unwrap();
        assert_eq!(again, once, "the same node is no second use");
        let twice = again.redeem(&SECRET, node_id(2), false, at(3)).unwrap();
        let refusal = twice.redeem(&SECRET, node_id(3), false, at(4)).unwrap_err();
        assert_eq!(refusal, Refusal::UsedUp { ticket: twice.id(), uses: 2 });
        assert!(twice.redeem(&SECRET, node_id(1), false, at(5)).is_ok());
    }

    #[test]
    fn node_that_is_registered_hears_so_after_the_ticket_is_over() {
        let full = ticket(Some(1)).redeem(&SECRET, node_id(1), false, at(1)).unwrap();
        assert_eq!(full.redeem(&SECRET, node_id(1), true, at(200)).unwrap(), full);
        // One whose record is gone comes anew.
        assert!(full.redeem(&SECRET, node_id(1), false, at(200)).is_err());
    }

    #[test]
    fn revoked_ticket_is_good_for_nothing() {
        let revoked = ticket(None).revoked(at(5));
        for registered in [false, true] {
            let refusal = revoked.redeem(&SECRET, node_id(1), registered, at(6)).unwrap_err();
            assert_eq!(refusal, Refusal::Revoked { ticket: revoked.id(), at: at(5) });
        }
        assert_eq!(revoked.clone().revoked(at(9)), revoked, "it keeps its time");
    }

    #[test]
    fn ticket_that_nobody_could_use_is_not_made() {
        let good = Wanted {
            created_by: String::new(),
            lifetime: Duration::from_secs(1),
            uses: None,
            purpose: String::new(),
        };
        for wanted in [
            Wanted { lifetime: Duration::ZERO, ..good.clone() },
            Wanted { uses: Some(0), ..good.clone() },
            Wanted { uses: Some(10_001), ..good.clone() },
            Wanted { purpose: "p".repeat(201), ..good.clone() },
        ] {
            assert_eq!(Ticket::new(&SECRET, wanted, at(0)).unwrap_err().code(), Code::InvalidArgument);
        }
        assert!(Ticket::new(&SECRET, good, at(0)).is_ok());
    }

    #[test]
    fn secret_is_in_no_record_and_in_no_text() {
        let ticket = ticket(Some(1));
        assert!(!ticket.encode().windows(32).any(|window| window == SECRET.reveal()));
        assert_eq!(format!("{SECRET:?}"), "Secret(…)");
        assert_eq!(SECRET.id(), ticket.id());
        let error = hex::encode(SECRET.reveal()).parse::<TicketId>().unwrap_err().to_string();
        assert!(!error.contains(&hex::encode([7; 8])), "{error}");
        assert!(Secret::from_slice(&[7; 31]).unwrap_err().contains("31 bytes"));
    }

    #[test]
    fn record_reads_back_as_it_was_written_and_only_under_its_key() {
        let ticket = ticket(Some(3)).redeem(&SECRET, node_id(1), false, at(1)).unwrap().revoked(at(2));
        let key = TICKETS.key(ticket.id()).unwrap();
        assert_eq!(Ticket::decode(&key, &ticket.encode()).unwrap(), ticket);
        let error = Ticket::decode(&TICKETS.key("0011223344556677").unwrap(), &ticket.encode()).unwrap_err();
        assert!(error.to_string().contains("it is that of"), "{error}");
        let mut record = wire::TicketRecord::decode(ticket.encode().as_slice()).unwrap();
        record.secret_sha256.pop();
        let error = Ticket::decode(&key, &record.encode_to_vec()).unwrap_err();
        assert!(error.to_string().contains("31 bytes"), "{error}");
    }
}
