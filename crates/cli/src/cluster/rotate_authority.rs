//! `cluster rotate-authority`: replace the authority of a cluster, and follow how far that is.

use std::time::Duration;

use clap::Args;

use crate::cluster::outcome::format_response;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use crate::output::print_stderr;
use crate::wait::condition::{ClusterGoal, WaitGoal};
use crate::wait::fetch::Subject;
use crate::wait::follow::{WaitReport, Waiting, follow_objects};
use bmdb::cluster::lock::order_target;
use model::cluster::authority_rotation::RotationKind;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const ROTATE_AUTHORITY_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster rotate-authority ams --reason 'its key is two years old'
  shepherdctl cluster rotate-authority ams --wait --reason 'a member left with its disk'
  shepherdctl cluster rotate-authority ams --compromised --confirm 'WORDS' --reason 'a stolen disk'

The authority signs every certificate of the cluster. The key of it is in etcd, on the disk of each member.
The curators replace it in three stages: all nodes accept the new one, the new one signs, and all nodes
reject the old one. Each stage waits for the nodes; cluster describe names them and what each lacks. The
members of etcd restart one by one, twice. Nothing else is interrupted. A worker that is off for more than
an hour does not delay it, and follows when it returns. A member of etcd that is off does.
Certificates of people end with the old authority: issue other ones. Restore the cluster only from
snapshots that were taken since.

If somebody else may have the key of the old authority, that is not enough: who has it can read the new one.
Use --compromised. The shepherd then makes the new authority, and sends it to each machine over its agent
channel, which the old authority does not sign: to the members of etcd first, which restart twice, then to
all others. It takes the place of a planned replacement. Tickets, certificates of people and owners' keys
that are not the shepherd's end. A member of etcd that is off delays it, and so does any other machine until
it returns or is retired. On a machine without an agent, a person runs roleserver follow-authority.";

/// Arguments of `cluster rotate-authority`: the cluster, and why its authority is replaced.
#[derive(Debug, Args)]
pub struct RotateClusterAuthority {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Replace the authority after a theft of its key: nothing that the old one signs leads to the new one
    #[arg(long)]
    pub compromised: bool,
    /// Words that confirm what --compromised costs; without this flag, the error shows the exact words
    #[arg(long = "confirm", value_name = "WORDS", default_value = "")]
    pub confirm: String,
    /// Wait until the authority is replaced, and report each stage and the nodes that it waits for
    #[arg(long)]
    pub wait: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Orders that the authority of a cluster be replaced, and waits for the end if the flag requires it.
pub(super) async fn rotate_cluster_authority(
    context: &CommandContext,
    args: &RotateClusterAuthority,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let kind = if args.compromised { RotationKind::Compromised } else { RotationKind::Planned };
    let give = async |service, order| {
        let request = v1::RotateClusterAuthorityRequest {
            name: args.name.clone(),
            order: Some(order),
            kind: kind.as_str().to_owned(),
            confirmation: args.confirm.clone(),
        };
        ClustersClient::new(service).rotate_authority(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    if !args.wait || context.order_flags.dry_run {
        return format_response(context, &args.name, &response);
    }
    let message = context.target_flags.qualify(&response.message);
    print_stderr(&format!("shepherdctl: {} {message}", order_target(&args.name)));
    follow_replacement(context, &args.name).await?;
    let message = "has a new authority, and rejects the former one".to_owned();
    let response = v1::OrderResponse { message, ..response };
    format_response(context, &args.name, &response)
}

/// Waits until no replacement is ordered or under way, and prints each step. There is no limit, because a member of etcd that
/// is off delays the replacement until it returns.
async fn follow_replacement(context: &CommandContext, name: &str) -> Result<(), CliError> {
    let waiting = Waiting {
        goal: WaitGoal::Cluster(ClusterGoal::AuthorityReplaced),
        subjects: vec![Subject::cluster(name)],
        timeout: Duration::MAX,
        report: WaitReport::Steps,
        colors: context.colors,
        target_flags: context.target_flags.clone(),
    };
    // In a box: the future of the order would contain it.
    Box::pin(follow_objects(&context.client, waiting)).await.map(drop)
}
