//! Whether an etcd may be started on the data that another version left.
//!
//! etcd is upgraded one minor version at a time and never downgraded. Its developers also name the first version of a
//! minor version from which the next one may be installed ([`FIRST_STEPS`]).

use std::fmt;

use crate::kubernetes::version::ReleaseVersion;
use crate::program_versions::version::ProgramVersion;
use crate::program_versions::{Program, VERSION_FAULTS, VersionFault, find_faults};

/// What a minor version requires of the etcd that ran on the data before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstStep {
    /// Name by which the requirement is waived.
    pub name: &'static str,
    /// The minor version of etcd 3 that requires it.
    pub minor: u32,
    /// The oldest version of the minor version before that fulfils it.
    pub oldest: ReleaseVersion,
    /// Why, as a clause about the version that ran before.
    pub reason: &'static str,
}

/// Every requirement. `docs/versions.md` has the same list, and a test compares them.
pub const FIRST_STEPS: &[FirstStep] = &[
    // https://etcd.io/blog/2025/zombie_members_upgrade/
    FirstStep {
        name: "etcd-membership-records",
        minor: 6,
        oldest: ReleaseVersion::new(3, 5, 26),
        reason: "may have left membership records that 3.6 does not accept",
    },
    // https://etcd.io/docs/v3.7/upgrades/upgrade_3_7/
    FirstStep {
        name: "etcd-rolling-upgrade",
        minor: 7,
        oldest: ReleaseVersion::new(3, 6, 11),
        reason: "may not run in one cluster with 3.7",
    },
];

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
    /// The minor version requires a later version of the minor version before.
    #[error(
        "etcd {next} is not started, because etcd {last} ran on the data of this member before, which {}: install etcd {} \
         or a later {} first, on every member, or allow it by the name {} in ROLESERVER_ALLOWED_FAULTS",
        step.reason,
        step.oldest,
        minor_version(step.oldest),
        step.name
    )]
    TooEarly {
        /// The version that last ran there.
        last: ReleaseVersion,
        /// The version of the program.
        next: ReleaseVersion,
        /// What the minor version of the program requires.
        step: &'static FirstStep,
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
        next: ProgramVersion,
        /// The fault that loses data.
        fault: &'static VersionFault,
    },
}

/// A minor version, such as 3.5.
fn minor_version(version: ReleaseVersion) -> impl fmt::Display {
    format!("{}.{}", version.major, version.minor)
}

fn line_of(version: ReleaseVersion) -> String {
    format!("etcd {}", minor_version(version))
}

fn line_after(version: ReleaseVersion) -> String {
    format!("etcd {}.{}", version.major, version.minor + 1)
}

/// Whether an etcd of version `next` may be started on data on which `last` ran; `None` for new data. `allowed` has the
/// names of faults and of requirements that the operator allows.
pub fn check_etcd_start(
    last: Option<ReleaseVersion>,
    next: ProgramVersion,
    allowed: &[String],
) -> Result<(), EtcdStartRefusal> {
    let is_allowed = |name: &str| allowed.iter().any(|one| one == name);
    let mut faults = find_faults(Program::Etcd, next).into_iter().map(|finding| finding.fault);
    if let Some(fault) = faults.find(|fault| fault.loses_data && !is_allowed(fault.name)) {
        return Err(EtcdStartRefusal::Faulty { next, fault });
    }
    let Some(last) = last else { return Ok(()) };
    let next = next.upstream.numbers;
    let (before, after) = ((last.major, last.minor), (next.major, next.minor));
    if after < before {
        return Err(EtcdStartRefusal::Older { last, next });
    }
    if after > (last.major, last.minor + 1) {
        return Err(EtcdStartRefusal::Skips { last, next });
    }
    let is_step = |step: &&FirstStep| after == (3, step.minor) && before < after && last < step.oldest;
    match FIRST_STEPS.iter().find(is_step).filter(|step| !is_allowed(step.name)) {
        Some(step) => Err(EtcdStartRefusal::TooEarly { last, next, step }),
        None => Ok(()),
    }
}

