//! Versions as programs report them and as packages of distributions are named.
//!
//! [`ProgramVersion`] has three parts: the numbers of the release, the stage of a pre-release, and the revision of a
//! package. Faults are published for the first two. The third is of a distribution, which may have corrected a fault
//! without another release.

use std::fmt;

use crate::kubernetes::version::ReleaseVersion;

/// How far a release is. A pre-release is before the release with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReleaseStage {
    /// A first pre-release and its number.
    Alpha(u32),
    /// A later pre-release and its number.
    Beta(u32),
    /// A release candidate and its number.
    Candidate(u32),
    /// The release that these lead to.
    Release,
}

/// A release or a pre-release of a program's developers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UpstreamVersion {
    /// The numbers that the developers count.
    pub numbers: ReleaseVersion,
    /// The stage, which orders versions with the same numbers.
    pub stage: ReleaseStage,
}

/// An update of a stable release of Debian, which the version of a package ends with: `+deb12u3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DebianUpdate {
    /// Number of the release of Debian.
    pub debian: u32,
    /// Number of the update of the package in that release.
    pub update: u32,
}

/// What the version of a package adds to that of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackageRevision {
    /// The update of Debian; `None` for a package of another distribution, and for one that was never updated.
    pub debian_update: Option<DebianUpdate>,
}

/// The version of a program that is installed somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramVersion {
    /// The version of the developers.
    pub upstream: UpstreamVersion,
    /// The revision of its package; `None` if the version has none, as most programs report it.
    pub revision: Option<PackageRevision>,
}

impl UpstreamVersion {
    /// The release with these numbers.
    #[must_use]
    pub const fn release(major: u32, minor: u32, patch: u32) -> Self {
        Self { numbers: ReleaseVersion::new(major, minor, patch), stage: ReleaseStage::Release }
    }

    /// A candidate of the release with these numbers.
    #[must_use]
    pub const fn candidate(major: u32, minor: u32, patch: u32, number: u32) -> Self {
        Self { numbers: ReleaseVersion::new(major, minor, patch), stage: ReleaseStage::Candidate(number) }
    }

    /// Whether it is not before `first`. A release as `first` includes its own pre-releases.
    pub(super) fn is_since(self, first: Self) -> bool {
        match first.stage {
            ReleaseStage::Release => self.numbers >= first.numbers,
            _ => self >= first,
        }
    }
}

impl From<ReleaseVersion> for UpstreamVersion {
    fn from(numbers: ReleaseVersion) -> Self {
        Self { numbers, stage: ReleaseStage::Release }
    }
}

impl From<ReleaseVersion> for ProgramVersion {
    fn from(numbers: ReleaseVersion) -> Self {
        Self { upstream: numbers.into(), revision: None }
    }
}

impl fmt::Display for UpstreamVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.numbers)?;
        match self.stage {
            ReleaseStage::Alpha(number) => write!(f, "-alpha.{number}"),
            ReleaseStage::Beta(number) => write!(f, "-beta.{number}"),
            ReleaseStage::Candidate(number) => write!(f, "-rc.{number}"),
            ReleaseStage::Release => Ok(()),
        }
    }
}

/// Parses the version that a program reports or that its package has: two or three numbers, with or without a `v` or the
/// epoch of a package before them, then the stage of a pre-release (`-rc.1`, `~rc93`), then the revision of a package.
#[must_use]
pub fn parse_program_version(text: &str) -> Option<ProgramVersion> {
    let text = text.trim();
    let text = match text.split_once(':') {
        Some((epoch, rest)) if !epoch.is_empty() && epoch.bytes().all(|byte| byte.is_ascii_digit()) => rest,
        _ => text,
    };
    let text = text.strip_prefix('v').unwrap_or(text);
    let (numbers, rest) = split_before(text, |c| !c.is_ascii_digit() && c != '.');
    let mut numbers = numbers.split('.');
    let mut next = || numbers.next()?.parse::<u32>().ok();
    let (major, minor) = (next()?, next()?);
    let numbers = ReleaseVersion::new(major, minor, next().unwrap_or(0));
    let (stage, rest) = parse_stage(rest);
    let revision = !rest.trim().is_empty();
    let revision = revision.then(|| PackageRevision { debian_update: parse_debian_update(rest) });
    Some(ProgramVersion { upstream: UpstreamVersion { numbers, stage }, revision })
}

