//! Grammar of `cluster`, and dispatch to its verbs.

use clap::Subcommand;

use crate::cluster::approve::{APPROVE_EXAMPLES, ApproveInCluster, approve_machine};
use crate::cluster::change::{
    ChangeClusterRoles, ROLES_EXAMPLES, SCALE_EXAMPLES, ScaleCluster, change_cluster,
};
use crate::cluster::create::{CREATE_EXAMPLES, CreateCluster, create_cluster};
use crate::cluster::credentials::{CredentialsCommand, run_credentials_command};
use crate::cluster::declare::{
    DECLARE_EXAMPLES, DeclareInCluster, UNDECLARE_EXAMPLES, UndeclareInCluster, declare_role, undeclare_role,
};
use crate::cluster::delete::{DELETE_EXAMPLES, DeleteCluster, delete_cluster};
use crate::cluster::describe::DESCRIBE_EXAMPLES;
use crate::cluster::kubeconfig::{KUBECONFIG_EXAMPLES, KubeconfigArgs, create_kubeconfig};
use crate::cluster::kubernetes::command::{KubernetesCommand, run_kubernetes_command};
use crate::cluster::plan::{PLAN_EXAMPLES, PlanCluster, plan_cluster};
use crate::cluster::renew_peers::{RENEW_PEERS_EXAMPLES, renew_cluster_peers};
use crate::cluster::rotate_authority::{
    ROTATE_AUTHORITY_EXAMPLES, RotateClusterAuthority, rotate_cluster_authority,
};
use crate::cluster::rotate_key::{ROTATE_KEY_EXAMPLES, rotate_cluster_key};
use crate::cluster::rotate_secrets_key::{ROTATE_SECRETS_KEY_EXAMPLES, rotate_secrets_key};
use crate::cluster::snapshots::{
    RESTORE_EXAMPLES, RestoreCluster, SNAPSHOT_EXAMPLES, SNAPSHOTS_EXAMPLES, request_snapshot,
    restore_cluster, show_snapshots,
};
use crate::cluster::upgrade::{UPGRADE_EXAMPLES, UpgradeCluster, run_upgrade_command};
use crate::cluster::{ClusterArg, ClusterOrderArgs};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::command::{DescribeCommand, GetArgs, KindSelection};
use crate::object::describe::run_describe_command;
use crate::object::get::run_get_command;
use crate::object::kind::ObjectKind;
use model::cluster::spec::ClusterSpecChange;

const GET_EXAMPLES: &str = "\
Example:
  shepherdctl cluster get prod                  the same as get clusters prod";

/// Subcommands of `cluster`, one per verb.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Create a cluster of machines of the fleet
    #[command(after_help = CREATE_EXAMPLES)]
    Create(CreateCluster),
    /// List clusters with their stage, size, health and votes, as `get clusters` does
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
    /// Show a cluster, its machines, and what each waits for
    #[command(after_help = DESCRIBE_EXAMPLES)]
    Describe(ClusterArg),
    /// Show the next steps for a cluster, or the steps if it were created, changed or deleted
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanCluster),
    /// Change the size of a cluster
    #[command(after_help = SCALE_EXAMPLES)]
    Scale(ScaleCluster),
    /// Declare a role of a cluster from a file: services that every node with the role runs
    #[command(after_help = DECLARE_EXAMPLES)]
    Declare(DeclareInCluster),
    /// Withdraw a role that was declared to a cluster
    #[command(after_help = UNDECLARE_EXAMPLES)]
    Undeclare(UndeclareInCluster),
    /// Change the roles of a cluster's workers
    #[command(after_help = ROLES_EXAMPLES)]
    Roles(ChangeClusterRoles),
    /// Approve the join request of a machine, in a cluster with manual approval
    #[command(after_help = APPROVE_EXAMPLES)]
    Approve(ApproveInCluster),
    /// Take a snapshot of a cluster's records now
    #[command(after_help = SNAPSHOT_EXAMPLES)]
    Snapshot(ClusterOrderArgs),
    /// List the snapshots of a cluster
    #[command(after_help = SNAPSHOTS_EXAMPLES)]
    Snapshots(ClusterArg),
    /// Restore a cluster from a snapshot, after the quorum of its control plane is permanently lost
    #[command(after_help = RESTORE_EXAMPLES)]
    Restore(RestoreCluster),
    /// Send the members of a cluster's etcd new certificates, after all of theirs have ended
    #[command(after_help = RENEW_PEERS_EXAMPLES)]
    RenewPeers(ClusterOrderArgs),
    /// Issue, list and revoke client certificates of people for the curators of a cluster
    #[command(subcommand)]
    Credentials(CredentialsCommand),
    /// Replace the authority that signs the certificates of a cluster
    #[command(after_help = ROTATE_AUTHORITY_EXAMPLES)]
    RotateAuthority(RotateClusterAuthority),
    /// Rotate the shepherd's own key for a cluster now
    #[command(after_help = ROTATE_KEY_EXAMPLES)]
    RotateKey(ClusterOrderArgs),
    /// Replace the key that the Kubernetes Secrets of a cluster are encrypted with
    #[command(after_help = ROTATE_SECRETS_KEY_EXAMPLES)]
    RotateSecretsKey(ClusterOrderArgs),
    /// Manage Kubernetes of a cluster
    #[command(subcommand)]
    Kubernetes(KubernetesCommand),
    /// Create a kubeconfig for a cluster, with a new key
    #[command(after_help = KUBECONFIG_EXAMPLES)]
    Kubeconfig(KubeconfigArgs),
    /// Upgrade a cluster: its role servers, then its controllers one by one, then its workers; or go back
    #[command(after_help = UPGRADE_EXAMPLES)]
    Upgrade(UpgradeCluster),
    /// Delete a cluster: its machines leave it, and its data on them is removed
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(DeleteCluster),
}

