//! Keys of the terms of a selector.

/// What a term of a selector is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectorKey {
    /// Id of the machine at its provider, also as `PROVIDER/ID`.
    Name,
    /// Provider of the machine.
    Provider,
    /// Location of the machine.
    Location,
    /// Manufacturer by the hardware report.
    Manufacturer,
    /// Product by the hardware report.
    Product,
    /// A label, written `label.KEY`.
    Label,
    /// Size of the memory.
    Memory,
    /// Number of processor threads.
    Cpus,
    /// Phase of the machine's life.
    Phase,
    /// Cluster that has the machine.
    Cluster,
    /// Fact that the machine has.
    Fact,
}

impl SelectorKey {
    /// Every key, in the order in which messages list them.
    pub const ALL: [Self; 11] = [
        Self::Name,
        Self::Provider,
        Self::Location,
        Self::Manufacturer,
        Self::Product,
        Self::Label,
        Self::Memory,
        Self::Cpus,
        Self::Phase,
        Self::Cluster,
        Self::Fact,
    ];

    /// The word for it in a selector. The key of a label follows it after a dot.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Provider => "provider",
            Self::Location => "location",
            Self::Manufacturer => "manufacturer",
            Self::Product => "product",
            Self::Label => "label",
            Self::Memory => "memory",
            Self::Cpus => "cpus",
            Self::Phase => "phase",
            Self::Cluster => "cluster",
            Self::Fact => "fact",
        }
    }

    /// The key of this word; `None` for an unknown word and for that of labels, which need a key of their own.
    pub(super) fn find(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|key| *key != Self::Label && key.as_str() == word)
    }
}

/// The keys for a sentence.
pub(super) const KEYS_TEXT: &str =
    "name, provider, location, manufacturer, product, label.KEY, memory, cpus, phase, cluster and fact";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_has_every_key() {
        let words = KEYS_TEXT.replace(" and ", ", ").replace(".KEY", "");
        assert!(words.split(", ").eq(SelectorKey::ALL.map(SelectorKey::as_str)), "{words}");
    }
}
