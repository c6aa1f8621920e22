//! Successions: an authority of a cluster names the one that replaces it, by its signature.
//!
//! A node that was off while the authority was replaced trusts the former one. Curators send the successions with each
//! statement ([`statement`](crate::statement)), oldest first, so the node follows them from the authority that it trusts to
//! the one that signs now. Nobody vouches for the list itself: each succession is worth what its old authority is worth.
//! An authority that is not trusted names nobody, and a list from which one is missing leads nowhere.
//!
//! The list has an end. Curators send the newest [`MAX_SUCCESSIONS`], so a node that was off for longer does not find the
//! way by them. A node that has followed stores the way from the authority that it trusts, which gets longer with each
//! replacement. So from [`ROOT_CHANGE`] on it trusts the end of that way instead of its beginning, and shepherds do the same.
//!
//! There is no succession after a theft of the authority's key. The thief could sign one as well.

use prost::Message as _;
use proto::curator::v1 as wire;
use ring::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};

use crate::pki::{Authority, PkiError, TrustAnchor};

/// Most successions that a cluster stores and sends. The oldest ones are dropped.
pub const MAX_SUCCESSIONS: usize = 64;

/// Number of stored successions from which on the authority at their end is trusted instead of the one at their beginning.
pub const ROOT_CHANGE: usize = 32;

/// The format of successions that this program knows.
const FORMAT: u32 = 1;
/// Precedes the signed bytes, so that a signature of the authority never counts for anything else.
const CONTEXT: &[u8] = b"shepherd authority succession\0";
/// Most successions that are read, the newest ones: those that lead to the stored statement, and those that lead further.
const MAX_READ: usize = 2 * MAX_SUCCESSIONS;
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
        UnparsedPublicKey::new(&ED25519, &succession.old.key.0)
            .verify(&signed_bytes(&signed.succession), &signed.signature)
            .map_err(|_| SuccessionError::BadSignature)?;
        Ok(succession)
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
    let at_once = |anchor: &TrustAnchor| SuccessionPath { end: anchor.clone(), successions: Vec::new() };
    let mut reached: Vec<SuccessionPath> = trusted.iter().map(at_once).collect();
    for encoded in &successions[successions.len().saturating_sub(MAX_READ)..] {
        if reached.iter().any(|path| is_wanted(&path.end)) {
            break;
        }
        let Ok(succession) = Succession::verify(encoded) else { continue };
        if reached.iter().any(|path| path.end.key == succession.new.key) {
            continue;
        }
        let Some(path) = reached.iter().find(|path| path.end.key == succession.old.key) else { continue };
        let further = path.successions.iter().chain([encoded]).cloned().collect();
        reached.push(SuccessionPath { end: succession.new, successions: further });
    }
    reached.into_iter().find(|path| is_wanted(&path.end))
}

fn signed_bytes(encoded: &[u8]) -> Vec<u8> {
    [CONTEXT, encoded].concat()
}

#[cfg(test)]
mod tests {
    use std::slice;

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
    fn newest_successions_of_a_long_list_are_read() {
        let (list, wanted): (Vec<_>, _) = ((1..=150).map(|old| link(old, old + 1)).collect(), anchor(151));
        for (trusted, length) in [(1, None), (22, None), (23, Some(128)), (100, Some(51)), (151, Some(0))] {
            let path = find_path(&[anchor(trusted)], &list, |found| found.key == wanted.key);
            assert_eq!(path.map(|path| path.successions.len()), length, "from {trusted}");
        }
    }

    #[test]
    fn end_of_a_long_path_is_trusted_instead_of_its_beginning() {
        let list: Vec<Vec<u8>> = (1..=40).map(|old| link(old, old + 1)).collect();
        for (successions, changed) in [(0, false), (31, false), (32, true), (40, true)] {
            let signer = u8::try_from(successions).unwrap() + 1;
            let stored = stated(9, signer, None).with_successors(list[..successions].to_vec());
            let root = stored.next_root().cloned();
            assert_eq!(root, changed.then(|| anchor(signer)), "{successions}");
            let Some(root) = root else { continue };
            // The stored statement counts from both, and what follows from it has a short path.
            let again = SignedStatement::verify(&stored.to_wire(), slice::from_ref(&root)).unwrap();
            assert_eq!(again.statement, stored.statement);
            assert!(again.next_root().is_none() && again.to_wire().successors.is_empty());
            let further = [list[..successions].to_vec(), vec![link(signer, signer + 1)]].concat();
            let next = stated(10, signer + 1, None).with_successors(further).to_wire();
            assert_eq!(
                SignedStatement::verify(&next, slice::from_ref(&root)).unwrap().to_wire().successors.len(),
                1
            );
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
