//! The statement of a cluster's authority: epoch, trusted authorities and revoked curators, signed and numbered.
//!
//! Curators serve the newest statement to everybody, and its signature alone proves it. So it may come from any node,
//! over any connection. Nodes and shepherds store the newest one that they have verified. From then on they follow only
//! a node that shows the certificate of a curator which the statement does not list as revoked.
//!
//! # Order
//!
//! Statements are ordered by epoch and then by number. A cluster that was restored from a snapshot continues with a
//! number that may be lower than one of before, and with a higher epoch. A lower statement than the stored one is
//! rejected, and so are two different ones of one order: the authority signs one statement under each number.
//!
//! # Authorities
//!
//! While an authority is replaced, certificates of two of them count. Statements are signed by the first one, and later
//! by an authority that it named as its successor ([`succession`](crate::succession)).
//!
//! # Time
//!
//! The certificate of a curator lives for [`CURATOR_LIFETIME`]. So the list of revoked ones stays short, and a statement
//! that is older than that proves nothing about the present curators: it is stale, and no curator is followed until a
//! newer statement arrives. The leader signs it again each [`STATEMENT_REFRESH`].
//!
//! A leader whose clock is fast by up to [`MAX_CLOCK_DIFFERENCE`] keeps leading, so its statements count at once: each of
//! them may revoke somebody. One that was signed that far ahead is stale that much later.
//!
//! Everything here is pure. Storing and sharing the newest statement is the task of
//! [`statement_trust`](crate::statement_trust).

use std::collections::BTreeMap;
use std::time::Duration;

use model::cluster::restore::MAX_EPOCH_LEAD;
use model::time::{Timestamp, after};
use prost::Message as _;
use proto::curator::v1 as wire;
use ring::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};
use uuid::Uuid;

use crate::certificate::Serial;
use crate::clock::MAX_CLOCK_DIFFERENCE;
use crate::node_id::PublicKey;
use crate::pki::{Authority, CURATOR_LIFETIME, PkiError, TrustAnchor};
use crate::succession::{SuccessionPath, find_path};

/// How often the leader signs an unchanged statement again.
pub const STATEMENT_REFRESH: Duration = Duration::from_hours(1);

/// The format of statements that this program knows.
const FORMAT: u32 = 1;
/// Precedes the signed bytes, so that a signature of the authority never counts for anything else.
const CONTEXT: &[u8] = b"shepherd cluster statement\0";
/// Most authorities in a statement: the one that signs, and another one while the authority is replaced.
const MAX_AUTHORITIES: usize = 2;
/// Most revoked certificates in a statement.
const MAX_REVOKED: usize = 4096;
/// Longest encoded statement that is decoded, in bytes. The largest valid one has about 130 KiB.
const MAX_ENCODED_BYTES: usize = 256 << 10;

/// What the authority of a cluster states about the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Id of the cluster.
    pub cluster: Uuid,
    /// Number of restorations of the cluster from a snapshot.
    pub epoch: u64,
    /// Number of the statement. The first one has 1.
    pub number: u64,
    /// When the statement was signed. Whole milliseconds are signed.
    pub issued_at: Timestamp,
    /// Trusted authorities. The first one signs.
    pub authorities: Vec<TrustAnchor>,
    /// Certificates of curators that are rejected, with the expiry of each.
    pub revoked: BTreeMap<Serial, Timestamp>,
}

/// A statement with a verified signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedStatement {
    /// What the authority states, as the signature proves it.
    pub statement: Statement,
    encoded: Vec<u8>,
    signature: Vec<u8>,
    /// Encoded successions from the authority that is trusted here to the one that signed, oldest first.
    successors: Vec<Vec<u8>>,
}

