//! Versions of other programs: those with a published fault, those that are supported, and how etcd may be replaced.
//!
//! A fault of another program is named before it bites: wherever a version is learned, [`find_faults`] is called with it.
//! A fault that loses data is refused unless it is allowed by its name; others are shown. `docs/versions.md` has the same
//! table, and a test compares them.
//!
//! # How to add a row
//!
//! State the range by the releases themselves: the first version that has the fault, and the first that does not. Where
//! the developers name no first version, it is the first release of all. Give the page of the program's own developers as
//! the reference. A name never changes, because configurations contain it.

use std::fmt;

use crate::kubernetes::version::ReleaseVersion;

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
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Etcd => "etcd",
            Self::Postgres => "PostgreSQL",
            Self::Kubernetes => "Kubernetes",
            Self::Containerd => "containerd",
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
    /// For each line of releases: the first version with the fault, and the first without.
    pub ranges: &'static [(ReleaseVersion, ReleaseVersion)],
    /// What the program does wrong, as the end of a sentence that begins with its version.
    pub effect: &'static str,
    /// Whether it loses data, so that the version is refused unless the fault is allowed.
    pub loses_data: bool,
    /// The page of its developers.
    pub reference: &'static str,
}

const fn version(major: u32, minor: u32, patch: u32) -> ReleaseVersion {
    ReleaseVersion::new(major, minor, patch)
}

/// Every fault, by program.
pub const VERSION_FAULTS: &[VersionFault] = &[
    VersionFault {
        name: "etcd-lost-delete-event",
        program: Program::Etcd,
        ranges: &[(version(3, 4, 0), version(3, 4, 36)), (version(3, 5, 0), version(3, 5, 18))],
        effect: "sends no event for a deletion at the very revision of a compaction; the curators bear it, and other \
                 clients may not",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/issues/18089",
    },
    VersionFault {
        name: "etcd-divergence",
        program: Program::Etcd,
        ranges: &[(version(3, 5, 0), version(3, 5, 3))],
        effect: "can lose writes when it is killed, so that its members have different data",
        loses_data: true,
        reference: "https://github.com/etcd-io/etcd/issues/13766",
    },
    VersionFault {
        name: "postgresql-concurrent-index",
        program: Program::Postgres,
        ranges: &[(version(14, 0, 0), version(14, 4, 0))],
        effect: "breaks indexes that are built concurrently, so that they miss rows",
        loses_data: false,
        reference: "https://www.postgresql.org/docs/release/14.4/",
    },
    VersionFault {
        name: "kubernetes-subpath",
        program: Program::Kubernetes,
        ranges: &[
            (version(1, 0, 0), version(1, 19, 15)),
            (version(1, 20, 0), version(1, 20, 11)),
            (version(1, 21, 0), version(1, 21, 5)),
            (version(1, 22, 0), version(1, 22, 2)),
        ],
        effect: "lets a container reach files of its host by a volume's subpath (CVE-2021-25741)",
        loses_data: false,
        reference: "https://github.com/kubernetes/kubernetes/issues/104980",
    },
    VersionFault {
        name: "containerd-image-volumes",
        program: Program::Containerd,
        ranges: &[
            (version(1, 0, 0), version(1, 4, 13)),
            (version(1, 5, 0), version(1, 5, 10)),
            (version(1, 6, 0), version(1, 6, 1)),
        ],
        effect: "lets an image read files of its host (CVE-2022-23648)",
        loses_data: false,
        reference: "https://github.com/containerd/containerd/security/advisories/GHSA-crp2-qrr5-8pq7",
    },
];

/// The oldest and the newest supported line of releases of a program. Both are run by tests.
pub const SUPPORTED_ETCD: (ReleaseVersion, ReleaseVersion) = (version(3, 4, 16), version(3, 7, 0));
/// As [`SUPPORTED_ETCD`], for PostgreSQL.
pub const SUPPORTED_POSTGRES: (u32, u32) = (15, 18);

/// Name by which etcd 3.6 may be started on data of an etcd before 3.5.26.
pub const MEMBERSHIP_RECORDS: &str = "etcd-membership-records";
/// The first version of etcd 3.5 that repairs the membership records which 3.6 requires.
const REPAIRS_MEMBERSHIP: ReleaseVersion = version(3, 5, 26);

