//! `cluster snapshot|snapshots|restore`: take, list and restore cluster snapshots.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::cluster::ClusterOrderArgs;
use crate::cluster::outcome::{send_cluster_order, send_final_order};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::document::format_message;
use crate::order::confirmation::ConfirmFlag;
use crate::order::wait_flags::WaitFlags;
use crate::output::Format;
use crate::output::table::{format_table, terminal_width};
use bmdb::cluster::lock::order_target;
use model::byte_size::ByteSize;
use model::cluster::snapshot::SnapshotView;
use model::humanize::humanize_duration;
use model::time::between;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const SNAPSHOT_EXAMPLES: &str = "\
Example:
  shepherdctl cluster snapshot ams --reason 'before the new release'

A snapshot is also taken every hour, and when the members of the control plane change.";

pub(crate) const SNAPSHOTS_EXAMPLES: &str = "\
Example:
  shepherdctl cluster snapshots ams -o json | jq -r '.snapshots[0].id'

A snapshot contains every secret of the cluster. The database stores it sealed. IMAGE is the size of
the image of etcd, with every Kubernetes object. It is taken after the snapshot, if the cluster has
Kubernetes.";

pub(crate) const RESTORE_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster restore ams --reason 'two of its three members burnt'
  shepherdctl cluster restore ams --target-machine rack-7-03 --reason 'the rest of the hall is dark'

Changes since the snapshot are lost, and nothing undoes that: type the name of the cluster, or give
--yes. Workers continue what they run, and follow the new control plane. Machines of the old one leave;
an unreachable one gets the order when it reports again.

Kubernetes objects come back with the image of etcd of the snapshot (cluster snapshots shows which ones
have one). A machine has to have etcdutl for that, 3.5.10 or later, of the minor version of its etcd.
Without an image, or with --without-kubernetes, a cluster with Kubernetes loses all objects and all
pods, and is restored only with --confirm.";

/// Arguments of `cluster restore`: the cluster, the snapshot and the target machine.
#[derive(Debug, Args)]
pub struct RestoreCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The snapshot [default: the newest one that has the Kubernetes objects, or the newest one]
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    pub snapshot: Option<String>,
    /// Machine to restore onto first: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    /// [default: any free machine]
    #[arg(long = "target-machine", value_name = "M", value_parser = NonEmptyStringValueParser::new())]
    pub target_machine: Option<String>,
    /// Restore although the control plane still has a quorum; changes since the snapshot are lost
    #[arg(long = "bypass-quorum")]
    pub bypass_quorum: bool,
    /// Lose the Kubernetes objects although the snapshot has them; that has to be confirmed
    #[arg(long = "without-kubernetes")]
    pub without_kubernetes: bool,
    /// Words that confirm what a cluster with Kubernetes loses; without this flag, the error shows the exact words
    #[arg(long = "confirm", value_name = "WORDS", default_value = "")]
    pub confirm: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Confirmation without a terminal.
    #[command(flatten)]
    pub confirm_flag: ConfirmFlag,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
}

/// Orders a snapshot of a cluster.
pub(super) async fn request_snapshot(
    context: &CommandContext,
    args: &ClusterOrderArgs,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::SnapshotClusterRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).snapshot(request).await
    };
    send_cluster_order(context, args, give).await
}

/// Orders the restoration of a cluster from a snapshot.
pub(super) async fn restore_cluster(
    context: &CommandContext,
    args: &RestoreCluster,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::RestoreClusterRequest {
            name: args.name.clone(),
            order: Some(order),
            snapshot: args.snapshot.clone().unwrap_or_default(),
            target_machine: args.target_machine.clone().unwrap_or_default(),
            bypass_quorum: args.bypass_quorum,
            without_kubernetes: args.without_kubernetes,
            confirmation: args.confirm.clone(),
        };
        ClustersClient::new(service).restore(request).await
    };
    send_final_order(context, &args.name, &args.reason, args.confirm_flag.yes, give).await
}

/// Lists the stored snapshots of a cluster.
pub(super) async fn show_snapshots(
    client: &FleetClient,
    name: &str,
    format: Format,
) -> Result<String, CliError> {
    let request = v1::ListSnapshotsRequest { name: name.to_owned() };
    let result = ClustersClient::new(client.channel()).list_snapshots(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    if format == Format::Json {
        return format_message(&response);
    }
    let now = require_timestamp(response.read_at, "its read time")?;
    let snapshots =
        response.snapshots.into_iter().map(decode_snapshot).collect::<Result<Vec<_>, CliError>>()?;
    if snapshots.is_empty() {
        return Ok(format!("no snapshot of {} is kept yet\n", order_target(name)));
    }
    let rows: Vec<Vec<String>> = snapshots
        .iter()
        .map(|snapshot| {
            vec![
                snapshot.id.clone(),
                humanize_duration(between(snapshot.taken_at, now)),
                snapshot.reason.clone(),
                snapshot.revision.to_string(),
                snapshot.epoch.to_string(),
                ByteSize(snapshot.bytes).humanize(),
                snapshot.nodes.to_string(),
                snapshot.members.to_string(),
                snapshot.image_bytes.map_or_else(|| "-".to_owned(), |bytes| ByteSize(bytes).humanize()),
            ]
        })
        .collect();
    let head = ["SNAPSHOT", "AGE", "WHY", "REVISION", "EPOCH", "SIZE", "NODES", "MEMBERS", "IMAGE"];
    Ok(format_table(&head, &rows, terminal_width()))
}

fn decode_snapshot(snapshot: v1::ClusterSnapshot) -> Result<SnapshotView, CliError> {
    Ok(SnapshotView {
        id: snapshot.id,
        taken_at: require_timestamp(snapshot.taken_at, "the time when a snapshot was taken")?,
        reason: snapshot.reason,
        revision: snapshot.revision,
        epoch: snapshot.epoch,
        bytes: snapshot.bytes,
        nodes: snapshot.nodes,
        members: snapshot.members,
        digest: snapshot.digest,
        image_bytes: snapshot.image_bytes,
    })
}
