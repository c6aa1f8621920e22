//! What the tests stand on.

pub(crate) mod aloud;
pub(crate) mod callback;
pub(crate) mod child;
pub(crate) mod dialect;
pub(crate) mod etcd_program;
pub(crate) mod etcd_servers;
pub(crate) mod fleet;
pub(crate) mod kube_bundle;
pub(crate) mod kubernetes;
pub(crate) mod line;
pub(crate) mod memory;
pub(crate) mod ordering;
pub(crate) mod port;
pub(crate) mod postgres;
pub(crate) mod program;
pub(crate) mod promtool;
pub(crate) mod rack;
pub(crate) mod screen;
pub(crate) mod source;
