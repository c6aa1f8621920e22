//! What a selector sees of a machine.

use std::collections::BTreeSet;

use crate::label::Labels;

/// No facts, for machines whose facts are not read.
pub static NO_FACTS: BTreeSet<String> = BTreeSet::new();

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

/// The values of a machine that a selector can use.
#[derive(Clone, Copy, Debug)]
pub struct MachineTraits<'a> {
    /// Provider that the machine belongs to; `None` if unknown.
    pub provider: Option<&'a str>,
    /// Its id at the provider; `None` if unknown.
    pub provider_id: Option<&'a str>,
    /// Location of the machine; `None` if unknown.
    pub location: Option<&'a str>,
    /// Its hardware, as far as it is known.
    pub hardware: &'a Hardware,
    /// Labels that operators set on it.
    pub labels: &'a Labels,
    /// Phase as it is indexed; `None` if it was not read.
    pub phase: Option<&'a str>,
    /// Name of the cluster that has it; `None` for none.
    pub cluster: Option<&'a str>,
    /// Those of `known_facts` that the machine has.
    pub facts: &'a BTreeSet<String>,
    /// Facts of which it is known whether the machine has them. A term about any other fact is not met.
    pub known_facts: &'a BTreeSet<String>,
}
