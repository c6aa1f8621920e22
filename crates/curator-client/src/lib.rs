//! What a program needs to talk to the curators of a cluster: identities, certificates, TLS, the channel to the leader.
//!
//! Nodes call the curators of their cluster, and shepherds call those of clusters that they own. The curators
//! themselves use the same definitions, so that both ends of a connection follow one rule.
//!
//! # How the files fit
//!
//! * [`identity`][]: a key pair that identifies its holder. [`node_id`][]: the identity of a node, made from its key.
//! * [`pki`][]: what the authority of a cluster signs. [`peer_identity`][]: whom a certificate identifies. [`tls`][]:
//!   the TLS configurations of both ends, which use a [`clock`][].
//! * [`curator_channel`][]: a connection to one curator. [`leader_channel`][]: a channel that always goes to the
//!   leader.
//! * [`node`][]: the record of a node, with [`ticket_id`][] and [`kubernetes_status`][]. [`cluster`][]: the records of
//!   the cluster and of its authority.
//! * [`cluster_snapshot`][]: all records at one revision. A shepherd checks a snapshot before it stores it.
//!
//! No file decides anything about a cluster. That is for the curators.

pub mod clock;
pub mod cluster;
pub mod cluster_snapshot;
pub mod curator_channel;
pub mod identity;
pub mod kubernetes_status;
pub mod leader_channel;
pub mod node;
pub mod node_id;
pub mod peer_identity;
pub mod pki;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod ticket_id;
pub mod tls;
