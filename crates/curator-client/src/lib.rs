//! What a program needs to talk to the curators of a cluster: identities, certificates, TLS, the channel to the leader.
//!
//! A curator runs on every consensus member of a cluster. One curator leads and answers all calls. Nodes call the
//! curators of their cluster, and shepherds call those of clusters that they own. This crate has what callers and
//! curators share, so that both ends of a connection follow one rule. It decides nothing about a cluster; that is the
//! task of the crate `curator`.
//!
//! # How it works
//!
//! * Identities. A node, an owner and an agent each make an Ed25519 key, and show its public half alone
//!   ([`identity`][]). The id of a node follows from its key ([`node_id`][]).
//! * Certificates. Each cluster has one certificate authority, which signs the certificates of its nodes, owners and
//!   etcd members ([`pki`][]). Serial numbers, validity and renewal are in [`certificate`][], and
//!   [`renewal_spread`][] spreads the renewals of many nodes over time. [`peer_identity`][] decides whom a certificate identifies, and [`curator_role`][] whether a server is a curator.
//! * Peers. [`pki_revocation_list`][] has the list of the certificates that etcd's members reject. [`peer_renewal`][]
//!   signs certificates for members that cannot renew theirs.
//! * Connections. [`tls`][] has the TLS configurations of both ends. [`curator_channel`][] connects to one curator.
//!   [`leader_channel`][] finds the curator that leads and follows it.
//! * Statements. The authority of a cluster states its epoch and which curators are revoked ([`statement`][]).
//!   [`statement_trust`][] has the newest one that was verified, and [`proved_curators`][] where curators have proved
//!   themselves by it. [`known_epoch`][] separates what is proved of the epoch from what is reported.
//! * Successions. While a cluster replaces its authority, certificates of two of them count ([`peer_authorities`][]). The
//!   old one names the new one ([`succession`][]), also for nodes that are off meanwhile. The record has both
//!   ([`authority_ring`][]).
//! * Connections. [`tls`][] has the TLS configurations of both ends. [`curator_channel`][] connects to one curator, and
//!   [`curator_refusal`][] has the reason why it was not accepted. [`leader_channel`][] finds the curator that leads and
//!   follows it.
//! * Records. [`node`][] is the record of a node, with the status that it reports ([`node_status`][],
//!   [`kubernetes_status`][]) and the ticket that it registered with ([`ticket_id`][]). [`cluster`][] has the records
//!   of the cluster and of its authority.
//! * Snapshots. [`cluster_snapshot`][] is a copy of all records at one revision. A shepherd checks a snapshot before it
//!   stores it, and a node restores a cluster from one.
//! * Errors. [`status_text`][] has the text of a gRPC status with its causes.
//! * Time. [`clock`][] has the two clocks that the others use.
//!
//! # Invariants
//!
//! * Only TLS 1.3 and only Ed25519 keys are accepted, because nothing else is ever certified here.
//! * A certificate identifies at most one kind of peer: a node's is never accepted as an owner's, nor the other way
//!   round. A certificate that fits no kind is rejected.
//! * The record of a node that breaks a rule is neither written nor read, so no decision has to handle one. Other
//!   records are validated where they are read.
//! * An epoch of the cluster is stored durably before it is followed. No curator of a lower epoch is followed after
//!   that. The same is true of statements: no lower one is accepted after that, and only a statement or the caller raises
//!   the epoch. The first statement ends what nodes have reported before it.
//! * No error and no `Debug` output shows a secret.
//!
//! # Notes for the next implementor
//!
//! * A new kind of certificate needs two changes: the authority signs it in [`pki`][], and [`peer_identity`][]
//!   distinguishes it from all others. Kinds differ in their extended key usage and in their names.
//! * A new field of a record is validated where the record is decoded, since a record may come from a snapshot. If it
//!   must not be lost, [`etcd::record::FORMAT`][] grows.
//! * What nodes report is stored and sent to all watchers. Limit its size.
//! * The feature `testing` offers keys, nodes, certificates, a statement and a snapshot for tests (`testing.rs`).
//!   Programs are built without it.

pub mod authority_ring;
pub mod certificate;
pub mod clock;
pub mod cluster;
pub mod cluster_snapshot;
mod curator_addresses;
mod curator_authentication;
pub mod curator_channel;
pub mod curator_refusal;
pub mod curator_role;
pub mod identity;
pub mod known_epoch;
pub mod kubernetes_status;
pub mod leader_channel;
pub mod node;
pub mod node_id;
pub mod node_status;
pub mod peer_authorities;
pub mod peer_identity;
pub mod peer_renewal;
pub mod pki;
mod pki_curator;
pub mod pki_revocation_list;
pub mod proved_curators;
pub mod renewal_spread;
pub mod statement;
pub mod statement_trust;
pub mod status_text;
pub mod succession;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod ticket_id;
pub mod tls;