/// Parses the version line of an OpenSSH server (`SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3`); `None` for another server.
/// Distributions correct OpenSSH without another version, and not each of them changes this line. So the version counts as
/// that of a package in any case.
#[must_use]
pub fn parse_openssh_banner(line: &str) -> Option<ProgramVersion> {
    let (_, version) =
        line.trim().split_once("-OpenSSH_").filter(|(protocol, _)| protocol.starts_with("SSH-"))?;
    let parsed = parse_program_version(version)?;
    let revision = parsed.revision.unwrap_or(PackageRevision { debian_update: None });
    Some(ProgramVersion { revision: Some(revision), ..parsed })
}

/// The stage at the beginning of a text, and the rest.
fn parse_stage(text: &str) -> (ReleaseStage, &str) {
    type StageOf = fn(u32) -> ReleaseStage;
    const STAGES: [(&str, StageOf); 3] =
        [("alpha", ReleaseStage::Alpha), ("beta", ReleaseStage::Beta), ("rc", ReleaseStage::Candidate)];
    let stage = text.strip_prefix(['-', '~']).unwrap_or(text);
    let found = STAGES.iter().find_map(|(word, stage_of)| Some((stage.strip_prefix(word)?, stage_of)));
    let Some((number, stage_of)) = found else { return (ReleaseStage::Release, text) };
    let (number, rest) = split_before(number.strip_prefix('.').unwrap_or(number), |c| !c.is_ascii_digit());
    (stage_of(number.parse().unwrap_or(0)), rest)
}

/// The update of Debian in the revision of a package: `-1+deb12u3`, or `~deb12u1` in a package of a later release.
fn parse_debian_update(revision: &str) -> Option<DebianUpdate> {
    let (_, update) = revision.rsplit_once("deb")?;
    let (debian, update) = update.split_once('u')?;
    let (update, _) = split_before(update, |c| !c.is_ascii_digit());
    Some(DebianUpdate { debian: debian.parse().ok()?, update: update.parse().ok()? })
}

/// Splits a text before the first character of a kind.
fn split_before(text: &str, is_after: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(is_after).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_as_programs_report_them() {
        for (text, expected) in [
            ("3.4.23", "3.4.23"),
            ("v1.7.24~ds1-6", "1.7.24 packaged"),
            ("3.7.0-rc.1", "3.7.0-rc.1"),
            ("v2.4.0-beta.0", "2.4.0-beta.0"),
            ("3.7.0-alpha.0", "3.7.0-alpha.0"),
            ("1.0.0-rc93", "1.0.0-rc.93"),
            ("1.0.0~rc93+ds1-5+deb11u3", "1.0.0-rc.93 packaged 11u3"),
            (" 15.4 (Debian 15.4-1)", "15.4.0 packaged"),
            (" 15.14 (Debian 15.14-0+deb12u1)", "15.14.0 packaged 12u1"),
            ("1.1.15+deb12u1", "1.1.15 packaged 12u1"),
            ("1.1.5+ds1-1+deb12u1+b3", "1.1.5 packaged 12u1"),
            ("1.1.12-1~deb12u2", "1.1.12 packaged 12u2"),
            ("1.6.20~ds1-1+b1", "1.6.20 packaged"),
            ("3.4.23-4+deb12u1", "3.4.23 packaged 12u1"),
            ("1:9.2p1-2+deb12u3", "9.2.0 packaged 12u3"),
            ("1.7.27-0ubuntu1~24.04.1", "1.7.27 packaged"),
            ("v1.31.5+k3s1", "1.31.5 packaged"),
            ("18beta1", ""),
            (":1.2.3", ""),
            ("", ""),
            ("not a version", ""),
        ] {
            let parsed = parse_program_version(text).map_or_else(String::new, |version| {
                let revision = version.revision.map_or_else(String::new, |revision| {
                    let update = revision.debian_update.map(|at| format!(" {}u{}", at.debian, at.update));
                    format!(" packaged{}", update.unwrap_or_default())
                });
                format!("{}{revision}", version.upstream)
            });
            assert_eq!(parsed, expected, "{text}");
        }
    }

    #[test]
    fn pre_releases_are_before_their_release() {
        let texts = ["1.3.9", "1.4.0-alpha.7", "1.4.0-beta.0", "1.4.0-rc3", "1.4.0-rc93", "1.4.0", "1.4.1"];
        let versions: Vec<_> =
            texts.iter().map(|text| parse_program_version(text).unwrap().upstream).collect();
        assert!(versions.is_sorted_by(|one, other| one < other), "{versions:?}");
        for (text, expected) in [("1.3.9", false), ("1.4.0-alpha.7", true), ("1.4.0", true)] {
            let version = parse_program_version(text).unwrap().upstream;
            assert_eq!(version.is_since(UpstreamVersion::release(1, 4, 0)), expected, "{text}");
        }
        assert!(!UpstreamVersion::candidate(1, 4, 0, 2).is_since(UpstreamVersion::candidate(1, 4, 0, 3)));
    }
}
