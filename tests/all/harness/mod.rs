//! Fixtures of the integration tests.

pub(crate) mod callback;
pub(crate) mod fleet;
pub(crate) mod kube_bundle;
pub(crate) mod kubernetes;
pub(crate) mod line;
pub(crate) mod minisign;
pub(crate) mod ordering;
pub(crate) mod program;
pub(crate) mod promtool;
pub(crate) mod rack;
pub(crate) mod screen;
pub(crate) mod seeds;
pub(crate) mod shell_completion;
pub(crate) mod small_etcd;
pub(crate) mod terminal;

// Fixtures that these tests share with those of crates.
pub(crate) use testkit::{
    aloud, child, curators, damage, dialect, etcd_program, etcd_servers, forged_access, key_holder, memory,
    port, postgres, skip, source, statement,
};
