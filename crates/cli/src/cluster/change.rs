//! `cluster scale`, `cluster roles`: change the size of a cluster and the roles of its workers.

use clap::Args;

use crate::cluster::outcome::format_response;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use crate::order::wait_flags::WaitFlags;
use model::cluster::spec::ClusterSpecChange;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const SCALE_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster scale ams --workers 8 --reason 'more load'
  shepherdctl cluster scale ams --control-plane 5 --reason 'to bear two losses'

When a cluster shrinks, unhealthy machines leave first, then those that were chosen last.
Members of the control plane leave one at a time.

The disk of such a member has the key of the cluster's authority. So the authority is replaced
after it has left, and etcd of the other members restarts twice. Until the replacement has ended,
the disk opens etcd of the cluster. If somebody has the disk, that is not enough: move what runs
in the cluster to another one, and delete this one.";

pub(crate) const ROLES_EXAMPLES: &str = "\
Example:
  shepherdctl cluster roles ams --add-role web --remove-role old-web --reason 'the new front'

A role has to be declared to the cluster before nodes can have it: shepherdctl cluster declare.";

/// Arguments of `cluster scale`: the cluster and its new size.
#[derive(Debug, Args)]
pub struct ScaleCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Number of machines of its control plane: 1, 3, 5 or 7
    #[arg(long = "control-plane", value_name = "N", required_unless_present = "workers")]
    pub control_plane: Option<u32>,
    /// Number of workers
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,
    /// Keep the authority of the cluster: the disks of the machines that leave are destroyed or wiped by other means
    #[arg(long = "keep-authority", requires = "control_plane")]
    pub keep_authority: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
}

/// Arguments of `cluster roles`: the roles that workers get and lose.
#[derive(Debug, Args)]
pub struct ChangeClusterRoles {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Role to add to every worker; may be given several times
    #[arg(long = "add-role", value_name = "ROLE", required_unless_present = "remove_roles")]
    pub add_roles: Vec<String>,
    /// Role to remove from every worker; may be given several times
    #[arg(long = "remove-role", value_name = "ROLE")]
    pub remove_roles: Vec<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(super) async fn change_cluster(
    context: &CommandContext,
    name: &str,
    change: &ClusterSpecChange,
    reason: &str,
) -> Result<String, CliError> {
    require_audit_reason(reason)?;
    let give = async |service, order| {
        let request = v1::ChangeClusterRequest {
            name: name.to_owned(),
            order: Some(order),
            control_plane: change.control_plane,
            workers: change.workers,
            add_roles: change.add_roles.iter().cloned().collect(),
            remove_roles: change.remove_roles.iter().cloned().collect(),
            keep_authority: change.keep_authority,
        };
        ClustersClient::new(service).change(request).await
    };
    let response = send_order(context, reason, give).await?;
    format_response(context, name, &response)
}
