//! Which release of the role server a machine runs.

/// What an agent says of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The newest order that has ended there; 0: none.
    pub generation: i64,
    /// Digest of the program that runs.
    pub sha256: [u8; 32],
    /// Why the release that was ordered does not run, a sentence.
    pub error: Option<String>,
}
