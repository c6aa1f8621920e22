//! `cluster renew-peers`: new certificates for members of etcd that cannot renew theirs.

use crate::cluster::ClusterOrderArgs;
use crate::cluster::outcome::send_cluster_order;
use crate::context::CommandContext;
use crate::error::CliError;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const RENEW_PEERS_EXAMPLES: &str = "\
Example:
  shepherdctl cluster renew-peers ams --reason 'the hall was dark for six weeks'

The members of etcd renew their certificates by themselves, as long as most of them work. Members that were
all off for more than ten days may have certificates that ended: each rejects the others. Then this order is
the way back.
The shepherd signs a certificate for each of them, with the authority in the newest snapshot, and sends it
over the agent channel. Nothing is lost, and nothing restarts. While most members answer, the order is
rejected. A member that is off gets its certificate when it reports again. Repeat the order if a machine
could not use its certificate.

Update the role servers first: a machine of an earlier release reports that it does not know the operation.";

/// Orders new certificates for the members of a cluster's etcd.
pub(super) async fn renew_cluster_peers(
    context: &CommandContext,
    args: &ClusterOrderArgs,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::RenewClusterPeersRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).renew_peers(request).await
    };
    send_cluster_order(context, args, give).await
}
