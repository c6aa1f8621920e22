//! Artefacts: content-addressed files, uploaded and stored in pieces.
//!
//! Machines fetch them from any shepherd. A digest identifies a file completely. So a file that is stored need not be
//! uploaded again, a piece that is uploaded twice is the same, and a machine that has fetched a file can verify it
//! without trusting the shepherd that it came from.

use serde::{Deserialize, Serialize};

use crate::byte_size::ByteSize;
use crate::plain_text::canonical_line;
use crate::role_declaration::Sha256;
use crate::time::Timestamp;

/// Bytes of a piece. The last piece of a file may be shorter.
pub const PIECE_BYTES: u64 = 256 << 10;
/// Largest size of a file, in bytes (256 MiB).
pub const MAX_BYTES: u64 = 256 << 20;
/// Most files that may be stored, incomplete ones included.
pub const MAX_ARTEFACTS: i64 = 200;
/// Most files that may be incomplete at a time.
pub const MAX_INCOMPLETE: i64 = 16;
/// Longest name, in characters.
const MAX_NAME_CHARS: usize = 100;
/// Fewest digits of a digest that identify a file.
const MIN_DIGEST_PREFIX: usize = 8;

/// An artefact as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtefactView {
    /// Its SHA-256 digest, 64 hexadecimal digits.
    pub sha256: String,
    /// Size of the whole file, in bytes.
    pub size: u64,
    /// Its name for people; `None` until the file is complete.
    pub name: Option<String>,
    /// When its upload was last started.
    pub upload_started_at: Timestamp,
    /// Since when it is complete; `None` until then.
    pub added_at: Option<Timestamp>,
    /// The operator who added it; `None` until it is complete.
    pub added_by: Option<String>,
    /// How many of its pieces are stored.
    pub pieces: u64,
    /// Version of Kubernetes, if the file is a bundle of Kubernetes programs.
    #[serde(default)]
    pub kubernetes: Option<String>,
    /// Id of the key that signed the file; `None` if it is not signed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signing_key_id: Option<String>,
    /// Trusted comment of its signature, which says what it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed_comment: Option<String>,
}

/// Checks that a file may have this size. The error is a sentence.
pub fn check_size(size: u64) -> Result<(), String> {
    match size {
        0 => Err("an artefact has one byte at least".to_owned()),
        size if size > MAX_BYTES => Err(format!(
            "it has {size} bytes, and an artefact has {MAX_BYTES} at the most; let machines fetch what is larger from a URL"
        )),
        _ => Ok(()),
    }
}

/// Checks a limit of the storage of all artefacts: one of the largest size must fit. The error is a sentence without
/// its subject.
pub fn check_storage_limit(limit: ByteSize) -> Result<(), String> {
    let least = ByteSize(MAX_BYTES);
    if limit < least {
        return Err(format!("{limit} is too small: give at least {least}, the size of the largest artefact"));
    }
    Ok(())
}

/// Checks that a file of this size may be uploaded when so much is stored. The error is a sentence.
pub fn check_storage(stored: ByteSize, size: u64, limit: ByteSize) -> Result<(), String> {
    if stored.0.checked_add(size).is_some_and(|all| all <= limit.0) {
        return Ok(());
    }
    Err(format!(
        "it has {}, and the artefacts take {} of at most {} of the database; remove some with shepherdctl artefacts \
         delete, or raise --artefact_storage_limit of the shepherds",
        ByteSize(size).humanize(),
        stored.humanize(),
        limit.humanize()
    ))
}

/// Whether the artefacts take so much that an operator should act before an upload is rejected: 80 % of the limit.
#[must_use]
pub fn is_storage_nearly_full(stored: ByteSize, limit: ByteSize) -> bool {
    u128::from(stored.0) * 5 >= u128::from(limit.0) * 4
}

