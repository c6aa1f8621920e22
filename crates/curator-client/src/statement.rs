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
//! # Time
//!
//! The certificate of a curator lives for [`CURATOR_LIFETIME`]. So the list of revoked ones stays short, and a statement
//! that is older than that proves nothing about the present curators: it is stale, and no curator is followed until a
//! newer statement arrives. The leader signs it again each [`STATEMENT_REFRESH`].
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

use crate::certificate::{CLOCK_SKEW, Serial};
use crate::node_id::PublicKey;
use crate::pki::{Authority, CURATOR_LIFETIME, PkiError, TrustAnchor};

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
        /// The highest epoch received.
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
        Ok(SignedStatement { statement, encoded, signature })
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
    /// Verifies a statement. One of these authorities must have signed it.
    pub fn verify(wire: &wire::SignedStatement, anchors: &[TrustAnchor]) -> Result<Self, StatementError> {
        let made_signature = |key: &PublicKey| {
            UnparsedPublicKey::new(&ED25519, &key.0)
                .verify(&signed_bytes(&wire.statement), &wire.signature)
                .is_ok()
        };
        let Some(signer) = anchors.iter().find(|anchor| made_signature(&anchor.key)) else {
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
        Ok(Self { statement, encoded: wire.statement.clone(), signature: wire.signature.clone() })
    }

    /// The statement as it is sent and stored.
    #[must_use]
    pub fn to_wire(&self) -> wire::SignedStatement {
        wire::SignedStatement {
            statement: self.encoded.clone(),
            signature: self.signature.clone(),
            successors: Vec::new(),
        }
    }
}