impl VersionFault {
    /// Whether a version has the fault.
    #[must_use]
    pub fn affects(&self, version: ReleaseVersion) -> bool {
        self.ranges.iter().any(|(first, fixed)| (*first..*fixed).contains(&version))
    }

    /// The first version without the fault in the line of releases of `version`.
    fn fixed_in(&self, version: ReleaseVersion) -> Option<ReleaseVersion> {
        self.ranges.iter().find(|(first, fixed)| (*first..*fixed).contains(&version)).map(|(_, fixed)| *fixed)
    }

    /// The fault of a version as a sentence without its end.
    #[must_use]
    pub fn describe(&self, version: ReleaseVersion) -> String {
        let Self { name, program, effect, reference, .. } = self;
        let fixed = self.fixed_in(version).map(|fixed| format_version(*program, fixed));
        let remedy = fixed.map_or_else(String::new, |fixed| format!(": install {fixed} or later"));
        let version = format_version(*program, version);
        format!("{program} {version} {effect} ({name}, {reference}){remedy}")
    }
}

/// A version as the program's developers write it. PostgreSQL has two numbers.
#[must_use]
pub fn format_version(program: Program, version: ReleaseVersion) -> String {
    match program {
        Program::Postgres => format!("{}.{}", version.major, version.minor),
        _ => version.to_string(),
    }
}

/// The faults of a version of a program.
#[must_use]
pub fn find_faults(program: Program, version: ReleaseVersion) -> Vec<&'static VersionFault> {
    VERSION_FAULTS.iter().filter(|fault| fault.program == program && fault.affects(version)).collect()
}

/// Parses the version that a program reports: two or three numbers, with or without a `v`. A suffix is ignored, because
/// a package of a distribution and a pre-release have the faults of the release.
#[must_use]
pub fn parse_program_version(text: &str) -> Option<ReleaseVersion> {
    let text = text.trim();
    let text = text.strip_prefix('v').unwrap_or(text);
    let numbers = text.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    let mut numbers = numbers.split('.');
    let mut next = || numbers.next()?.parse::<u32>().ok();
    let (major, minor) = (next()?, next()?);
    Some(ReleaseVersion::new(major, minor, next().unwrap_or(0)))
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
        find_faults(Program::Postgres, version).iter().map(|fault| fault.describe(version)).collect();
    if !(oldest..=newest).contains(&version.major) {
        let version = format_version(Program::Postgres, version);
        warnings.push(format!("PostgreSQL {version} is not supported; {oldest} to {newest} are"));
    }
    warnings
}

/// Why an etcd is not started. Each text is a sentence that names the way out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdStartRefusal {
    /// An etcd of a later minor version ran on the data.
    #[error(
        "etcd {next} is not started, because etcd {last} ran on the data of this member before: install {} again, or \
         replace this member (`shepherdctl cluster scale`)",
        line_of(*last)
    )]
    Older {
        /// The version that last ran there.
        last: ReleaseVersion,
        /// The version of the program.
        next: ReleaseVersion,
    },
    /// etcd is upgraded one minor version at a time.
    #[error(
        "etcd {next} is not started, because etcd {last} ran on the data of this member before, and etcd is upgraded one \
         minor version at a time: install {} first, on one member after the other",
        line_after(*last)
    )]
    Skips {
        /// The version that last ran there.
        last: ReleaseVersion,
        /// The version of the program.
        next: ReleaseVersion,
    },
    /// etcd 3.6 requires membership records that 3.5.26 repairs.
    #[error(
        "etcd {next} is not started, because etcd {last} ran on the data of this member before, which may have left \
         membership records that 3.6 does not accept: install etcd 3.5.26 or a later 3.5 first, on every member, or allow \
         it by the name {} in ROLESERVER_ALLOWED_FAULTS",
        MEMBERSHIP_RECORDS
    )]
    Unrepaired {
        /// The version that last ran there.
        last: ReleaseVersion,
        /// The version of the program.
        next: ReleaseVersion,
    },
    /// The version loses data.
    #[error(
        "{}; it is not started, because it loses data, unless it is allowed by the name {} in \
         ROLESERVER_ALLOWED_FAULTS",
        fault.describe(*next),
        fault.name
    )]
    Faulty {
        /// The version of the program.
        next: ReleaseVersion,
        /// The fault that loses data.
        fault: &'static VersionFault,
    },
}

