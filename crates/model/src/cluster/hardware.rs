//! Hardware facts that select and label cluster members.

/// Hardware of a machine; `None` for what is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// Manufacturer's name, from the hardware report.
    pub manufacturer: Option<String>,
    /// Product name, from the hardware report.
    pub product: Option<String>,
    /// Size of the memory in bytes.
    pub memory: Option<u64>,
    /// Number of processor threads.
    pub cpus: Option<u64>,
}