/// The warning about names that allow nothing, such as misspelled ones; `None` if each allows something.
#[must_use]
pub fn warn_about_allowed(allowed: &[String]) -> Option<String> {
    let faults = VERSION_FAULTS.iter().filter(|fault| fault.loses_data).map(|fault| fault.name);
    let known: Vec<&str> = faults.chain(FIRST_STEPS.iter().map(|step| step.name)).collect();
    let unknown: Vec<String> = allowed
        .iter()
        .filter(|name| !known.contains(&name.as_str()))
        .map(|name| format!("{name:?}"))
        .collect();
    (!unknown.is_empty()).then(|| {
        format!(
            "ROLESERVER_ALLOWED_FAULTS has {}, which allows nothing: the names that allow something are {}",
            unknown.join(", "),
            known.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::program_versions::version::parse_program_version;

    #[test]
    fn names_that_allow_nothing_are_reported_with_those_that_do() {
        let warning = |names: &[&str]| {
            warn_about_allowed(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(warning(&[]), None);
        assert_eq!(warning(&["etcd-divergence", "etcd-membership-records", "etcd-rolling-upgrade"]), None);
        let text = warning(&["etcd-divergence", "etcd-divergense", "etcd-stale-read"]).unwrap();
        assert_eq!(
            text,
            "ROLESERVER_ALLOWED_FAULTS has \"etcd-divergense\", \"etcd-stale-read\", which allows nothing: the names that \
             allow something are etcd-divergence, etcd-membership-records, etcd-rolling-upgrade"
        );
    }

    #[test]
    fn etcd_is_started_unless_it_would_harm_the_data() {
        let all: Vec<String> = ["etcd-divergence"]
            .into_iter()
            .chain(FIRST_STEPS.iter().map(|step| step.name))
            .map(str::to_owned)
            .collect();
        for (last, next, allowed, expected) in [
            (None, "3.4.23", &[][..], None),
            (None, "3.7.3", &[], None),
            (None, "3.5.2", &[], Some("etcd 3.5.2 can lose writes")),
            (None, "3.5.2", &all, None),
            (None, "3.5.3-rc.0", &[], Some("etcd 3.5.3-rc.0 can lose writes")),
            (Some("3.4.23"), "3.4.23", &[], None),
            (Some("3.4.34"), "3.4.23", &[], None),
            (Some("3.4.23"), "3.5.26", &[], None),
            (Some("3.5.26"), "3.4.34", &[], Some("etcd 3.4.34 is not started, because etcd 3.5.26 ran")),
            (Some("3.5.26"), "3.4.34", &all, Some("install etcd 3.5 again")),
            (Some("3.4.23"), "3.6.9", &all, Some("install etcd 3.5 first, on one member after the other")),
            (Some("3.4.23"), "4.0.0", &[], Some("one minor version at a time")),
            (Some("3.5.16"), "3.6.9", &[], Some("install etcd 3.5.26 or a later 3.5 first")),
            (Some("3.5.25"), "3.6.9", &[], Some("by the name etcd-membership-records in")),
            (Some("3.5.16"), "3.6.9", &all, None),
            (Some("3.5.26"), "3.6.9", &[], None),
            (Some("3.6.9"), "3.6.14", &[], None),
            (Some("3.6.9"), "3.7.3", &[], Some("install etcd 3.6.11 or a later 3.6 first, on every member")),
            (Some("3.6.10"), "3.7.0-rc.0", &[], Some("by the name etcd-rolling-upgrade in")),
            (Some("3.6.10"), "3.7.3", &all, None),
            (Some("3.6.11"), "3.7.3", &[], None),
            (Some("3.7.0"), "3.7.3", &[], None),
            (Some("3.7.3"), "3.8.0", &[], None),
        ] {
            let parsed = |text| parse_program_version(text).unwrap();
            let checked =
                check_etcd_start(last.map(|last| parsed(last).upstream.numbers), parsed(next), allowed);
            let refusal = checked.err().map(|refusal| refusal.to_string());
            assert_eq!(refusal.is_some(), expected.is_some(), "{last:?} {next}: {refusal:?}");
            assert!(
                refusal.as_deref().unwrap_or_default().contains(expected.unwrap_or_default()),
                "{last:?} {next}: {refusal:?}"
            );
        }
    }
}
