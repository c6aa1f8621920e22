//! What a service may do beyond the default confinement: capabilities, system calls, more privileges by `execve`.
//!
//! A service is confined as container runtimes confine theirs. A declaration may request more, by name. To request nothing
//! is the default, which declarations of earlier releases have too: [`Privileges::is_default`] distinguishes the two, so
//! that a declaration that requests nothing has the digest that it had before.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Names of the capabilities of Linux by their numbers, without `CAP_` (capabilities(7)).
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// A capability of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Capability(u8);

impl Capability {
    /// All capabilities, by their numbers. A kernel may have fewer, or more.
    pub fn all() -> impl Iterator<Item = Self> {
        (0_u8..).zip(NAMES).map(|(number, _)| Self(number))
    }

    /// Its number, which is its bit in a set.
    #[must_use]
    pub const fn number(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Capability {
    /// The name without `CAP_`, as declarations have it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get(usize::from(self.0)) {
            Some(name) => f.write_str(name),
            None => write!(f, "{}", self.0),
        }
    }
}

/// A name that no capability has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a capability; the names are those of capabilities(7) without CAP_, for example NET_ADMIN"
)]
pub struct UnknownCapability(String);

impl FromStr for Capability {
    type Err = UnknownCapability;

    fn from_str(text: &str) -> Result<Self, UnknownCapability> {
        (0_u8..)
            .zip(NAMES)
            .find(|(_, name)| *name == text)
            .map(|(number, _)| Self(number))
            .ok_or_else(|| UnknownCapability(text.chars().take(100).collect()))
    }
}

/// Privileges that a service requests beyond the default confinement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Privileges {
    /// Capabilities besides the default ones.
    pub capabilities: BTreeSet<Capability>,
    /// Whether a service in a root filesystem runs without a filter of system calls.
    pub unfiltered_system_calls: bool,
    /// Whether programs that it executes may gain privileges, as with `sudo`.
    pub new_privileges: bool,
}

impl Privileges {
    /// Whether nothing is requested.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_names_have_their_numbers_in_linux() {
        for (name, number) in
            [("CHOWN", 0), ("SETPCAP", 8), ("NET_ADMIN", 12), ("SYS_ADMIN", 21), ("CHECKPOINT_RESTORE", 40)]
        {
            let capability: Capability = name.parse().unwrap();
            assert_eq!((capability.number(), capability.to_string().as_str()), (number, name));
        }
        for wrong in ["", "net_admin", "CAP_NET_ADMIN", "ALL", "41"] {
            let error = wrong.parse::<Capability>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{wrong:?} is not a capability")), "{error}");
        }
    }
}
