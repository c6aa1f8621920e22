//! `cluster ...`: clusters of machines, their credentials, their snapshots, and Kubernetes on them.
//!
//! [`command`][] is the grammar and runs each verb. A verb has a file, or shares it with verbs that belong to it. What
//! several verbs need is below them: a cluster as commands print it ([`view`][], [`fetch`][]), an order and its outcome
//! ([`outcome`][]), what the two kinds of certificates for people share ([`certificate`][]), and the settings and the
//! state of Kubernetes ([`kubernetes`][]).
//!
//! A private key for a cluster is generated on this host, and only its public half is sent. The curators sign it when
//! the holder of the cluster's lease requests the signature, so these commands wait.

use clap::Args;

pub mod approve;
pub mod authority_progress;
pub mod certificate;
pub mod change;
pub mod command;
pub mod create;
pub mod credentials;
pub mod declare;
pub mod delete;
pub mod describe;
pub mod fetch;
pub mod get;
pub mod kubeconfig;
pub mod kubernetes;
pub mod outcome;
pub mod plan;
pub mod renew_peers;
pub mod role_file;
pub mod rotate_authority;
pub mod rotate_key;
pub mod rotate_secrets_key;
pub mod snapshots;
pub mod upgrade;
pub mod view;

/// A cluster to show.
#[derive(Debug, Args)]
pub struct ClusterArg {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// An order that needs nothing but the cluster and a reason.
#[derive(Debug, Args)]
pub struct ClusterOrderArgs {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}
