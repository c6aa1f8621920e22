//! Three-part release versions: parse, print and compare.
//!
//! Kubernetes and the role server have such versions. Only releases do: a pre-release of Kubernetes promises no
//! compatibility with the release before it, so there is no rule by which a cluster could change to it or come back.
//! The syntax is that of semantic versions, and the library `semver` parses it.

use std::fmt;
use std::str::FromStr;

use semver::Version;

/// A version. Versions are ordered by their numbers, from the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReleaseVersion {
    /// The first of the three numbers.
    pub major: u32,
    /// The second of the three numbers; Kubernetes' skew policy counts by it.
    pub minor: u32,
    /// The third of the three numbers.
    pub patch: u32,
}

/// Error for a text that is not a version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a version of a release; write three numbers with dots between them, such as 1.20.2")]
pub struct VersionError(String);

impl ReleaseVersion {
    /// The version with these numbers.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }
}

impl fmt::Display for ReleaseVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for ReleaseVersion {
    type Err = VersionError;

    /// Parses three numbers, with or without the `v` that Kubernetes' own programs put before them. Numbers have no
    /// leading zeros: a version is written in one way.
    fn from_str(text: &str) -> Result<Self, VersionError> {
        let invalid = || VersionError(text.chars().take(100).collect());
        let version = Version::parse(text.strip_prefix('v').unwrap_or(text)).map_err(|_| invalid())?;
        if !version.pre.is_empty() || !version.build.is_empty() {
            return Err(invalid());
        }
        let number = |number: u64| u32::try_from(number).map_err(|_| invalid());
        Ok(Self {
            major: number(version.major)?,
            minor: number(version.minor)?,
            patch: number(version.patch)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_numerically() {
        let sorted = ["0.0.2", "0.0.10", "1.9.0", "1.20.2", "1.20.10", "1.21.0", "2.0.0"];
        let versions: Vec<ReleaseVersion> = sorted.iter().map(|text| text.parse().unwrap()).collect();
        assert!(versions.is_sorted_by(|one, other| one < other), "{versions:?}");
        for (version, text) in versions.iter().zip(sorted) {
            assert_eq!(version.to_string(), text);
            assert_eq!(format!("v{text}").parse::<ReleaseVersion>().as_ref(), Ok(version));
        }
    }

    #[test]
    fn invalid_versions_are_rejected() {
        for text in [
            "",
            "v",
            "1",
            "1.20",
            "1.20.2.1",
            "1..2",
            "+1.2.3",
            "1.20.2-rc.1",
            "1.20.2+k3s1",
            "1.020.2",
            "vv1.2.3",
            "1.2.4294967296",
            " 1.2.3",
        ] {
            let error = text.parse::<ReleaseVersion>().unwrap_err().to_string();
            assert!(error.contains("is not a version"), "{text}: {error}");
        }
    }
}
