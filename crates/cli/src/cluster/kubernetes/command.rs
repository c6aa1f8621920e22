//! `cluster kubernetes set|remove|rotate`: change Kubernetes of a cluster.

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

use crate::cluster::kubernetes::patch::{KubernetesFlags, encode_patch, parse_patch};
use crate::cluster::outcome::{format_response, send_final_order};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::one_of::one_of;
use crate::order::confirmation::ConfirmFlag;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use model::cluster::kubernetes::{KeyPurpose, VolumeDriver};
use proto::fleet::v1;
use proto::fleet::v1::cluster_kubernetes_client::ClusterKubernetesClient;

const SET_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster kubernetes set ams --bundle 'kubernetes 1.20.2' --reason 'the first services'
  shepherdctl cluster kubernetes set ams --add-on dns=coredns.yaml --reason 'names for services'

Bundles and add-ons are artefacts: shepherdctl artefacts add. To change the bundle of a cluster, upgrade
the cluster: shepherdctl cluster upgrade.";

const REMOVE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster kubernetes remove ams --reason 'the trial is over'

The workers stop their pods, then the controllers stop, and the authorities are deleted. What Kubernetes
stored in etcd stays there. Nothing undoes that: type the name of the cluster, or give --yes.";

const ROTATE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster kubernetes rotate ams --keys clients --reason 'a laptop was stolen'

The new authority or key is trusted on every node before it signs. The old one stays trusted until every
node has replaced what it signed. `shepherdctl cluster describe` shows the progress, and the nodes that the
rotation waits for.";

/// Subcommands of `cluster kubernetes`.
#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    /// Install Kubernetes on a cluster, or change its add-ons and storage
    #[command(after_help = SET_EXAMPLES)]
    Set(SetKubernetes),
    /// Remove Kubernetes from a cluster
    #[command(after_help = REMOVE_EXAMPLES)]
    Remove(RemoveKubernetes),
    /// Rotate a certificate authority or keys of Kubernetes, in steps
    #[command(after_help = ROTATE_EXAMPLES)]
    Rotate(RotateKubernetes),
}

/// Arguments of `cluster kubernetes set`: the bundle and the settings.
#[derive(Debug, Args)]
pub struct SetKubernetes {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Bundle, for a cluster that has none yet: an artefact's digest, the beginning of it, or its name
    #[arg(long, value_name = "BUNDLE", value_parser = NonEmptyStringValueParser::new())]
    pub bundle: Option<String>,
    /// Desired settings, without the bundle.
    #[command(flatten)]
    pub flags: KubernetesFlags,
    /// Add-on to remove from the settings; may be given several times
    #[arg(long = "remove-add-on", value_name = "NAME")]
    pub remove_add_on: Vec<String>,
    /// Remove the storage driver
    #[arg(long = "remove-storage", conflicts_with = "storage_driver")]
    pub remove_storage: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Arguments of `cluster kubernetes remove`: the cluster, the reason and the confirmation.
#[derive(Debug, Args)]
pub struct RemoveKubernetes {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Confirmation without a terminal.
    #[command(flatten)]
    pub confirm: ConfirmFlag,
}

/// Arguments of `cluster kubernetes rotate`: the cluster, the keys and the reason.
#[derive(Debug, Args)]
pub struct RotateKubernetes {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Set of keys to replace; the new ones are trusted everywhere before they sign
    #[arg(long, value_name = "WHAT", value_parser = one_of(KeyPurpose::ALL.map(KeyPurpose::as_str)))]
    pub keys: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Runs a `cluster kubernetes` command and returns its output.
pub(crate) async fn run_kubernetes_command(
    context: &CommandContext,
    command: &KubernetesCommand,
) -> Result<String, CliError> {
    match command {
        KubernetesCommand::Set(args) => set_kubernetes(context, args).await,
        KubernetesCommand::Remove(args) => remove_kubernetes(context, args).await,
        KubernetesCommand::Rotate(args) => rotate_keys(context, args).await,
    }
}

async fn set_kubernetes(context: &CommandContext, args: &SetKubernetes) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let mut wish = parse_patch(args.bundle.as_deref(), &args.flags)?;
    wish.remove_add_ons = args.remove_add_on.iter().cloned().collect();
    if args.remove_storage {
        wish.storage = Some(VolumeDriver { driver: String::new(), class: String::new() });
    }
    let give = async |service, order| {
        let request = v1::SetClusterKubernetesRequest {
            name: args.name.clone(),
            order: Some(order),
            patch: Some(encode_patch(&wish)),
        };
        ClusterKubernetesClient::new(service).set(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &response)
}

async fn remove_kubernetes(context: &CommandContext, args: &RemoveKubernetes) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::RemoveClusterKubernetesRequest { name: args.name.clone(), order: Some(order) };
        ClusterKubernetesClient::new(service).remove(request).await
    };
    send_final_order(context, &args.name, &args.reason, args.confirm.yes, give).await
}

async fn rotate_keys(context: &CommandContext, args: &RotateKubernetes) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::RotateClusterKubernetesRequest {
            name: args.name.clone(),
            order: Some(order),
            keys: args.keys.clone(),
        };
        ClusterKubernetesClient::new(service).rotate(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &response)
}
