//! Successions: an authority of a cluster names the one that replaces it, by its signature.
//!
//! A node that was off while the authority was replaced trusts the former one. Curators send the successions with each
//! statement ([`statement`](crate::statement)), oldest first, so the node follows them from the authority that it trusts to
//! the one that signs now. Nobody vouches for the list itself: each succession is worth what its old authority is worth.
//! An authority that is not trusted names nobody, and a list from which one is missing leads nowhere.
//!
//! The list has an end. Curators send the newest [`MAX_SUCCESSIONS`], so a node that was off for longer does not find the
//! way by them. What a node or a shepherd has followed once stays stored with its statement, one succession for each
//! replacement, because the statement is verified again from the first authority.
//!
//! There is no succession after a theft of the authority's key. The thief could sign one as well.

use model::cluster::authority_rotation::MAX_REPLACEMENTS;
use prost::Message as _;
use proto::curator::v1 as wire;
use ring::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};

use crate::node_id::PublicKey;
use crate::pki::{Authority, PkiError, TrustAnchor};

/// Most successions that curators store and send. The oldest ones are dropped.
pub const MAX_SUCCESSIONS: usize = 64;

/// The format of successions that this program knows.
const FORMAT: u32 = 1;
/// Precedes the signed bytes, so that a signature of the authority never counts for anything else.
const CONTEXT: &[u8] = b"shepherd authority succession\0";
/// Most successions that are read, the newest ones. It bounds what a file or a message may have, and with it how often an
/// authority can be replaced: each week for 39 years. An issue of the shepherd announces the end before.
const MAX_READ: usize = MAX_REPLACEMENTS;
/// Longest encoded succession that is decoded, in bytes. A valid one has less than 1 KiB.
const MAX_ENCODED_BYTES: usize = 4 << 10;

/// An authority and its successor. Both are authorities of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Succession {
    /// The authority that signed the succession.
    pub old: TrustAnchor,
    /// The authority that replaces it.
    pub new: TrustAnchor,
}

/// The way from a trusted authority to one of its successors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuccessionPath {
    /// The authority at its end.
    pub end: TrustAnchor,
    /// Encoded successions, oldest first. Empty: the authority at the end is trusted itself.
    pub successions: Vec<Vec<u8>>,
}

/// Why a succession is not signed or not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SuccessionError {
    /// The succession is malformed; the text describes the fault.
    #[error("the succession of the cluster's authority is malformed: {0}")]
    Malformed(&'static str),
    /// The old authority did not sign it.
    #[error("the signature of the succession is wrong: the old authority did not make it")]
    BadSignature,
    /// The key or the certificate of an authority cannot be used.
    #[error(transparent)]
    Pki(#[from] PkiError),
}

impl Succession {
    /// Lets an authority name its successor. Returns the encoded succession with its signature.
    pub fn sign(old: &Authority, new: &TrustAnchor) -> Result<Vec<u8>, SuccessionError> {
        let succession = Self { old: old.anchor().clone(), new: new.clone() };
        succession.validate()?;
        let message = wire::Succession {
            format: FORMAT,
            old: succession.old.certificate,
            new: succession.new.certificate,
        };
        let encoded = message.encode_to_vec();
        let key =
            Ed25519KeyPair::from_pkcs8_maybe_unchecked(old.pkcs8()).map_err(|_| PkiError::InvalidKey)?;
        let signature = key.sign(&signed_bytes(&encoded)).as_ref().to_vec();
        Ok(wire::SignedSuccession { succession: encoded, signature }.encode_to_vec())
    }

    /// Decodes a succession that its old authority signed. Whether that one is trusted is for the caller to decide.
    pub fn verify(encoded: &[u8]) -> Result<Self, SuccessionError> {
        let (succession, signed) = Self::decode(encoded)?;
        succession.verify_signature(&signed)?;
        Ok(succession)
    }

    fn decode(encoded: &[u8]) -> Result<(Self, wire::SignedSuccession), SuccessionError> {
        let malformed = SuccessionError::Malformed;
        if encoded.len() > MAX_ENCODED_BYTES {
            return Err(malformed("it is longer than 4 KiB"));
        }
        let signed =
            wire::SignedSuccession::decode(encoded).map_err(|_| malformed("it cannot be decoded"))?;
        let message = wire::Succession::decode(signed.succession.as_slice())
            .map_err(|_| malformed("it cannot be decoded"))?;
        if message.format != FORMAT {
            return Err(malformed("this program does not know its format: update this program"));
        }
        let succession =
            Self { old: TrustAnchor::parse(&message.old)?, new: TrustAnchor::parse(&message.new)? };
        succession.validate()?;
        Ok((succession, signed))
    }

    fn verify_signature(&self, signed: &wire::SignedSuccession) -> Result<(), SuccessionError> {
        UnparsedPublicKey::new(&ED25519, &self.old.key.0)
            .verify(&signed_bytes(&signed.succession), &signed.signature)
            .map_err(|_| SuccessionError::BadSignature)
    }

    fn validate(&self) -> Result<(), SuccessionError> {
        if self.old.cluster != self.new.cluster {
            return Err(SuccessionError::Malformed("its authorities are of two clusters"));
        }
        if self.old.key == self.new.key {
            return Err(SuccessionError::Malformed("its authorities have one key"));
        }
        Ok(())
    }
}

/// Finds the authority that is wanted: one of the trusted ones, or one that these successions, oldest first, reach from
/// them. A succession that is invalid, or begins at an authority that is not reached, leads nowhere.
pub fn find_path(
    trusted: &[TrustAnchor],
    successions: &[Vec<u8>],
    is_wanted: impl Fn(&TrustAnchor) -> bool,
) -> Option<SuccessionPath> {
    let mut reached: Vec<Reached<'_>> = trusted.iter().map(|anchor| (anchor.clone(), None)).collect();
    let mut found = reached.iter().position(|(end, _)| is_wanted(end));
    for encoded in &successions[successions.len().saturating_sub(MAX_READ)..] {
        if found.is_some() {
            break;
        }
        let Ok((succession, signed)) = Succession::decode(encoded) else { continue };
        if find_place(&reached, &succession.new.key).is_some() {
            continue;
        }
        // The list may be long, and of anyone: no signature is verified that leads nowhere.
        let Some(before) = find_place(&reached, &succession.old.key) else { continue };
        if succession.verify_signature(&signed).is_err() {
            continue;
        }
        found = is_wanted(&succession.new).then_some(reached.len());
        reached.push((succession.new, Some((encoded.as_slice(), before))));
    }
    let end = found?;
    let mut path = SuccessionPath { end: reached[end].0.clone(), successions: Vec::new() };
    let mut place = end;
    while let Some((encoded, before)) = reached[place].1 {
        path.successions.push(encoded.to_vec());
        place = before;
    }
    path.successions.reverse();
    Some(path)
}

/// An authority that is reached, with the succession that names it and the place of the authority before it.
type Reached<'s> = (TrustAnchor, Option<(&'s [u8], usize)>);

