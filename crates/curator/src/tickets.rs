//! Registration tickets: create, redeem, revoke.
//!
//! A ticket is 32 random bytes. A machine that has them may register, until the ticket expires, is used up, or is
//! revoked. The cluster stores a hash alone, so a snapshot of etcd admits nobody. The first bytes of the hash are the
//! ticket's id: they find the record, and the whole hash is then compared in constant time.
//!
//! A node that lost the response registers again with the same key and the same ticket. That is no second use. It is
//! granted even if the ticket has expired or was used up since, because the node is registered and only needs the
//! response. A revoked ticket is worth nothing at all, because it may be in wrong hands.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use curator_client::node_id::NodeId;
use curator_client::ticket_id::TicketId;
use etcd::key_space::TICKETS;
use etcd::record::{self, RecordError};
use model::time::{Timestamp, after, parse_timestamp};
use prost::Message as _;
use proto::curator::v1 as wire;
use ring::digest::{SHA256, digest};
use tonic::Code;

/// Longest purpose of a ticket, in bytes.
const MAX_PURPOSE_BYTES: usize = 200;
/// Most nodes that a ticket with counted uses may admit; the ticket's record lists each of them.
const MAX_COUNTED_USES: u32 = 10_000;

/// The secret of a ticket. Its `Debug` reveals nothing of it.
#[derive(Clone, PartialEq, Eq)]
pub struct TicketSecret([u8; 32]);

impl TicketSecret {
    /// Takes 32 random bytes.
    #[must_use]
    pub const fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// Takes the bytes that a machine offers; the error is a sentence and reveals nothing of them.
    pub fn from_slice(bytes: &[u8]) -> Result<Self, String> {
        let bytes = bytes.try_into().map_err(|_| {
            format!("the ticket has {} bytes, and tickets have 32: give all of it", bytes.len())
        })?;
        Ok(Self(bytes))
    }

    /// The secret bytes, to be shown to the owner once.
    #[must_use]
    pub const fn reveal(&self) -> &[u8; 32] {
        &self.0
    }

    /// The id of the ticket that this secret would belong to.
    #[must_use]
    pub fn id(&self) -> TicketId {
        TicketId::from_hash(&self.sha256())
    }

    fn sha256(&self) -> [u8; 32] {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, &self.0).as_ref());
        hash
    }
}

impl fmt::Debug for TicketSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TicketSecret(…)")
    }
}

/// The record of a ticket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ticket {
    hash: [u8; 32],
    /// When it was created.
    pub created_at: Timestamp,
    /// The owner who created it.
    pub created_by: String,
    /// From when on it is rejected.
    pub expires_at: Timestamp,
    /// When it was revoked; `None` if it was not.
    pub revoked_at: Option<Timestamp>,
    /// How many different nodes may register with it; `None` for any number.
    pub uses: Option<u32>,
    /// Nodes that registered with it; recorded only if uses are counted.
    pub used_by: BTreeSet<NodeId>,
    /// What it is for, as its creator described it.
    pub purpose: String,
}

/// The properties of a new ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketRequest {
    /// The owner who creates it.
    pub created_by: String,
    /// Time from creation to expiry; more than zero.
    pub lifetime: Duration,
    /// How many different nodes may register with it; `None` for any number.
    pub uses: Option<u32>,
    /// What it is for; 200 bytes at the most.
    pub purpose: String,
}

/// Why a ticket is rejected, or cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// No ticket has this secret.
    #[error("the ticket is unknown to this cluster: ask an owner for another one")]
    Unknown,
    /// The ticket has expired.
    #[error("ticket {ticket} expired at {at}: ask an owner for another one")]
    Expired {
        /// Id of the ticket.
        ticket: TicketId,
        /// The time of its expiry.
        at: Timestamp,
    },
    /// The ticket was revoked.
    #[error("ticket {ticket} was revoked at {at}: ask an owner for another one")]
    Revoked {
        /// Id of the ticket.
        ticket: TicketId,
        /// When it was revoked.
        at: Timestamp,
    },
    /// As many nodes have registered with it as are allowed.
    #[error(
        "ticket {ticket} is used up, {uses} other nodes have registered with it: ask an owner for another one"
    )]
    UsedUp {
        /// Id of the ticket.
        ticket: TicketId,
        /// How many nodes it admits.
        uses: u32,
    },
    /// The properties are invalid; the text names them.
    #[error("no ticket was made: {0}")]
    InvalidRequest(String),
}

impl TicketError {
    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::InvalidRequest(_) => Code::InvalidArgument,
            _ => Code::PermissionDenied,
        }
    }
}

