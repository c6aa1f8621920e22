//! Release numbers and versions, and how they compare.
//!
//! Only the three numbers of a release are compared. The rest of a version (a pre-release, a commit) identifies builds
//! for people: two builds of one release need the same objects, or one of them should have had another number.

use std::fmt;
use std::str::FromStr;

/// The longest version that is accepted, in bytes.
const MAX_VERSION_BYTES: usize = 1000;

/// A release. Releases are ordered by their numbers, from the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release {
    /// The first number, compared first.
    pub major: u32,
    /// The second number of the three.
    pub minor: u32,
    /// The third number, compared last.
    pub patch: u32,
}

/// The error for a text that is no version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no version: three numbers with dots between them are wanted, as in 1.2.3 or 1.2.3-rc.1+abcdef"
)]
pub struct InvalidVersion(String);

impl Release {
    /// A release with these numbers.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for Release {
    type Err = InvalidVersion;

    /// Parses exactly three numbers.
    fn from_str(text: &str) -> Result<Self, InvalidVersion> {
        let number = |word: Option<&str>| {
            word.filter(|word| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|word| word.parse().ok())
        };
        let mut words = text.split('.');
        match (number(words.next()), number(words.next()), number(words.next()), words.next()) {
            (Some(major), Some(minor), Some(patch), None) => Ok(Self { major, minor, patch }),
            _ => Err(InvalidVersion(text.chars().take(100).collect())),
        }
    }
}

/// The version of a program: a release, and details for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    text: String,
    release: Release,
}

impl Version {
    /// The release, which is what gets compared.
    #[must_use]
    pub const fn release(&self) -> Release {
        self.release
    }

    /// The whole version text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl From<Release> for Version {
    fn from(release: Release) -> Self {
        Self { text: release.to_string(), release }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Version {
    type Err = InvalidVersion;

    fn from_str(text: &str) -> Result<Self, InvalidVersion> {
        let numbers = text.split(['-', '+']).next().unwrap_or_default();
        match numbers.parse() {
            Ok(release) if text.len() <= MAX_VERSION_BYTES => Ok(Self { text: text.to_owned(), release }),
            _ => Err(InvalidVersion(text.chars().take(100).collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_from_the_left_and_as_numbers() {
        let sorted = ["0.0.2", "0.0.10", "0.1.0", "0.10.0", "1.0.0", "10000.0.0"];
        let releases: Vec<Release> = sorted.iter().map(|text| text.parse().unwrap()).collect();
        assert!(releases.is_sorted_by(|one, other| one < other), "{releases:?}");
        for (release, text) in releases.iter().zip(sorted) {
            assert_eq!(release.to_string(), text);
        }
    }

    #[test]
    fn suffix_is_preserved_and_not_compared() {
        for text in ["1.2.3", "1.2.3-rc.1", "1.2.3+0f1e2d", "1.2.3-dev.4+0f1e2d-dirty"] {
            let version: Version = text.parse().unwrap();
            assert_eq!(version.release(), Release::new(1, 2, 3), "{text}");
            assert_eq!(version.to_string(), text);
        }
        let (one, other): (Version, Version) = ("1.2.3+a".parse().unwrap(), "1.2.3+b".parse().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.release(), other.release());
    }

    #[test]
    fn invalid_version_is_rejected() {
        let long = format!("1.2.3-{}", "a".repeat(MAX_VERSION_BYTES));
        for text in
            ["", "1", "1.2", "1.2.3.4", "v1.2.3", "1..3", "+1.2.3", "1.2.-3", "1.2.4294967296", "a", &long]
        {
            let error = text.parse::<Version>().unwrap_err().to_string();
            assert!(error.contains("is no version"), "{text}: {error}");
        }
    }
}