fn line_of(version: ReleaseVersion) -> String {
    format!("etcd {}.{}", version.major, version.minor)
}

fn line_after(version: ReleaseVersion) -> String {
    format!("etcd {}.{}", version.major, version.minor + 1)
}

/// Whether an etcd of version `next` may be started on data on which `last` ran; `None` for new data. `allowed` has the
/// names of faults that the operator allows.
pub fn check_etcd_start(
    last: Option<ReleaseVersion>,
    next: ReleaseVersion,
    allowed: &[String],
) -> Result<(), EtcdStartRefusal> {
    let is_allowed = |name: &str| allowed.iter().any(|one| one == name);
    let mut faults = find_faults(Program::Etcd, next).into_iter();
    if let Some(fault) = faults.find(|fault| fault.loses_data && !is_allowed(fault.name)) {
        return Err(EtcdStartRefusal::Faulty { next, fault });
    }
    let Some(last) = last else { return Ok(()) };
    let (before, after) = ((last.major, last.minor), (next.major, next.minor));
    if after < before {
        return Err(EtcdStartRefusal::Older { last, next });
    }
    if after > (last.major, last.minor + 1) {
        return Err(EtcdStartRefusal::Skips { last, next });
    }
    let is_unrepaired = before == (3, 5) && after == (3, 6) && last < REPAIRS_MEMBERSHIP;
    if is_unrepaired && !is_allowed(MEMBERSHIP_RECORDS) {
        return Err(EtcdStartRefusal::Unrepaired { last, next });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn parsed(text: &str) -> ReleaseVersion {
        parse_program_version(text).unwrap()
    }

    #[test]
    fn each_fault_begins_and_ends_with_its_versions() {
        for (program, text, expected) in [
            (Program::Etcd, "3.4.23", &["etcd-lost-delete-event"][..]),
            (Program::Etcd, "3.4.33", &["etcd-lost-delete-event"]),
            (Program::Etcd, "3.4.34", &["etcd-lost-delete-event"]),
            (Program::Etcd, "3.4.35", &["etcd-lost-delete-event"]),
            (Program::Etcd, "3.4.36", &[]),
            (Program::Etcd, "3.5.0", &["etcd-lost-delete-event", "etcd-divergence"]),
            (Program::Etcd, "3.5.2", &["etcd-lost-delete-event", "etcd-divergence"]),
            (Program::Etcd, "3.5.3", &["etcd-lost-delete-event"]),
            (Program::Etcd, "3.5.17", &["etcd-lost-delete-event"]),
            (Program::Etcd, "3.5.18", &[]),
            (Program::Etcd, "3.6.0", &[]),
            (Program::Etcd, "3.7.3", &[]),
            (Program::Postgres, "13.22", &[]),
            (Program::Postgres, "14.0", &["postgresql-concurrent-index"]),
            (Program::Postgres, "14.3 (Debian 14.3-1)", &["postgresql-concurrent-index"]),
            (Program::Postgres, "14.4", &[]),
            (Program::Postgres, "15.0", &[]),
            (Program::Kubernetes, "v1.18.20", &["kubernetes-subpath"]),
            (Program::Kubernetes, "v1.19.14", &["kubernetes-subpath"]),
            (Program::Kubernetes, "v1.19.15", &[]),
            (Program::Kubernetes, "v1.22.1", &["kubernetes-subpath"]),
            (Program::Kubernetes, "v1.22.2", &[]),
            (Program::Containerd, "1.3.10", &["containerd-image-volumes"]),
            (Program::Containerd, "1.4.13", &[]),
            (Program::Containerd, "1.6.0", &["containerd-image-volumes"]),
            (Program::Containerd, "v1.7.0", &[]),
        ] {
            let found = find_faults(program, parsed(text));
            let names: Vec<&str> = found.iter().map(|fault| fault.name).collect();
            assert_eq!(names, expected, "{program} {text}");
        }
    }

    #[test]
    fn table_is_in_the_documentation() {
        let page = include_str!("../../../docs/versions.md");
        let mut names = BTreeSet::new();
        for fault in VERSION_FAULTS {
            assert!(names.insert(fault.name), "{} is there twice", fault.name);
            let row = page.lines().find(|line| line.starts_with(&format!("| `{}` |", fault.name)));
            let row = row.unwrap_or_else(|| panic!("docs/versions.md has no row for {}", fault.name));
            for (first, fixed) in fault.ranges {
                assert!(first < fixed, "{}", fault.name);
                let range = [first, fixed].map(|version| format_version(fault.program, *version));
                assert!(row.contains(&format!("{} until {}", range[0], range[1])), "{row}");
            }
            assert!(row.contains(&fault.program.to_string()) && row.contains(fault.reference), "{row}");
            assert_eq!(row.contains("refused"), fault.loses_data, "{row}");
        }
        assert!(page.contains(MEMBERSHIP_RECORDS));
    }

    #[test]
    fn versions_are_parsed_as_programs_report_them() {
        for (text, expected) in [
            ("3.4.23", Some((3, 4, 23))),
            ("v1.7.24~ds1-6", Some((1, 7, 24))),
            ("3.7.0-rc.1", Some((3, 7, 0))),
            (" 15.4 (Debian 15.4-1)", Some((15, 4, 0))),
            ("18beta1", None),
            ("", None),
            ("not a version", None),
        ] {
            let expected = expected.map(|(major, minor, patch)| ReleaseVersion::new(major, minor, patch));
            assert_eq!(parse_program_version(text), expected, "{text}");
        }
        assert_eq!(format_version(Program::Postgres, postgres_version(150_004)), "15.4");
    }

    #[test]
    fn postgres_outside_the_supported_versions_is_named() {
        assert_eq!(postgres_warnings(parsed("15.4")), [""; 0]);
        assert_eq!(postgres_warnings(parsed("18.1")), [""; 0]);
        assert_eq!(postgres_warnings(parsed("19.0")), ["PostgreSQL 19.0 is not supported; 15 to 18 are"]);
        let old = postgres_warnings(parsed("14.2"));
        assert_eq!(old.len(), 2, "{old:?}");
        assert!(old[0].ends_with("/14.4/): install 14.4 or later"), "{old:?}");
    }

    #[test]
    fn etcd_is_started_unless_it_would_harm_the_data() {
        let all = ["etcd-divergence".to_owned(), MEMBERSHIP_RECORDS.to_owned()];
        for (last, next, allowed, expected) in [
            (None, "3.4.23", &[][..], None),
            (None, "3.7.3", &[], None),
            (None, "3.5.2", &[], Some("etcd 3.5.2 can lose writes")),
            (None, "3.5.2", &all, None),
            (Some("3.4.23"), "3.4.23", &[], None),
            (Some("3.4.34"), "3.4.23", &[], None),
            (Some("3.4.23"), "3.5.26", &[], None),
            (Some("3.5.26"), "3.4.34", &[], Some("etcd 3.4.34 is not started, because etcd 3.5.26 ran")),
            (Some("3.5.26"), "3.4.34", &all, Some("install etcd 3.5 again")),
            (Some("3.4.23"), "3.6.9", &all, Some("install etcd 3.5 first, on one member after the other")),
            (Some("3.4.23"), "4.0.0", &[], Some("one minor version at a time")),
            (Some("3.5.16"), "3.6.9", &[], Some("install etcd 3.5.26 or a later 3.5 first")),
            (Some("3.5.16"), "3.6.9", &all, None),
            (Some("3.5.26"), "3.6.9", &[], None),
            (Some("3.6.9"), "3.7.3", &[], None),
        ] {
            let checked = check_etcd_start(last.map(parsed), parsed(next), allowed);
            let refusal = checked.err().map(|refusal| refusal.to_string());
            assert_eq!(refusal.is_some(), expected.is_some(), "{last:?} {next}: {refusal:?}");
            assert!(refusal.unwrap_or_default().contains(expected.unwrap_or_default()), "{last:?} {next}");
        }
    }
}
