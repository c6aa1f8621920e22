//! What the machine is made of.
//!
//! One file per source. Every reader takes where to read from ([`Sources`]), so
//! that a test can lay out a machine by hand, and every parser is a function of
//! bytes. A thing that cannot be read is left unset and becomes a warning; no
//! failure to read something ever fails the report.

use std::path::{Path, PathBuf};

use crate::proto::hardware::v1 as wire;

/// Where the kernel shows the machine.
#[derive(Clone, Debug)]
pub struct Sources {
    /// sysfs.
    pub sys: PathBuf,
    /// procfs.
    pub proc: PathBuf,
    /// Device nodes.
    pub dev: PathBuf,
}

impl Sources {
    /// The machine this program runs on.
    #[must_use]
    pub fn host() -> Self {
        Self { sys: "/sys".into(), proc: "/proc".into(), dev: "/dev".into() }
    }

    /// A machine laid out under one directory.
    #[must_use]
    pub fn under(root: &Path) -> Self {
        Self { sys: root.join("sys"), proc: root.join("proc"), dev: root.join("dev") }
    }
}

/// Reads the whole machine; blocks, on a broken disk for long.
#[must_use]
pub fn read(_sources: &Sources) -> wire::HardwareReport {
    wire::HardwareReport::default()
}