/// Why a statement is not signed, not accepted, or not enough.
#[derive(Debug, thiserror::Error)]
pub enum StatementError {
    /// The statement is malformed; the text describes the fault.
    #[error("the statement of the cluster's authority is malformed: {0}")]
    Malformed(&'static str),
    /// No trusted authority made the signature.
    #[error("the signature of the cluster's statement is wrong: no authority of the cluster made it")]
    BadSignature,
    /// An authority signed the statement that is not trusted any more, or not yet.
    #[error(
        "an authority signed the cluster's statement that is not trusted: it is retired, or it is unknown here"
    )]
    RetiredAuthority,
    /// The statement is about another cluster.
    #[error("the statement is about cluster {found}, and this is cluster {expected}: is the address right?")]
    OtherCluster {
        /// Id of the cluster that was expected.
        expected: Uuid,
        /// Id of the cluster in the statement.
        found: Uuid,
    },
    /// A higher statement or epoch is known.
    #[error(
        "statement {} of epoch {} is lower than what is known here: epoch {}, number {}",
        .offered.1, .offered.0, .known.0, .known.1
    )]
    Lower {
        /// Epoch and number of the offered statement.
        offered: (u64, u64),
        /// Epoch and number that are known. The number is 0 if only the epoch is.
        known: (u64, u64),
    },
    /// Another statement of the same order is known.
    #[error(
        "there are two different statements with number {number} of epoch {epoch}: report this, and replace the \
         cluster's authority"
    )]
    Conflicting {
        /// The epoch that both of them name.
        epoch: u64,
        /// The number that both of them have.
        number: u64,
    },
    /// The statement was signed in the future.
    #[error(
        "the statement of the cluster was signed at {issued_at}, and it is {now} here: is one of the two clocks wrong?"
    )]
    FromTheFuture {
        /// When it was signed.
        issued_at: Timestamp,
        /// The time by the clock of this side.
        now: Timestamp,
    },
    /// The epoch is too far ahead.
    #[error("epoch {offered} of the statement is too far beyond {known}, the highest known one")]
    EpochTooFar {
        /// Epoch of the statement.
        offered: u64,
        /// The highest proved epoch.
        known: u64,
    },
    /// The newest statement is older than a curator's certificate lives.
    #[error(
        "the newest statement of the cluster is of {issued_at}, older than a day: no curator is followed until one sends \
         a newer one. If a curator leads, its clock or the one here may be wrong"
    )]
    Stale {
        /// When it was signed.
        issued_at: Timestamp,
    },
    /// The statement would list too many certificates.
    #[error("the statement would list {0} revoked certificates of curators, and {max} fit", max = MAX_REVOKED)]
    TooLong(usize),
    /// The statement could not be stored; the text is a sentence.
    #[error("the new statement of the cluster could not be stored: {0}")]
    NotPersisted(String),
    /// The stored statement cannot be read; the text is a sentence that names the way back.
    #[error("no curator is followed, because the stored statement of the cluster cannot be read: {0}")]
    Unreadable(String),
    /// The authority's key or certificate cannot be used.
    #[error(transparent)]
    Pki(#[from] PkiError),
}

impl Statement {
    /// Signs the statement. The authority must be the first one of the statement.
    pub fn sign(&self, authority: &Authority) -> Result<SignedStatement, StatementError> {
        if self.revoked.len() > MAX_REVOKED {
            return Err(StatementError::TooLong(self.revoked.len()));
        }
        if self.authorities.first() != Some(authority.anchor()) {
            return Err(StatementError::Malformed("its first authority is not the one that signs"));
        }
        let encoded = self.to_wire().encode_to_vec();
        // Read back what is signed: moments are rounded to milliseconds, and nobody may sign what nobody accepts.
        let statement = Self::decode(&encoded)?;
        let key = Ed25519KeyPair::from_pkcs8_maybe_unchecked(authority.pkcs8())
            .map_err(|_| PkiError::InvalidKey)?;
        let signature = key.sign(&signed_bytes(&encoded)).as_ref().to_vec();
        Ok(SignedStatement { statement, encoded, signature, successors: Vec::new() })
    }