fn find_place(reached: &[Reached<'_>], key: &PublicKey) -> Option<usize> {
    reached.iter().position(|(end, _)| end.key == *key)
}

fn signed_bytes(encoded: &[u8]) -> Vec<u8> {
    [CONTEXT, encoded].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statement::{SignedStatement, Statement, StatementError};
    use crate::testing::{authority, authority_of, statement};

    /// The authority of the first cluster with the key of that number.
    fn of_one(number: u8) -> Authority {
        authority_of(1, number)
    }

    fn anchor(number: u8) -> TrustAnchor {
        of_one(number).anchor().clone()
    }

    fn link(old: u8, new: u8) -> Vec<u8> {
        Succession::sign(&of_one(old), &anchor(new)).unwrap()
    }

    /// A statement by that authority, which also lists another one.
    fn stated(number: u64, signer: u8, other: Option<u8>) -> SignedStatement {
        let authorities = [signer].into_iter().chain(other).map(anchor).collect();
        Statement { authorities, ..statement(0, number) }.sign(&of_one(signer)).unwrap()
    }

    #[test]
    fn succession_round_trips_and_any_changed_byte_is_refused() {
        let encoded = link(1, 5);
        let succession = Succession::verify(&encoded).unwrap();
        assert_eq!(succession, Succession { old: anchor(1), new: anchor(5) });
        for position in 0..encoded.len() {
            let mut changed = encoded.clone();
            changed[position] ^= 1;
            assert!(Succession::verify(&changed).is_err(), "byte {position}");
        }
        assert!(Succession::verify(&encoded[..encoded.len() - 1]).is_err());
        assert!(Succession::verify(&[]).is_err());
    }

    #[test]
    fn succession_that_no_authority_would_sign_is_refused() {
        let error = Succession::sign(&of_one(1), &anchor(1)).unwrap_err().to_string();
        assert!(error.contains("have one key"), "{error}");
        let error = Succession::sign(&of_one(1), authority(2).anchor()).unwrap_err().to_string();
        assert!(error.contains("of two clusters"), "{error}");

        let signed = |format, context: &[u8]| {
            let message = wire::Succession { format, old: anchor(1).certificate, new: anchor(5).certificate };
            let succession = message.encode_to_vec();
            let key = Ed25519KeyPair::from_pkcs8_maybe_unchecked(of_one(1).pkcs8()).unwrap();
            let signature = key.sign(&[context, &succession].concat()).as_ref().to_vec();
            Succession::verify(&wire::SignedSuccession { succession, signature }.encode_to_vec())
        };
        assert!(signed(FORMAT, CONTEXT).is_ok());
        let error = signed(FORMAT + 1, CONTEXT).unwrap_err().to_string();
        assert!(error.contains("does not know its format"), "{error}");
        let as_a_statement = signed(FORMAT, b"shepherd cluster statement\0");
        assert!(matches!(as_a_statement, Err(SuccessionError::BadSignature)));
        let long = Succession::verify(&[0; MAX_ENCODED_BYTES + 1]).unwrap_err().to_string();
        assert!(long.contains("longer than 4 KiB"), "{long}");
    }

    #[test]
    fn successors_are_reached_from_a_trusted_authority_alone() {
        /// Trusted authorities, successions, the authority that is wanted, and the way to it.
        type Case<'a> = (&'a str, &'a [u8], &'a [Vec<u8>], u8, Option<&'a [Vec<u8>]>);
        let chain = vec![link(1, 5), link(5, 6), link(6, 7)];
        let reach = |trusted: &[u8], chain: &[Vec<u8>], wanted: u8| {
            let trusted: Vec<TrustAnchor> = trusted.iter().copied().map(anchor).collect();
            find_path(&trusted, chain, |found| found.key == anchor(wanted).key).map(|path| {
                assert_eq!(path.end, anchor(wanted));
                path.successions
            })
        };
        let backwards: Vec<Vec<u8>> = chain.iter().rev().cloned().collect();
        let with_others = [vec![vec![1, 2, 3], link(8, 9)], chain.clone(), vec![link(9, 7)]].concat();
        let twice = [chain.clone(), chain.clone()].concat();
        let torn = [chain[0].clone(), chain[2].clone()];
        let cases: [Case<'_>; 13] = [
            ("it is trusted", &[1], &chain, 1, Some(&chain[..0])),
            ("one step", &[1], &chain, 5, Some(&chain[..1])),
            ("three steps", &[1], &chain, 7, Some(&chain[..])),
            ("from the middle", &[5], &chain, 7, Some(&chain[1..])),
            ("from two", &[1, 6], &chain, 7, Some(&chain[2..])),
            ("with others between", &[1], &with_others, 7, Some(&chain[..])),
            ("each of them twice", &[1], &twice, 7, Some(&chain[..])),
            ("nobody names it", &[1], &chain, 8, None),
            ("it is retired", &[5], &chain, 1, None),
            ("the trusted one is unrelated", &[8], &chain, 7, None),
            ("one is missing", &[1], &torn, 7, None),
            ("newest first", &[1], &backwards, 7, None),
            ("nothing is trusted", &[], &chain, 7, None),
        ];
        for (what, trusted, chain, wanted, expected) in cases {
            assert_eq!(reach(trusted, chain, wanted).as_deref(), expected, "{what}");
        }
    }

    #[test]
    fn node_that_followed_many_replacements_reads_its_statement() {
        // As many as a test has keys.
        let list: Vec<Vec<u8>> = (1..=200).map(|old| link(old, old + 1)).collect();
        let stored = stated(9, 201, None).with_successors(list.clone()).to_wire();
        let read = SignedStatement::verify(&stored, &[anchor(1)]).unwrap();
        assert_eq!(read.to_wire(), stored);
        assert_eq!(read.succession_count(), 200);
        // What curators send is enough for a node that was off for as long as they store.
        let newest = list[list.len() - MAX_SUCCESSIONS..].to_vec();
        let sent = wire::SignedStatement { successors: newest.clone(), ..stored };
        let followed = SignedStatement::verify(&sent, &[anchor(137)]).unwrap();
        assert_eq!(followed.to_wire().successors, newest);
        let error = SignedStatement::verify(&sent, &[anchor(136)]).unwrap_err();
        assert!(matches!(error, StatementError::RetiredAuthority), "{error}");
    }

    #[test]
    fn newest_successions_of_a_list_that_is_too_long_are_read() {
        let bogus = vec![vec![1, 2, 3]; MAX_READ];
        for (what, list, found) in [
            ("the last one", [bogus[1..].to_vec(), vec![link(1, 5)]].concat(), true),
            ("the first one of those", [vec![link(1, 5)], bogus[1..].to_vec()].concat(), true),
            ("the one before", [vec![link(1, 5)], bogus].concat(), false),
        ] {
            let path = find_path(&[anchor(1)], &list, |end| end.key == anchor(5).key);
            assert_eq!(path.is_some(), found, "{what}");
        }
    }

    #[test]
    fn statement_of_a_successor_is_verified_through_the_chain() {
        let chain = vec![link(1, 5), link(5, 6)];
        let by_six = stated(9, 6, Some(5)).with_successors(chain.clone());
        let sent = by_six.to_wire();
        for (trusted, path) in [(1, &chain[..]), (5, &chain[1..]), (6, &chain[..0])] {
            let verified = SignedStatement::verify(&sent, &[anchor(trusted)]).unwrap();
            assert_eq!(verified.statement, by_six.statement);
            assert_eq!(verified.to_wire().successors, path, "from {trusted}");
        }
        let torn = wire::SignedStatement { successors: chain[1..].to_vec(), ..sent.clone() };
        let retired = stated(10, 1, None).with_successors(chain).to_wire();
        for (what, wire, trusted) in [("one is missing", &torn, 1), ("a retired one signs", &retired, 6)] {
            let error = SignedStatement::verify(wire, &[anchor(trusted)]).unwrap_err();
            assert!(matches!(error, StatementError::RetiredAuthority), "{what}: {error}");
        }
        // The chain proves who signs, and not what is signed.
        let mut forged = sent;
        forged.statement[3] ^= 1;
        assert!(SignedStatement::verify(&forged, &[anchor(1)]).is_err());
    }
}
