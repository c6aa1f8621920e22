//! The state of a cluster of nodes, kept in etcd, and who may change it.
//!
//! Every node that is a consensus member runs an etcd and a curator beside it; of the curators one leads, and only
//! it writes. What it writes is guarded by the key that made it the leader, so a former leader that does not know yet
//! that it is one changes nothing.
//!
//! * [`etcd`][]: all that is said to etcd.

pub mod etcd;
