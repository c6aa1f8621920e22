//! Compressing and sealing the parts of an image of etcd.
//!
//! An image may have 2 GiB, so it is sealed in parts of 1 MiB, and only one of them is in memory. Each part is sealed
//! together with its place: the cluster, the snapshot, the image, its number, and in the last part the number of all parts.
//! Nobody without the secrets key can make a part for another place. So a part that is missing, swapped, or of another
//! image is an error when the image is opened, and so is an image that lacks its end.
//!
//! Parts are compressed with gzip, quickly: most of what etcd has is text, and pages that it does not use.

use std::fmt;
use std::io::{Read as _, Write as _};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use secrecy::{ExposeSecret as _, SecretSlice};
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::fleet::secret::{SecretError, SecretsKey};

/// Size in bytes of every part but the last one, before compression. The last one has at least one byte.
pub const PART_BYTES: usize = 1 << 20;

/// Name of the sealed value in errors.
const SECRET_NAME: &str = "a part of an image of etcd";
/// The sealed form that this release writes and reads.
const FORMAT: u8 = 1;
/// Bytes before the compressed part: the format, three ids, and two numbers.
const PLACE_BYTES: usize = 1 + 3 * 16 + 2 * 8;

/// The place of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartPlace {
    /// The cluster that the etcd belongs to.
    pub cluster: Uuid,
    /// The snapshot that the image belongs to.
    pub snapshot: Uuid,
    /// Id of the image, which each attempt has for itself.
    pub image: Uuid,
    /// Number of the part, from 0.
    pub number: u64,
    /// In the last part, the number of all parts of the image.
    pub last_of: Option<u64>,
}

impl fmt::Display for PartPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cluster, snapshot, number, .. } = self;
        write!(f, "part {number} of the image of etcd in the snapshot {snapshot} of the cluster {cluster}")
    }
}

impl PartPlace {
    fn encode(&self) -> [u8; PLACE_BYTES] {
        let mut encoded = [0; PLACE_BYTES];
        encoded[0] = FORMAT;
        let ids = [self.cluster, self.snapshot, self.image];
        for (field, id) in encoded[1..49].chunks_exact_mut(16).zip(ids) {
            field.copy_from_slice(id.as_bytes());
        }
        let numbers = [self.number, self.last_of.unwrap_or(0)];
        for (field, number) in encoded[49..].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_be_bytes());
        }
        encoded
    }

    /// The place in these bytes; `None` if another release wrote them.
    fn decode(encoded: &[u8; PLACE_BYTES]) -> Option<Self> {
        let id = |from: usize| Uuid::from_slice(&encoded[from..from + 16]).ok();
        let number = |from: usize| Some(u64::from_be_bytes(encoded[from..from + 8].try_into().ok()?));
        if encoded[0] != FORMAT {
            return None;
        }
        Some(Self {
            cluster: id(1)?,
            snapshot: id(17)?,
            image: id(33)?,
            number: number(49)?,
            last_of: number(57).filter(|count| *count != 0),
        })
    }
}

/// Compresses and seals a part together with its place.
pub fn seal_part(secrets: &SecretsKey, place: &PartPlace, part: &[u8]) -> Result<Vec<u8>, SecretError> {
    let failed = |reason: String| SecretError::Seal { name: SECRET_NAME.to_owned(), reason };
    if part.len() > PART_BYTES {
        return Err(failed(format!("it has {} bytes, and {PART_BYTES} are the maximum", part.len())));
    }
    let mut packing = GzEncoder::new(place.encode().to_vec(), Compression::fast());
    packing.write_all(part).map_err(|error| failed(error.to_string()))?;
    let packed = packing.finish().map_err(|error| failed(error.to_string()))?;
    secrets.seal(SECRET_NAME, &SecretSlice::from(packed))
}

/// Opens the part of this place.
pub fn unseal_part(
    secrets: &SecretsKey,
    place: &PartPlace,
    sealed: &[u8],
) -> Result<SecretSlice<u8>, SecretError> {
    let corrupt = |text: String| SecretError::from(BmdbError::Corrupt(text));
    let plain = secrets.unseal(SECRET_NAME, sealed)?;
    let found = plain.expose_secret().split_first_chunk::<PLACE_BYTES>();
    let found = found.and_then(|(found, packed)| Some((PartPlace::decode(found)?, packed)));
    let (found, packed) =
        found.ok_or_else(|| corrupt(format!("{place}: it has a form that this release does not know")))?;
    if let Some(flaw) = describe_other_place(place, &found) {
        return Err(corrupt(format!("{place}: {flaw}; restore another snapshot")));
    }
    let mut part = Vec::new();
    let most = u64::try_from(PART_BYTES).unwrap_or(u64::MAX).saturating_add(1);
    GzDecoder::new(packed)
        .take(most)
        .read_to_end(&mut part)
        .map_err(|error| corrupt(format!("{place}: it cannot be unpacked: {error}")))?;
    if part.len() > PART_BYTES {
        return Err(corrupt(format!("{place}: it is larger than a part may be")));
    }
    Ok(SecretSlice::from(part))
}

