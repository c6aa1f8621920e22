//! Kubernetes of a cluster, for the curator: settings, keys, certificates, key rotation.
//!
//! The curator runs no Kubernetes component. Nodes that have the roles run them, from the setup that the curator sends.
//! The curator has what all nodes must agree on: the settings, the address range of each node, and the keys by which
//! components trust each other.
//!
//! # How it works
//!
//! All files decide, and none of them does I/O:
//!
//! * [`settings`][]: what an owner configures. [`node_allocation`][]: each node's pod range, and its own bundle.
//! * [`signer`][]: one signing key, and what it signs. [`keys`][]: all signing keys, and what is trusted beside them.
//! * [`component_certificates`][]: which component gets a certificate of which authority, with which subject, on which
//!   nodes. [`user_certificates`][]: certificates for people and for programs outside the cluster.
//! * [`key_rotation`][]: replaces a key without any component being rejected meanwhile. [`key_rollout`][]: assigns a
//!   new generation of keys to one node after the other. [`trust_bundle`][]: what the nodes get whose turn has not
//!   come. [`exposed_keys`][]: which keys are rotated because somebody else has them.
//! * `node_setup`: the setup of one node. [`error`][]: why a call fails.
//!
//! What a node may report is in [`kubernetes_status`](curator_client::kubernetes_status). The calls are in
//! `service/kubernetes.rs`, and what the leader does by itself is in `service/kubernetes_controller.rs`.
//!
//! # Invariants
//!
//! * No two nodes have the same pod range, and a node keeps its range until it is deleted.
//! * Each step of a key rotation is one write and has a generation of its own. The generation never starts over.
//! * A setup has no secret. A node requests its secrets one by one, for the roles that it has at that moment.
//! * Address ranges and domain do not change while the cluster has Kubernetes: nothing that runs would follow.
//!
//! # Notes for the next implementor
//!
//! * A component that needs a certificate gets a row in [`component_certificates`][] and a number in the contract. What
//!   it may do in Kubernetes follows from its name and its group there.
//! * A new purpose of keys changes the stored record: clusters that exist have no key for it yet, and earlier releases
//!   reject a ring that they do not know. [`kubelet_authority`][] shows a way.
//!
//! # Keys of its own
//!
//! The cluster's own authority signs nothing of Kubernetes. A node certificate gives access to the curator, so a
//! program that could get one for a kubelet would be a node of the cluster. The other way round, an API server believes
//! any certificate of its authority about its holder's groups. So there are five more authorities, one for each
//! question that components have about each other: who serves the API (`servers`), who calls (`clients`), whether an
//! API server passes a call on (`front-proxy`), who is at the two ends of a connection to etcd (`etcd`), and who is a
//! node's kubelet (`kubelets`). A certificate that is valid for one of them is valid for nothing else.
//!
//! All keys are ECDSA with the curve P-256. The components would accept Ed25519 from each other by now, but neither
//! browsers nor every client of the Kubernetes API does, and service-account tokens are verified by RSA or ECDSA alone
//! (RFC 7518, section 3.1, `ES256`). With one kind of key for everything, there is one kind to understand.
//!
//! # No revocation
//!
//! Kubernetes checks no revocation list. It accepts a certificate until it expires, whatever the curator thinks of the
//! holder by then. So the certificates of components are valid for a week and renewed when half of that is over; those
//! of users are valid for as long as requested, a week at the most. To reject somebody at once, the authority that
//! signed the certificate has to be rotated, which takes as long as the slowest node.

pub mod component_certificates;
pub mod error;
pub mod exposed_keys;
pub mod key_rollout;
pub mod key_rotation;
pub mod keys;
pub mod kubelet_authority;
pub mod node_allocation;
pub(crate) mod node_setup;
pub mod settings;
pub mod signer;
pub mod trust_bundle;
pub mod user_certificates;
