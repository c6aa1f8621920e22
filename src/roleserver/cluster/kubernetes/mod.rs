//! Kubernetes on a node.
//!
//! What runs comes from a bundle ([`crate::model::kubernetes::bundle`]), which the node fetches like every other artefact and
//! keeps unpacked. [`bundles`][] is that store.

pub mod bundles;
