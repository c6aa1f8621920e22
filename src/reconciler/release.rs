//! Releases, as far as they are compared: three numbers.
//!
//! What stands behind them in a version (a pre-release, a commit) tells builds apart for people, and is no part of any
//! comparison: two builds of one release want the same objects, or one of them should have had another number.

use std::fmt;
use std::str::FromStr;

/// The longest version that is taken.
const LONGEST: usize = 1000;

/// A release. The order is that of the numbers, from the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
    pub patch: u32,
}

/// A text that names no release.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no version: three numbers with dots between them are wanted, as in 1.2.3 or 1.2.3-rc.1+abcdef"
)]
pub struct NoVersion(String);

impl Release {
    /// The release of these numbers.
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
    type Err = NoVersion;

    /// Reads three numbers and nothing else.
    fn from_str(text: &str) -> Result<Self, NoVersion> {
        let number = |word: Option<&str>| {
            word.filter(|word| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|word| word.parse().ok())
        };
        let mut words = text.split('.');
        match (number(words.next()), number(words.next()), number(words.next()), words.next()) {
            (Some(major), Some(minor), Some(patch), None) => Ok(Self { major, minor, patch }),
            _ => Err(NoVersion(text.chars().take(100).collect())),
        }
    }
}

/// A version as a program says it: a release, and what people want to know besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    text: String,
    release: Release,
}

impl Version {
    /// What is compared.
    #[must_use]
    pub const fn release(&self) -> Release {
        self.release
    }

    /// All of it.
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
    type Err = NoVersion;

    fn from_str(text: &str) -> Result<Self, NoVersion> {
        let numbers = text.split(['-', '+']).next().unwrap_or_default();
        match numbers.parse() {
            Ok(release) if text.len() <= LONGEST => Ok(Self { text: text.to_owned(), release }),
            _ => Err(NoVersion(text.chars().take(100).collect())),
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
    fn what_stands_behind_the_numbers_is_kept_and_not_compared() {
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
    fn what_names_no_release_is_told_so() {
        let long = format!("1.2.3-{}", "a".repeat(LONGEST));
        for text in
            ["", "1", "1.2", "1.2.3.4", "v1.2.3", "1..3", "+1.2.3", "1.2.-3", "1.2.4294967296", "a", &long]
        {
            let error = text.parse::<Version>().unwrap_err().to_string();
            assert!(error.contains("is no version"), "{text}: {error}");
        }
    }
}
