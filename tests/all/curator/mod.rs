//! Keys and certificates of a curator, used by real Kubernetes programs. `crates/curator/tests` has its other tests.

mod kubernetes_kinds;