/// What is wrong with a part that was sealed for the place `found`; `None` if that is the place `expected`.
fn describe_other_place(expected: &PartPlace, found: &PartPlace) -> Option<String> {
    if found.cluster != expected.cluster {
        Some(format!("the stored part is of another cluster, {}", found.cluster))
    } else if found.snapshot != expected.snapshot {
        Some(format!("the stored part is of another snapshot, {}", found.snapshot))
    } else if found.image != expected.image {
        Some("the stored part is of another image, which was not completed".to_owned())
    } else if found.number != expected.number {
        Some(format!("the stored part is number {}", found.number))
    } else {
        match (found.last_of, expected.last_of) {
            (found, expected) if found == expected => None,
            (None, _) => Some("the stored part is not the last one, so the end is missing".to_owned()),
            (Some(count), _) => Some(format!("the stored part is the last one of {count}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> SecretsKey {
        let directory = tempfile::tempdir().unwrap();
        SecretsKey::open(&directory.path().join(name)).unwrap()
    }

    fn place() -> PartPlace {
        PartPlace {
            cluster: Uuid::from_u128(1),
            snapshot: Uuid::from_u128(2),
            image: Uuid::from_u128(3),
            number: 4,
            last_of: None,
        }
    }

    #[test]
    fn sealed_part_shows_nothing_and_opens_as_it_was() {
        let secrets = key("secrets.key");
        let part = b"a planted Secret ".repeat(PART_BYTES / 17);
        for place in [place(), PartPlace { last_of: Some(5), ..place() }] {
            let sealed = seal_part(&secrets, &place, &part).unwrap();
            assert!(sealed.len() < part.len() / 10, "{} bytes", sealed.len());
            assert!(!sealed.windows(7).any(|words| words == b"planted"));
            assert_eq!(unseal_part(&secrets, &place, &sealed).unwrap().expose_secret(), part);
            assert!(unseal_part(&key("other.key"), &place, &sealed).is_err());
            assert!(unseal_part(&secrets, &place, &sealed[..sealed.len() - 1]).is_err());
        }
    }

    #[test]
    fn part_opens_in_its_own_place_alone() {
        let secrets = key("secrets.key");
        let sealed = seal_part(&secrets, &place(), b"part").unwrap();
        let last = seal_part(&secrets, &PartPlace { last_of: Some(5), ..place() }, b"part").unwrap();
        let other = Uuid::from_u128(9);
        for (what, sealed, place, expected) in [
            ("cluster", &sealed, PartPlace { cluster: other, ..place() }, "of another cluster, 0000"),
            ("snapshot", &sealed, PartPlace { snapshot: other, ..place() }, "of another snapshot, 0000"),
            ("image", &sealed, PartPlace { image: other, ..place() }, "of another image"),
            ("swapped", &sealed, PartPlace { number: 3, ..place() }, "is number 4"),
            ("cut off", &sealed, PartPlace { last_of: Some(5), ..place() }, "so the end is missing"),
            ("longer", &last, PartPlace { last_of: None, ..place() }, "is the last one of 5"),
            ("other end", &last, PartPlace { last_of: Some(6), ..place() }, "is the last one of 5"),
        ] {
            let error = unseal_part(&secrets, &place, sealed).unwrap_err().to_string();
            assert!(error.contains(expected), "{what}: {error}");
            assert!(error.contains("restore another snapshot"), "{what}: {error}");
        }
    }

    #[test]
    fn part_of_more_than_a_mebibyte_is_not_sealed() {
        let secrets = key("secrets.key");
        assert!(seal_part(&secrets, &place(), &vec![0; PART_BYTES]).is_ok());
        let error = seal_part(&secrets, &place(), &vec![0; PART_BYTES + 1]).unwrap_err().to_string();
        assert!(error.contains("1048577 bytes"), "{error}");
    }
}
