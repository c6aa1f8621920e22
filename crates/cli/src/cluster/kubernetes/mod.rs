//! `cluster kubernetes`: Kubernetes of a cluster, its settings, its state and its keys.

pub mod command;
pub mod decode;
pub mod patch;
pub mod status;