impl Ticket {
    /// Creates a ticket at `now`.
    pub fn new(secret: &TicketSecret, wanted: TicketRequest, now: Timestamp) -> Result<Self, TicketError> {
        if wanted.lifetime.is_zero() {
            return Err(TicketError::InvalidRequest(
                "it would expire at once; give the time for which it is valid".to_owned(),
            ));
        }
        if wanted.uses == Some(0) {
            return Err(TicketError::InvalidRequest(
                "no node could use it; omit uses to allow any number of nodes".to_owned(),
            ));
        }
        if let Some(uses) = wanted.uses.filter(|uses| *uses > MAX_COUNTED_USES) {
            let sentence = format!(
                "uses is {uses}, and {MAX_COUNTED_USES} is the maximum; omit it to allow any number of nodes"
            );
            return Err(TicketError::InvalidRequest(sentence));
        }
        if wanted.purpose.len() > MAX_PURPOSE_BYTES {
            let length = wanted.purpose.len();
            let sentence = format!("its purpose has {length} bytes, and {MAX_PURPOSE_BYTES} are enough");
            return Err(TicketError::InvalidRequest(sentence));
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

    /// The id of the ticket.
    #[must_use]
    pub fn id(&self) -> TicketId {
        TicketId::from_hash(&self.hash)
    }

    /// The ticket to store once `node` has registered with `secret` at `now`.
    ///
    /// `registered`: whether the node's record shows that it registered with this ticket before. The result must be
    /// written in the same transaction as the node's record; otherwise a ticket could be used more often than it
    /// allows.
    pub fn redeem(
        &self,
        secret: &TicketSecret,
        node: NodeId,
        registered: bool,
        now: Timestamp,
    ) -> Result<Self, TicketError> {
        if !constant_time_eq(&self.hash, &secret.sha256()) {
            return Err(TicketError::Unknown);
        }
        let ticket = self.id();
        if let Some(at) = self.revoked_at {
            return Err(TicketError::Revoked { ticket, at });
        }
        if registered || self.used_by.contains(&node) && now < self.expires_at {
            return Ok(self.clone());
        }
        if now >= self.expires_at {
            return Err(TicketError::Expired { ticket, at: self.expires_at });
        }
        let mut redeemed = self.clone();
        if let Some(uses) = self.uses {
            if self.used_by.len() >= uses as usize {
                return Err(TicketError::UsedUp { ticket, uses });
            }
            redeemed.used_by.insert(node);
        }
        Ok(redeemed)
    }

    /// The ticket, revoked at `now`; if it was revoked before, it keeps the former time.
    #[must_use]
    pub fn into_revoked(mut self, now: Timestamp) -> Self {
        self.revoked_at.get_or_insert(now);
        self
    }

    /// The ticket as the API shows it to owners.
    #[must_use]
    pub fn to_wire(&self) -> wire::Ticket {
        wire::Ticket {
            ticket_id: self.id().to_string(),
            created_at_ms: self.created_at.timestamp_millis(),
            created_by: self.created_by.clone(),
            expires_at_ms: self.expires_at.timestamp_millis(),
            revoked_at_ms: self.revoked_at.map(|at| at.timestamp_millis()),
            max_uses: self.uses,
            used_by: self.used_by.iter().map(ToString::to_string).collect(),
            purpose: self.purpose.clone(),
        }
    }

    /// Encodes the record for etcd.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        wire::TicketRecord {
            format: record::FORMAT,
            secret_sha256: self.hash.to_vec(),
            created_at_ms: self.created_at.timestamp_millis(),
            created_by: self.created_by.clone(),
            expires_at_ms: self.expires_at.timestamp_millis(),
            revoked_at_ms: self.revoked_at.map(|at| at.timestamp_millis()),
            max_uses: self.uses,
            used_by: self.used_by.iter().map(ToString::to_string).collect(),
            purpose: self.purpose.clone(),
        }
        .encode_to_vec()
    }

