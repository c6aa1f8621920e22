//! Version of a program, and how versions compare.
//!
//! Only the three numbers of a release are compared. The rest of a version (a pre-release, a commit) identifies builds
//! for people: two builds of one release need the same objects, or one of them should have had another number.
//! So [`Version`] is not the type of the library `semver`, which orders a pre-release before its release.

use std::fmt;
use std::str::FromStr;

use model::kubernetes::version::ReleaseVersion;

/// The longest version that is accepted, in bytes.
const MAX_VERSION_BYTES: usize = 1000;

/// The error for a text that is no version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a version; write three numbers with dots between them, such as 1.2.3 or 1.2.3-rc.1+abcdef"
)]
pub struct InvalidVersion(String);

/// The version of a program: a release, and details for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    text: String,
    release: ReleaseVersion,
}

impl Version {
    /// The release, which is what gets compared.
    #[must_use]
    pub const fn release(&self) -> ReleaseVersion {
        self.release
    }

    /// The whole version text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl From<ReleaseVersion> for Version {
    fn from(release: ReleaseVersion) -> Self {
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
            // Only programs of Kubernetes put a `v` before their version.
            Ok(release) if text.len() <= MAX_VERSION_BYTES && !text.starts_with('v') => {
                Ok(Self { text: text.to_owned(), release })
            }
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
        let releases: Vec<ReleaseVersion> = sorted.iter().map(|text| text.parse().unwrap()).collect();
        assert!(releases.is_sorted_by(|one, other| one < other), "{releases:?}");
        for (release, text) in releases.iter().zip(sorted) {
            assert_eq!(release.to_string(), text);
        }
    }

    #[test]
    fn suffix_is_preserved_and_not_compared() {
        for text in ["1.2.3", "1.2.3-rc.1", "1.2.3+0f1e2d", "1.2.3-dev.4+0f1e2d-dirty"] {
            let version: Version = text.parse().unwrap();
            assert_eq!(version.release(), ReleaseVersion::new(1, 2, 3), "{text}");
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
            assert!(error.contains("is not a version"), "{text}: {error}");
        }
    }
}
