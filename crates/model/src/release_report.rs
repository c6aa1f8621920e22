//! Release report: which role server release a machine runs.

use crate::host_finding::HostFinding;

/// An agent's report of its release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleaseReport {
    /// Generation of the newest order that has ended on the machine; 0 for none.
    pub generation: i64,
    /// Digest of the running program.
    pub sha256: [u8; 32],
    /// Why the ordered release does not run, as a sentence.
    pub error: Option<String>,
    /// What it finds wrong with how it runs.
    pub findings: Vec<HostFinding>,
}
