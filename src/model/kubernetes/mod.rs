//! Kubernetes, as far as it is decided and not done.
//!
//! Clusters run Kubernetes from *bundles*: one file with all programs of a release, known by its digest like every other
//! artefact. Nothing of what a node runs comes from what a distribution happens to have installed there, so a node of today
//! and one of next year run the same programs, and going back means naming the digest of before.
//!
//! * [`version`][]: versions of Kubernetes, three numbers.
//! * [`skew`][]: which of them may run beside each other in one cluster.
//! * [`ranges`][]: from which addresses services and pods get theirs.
//! * [`bundle`][]: what a bundle says that it holds. [`manifest`][]: how that is written, and what is wrong with it.
//! * [`archive`][]: how a bundle is laid out as a file, so that what it says can be read from its first piece alone.

pub mod archive;
pub mod bundle;
pub mod manifest;
pub mod ranges;
pub mod skew;
pub mod version;
