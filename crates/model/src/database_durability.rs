//! Whether a commit that the database server answered survives a crash of it. *Pure.*
//!
//! A session that was renewed, a machine that was claimed, a step that was begun: each counts once its commit is
//! answered. A server without `fsync`, or a role with `synchronous_commit = off`, forgets the last of them in a crash, and
//! `local` forgets them at a fail-over to a synchronous standby.

use std::fmt;

/// A setting with which the server may lose commits that it answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DurabilityFault {
    /// Nothing is forced to the disk.
    NoFsync,
    /// A commit is answered before it is on the disk.
    CommitOff,
    /// A commit is answered before a synchronous standby has it.
    CommitLocal,
}

impl DurabilityFault {
    /// The fault of these values of `fsync`, `synchronous_commit` and `synchronous_standby_names`; `None` without one.
    #[must_use]
    pub fn find(fsync: &str, commit: &str, standbys: &str) -> Option<Self> {
        match (fsync, commit) {
            ("off", _) => Some(Self::NoFsync),
            (_, "off") => Some(Self::CommitOff),
            (_, "local") if !standbys.is_empty() => Some(Self::CommitLocal),
            _ => None,
        }
    }
}

/// The end of a sentence that begins with the database.
impl fmt::Display for DurabilityFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (setting, loses) = match self {
            Self::NoFsync => ("fsync = off", "a crash of its host may lose or damage everything"),
            Self::CommitOff => {
                ("synchronous_commit = off", "a crash loses the last commits that it answered")
            }
            Self::CommitLocal => {
                ("synchronous_commit = local", "a fail-over loses the last commits that it answered")
            }
        };
        write!(f, "runs with {setting}: {loses}, and another shepherd may repeat what was done to machines")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_that_loses_answered_commits_is_named() {
        for (fsync, commit, standbys, named) in [
            ("on", "on", "", None),
            ("on", "on", "ANY 1 (b, c)", None),
            ("on", "remote_write", "b", None),
            ("on", "remote_apply", "b", None),
            ("on", "local", "", None),
            ("on", "local", "b", Some("synchronous_commit = local")),
            ("on", "off", "", Some("synchronous_commit = off")),
            ("off", "on", "b", Some("fsync = off")),
            ("off", "off", "", Some("fsync = off")),
        ] {
            let fault = DurabilityFault::find(fsync, commit, standbys).map(|fault| fault.to_string());
            assert_eq!(fault.is_some(), named.is_some(), "{fsync} {commit} {standbys}: {fault:?}");
            assert!(
                fault.unwrap_or_default().contains(named.unwrap_or_default()),
                "{fsync} {commit} {standbys}"
            );
        }
    }
}