/// Decides about a verified statement. `true`: it replaces the stored one. `false`: it is the stored one.
///
/// `epoch` is the highest epoch received, also by another way than a statement.
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
    if offered.issued_at > after(now, CLOCK_SKEW) {
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
mod tests {
    use super::*;
    use crate::certificate::Validity;
    use crate::testing::{at, authority, pkcs8, serial, statement};

    fn anchors(numbers: &[u8]) -> Vec<TrustAnchor> {
        numbers.iter().map(|number| authority(*number).anchor().clone()).collect()
    }

    #[test]
    fn statement_round_trips_and_any_changed_byte_is_refused() {
        let signed = statement(2, 7).sign(&authority(1)).unwrap();
        assert_eq!(signed.statement, statement(2, 7));
        let sent = signed.to_wire();
        assert_eq!(SignedStatement::verify(&sent, &anchors(&[1])).unwrap(), signed);
        assert_eq!(SignedStatement::verify(&sent, &anchors(&[2, 1])).unwrap(), signed, "one of two");
        let refused = |changed: wire::SignedStatement| {
            let error = SignedStatement::verify(&changed, &anchors(&[1])).unwrap_err();
            assert!(matches!(error, StatementError::BadSignature), "{error}");
        };
        for position in 0..sent.statement.len() {
            let mut changed = sent.clone();
            changed.statement[position] ^= 1;
            refused(changed);
        }
        for position in 0..sent.signature.len() {
            let mut changed = sent.clone();
            changed.signature[position] ^= 1;
            refused(changed);
        }
        let between = after(at(0), Duration::from_micros(1_500));
        let rounded = Statement { issued_at: between, ..statement(2, 7) }.sign(&authority(1)).unwrap();
        assert_eq!(rounded.statement.issued_at, after(at(0), Duration::from_millis(1)));
        assert_eq!(SignedStatement::verify(&rounded.to_wire(), &anchors(&[1])).unwrap(), rounded);
    }

    #[test]
    fn statement_of_an_untrusted_authority_is_refused_by_its_reason() {
        let cluster = authority(2).anchor().cluster;
        let elsewhere = Statement { cluster, authorities: anchors(&[2]), ..statement(0, 1) };
        let elsewhere = elsewhere.sign(&authority(2)).unwrap();
        let error = SignedStatement::verify(&elsewhere.to_wire(), &anchors(&[1])).unwrap_err();
        assert!(matches!(error, StatementError::OtherCluster { .. }), "{error}");
        let long = Validity { not_before: at(-1000), not_after: at(1_000_000) };
        let next = Authority::create(statement(0, 1).cluster, &pkcs8(9), serial(9), long).unwrap();
        let former = statement(0, 1).sign(&authority(1)).unwrap();
        let trusted = [next.anchor().clone()];
        let error = SignedStatement::verify(&former.to_wire(), &trusted).unwrap_err();
        assert!(matches!(error, StatementError::RetiredAuthority), "{error}");
        let error = statement(0, 1).sign(&next).unwrap_err();
        assert!(matches!(error, StatementError::Malformed(_)), "{error}");
    }

    #[test]
    fn statement_lists_4096_certificates_and_no_more() {
        let serials = (0..=4096_u16).map(|number| {
            let mut bytes = [0x40; 16];
            bytes[14..].copy_from_slice(&number.to_be_bytes());
            (Serial::new(bytes), at(500))
        });
        let mut long = Statement { revoked: serials.collect(), ..statement(0, 1) };
        assert!(matches!(long.sign(&authority(1)), Err(StatementError::TooLong(4097))));
        long.revoked.pop_last();
        let longest = long.sign(&authority(1)).unwrap();
        assert_eq!(SignedStatement::verify(&longest.to_wire(), &anchors(&[1])).unwrap(), longest);
    }

    #[test]
    fn statements_are_ordered_by_epoch_and_number() {
        let ordered = [(0, 1), (0, 2), (0, u64::MAX), (1, 1), (1, 3), (2, 2)];
        for pair in ordered.windows(2) {
            let [(epoch, number), (later_epoch, later_number)] = pair else { unreachable!() };
            let (former, later) = (statement(*epoch, *number), statement(*later_epoch, *later_number));
            assert!(former.order() < later.order(), "{pair:?}");
            assert!(accept_statement(Some(&former), 0, &later, at(0)).unwrap(), "{pair:?}");
            assert!(accept_statement(Some(&later), 0, &former, at(0)).is_err(), "{pair:?}");
        }
    }

    #[test]
    fn offered_statement_is_accepted_or_refused_in_one_sentence() {
        let stored = statement(2, 7);
        let signed_at = |issued_at| Statement { issued_at, ..statement(2, 8) };
        let other = Statement { revoked: BTreeMap::new(), ..statement(2, 7) };
        let elsewhere = Statement { cluster: Uuid::from_u128(5), ..statement(2, 8) };
        for (stored, epoch, offered, expected) in [
            (None, 0, statement(0, 1), Ok(true)),
            (None, 2, statement(2, 1), Ok(true)),
            (
                None,
                2,
                statement(1, 9),
                Err("statement 9 of epoch 1 is lower than what is known here: epoch 2"),
            ),
            (None, 0, statement(1_000, 1), Ok(true)),
            (None, 0, statement(1_001, 1), Err("epoch 1001 of the statement is too far beyond 0")),
            (None, 2, signed_at(at(300)), Ok(true)),
            (None, 2, signed_at(at(301)), Err("was signed at")),
            (Some(&stored), 2, stored.clone(), Ok(false)),
            (Some(&stored), 3, stored.clone(), Ok(false)),
            (Some(&stored), 2, statement(2, 8), Ok(true)),
            (Some(&stored), 2, statement(3, 1), Ok(true)),
            (Some(&stored), 3, statement(2, 8), Err("lower than what is known here: epoch 3")),
            (Some(&stored), 2, statement(2, 6), Err("lower than what is known here: epoch 2, number 7")),
            (Some(&stored), 2, statement(1, 99), Err("lower than what is known here: epoch 2, number 7")),
            (Some(&stored), 2, other, Err("there are two different statements with number 7 of epoch 2")),
            (Some(&stored), 2, signed_at(at(301)), Err("is one of the two clocks wrong?")),
            // It is stale, and yet newer than the stored one: its revocations count.
            (Some(&stored), 2, signed_at(at(-200_000)), Ok(true)),
            (Some(&stored), 2, elsewhere, Err("is about cluster 00000000-0000-0000-0000-000000000005")),
        ] {
            let accepted =
                accept_statement(stored, epoch, &offered, at(0)).map_err(|error| error.to_string());
            match (&accepted, expected) {
                (Ok(accepted), Ok(expected)) => assert_eq!(*accepted, expected, "{epoch} {offered:?}"),
                (Err(error), Err(text)) => {
                    assert!(error.contains(text) && !error.contains(". "), "{text}: {error}");
                }
                _ => panic!("{epoch} {offered:?}: {accepted:?}, and {expected:?} was expected"),
            }
        }
    }

    #[test]
    fn statement_is_fresh_for_as_long_as_a_curators_certificate_lives() {
        for (second, fresh) in [(-90_000, true), (0, true), (86_399, true), (86_400, false), (999_999, false)]
        {
            assert_eq!(statement(0, 1).is_fresh(at(second)), fresh, "{second}");
        }
    }

    #[test]
    fn refresh_alone_ends_no_connection() {
        let former = statement(2, 7);
        let refreshed = Statement { issued_at: at(3_600), ..statement(2, 8) };
        assert!(!refreshed.ends_connections_of(Some(&former)));
        let shorter = Statement { revoked: BTreeMap::from([(serial(4), at(600))]), ..statement(2, 8) };
        assert!(!shorter.ends_connections_of(Some(&former)), "an expired certificate left the list");
        let further = Statement { revoked: BTreeMap::from([(serial(5), at(600))]), ..statement(2, 8) };
        assert!(further.ends_connections_of(Some(&former)));
        assert!(statement(3, 8).ends_connections_of(Some(&former)), "the cluster was restored");
        let rotated = Statement { authorities: anchors(&[1, 2]), ..statement(2, 8) };
        assert!(rotated.ends_connections_of(Some(&former)));
        assert!(former.ends_connections_of(None), "any node could be at the other end");
    }
}
