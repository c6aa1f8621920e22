//! Byte sizes as people write them: `20GiB`, `512MiB`, `64KiB`, `100B`; and those of disks, `3.8 TB`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Units from the largest down, with their sizes in bytes.
const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Decimal units, in which disks are sold.
const DISK_UNITS: [(&str, u64); 5] =
    [("TB", 1_000_000_000_000), ("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1000), ("B", 1)];

/// A number of bytes. Its text is exact: it has the largest unit of which the size is a whole number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// A size of `count` GiB, of 2^30 bytes each.
    #[must_use]
    pub const fn gibibytes(count: u64) -> Self {
        Self(count << 30)
    }

    /// The size for a sentence, in the largest unit that it fills, with one decimal: `17.5 GiB`.
    #[must_use]
    pub fn humanize(self) -> String {
        humanize_size(self.0, &UNITS)
    }

    /// Bytes of a size as [`ByteSize::humanize`] and [`DiskSize::humanize`] write it, about; `None` for any other text.
    #[must_use]
    pub fn parse_humanized(text: &str) -> Option<f64> {
        let (number, unit) = text.split_once(' ')?;
        let (_, size) = UNITS.into_iter().chain(DISK_UNITS).find(|(name, _)| *name == unit)?;
        #[expect(clippy::cast_precision_loss, reason = "units are powers of two and of ten")]
        let size = size as f64;
        number.parse::<f64>().ok().map(|number| number * size)
    }
}

/// A number of bytes in the decimal units of disks: `3.8 TB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskSize(pub u64);

impl DiskSize {
    /// The size for people, in the largest unit that it fills, with one decimal.
    #[must_use]
    pub fn humanize(self) -> String {
        humanize_size(self.0, &DISK_UNITS)
    }
}

fn humanize_size(bytes: u64, units: &[(&str, u64)]) -> String {
    let (unit, size) = units.iter().copied().find(|(_, size)| bytes >= *size).unwrap_or(("B", 1));
    if size == 1 {
        return format!("{bytes} B");
    }
    let tenths = u128::from(bytes) * 10 / u128::from(size);
    match tenths % 10 {
        0 => format!("{} {unit}", tenths / 10),
        decimal => format!("{}.{decimal} {unit}", tenths / 10),
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.into_iter().find(|(_, size)| self.0 != 0 && self.0.is_multiple_of(*size));
        let (unit, size) = whole.unwrap_or(("B", 1));
        write!(f, "{}{unit}", self.0 / size)
    }
}

/// A text that is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size; write a whole number with B, KiB, MiB, GiB or TiB, for example 20GiB")]
pub struct ByteSizeError(String);

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let error = || ByteSizeError(text.to_owned());
        let (digits, size) = split_unit(text).ok_or_else(error)?;
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let count = digits.parse::<u64>().ok().filter(|_| is_number).ok_or_else(error)?;
        count.checked_mul(size).map(Self).ok_or_else(error)
    }
}

/// The number of a size, and the bytes of the binary unit that ends it; `None` if none does.
fn split_unit(text: &str) -> Option<(&str, u64)> {
    UNITS.into_iter().find_map(|(unit, size)| Some((text.strip_suffix(unit)?, size)))
}

/// Parses `64GiB`, `512MiB`, `1TiB` or a number of bytes without a unit; `None` for any other text, or on overflow.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let (number, size) = split_unit(text).filter(|(_, size)| *size > 1).unwrap_or((text, 1));
    number.trim().parse::<u64>().ok()?.checked_mul(size)
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_exactly() {
        for (text, bytes) in [
            ("0B", 0),
            ("100B", 100),
            ("1KiB", 1024),
            ("1536B", 1536),
            ("512MiB", 512 << 20),
            ("20GiB", 20 << 30),
            ("2TiB", 2 << 40),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size, size.to_string().as_str()), (ByteSize(bytes), text));
        }
        for wrong in
            ["", "20", "GiB", "20 GiB", "20GB", "20gib", "-1GiB", "+1GiB", "1.5GiB", "99999999999TiB", "٣GiB"]
        {
            assert!(wrong.parse::<ByteSize>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_in_sentences_have_one_decimal() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (256 << 20, "256 MiB"),
            ((17 << 30) + (1 << 29), "17.5 GiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(ByteSize(bytes).humanize(), text);
        }
    }

    #[test]
    fn sizes_of_disks_have_decimal_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1500, "1.5 kB"),
            (480_103_981_056, "480.1 GB"),
            (3_840_755_982_336, "3.8 TB"),
            (16_000_900_661_248, "16 TB"),
        ] {
            assert_eq!(DiskSize(bytes).humanize(), text);
        }
    }

    #[test]
    fn size_for_people_is_parsed_again() {
        for (text, bytes) in [
            ("1.5 GiB", Some(1_610_612_736.0)),
            ("3.8 TB", Some(3_800_000_000_000.0)),
            ("512 B", Some(512.0)),
            ("1 gib", None),
            ("1GiB", None),
            ("GiB", None),
            ("x GiB", None),
            ("1 ", None),
        ] {
            assert_eq!(ByteSize::parse_humanized(text), bytes, "{text}");
        }
    }

    #[test]
    fn number_of_bytes_has_a_unit_or_none() {
        for (text, bytes) in [
            ("64GiB", Some(64 << 30)),
            ("64 GiB", Some(64 << 30)),
            ("1TiB", Some(1 << 40)),
            ("1536", Some(1536)),
            ("100B", None),
            ("20GB", None),
            ("GiB", None),
            ("99999999999TiB", None),
        ] {
            assert_eq!(parse_bytes(text), bytes, "{text}");
        }
    }
}
