//! The etcd client, tested against real etcd servers.

mod client;
mod election;
mod etcdutl;
mod guard;
mod lock;
mod lossy_etcd;
mod lost_events;
mod maintenance;
mod members;
mod snapshot;
mod value;
