//! Versions of other programs: those with a published fault, those that are supported, and how etcd may be replaced.
//!
//! A fault of another program is named before it bites: wherever a version is learned, [`find_faults`] is called with it.
//! A fault that loses data is refused unless it is allowed by its name; others are shown. [`VERSION_FAULTS`] is the table,
//! and [`etcd_start`][] has the rule by which one etcd may follow another.
//!
//! # Packages of distributions
//!
//! A distribution corrects a fault without another release, so the version of its package does not decide:
//!
//! * A package that is known to have the correction ([`VersionFault::corrected_in_debian`]) has no fault.
//! * An earlier update of the same package has the fault.
//! * Any other version with the revision of a package may have the correction. Its sentence says so, it is logged as
//!   information, and it is no issue ([`VersionFinding::is_certain`]).
//! * A version without a revision is that of the developers.

use std::fmt;

use crate::kubernetes::version::ReleaseVersion;
pub use crate::program_versions::table::VERSION_FAULTS;
use crate::program_versions::version::{DebianUpdate, ProgramVersion, UpstreamVersion};

pub mod etcd_start;
mod table;
pub mod version;

/// A program of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Program {
    /// The store of a cluster.
    Etcd,
    /// The database of the fleet.
    Postgres,
    /// The programs of Kubernetes in a bundle.
    Kubernetes,
    /// The container runtime in a bundle.
    Containerd,
    /// The program in a bundle that starts a container.
    Runc,
    /// The SSH server of a machine.
    OpenSsh,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Etcd => "etcd",
            Self::Postgres => "PostgreSQL",
            Self::Kubernetes => "Kubernetes",
            Self::Containerd => "containerd",
            Self::Runc => "runc",
            Self::OpenSsh => "OpenSSH",
        })
    }
}

/// A published fault of some versions of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionFault {
    /// Name by which it is allowed.
    pub name: &'static str,
    /// The program that has it.
    pub program: Program,
    /// For each line of releases: the first version with the fault, and the first without. The first version includes its
    /// own pre-releases, unless it is one itself.
    pub ranges: &'static [(UpstreamVersion, UpstreamVersion)],
    /// Versions in these ranges with the correction in the package of Debian, since an update.
    pub corrected_in_debian: &'static [(UpstreamVersion, DebianUpdate)],
    /// What the program does wrong, as the end of a sentence that begins with its version.
    pub effect: &'static str,
    /// Whether any cluster can lose data by it, so that the version is refused unless the fault is allowed.
    pub loses_data: bool,
    /// The page of its developers.
    pub reference: &'static str,
}

/// A published fault of a version. Shown as a sentence without its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionFinding {
    /// The row of the table.
    pub fault: &'static VersionFault,
    /// The version that has it.
    pub version: ProgramVersion,
    /// Whether no package may have corrected the fault: the version has no revision of a package, or one that is known to
    /// be older than the correction.
    pub is_certain: bool,
}

impl fmt::Display for VersionFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.fault.describe(self.version))
    }
}

/// The oldest and the newest supported line of releases of a program. Both are run by tests.
pub const SUPPORTED_ETCD: (ReleaseVersion, ReleaseVersion) =
    (ReleaseVersion::new(3, 4, 16), ReleaseVersion::new(3, 7, 0));
/// As [`SUPPORTED_ETCD`], for PostgreSQL.
pub const SUPPORTED_POSTGRES: (u32, u32) = (15, 18);

/// Name of the fault for which an etcd is never defragmented.
pub const KILLED_DEFRAGMENTATION_FAULT: &str = "etcd-killed-defragmentation";
/// Name of the fault for which an etcd is defragmented only once it is full.
pub const SNAPSHOT_DEFRAGMENTATION_FAULT: &str = "etcd-defragmentation";

impl VersionFault {
    /// Whether a version has the fault, as far as its number and its package show.
    #[must_use]
    pub fn affects(&self, version: ProgramVersion) -> bool {
        self.fixed_in(version.upstream).is_some() && self.is_corrected(version) != Some(true)
    }

    /// The first version without the fault in the line of releases of `version`; `None` if `version` has no fault.
    fn fixed_in(&self, version: UpstreamVersion) -> Option<UpstreamVersion> {
        let range = self.ranges.iter().find(|(first, fixed)| version.is_since(*first) && version < *fixed);
        range.map(|(_, fixed)| *fixed)
    }

    /// Whether the package of `version` has the correction; `None` if nothing is known about it.
    fn is_corrected(&self, version: ProgramVersion) -> Option<bool> {
        let update = version.revision?.debian_update?;
        let mut corrections = self.corrected_in_debian.iter();
        let (_, since) = corrections
            .find(|(upstream, since)| *upstream == version.upstream && update.debian == since.debian)?;
        Some(update.update >= since.update)
    }

    /// Whether no package may have corrected the fault that `version` has.
    fn is_certain(&self, version: ProgramVersion) -> bool {
        version.revision.is_none() || self.is_corrected(version) == Some(false)
    }

    /// The fault of a version as a sentence without its end.
    #[must_use]
    pub fn describe(&self, version: ProgramVersion) -> String {
        let Self { name, program, effect, reference, .. } = self;
        let fixed = self.fixed_in(version.upstream).map(|fixed| format_version(*program, fixed));
        let is_certain = self.is_certain(version);
        let version = format_version(*program, version.upstream);
        let fault = format!("{program} {version} {effect} ({name}, {reference})");
        match fixed {
            None => fault,
            Some(fixed) if !is_certain => format!(
                "{fault}, unless the distribution has corrected it in this package: if not, install {fixed} or later"
            ),
            Some(fixed) => format!("{fault}: install {fixed} or later"),
        }
    }
}

/// A version as the program's developers write it. PostgreSQL and OpenSSH have two numbers.
#[must_use]
pub fn format_version(program: Program, version: UpstreamVersion) -> String {
    match program {
        Program::Postgres => format!("{}.{}", version.numbers.major, version.numbers.minor),
        Program::OpenSsh => format!("{}.{}p1", version.numbers.major, version.numbers.minor),
        _ => version.to_string(),
    }
}

/// The faults of a version of a program.
#[must_use]
pub fn find_faults(program: Program, version: ProgramVersion) -> Vec<VersionFinding> {
    let faults = VERSION_FAULTS.iter().filter(|fault| fault.program == program && fault.affects(version));
    faults.map(|fault| VersionFinding { fault, version, is_certain: fault.is_certain(version) }).collect()
}

/// The version of a PostgreSQL from its `server_version_num`, such as 150004 for 15.4.
#[must_use]
pub fn postgres_version(number: u32) -> ReleaseVersion {
    ReleaseVersion::new(number / 10_000, number % 10_000, 0)
}

/// What is to be known about the version of a PostgreSQL: its faults, and whether it is supported. Sentences without
/// their ends.
#[must_use]
pub fn postgres_warnings(version: ReleaseVersion) -> Vec<String> {
    let (oldest, newest) = SUPPORTED_POSTGRES;
    let mut warnings: Vec<String> =
        find_faults(Program::Postgres, version.into()).iter().map(ToString::to_string).collect();
    if !(oldest..=newest).contains(&version.major) {
        let version = format_version(Program::Postgres, version.into());
        warnings.push(format!("PostgreSQL {version} is not supported; {oldest} to {newest} are"));
    }
    warnings
}

#[cfg(test)]
mod tests;