    /// Decodes the record that is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let id = TICKETS.id_of(key).map_err(|error| fault(error.to_string()))?;
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
            created_at: parse_timestamp("created_at", record.created_at_ms).map_err(fault)?,
            created_by: record.created_by,
            expires_at: parse_timestamp("expires_at", record.expires_at_ms).map_err(fault)?,
            revoked_at: record
                .revoked_at_ms
                .map(|at| parse_timestamp("revoked_at", at))
                .transpose()
                .map_err(fault)?,
            uses: record.max_uses,
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

/// Compares in a time that does not reveal where two hashes differ.
fn constant_time_eq(one: &[u8; 32], other: &[u8; 32]) -> bool {
    let difference = one.iter().zip(other).fold(0, |difference, (one, other)| difference | (one ^ other));
    // Otherwise the compiler may end the loop at the first difference.
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{at, node_id};

    use super::*;

    const SECRET: TicketSecret = TicketSecret::new([7; 32]);

    fn ticket(uses: Option<u32>) -> Ticket {
        let wanted = TicketRequest {
            created_by: "kim".to_owned(),
            lifetime: Duration::from_secs(100),
            uses,
            purpose: "row 7".to_owned(),
        };
        Ticket::new(&SECRET, wanted, at(0)).unwrap()
    }

    #[test]
    fn ticket_admits_its_holder_until_it_expires() {
        let ticket = ticket(None);
        assert_eq!(ticket.redeem(&SECRET, node_id(1), false, at(99)).unwrap(), ticket, "nothing is counted");
        let refusal = ticket.redeem(&SECRET, node_id(1), false, at(100)).unwrap_err();
        assert_eq!(refusal, TicketError::Expired { ticket: ticket.id(), at: at(100) });
        assert_eq!(refusal.code(), Code::PermissionDenied);
    }

    #[test]
    fn another_secret_is_refused_wherever_it_differs() {
        let ticket = ticket(None);
        for place in 0..32 {
            let mut bytes = *SECRET.reveal();
            bytes[place] ^= 1;
            let refusal = ticket.redeem(&TicketSecret::new(bytes), node_id(1), true, at(1)).unwrap_err();
            assert_eq!(refusal, TicketError::Unknown, "byte {place}");
        }
    }

    #[test]
    fn hashes_are_equal_only_in_every_byte() {
        for place in 0..32 {
            let mut other = [9; 32];
            other[place] ^= 0x80;
            assert!(!constant_time_eq(&[9; 32], &other), "byte {place}");
        }
        assert!(constant_time_eq(&[9; 32], &[9; 32]));
    }

    #[test]
    fn counted_ticket_admits_that_many_nodes_any_number_of_times() {
        let once = ticket(Some(2)).redeem(&SECRET, node_id(1), false, at(1)).unwrap();
        let again = once.redeem(&SECRET, node_id(1), false, at(2)).unwrap();
        assert_eq!(again, once, "the same node is no second use");
        let twice = again.redeem(&SECRET, node_id(2), false, at(3)).unwrap();
        let refusal = twice.redeem(&SECRET, node_id(3), false, at(4)).unwrap_err();
        assert_eq!(refusal, TicketError::UsedUp { ticket: twice.id(), uses: 2 });
        assert!(twice.redeem(&SECRET, node_id(1), false, at(5)).is_ok());
    }

    #[test]
    fn registered_node_is_confirmed_after_the_ticket_expired() {
        let full = ticket(Some(1)).redeem(&SECRET, node_id(1), false, at(1)).unwrap();
        assert_eq!(full.redeem(&SECRET, node_id(1), true, at(200)).unwrap(), full);
        // A node whose record was deleted registers as a new one.
        assert!(full.redeem(&SECRET, node_id(1), false, at(200)).is_err());
    }

    #[test]
    fn revoked_ticket_admits_nobody() {
        let revoked = ticket(None).into_revoked(at(5));
        for registered in [false, true] {
            let refusal = revoked.redeem(&SECRET, node_id(1), registered, at(6)).unwrap_err();
            assert_eq!(refusal, TicketError::Revoked { ticket: revoked.id(), at: at(5) });
        }
        assert_eq!(revoked.clone().into_revoked(at(9)), revoked, "it keeps its time");
    }

    #[test]
    fn unusable_ticket_is_not_created() {
        let good = TicketRequest {
            created_by: String::new(),
            lifetime: Duration::from_secs(1),
            uses: None,
            purpose: String::new(),
        };
        for wanted in [
            TicketRequest { lifetime: Duration::ZERO, ..good.clone() },
            TicketRequest { uses: Some(0), ..good.clone() },
            TicketRequest { uses: Some(10_001), ..good.clone() },
            TicketRequest { purpose: "p".repeat(201), ..good.clone() },
        ] {
            assert_eq!(Ticket::new(&SECRET, wanted, at(0)).unwrap_err().code(), Code::InvalidArgument);
        }
        assert!(Ticket::new(&SECRET, good, at(0)).is_ok());
    }

    #[test]
    fn secret_is_not_stored_and_not_printed() {
        let ticket = ticket(Some(1));
        assert!(!ticket.encode().windows(32).any(|window| window == SECRET.reveal()));
        assert_eq!(format!("{SECRET:?}"), "TicketSecret(…)");
        assert_eq!(SECRET.id(), ticket.id());
        let error = hex::encode(SECRET.reveal()).parse::<TicketId>().unwrap_err().to_string();
        assert!(!error.contains(&hex::encode([7; 8])), "{error}");
        assert!(TicketSecret::from_slice(&[7; 31]).unwrap_err().contains("31 bytes"));
    }

    #[test]
    fn record_round_trips_under_its_own_key_only() {
        let ticket = ticket(Some(3)).redeem(&SECRET, node_id(1), false, at(1)).unwrap().into_revoked(at(2));
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