impl ClusterCommand {
    /// Whether the command prints a file, which is not laid out for the terminal.
    pub(crate) const fn prints_file(&self) -> bool {
        matches!(self, Self::Kubeconfig(args) if args.output_file.is_none())
    }
}

/// Runs a `cluster` command and returns its output.
pub async fn run_cluster_command(
    context: &CommandContext,
    command: &ClusterCommand,
) -> Result<String, CliError> {
    match command {
        ClusterCommand::Create(args) => create_cluster(context, args).await,
        ClusterCommand::Get(args) => {
            let selection = KindSelection::default();
            run_get_command(context, ObjectKind::Cluster, args, &selection).await
        }
        ClusterCommand::Describe(of) => {
            let describe = DescribeCommand { kind: ObjectKind::Cluster, name: Some(of.name.clone()) };
            run_describe_command(context, &describe).await
        }
        ClusterCommand::Plan(args) => plan_cluster(&context.client, args, context.format).await,
        ClusterCommand::Scale(args) => {
            let change = ClusterSpecChange {
                control_plane: args.control_plane,
                workers: args.workers,
                keep_authority: args.keep_authority,
                ..ClusterSpecChange::default()
            };
            change_cluster(context, &args.name, &change, &args.reason).await
        }
        ClusterCommand::Declare(args) => declare_role(context, args).await,
        ClusterCommand::Undeclare(args) => undeclare_role(context, args).await,
        ClusterCommand::Roles(args) => {
            let change = ClusterSpecChange {
                add_roles: args.add_roles.iter().cloned().collect(),
                remove_roles: args.remove_roles.iter().cloned().collect(),
                ..ClusterSpecChange::default()
            };
            change_cluster(context, &args.name, &change, &args.reason).await
        }
        ClusterCommand::Approve(args) => approve_machine(context, args).await,
        ClusterCommand::Snapshot(args) => request_snapshot(context, args).await,
        ClusterCommand::Snapshots(of) => show_snapshots(&context.client, &of.name, context.format).await,
        ClusterCommand::Restore(args) => restore_cluster(context, args).await,
        ClusterCommand::RenewPeers(args) => renew_cluster_peers(context, args).await,
        ClusterCommand::RotateAuthority(args) => rotate_cluster_authority(context, args).await,
        ClusterCommand::RotateKey(args) => rotate_cluster_key(context, args).await,
        ClusterCommand::RotateSecretsKey(args) => rotate_secrets_key(context, args).await,
        ClusterCommand::Credentials(command) => run_credentials_command(context, command).await,
        ClusterCommand::Kubernetes(command) => run_kubernetes_command(context, command).await,
        ClusterCommand::Kubeconfig(args) => create_kubeconfig(context, args).await,
        ClusterCommand::Upgrade(args) => run_upgrade_command(context, args).await,
        ClusterCommand::Delete(args) => delete_cluster(context, args).await,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: ClusterCommand,
    }

    #[test]
    fn only_a_kubeconfig_on_standard_output_is_a_printed_file() {
        for (line, expected) in [
            ("cluster kubeconfig ams --reason r", true),
            ("cluster kubeconfig ams --reason r --output-file f", false),
            ("cluster snapshots ams", false),
        ] {
            let parsed = Line::try_parse_from(line.split(' ')).unwrap();
            assert_eq!(parsed.command.prints_file(), expected, "{line}");
        }
    }
}
