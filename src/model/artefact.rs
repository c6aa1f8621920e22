//! Files that machines fetch from any shepherd: known by their digest, brought and kept in pieces.
//!
//! A digest says all there is to say of a file, so one that is there needs not be brought again, a piece that was
//! brought twice is the same, and whoever has fetched one knows whether it is right without trusting anybody.

use serde::{Deserialize, Serialize};

use crate::model::declaration::Sha256;
use crate::model::time::Timestamp;

/// Bytes of a piece; the last one of a file is shorter.
pub const PIECE: u64 = 256 << 10;
/// Largest file.
pub const LARGEST: u64 = 256 << 20;
/// Most files there are, those that are not whole included.
pub const MOST: i64 = 200;
/// Most files that are not whole.
pub const MOST_BEGUN: i64 = 16;
/// Longest name, in characters.
const LONGEST_NAME: usize = 100;
/// Fewest digits that a digest may be named by.
const FEWEST_DIGITS: usize = 8;

/// An artefact as people see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtefactView {
    /// Its digest, 64 hexadecimal digits.
    pub sha256: String,
    /// Bytes.
    pub size: u64,
    /// What people call it; none until it is whole.
    pub name: Option<String>,
    /// When somebody last began to bring it.
    pub begun_at: Timestamp,
    /// Since when it is whole.
    pub added_at: Option<Timestamp>,
    /// Who added it.
    pub added_by: Option<String>,
    /// How many of its pieces are there.
    pub pieces: u64,
    /// The version of Kubernetes in it, of one that is a bundle of that.
    #[serde(default)]
    pub kubernetes: Option<String>,
}

/// Whether a file may have this size; if not, a sentence.
pub fn check_size(size: u64) -> Result<(), String> {
    match size {
        0 => Err("an artefact has one byte at least".to_owned()),
        size if size > LARGEST => Err(format!(
            "it has {size} bytes, and an artefact has {LARGEST} at the most; let machines fetch what is larger from a URL"
        )),
        _ => Ok(()),
    }
}

/// Whether a file may be called so; if not, a sentence.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name != name.trim() {
        return Err("the name of an artefact is empty, or has space around it".to_owned());
    }
    if name.chars().count() > LONGEST_NAME || name.chars().any(char::is_control) {
        return Err(format!(
            "the name of an artefact is one line of {LONGEST_NAME} characters at the most, without control characters"
        ));
    }
    Ok(())
}

/// How many pieces a file of this size has.
#[must_use]
pub const fn pieces(size: u64) -> u64 {
    size.div_ceil(PIECE)
}

/// How long its piece of that number is; none when it has no such piece.
#[must_use]
pub fn piece_length(size: u64, number: u64) -> Option<u64> {
    let begins = number.checked_mul(PIECE).filter(|begins| *begins < size)?;
    Some((size - begins).min(PIECE))
}

/// In which piece a byte is, and where in it.
#[must_use]
pub const fn place(offset: u64) -> (u64, u64) {
    (offset / PIECE, offset % PIECE)
}

/// Numbers of the pieces that are missing when those of these numbers are there.
#[must_use]
pub fn missing(size: u64, there: &[u64]) -> Vec<u64> {
    let there: std::collections::BTreeSet<u64> = there.iter().copied().collect();
    (0..pieces(size)).filter(|number| !there.contains(number)).collect()
}

/// A digest as it is written: 64 hexadecimal digits.
pub fn read_digest(text: &str) -> Result<Sha256, String> {
    let bytes = hex::decode(text).ok().and_then(|bytes| bytes.try_into().ok());
    bytes.map(Sha256).ok_or_else(|| format!("{text:?} is no SHA-256, which has 64 hexadecimal digits"))
}