/// Checks that a file may have this name. The error is a sentence.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name != name.trim() {
        return Err("the name of an artefact is empty, or has space around it".to_owned());
    }
    let canonical = canonical_line(name).map_err(|reason| format!("the name of an artefact {reason}"))?;
    if canonical != name {
        return Err(format!(
            "the name of an artefact is in another form than it is stored in: write it as {canonical}"
        ));
    }
    if name.chars().count() > MAX_NAME_CHARS {
        return Err(format!(
            "the name of an artefact is one line of {MAX_NAME_CHARS} characters at the most"
        ));
    }
    Ok(())
}

/// How many pieces a file of this size has.
#[must_use]
pub const fn piece_count(size: u64) -> u64 {
    size.div_ceil(PIECE_BYTES)
}

/// Length of the piece of that number, in bytes; `None` when the file has no such piece.
#[must_use]
pub fn piece_length(size: u64, number: u64) -> Option<u64> {
    let begins = number.checked_mul(PIECE_BYTES).filter(|begins| *begins < size)?;
    Some((size - begins).min(PIECE_BYTES))
}

/// The number of the piece that has this byte, and the offset within that piece.
#[must_use]
pub const fn locate_offset(offset: u64) -> (u64, u64) {
    (offset / PIECE_BYTES, offset % PIECE_BYTES)
}

/// Numbers of the pieces that are missing when those in `there` are stored.
#[must_use]
pub fn missing_pieces(size: u64, there: &[u64]) -> Vec<u64> {
    let there: std::collections::BTreeSet<u64> = there.iter().copied().collect();
    (0..piece_count(size)).filter(|number| !there.contains(number)).collect()
}

/// Parses a digest: 64 hexadecimal digits.
pub fn parse_digest(text: &str) -> Result<Sha256, String> {
    let bytes = hex::decode(text).ok().and_then(|bytes| bytes.try_into().ok());
    bytes.map(Sha256).ok_or_else(|| format!("{text:?} is not a SHA-256, which has 64 hexadecimal digits"))
}

