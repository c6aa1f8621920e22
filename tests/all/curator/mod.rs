//! Curators beside real etcd servers, called over TLS as nodes and owners call them.

mod access;
pub(crate) mod cluster;
mod consensus;
mod heartbeats;
mod kubernetes;
mod kubernetes_kinds;
mod kubernetes_turns;
pub(crate) mod leading;
mod life;
mod owner_keys;
mod restoring;
mod snapshots;
mod watches;
