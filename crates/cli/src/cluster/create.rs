//! `cluster create`: request a cluster.

use clap::Args;

use crate::cluster::kubernetes::patch::{KubernetesFlags, encode_patch, parse_patch};
use crate::cluster::outcome::format_response;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::selection::parse_selector;
use crate::one_of::one_of;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use crate::order::wait_flags::WaitFlags;
use bmdb::cluster::kubernetes::desired::KubernetesPatch;
use model::cluster::spec::{ClusterSpec, JoinApproval};
use model::selector::Selector;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const CREATE_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster create ams --workers 5 --reason 'the new hall' --wait
  shepherdctl cluster create edge -l 'location=ams*,memory>=64GiB' --reason 'a trial'

A machine can be chosen if it is Ready or Installed, in no cluster, and not held, quarantined or retiring.
The chosen machines are spread over as many locations as possible.
The first machine founds the cluster. The others are admitted by the key that each reported over its agent
channel. A SELECTOR has terms about name, provider, location, manufacturer, product, label.KEY, memory and
cpus, separated by commas; a machine must match all of them.";

/// Arguments of `cluster create`: the desired cluster.
#[derive(Debug, Args)]
pub struct CreateCluster {
    /// Name of the cluster: lower-case letters, digits and dashes
    #[arg(value_name = "NAME")]
    pub name: String,
    /// How many machines run its control plane: 1, 3, 5 or 7
    #[arg(long = "control-plane", value_name = "N", default_value_t = 3)]
    pub control_plane: u32,
    /// Number of workers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub workers: u32,
    /// Which machines may be chosen, for example 'location=ams*,memory>=64GiB,label.row=7' [default: any]
    #[arg(short = 'l', long, value_name = "SELECTOR", value_parser = parse_selector)]
    pub selector: Option<Selector>,
    /// Role of every worker, as declared to the cluster; may be given several times
    #[arg(long, value_name = "ROLE")]
    pub role: Vec<String>,
    /// Who approves join requests: automatic (the shepherd, by the key that each machine reported over its agent
    /// channel), or manual (an operator)
    #[arg(
        long,
        value_name = "WHO",
        default_value = "automatic",
        value_parser = one_of(JoinApproval::ALL.map(JoinApproval::as_str))
    )]
    pub approval: String,
    /// The bundle of Kubernetes that it runs: an artefact's digest, the beginning of it, or its name [default: none]
    #[arg(long = "kubernetes-bundle", value_name = "BUNDLE")]
    pub kubernetes_bundle: Option<String>,
    /// Settings of Kubernetes
    #[command(flatten)]
    pub flags: KubernetesFlags,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
}

pub(super) async fn create_cluster(
    context: &CommandContext,
    args: &CreateCluster,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let spec = ClusterSpec {
        name: args.name.clone(),
        control_plane: args.control_plane,
        workers: args.workers,
        selector: args.selector.clone().unwrap_or_default(),
        roles: args.role.iter().cloned().collect(),
        approval: args.approval.parse().unwrap_or_default(),
    };
    spec.validate().map_err(CliError::Invalid)?;
    let kubernetes = match &args.kubernetes_bundle {
        Some(bundle) => Some(parse_patch(Some(bundle), &args.flags)?),
        None if parse_patch(None, &args.flags)? == KubernetesPatch::default() => None,
        None => {
            return Err(CliError::Invalid(
                "settings of Kubernetes were given without a bundle; name it with --kubernetes-bundle BUNDLE"
                    .into(),
            ));
        }
    };
    let give = async |service, order| {
        let request = v1::CreateClusterRequest {
            name: spec.name.clone(),
            order: Some(order),
            control_plane: spec.control_plane,
            workers: spec.workers,
            selector: spec.selector.to_string(),
            roles: spec.roles.iter().cloned().collect(),
            approval: spec.approval.as_str().to_owned(),
            kubernetes: kubernetes.as_ref().map(encode_patch),
        };
        ClustersClient::new(service).create(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &response)
}
