//! The reconciler: against a real etcd, and in a cluster of which everything but its decisions is simulated.

mod controllers;
mod gate;
pub(crate) mod kit;
mod leading;
mod model;
mod rows;
