//! What is said to etcd, against real etcd servers.

mod client;
mod election;
mod guard;
mod members;
mod snapshot;
mod value;