/// Finds the artefact that a person means: by its digest, a prefix of the digest, or the name of a complete one.
pub fn find_artefact<'a>(artefacts: &'a [ArtefactView], text: &str) -> Result<&'a ArtefactView, String> {
    let lower = text.to_ascii_lowercase();
    if let Some(found) = artefacts.iter().find(|artefact| artefact.sha256 == lower) {
        return Ok(found);
    }
    let named: Vec<&ArtefactView> =
        artefacts.iter().filter(|artefact| artefact.name.as_deref() == Some(text)).collect();
    let digits = lower.len() >= MIN_DIGEST_PREFIX && lower.bytes().all(|byte| byte.is_ascii_hexdigit());
    let begins =
        || artefacts.iter().filter(|artefact| digits && artefact.sha256.starts_with(&lower)).collect();
    let meant = if named.is_empty() { begins() } else { named };
    match meant.as_slice() {
        [one] => Ok(one),
        [] => Err(format!(
            "there is no artefact {text:?}; shepherdctl get artefacts lists them, by name and digest"
        )),
        several => {
            let digests: Vec<&str> = several.iter().map(|artefact| &artefact.sha256[..16]).collect();
            Err(format!(
                "{text:?} is {} artefacts ({}…); say which by its digest",
                several.len(),
                digests.join("…, ")
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upload_beyond_the_limit_is_rejected_and_announced_before() {
        let limit = ByteSize::gibibytes(20);
        for (stored, size, fits) in [
            (0, 1, true),
            (limit.0 - 5, 5, true),
            (limit.0 - 5, 6, false),
            (limit.0, 1, false),
            (limit.0 + 9, 1, false),
            (u64::MAX, u64::MAX, false),
        ] {
            assert_eq!(check_storage(ByteSize(stored), size, limit).is_ok(), fits, "{stored} {size}");
        }
        let text = check_storage(ByteSize(limit.0 - 1), 3 << 20, limit).unwrap_err();
        assert_eq!(
            text,
            "it has 3 MiB, and the artefacts take 19.9 GiB of at most 20 GiB of the database; remove some with \
             shepherdctl artefacts delete, or raise --artefact_storage_limit of the shepherds"
        );
        for (stored, full) in [(0, false), (16 << 30, true), ((16 << 30) - 1, false), (u64::MAX, true)] {
            assert_eq!(is_storage_nearly_full(ByteSize(stored), limit), full, "{stored}");
        }
        assert!(check_storage_limit(ByteSize(MAX_BYTES)).is_ok());
        assert!(check_storage_limit(ByteSize(MAX_BYTES - 1)).is_err());
    }

    fn artefact(digit: char, name: Option<&str>) -> ArtefactView {
        ArtefactView {
            sha256: digit.to_string().repeat(64),
            size: 1,
            name: name.map(str::to_owned),
            upload_started_at: Timestamp::UNIX_EPOCH,
            added_at: None,
            added_by: None,
            pieces: 1,
            kubernetes: None,
            signing_key_id: None,
            signed_comment: None,
        }
    }

    #[test]
    fn pieces_cover_a_file_without_a_gap() {
        for size in [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 10 * PIECE_BYTES, MAX_BYTES] {
            let lengths: Vec<u64> =
                (0..piece_count(size)).filter_map(|number| piece_length(size, number)).collect();
            assert_eq!(lengths.iter().sum::<u64>(), size);
            assert_eq!(lengths.len() as u64, piece_count(size));
            assert_eq!(piece_length(size, piece_count(size)), None);
        }
        assert_eq!(piece_length(MAX_BYTES, u64::MAX), None);
        assert_eq!(
            (locate_offset(0), locate_offset(PIECE_BYTES - 1), locate_offset(PIECE_BYTES + 7)),
            ((0, 0), (0, PIECE_BYTES - 1), (1, 7))
        );
        assert_eq!(missing_pieces(3 * PIECE_BYTES + 1, &[2, 0]), [1, 3]);
        assert_eq!(missing_pieces(PIECE_BYTES, &[0]), [0; 0]);
    }

    #[test]
    fn size_and_name_have_bounds() {
        assert!(check_size(0).is_err() && check_size(MAX_BYTES + 1).is_err());
        assert!(check_size(1).is_ok() && check_size(MAX_BYTES).is_ok());
        for name in ["roleserver 1.4", "a", "ü"] {
            assert_eq!(check_name(name), Ok(()));
        }
        for name in ["", " a", "a\nb", "a\u{200b}", "e\u{301}", &"x".repeat(101)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert_eq!(parse_digest(&"ab".repeat(32)), Ok(Sha256([0xab; 32])));
        assert!(parse_digest("ab").is_err() && parse_digest(&"zz".repeat(32)).is_err());
    }

    #[test]
    fn artefact_is_found_by_digest_prefix_or_name() {
        let all = [
            artefact('a', Some("one")),
            artefact('b', Some("twice")),
            artefact('c', Some("twice")),
            artefact('d', Some("aaaaaaaa")),
            artefact('e', None),
        ];
        let digit = |text: &str| find_artefact(&all, text).map(|found| found.sha256.chars().next());
        assert_eq!(digit("one"), Ok(Some('a')));
        assert_eq!(digit(&"A".repeat(64)), Ok(Some('a')));
        assert_eq!(digit("bbbbbbbb"), Ok(Some('b')));
        assert_eq!(digit("aaaaaaaa"), Ok(Some('d')), "a name goes before the beginning of a digest");
        assert_eq!(digit("eeeeeeeee"), Ok(Some('e')));
        assert!(digit("twice").unwrap_err().contains("bbbbbbbbbbbbbbbb…, cccccccccccccccc…"));
        for nothing in ["nobody", "ccccccc", "", "zzzzzzzz"] {
            assert!(digit(nothing).unwrap_err().contains("get artefacts"), "{nothing}");
        }
    }
}
