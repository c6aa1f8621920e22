//! Versions of three numbers, as Kubernetes and the role server have them.
//!
//! Only releases are named so. A pre-release of Kubernetes promises nothing to the release before it, so there is no rule by
//! which a cluster could go to it or come back.

use std::fmt;
use std::str::FromStr;

/// A version. The order is that of the numbers, from the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second, which is the one that Kubernetes' rules of skew count by.
    pub minor: u32,
    /// The third.
    pub patch: u32,
}

/// A text that names no version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no version of a release: three numbers with dots between them are wanted, as in 1.20.2")]
pub struct NoVersion(String);

impl Version {
    /// The version of these numbers.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for Version {
    type Err = NoVersion;

    /// Reads three numbers, with or without the `v` that Kubernetes' own programs put before them. A number has no zeros
    /// before it: a version is written in one way.
    fn from_str(text: &str) -> Result<Self, NoVersion> {
        let number = |word: Option<&str>| {
            word.filter(|word| word.bytes().all(|byte| byte.is_ascii_digit()))
                .filter(|word| *word == "0" || !word.starts_with('0'))
                .and_then(|word| word.parse().ok())
        };
        let mut words = text.strip_prefix('v').unwrap_or(text).split('.');
        match (number(words.next()), number(words.next()), number(words.next()), words.next()) {
            (Some(major), Some(minor), Some(patch), None) => Ok(Self { major, minor, patch }),
            _ => Err(NoVersion(text.chars().take(100).collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_from_the_left() {
        let sorted = ["0.0.2", "0.0.10", "1.9.0", "1.20.2", "1.20.10", "1.21.0", "2.0.0"];
        let versions: Vec<Version> = sorted.iter().map(|text| text.parse().unwrap()).collect();
        assert!(versions.is_sorted_by(|one, other| one < other), "{versions:?}");
        for (version, text) in versions.iter().zip(sorted) {
            assert_eq!(version.to_string(), text);
            assert_eq!(format!("v{text}").parse::<Version>().as_ref(), Ok(version));
        }
    }

    #[test]
    fn what_names_no_release_is_told_so() {
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
            let error = text.parse::<Version>().unwrap_err().to_string();
            assert!(error.contains("is no version"), "{text}: {error}");
        }
    }
}
