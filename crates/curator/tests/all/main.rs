//! Curators beside real etcd servers, called over TLS as nodes and owners call them.

mod access;
mod addresses;
mod authority_rotation;
mod authority_theft;
mod consensus;
mod curator_revocations;
mod curator_role;
mod exposed_keys;
mod false_curator;
mod flood;
mod heartbeats;
mod kubelet_authority;
mod kubernetes;
mod kubernetes_turns;
mod leading;
mod life;
mod member_removal;
mod owner_keys;
mod peer_revocations;
mod restoring;
mod snapshots;
mod statement_clocks;
mod statements;
mod watches;