/// The one that somebody means: by its digest, the beginning of that, or the name of one that is whole.
pub fn find<'a>(artefacts: &'a [ArtefactView], said: &str) -> Result<&'a ArtefactView, String> {
    let lower = said.to_ascii_lowercase();
    if let Some(found) = artefacts.iter().find(|artefact| artefact.sha256 == lower) {
        return Ok(found);
    }
    let named: Vec<&ArtefactView> =
        artefacts.iter().filter(|artefact| artefact.name.as_deref() == Some(said)).collect();
    let digits = lower.len() >= FEWEST_DIGITS && lower.bytes().all(|byte| byte.is_ascii_hexdigit());
    let begins =
        || artefacts.iter().filter(|artefact| digits && artefact.sha256.starts_with(&lower)).collect();
    let meant = if named.is_empty() { begins() } else { named };
    match meant.as_slice() {
        [one] => Ok(one),
        [] => Err(format!(
            "there is no artefact {said:?}; shepherdctl artefacts get lists them, by name and digest"
        )),
        several => {
            let digests: Vec<&str> = several.iter().map(|artefact| &artefact.sha256[..16]).collect();
            Err(format!(
                "{said:?} is {} artefacts ({}…); say which by its digest",
                several.len(),
                digests.join("…, ")
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artefact(digit: char, name: Option<&str>) -> ArtefactView {
        ArtefactView {
            sha256: digit.to_string().repeat(64),
            size: 1,
            name: name.map(str::to_owned),
            begun_at: Timestamp::UNIX_EPOCH,
            added_at: None,
            added_by: None,
            pieces: 1,
            kubernetes: None,
        }
    }

    #[test]
    fn pieces_cover_a_file_without_a_gap() {
        for size in [1, PIECE - 1, PIECE, PIECE + 1, 10 * PIECE, LARGEST] {
            let lengths: Vec<u64> =
                (0..pieces(size)).filter_map(|number| piece_length(size, number)).collect();
            assert_eq!(lengths.iter().sum::<u64>(), size);
            assert_eq!(lengths.len() as u64, pieces(size));
            assert_eq!(piece_length(size, pieces(size)), None);
        }
        assert_eq!(piece_length(LARGEST, u64::MAX), None);
        assert_eq!((place(0), place(PIECE - 1), place(PIECE + 7)), ((0, 0), (0, PIECE - 1), (1, 7)));
        assert_eq!(missing(3 * PIECE + 1, &[2, 0]), [1, 3]);
        assert_eq!(missing(PIECE, &[0]), [0; 0]);
    }

    #[test]
    fn size_and_name_have_bounds() {
        assert!(check_size(0).is_err() && check_size(LARGEST + 1).is_err());
        assert!(check_size(1).is_ok() && check_size(LARGEST).is_ok());
        for name in ["roleserver 1.4", "a", "ü"] {
            assert_eq!(check_name(name), Ok(()));
        }
        for name in ["", " a", "a\nb", &"x".repeat(101)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert_eq!(read_digest(&"ab".repeat(32)), Ok(Sha256([0xab; 32])));
        assert!(read_digest("ab").is_err() && read_digest(&"zz".repeat(32)).is_err());
    }

    #[test]
    fn artefact_is_found_by_what_tells_it_from_others() {
        let all = [
            artefact('a', Some("one")),
            artefact('b', Some("twice")),
            artefact('c', Some("twice")),
            artefact('d', Some("aaaaaaaa")),
            artefact('e', None),
        ];
        let digit = |said: &str| find(&all, said).map(|found| found.sha256.chars().next());
        assert_eq!(digit("one"), Ok(Some('a')));
        assert_eq!(digit(&"A".repeat(64)), Ok(Some('a')));
        assert_eq!(digit("bbbbbbbb"), Ok(Some('b')));
        assert_eq!(digit("aaaaaaaa"), Ok(Some('d')), "a name goes before the beginning of a digest");
        assert_eq!(digit("eeeeeeeee"), Ok(Some('e')));
        assert!(digit("twice").unwrap_err().contains("bbbbbbbbbbbbbbbb…, cccccccccccccccc…"));
        for nothing in ["nobody", "ccccccc", "", "zzzzzzzz"] {
            assert!(digit(nothing).unwrap_err().contains("artefacts get"), "{nothing}");
        }
    }
}
