//! Kubernetes bundles, versions and address ranges.
//!
//! This module decides and does not act. Clusters run Kubernetes from *bundles*: one file with all programs of a
//! release, identified by its digest like every other artefact. No program of a node comes from its distribution. So a
//! node installed today and one installed next year run the same programs, and a rollback only names the previous
//! digest.
//!
//! * [`version`][]: versions of Kubernetes, three numbers.
//! * [`skew`][]: which versions may run together in one cluster.
//! * [`address_ranges`][]: ranges from which services and pods get their addresses.
//! * [`bundle_manifest`][]: contents of a bundle. `manifest_parser`: how a manifest is parsed and validated.
//! * [`archive`][]: file format of a bundle, whose manifest can be read from its first piece alone.

pub mod address_ranges;
pub mod archive;
pub mod bundle_manifest;
mod manifest_parser;
pub mod skew;
pub mod version;
