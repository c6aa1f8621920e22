//! What of a machine's hardware it is chosen and labelled by.

/// What is known of a machine's hardware.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// Who made it.
    pub manufacturer: Option<String>,
    /// What it is.
    pub product: Option<String>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Threads of its processors.
    pub cpus: Option<u64>,
}
