//! Kubernetes objects that the reconciler manages: against a server in this process, and against the real one.

mod add_ons;
mod discovery;
mod keeping;
pub(crate) mod kit;
mod leading;
mod node_objects;
pub(crate) mod real;
mod semantics;
mod server;
mod steady;
mod watching;