    /// The place of the statement among all statements of the cluster: epoch and number.
    #[must_use]
    pub const fn order(&self) -> (u64, u64) {
        (self.epoch, self.number)
    }

    /// Whether the statement is younger than a curator's certificate lives.
    #[must_use]
    pub fn is_fresh(&self, now: Timestamp) -> bool {
        now < after(self.issued_at, CURATOR_LIFETIME)
    }

    /// Whether connections that were checked by the statement of before must be checked again.
    ///
    /// `None`: they were checked by no statement, and any node of the cluster could be at the other end.
    #[must_use]
    pub fn ends_connections_of(&self, before: Option<&Self>) -> bool {
        let Some(before) = before else { return true };
        self.epoch != before.epoch
            || self.authorities != before.authorities
            || self.revoked.keys().any(|serial| !before.revoked.contains_key(serial))
    }

    fn to_wire(&self) -> wire::Statement {
        let revoked = self.revoked.iter().map(|(serial, expires_at)| wire::RevokedCurator {
            serial: serial.as_bytes().to_vec(),
            expires_at_ms: expires_at.timestamp_millis(),
        });
        wire::Statement {
            format: FORMAT,
            cluster_id: self.cluster.to_string(),
            epoch: self.epoch,
            number: self.number,
            issued_at_ms: self.issued_at.timestamp_millis(),
            authorities: self.authorities.iter().map(|authority| authority.certificate.clone()).collect(),
            revoked: revoked.collect(),
        }
    }

    fn decode(encoded: &[u8]) -> Result<Self, StatementError> {
        let malformed = StatementError::Malformed;
        if encoded.len() > MAX_ENCODED_BYTES {
            return Err(malformed("it is longer than 256 KiB"));
        }
        let decoded = wire::Statement::decode(encoded).map_err(|_| malformed("it cannot be decoded"))?;
        if decoded.format != FORMAT {
            return Err(malformed("this program does not know its format: update this program"));
        }
        let cluster: Uuid = decoded.cluster_id.parse().map_err(|_| malformed("it names no cluster"))?;
        if decoded.number == 0 {
            return Err(malformed("it has no number"));
        }
        let issued_at = parse_moment(decoded.issued_at_ms, "its time is out of range")?;
        if decoded.authorities.is_empty() || decoded.authorities.len() > MAX_AUTHORITIES {
            return Err(malformed("it has neither one authority nor two"));
        }
        let authorities: Vec<TrustAnchor> =
            decoded.authorities.iter().map(|der| TrustAnchor::parse(der)).collect::<Result<_, _>>()?;
        if authorities.iter().any(|authority| authority.cluster != cluster) {
            return Err(malformed("one of its authorities is that of another cluster"));
        }
        if decoded.revoked.len() > MAX_REVOKED {
            return Err(StatementError::TooLong(decoded.revoked.len()));
        }
        let mut revoked = BTreeMap::new();
        for entry in &decoded.revoked {
            let serial = Serial::from_certificate(&entry.serial)
                .ok_or(malformed("one of its serial numbers is none of a cluster"))?;
            if revoked.last_key_value().is_some_and(|(last, _)| *last >= serial) {
                return Err(malformed("its serial numbers are not in order"));
            }
            revoked.insert(serial, parse_moment(entry.expires_at_ms, "one of its ends is out of range")?);
        }
        Ok(Self { cluster, epoch: decoded.epoch, number: decoded.number, issued_at, authorities, revoked })
    }
}

