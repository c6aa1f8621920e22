//! Nodes that form a cluster: role servers with real etcd servers beside them, on addresses of the loopback.

mod attacker;
mod crashes;
mod damaged_files;
mod ended_certificates;
mod etcd_flags;
mod etcd_version;
mod flood;
mod forming;
pub(crate) mod kubernetes;
mod kubernetes_pods;
mod kubernetes_renewal;
mod kubernetes_worker;
mod moving;
mod node;
mod owner;
mod peer_addresses;
mod peer_renewal;
mod peer_restart;
mod peer_revocation;
mod renewal;
mod restoring;
mod restoring_kubernetes;
mod roles;
mod roots;
pub(crate) mod services;
#[cfg(debug_assertions)]
mod slow_disk;
mod space;
mod updating;