impl SignedStatement {
    /// Verifies a statement. One of these authorities must have signed it, or one of their successors.
    pub fn verify(wire: &wire::SignedStatement, anchors: &[TrustAnchor]) -> Result<Self, StatementError> {
        let made_signature = |key: &PublicKey| {
            UnparsedPublicKey::new(&ED25519, &key.0)
                .verify(&signed_bytes(&wire.statement), &wire.signature)
                .is_ok()
        };
        let path = find_path(anchors, &wire.successors, |anchor| made_signature(&anchor.key));
        let Some(SuccessionPath { end: signer, successions: successors }) = path else {
            let named = Statement::decode(&wire.statement).ok();
            let named = named.and_then(|statement| statement.authorities.into_iter().next());
            let named = named.filter(|authority| made_signature(&authority.key));
            return Err(match (named, anchors.first()) {
                (Some(named), Some(trusted)) if named.cluster != trusted.cluster => {
                    StatementError::OtherCluster { expected: trusted.cluster, found: named.cluster }
                }
                (Some(_), _) => StatementError::RetiredAuthority,
                (None, _) => StatementError::BadSignature,
            });
        };
        let statement = Statement::decode(&wire.statement)?;
        if statement.cluster != signer.cluster {
            return Err(StatementError::OtherCluster { expected: signer.cluster, found: statement.cluster });
        }
        if statement.authorities.first().is_none_or(|first| first.key != signer.key) {
            return Err(StatementError::Malformed("its first authority is not the one that signed it"));
        }
        Ok(Self { statement, encoded: wire.statement.clone(), signature: wire.signature.clone(), successors })
    }

    /// The statement with these successions, which lead to its authority.
    #[must_use]
    pub fn with_successors(self, successors: Vec<Vec<u8>>) -> Self {
        Self { successors, ..self }
    }

    /// How many successions lead from the authority that is trusted here to the one that signed.
    #[must_use]
    pub const fn succession_count(&self) -> usize {
        self.successors.len()
    }

    /// The statement, verified by the first authority of `former`, as one that the authority behind `former` verifies.
    pub(super) fn continuing(self, former: &Self) -> Self {
        let successors = former.successors.iter().chain(&self.successors).cloned().collect();
        self.with_successors(successors)
    }

    /// The statement as it is sent and stored.
    #[must_use]
    pub fn to_wire(&self) -> wire::SignedStatement {
        wire::SignedStatement {
            statement: self.encoded.clone(),
            signature: self.signature.clone(),
            successors: self.successors.clone(),
        }
    }
}

/// Decides about a verified statement. `true`: it replaces the stored one. `false`: it is the stored one.
///
/// `epoch` is the highest epoch that an order or a statement has proved. One that nodes have only reported does not count:
/// any of them could keep the first statement away with it.
pub fn accept_statement(
    stored: Option<&Statement>,
    epoch: u64,
    offered: &Statement,
    now: Timestamp,
) -> Result<bool, StatementError> {
    if let Some(stored) = stored {
        if offered.cluster != stored.cluster {
            return Err(StatementError::OtherCluster { expected: stored.cluster, found: offered.cluster });
        }
        if offered == stored {
            return Ok(false);
        }
        if offered.order() == stored.order() {
            return Err(StatementError::Conflicting { epoch: offered.epoch, number: offered.number });
        }
        if offered.order() < stored.order() {
            return Err(StatementError::Lower { offered: offered.order(), known: stored.order() });
        }
    }
    if offered.epoch < epoch {
        return Err(StatementError::Lower { offered: offered.order(), known: (epoch, 0) });
    }
    if offered.epoch - epoch > MAX_EPOCH_LEAD {
        return Err(StatementError::EpochTooFar { offered: offered.epoch, known: epoch });
    }
    if offered.issued_at > after(now, MAX_CLOCK_DIFFERENCE) {
        return Err(StatementError::FromTheFuture { issued_at: offered.issued_at, now });
    }
    Ok(true)
}

fn signed_bytes(encoded: &[u8]) -> Vec<u8> {
    [CONTEXT, encoded].concat()
}

fn parse_moment(milliseconds: i64, fault: &'static str) -> Result<Timestamp, StatementError> {
    let moment = Timestamp::from_timestamp_millis(milliseconds).filter(|_| milliseconds > 0);
    moment.ok_or(StatementError::Malformed(fault))
}

#[cfg(test)]
mod tests;
