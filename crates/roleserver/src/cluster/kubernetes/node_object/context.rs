//! What the tasks on the Node object share: the node's context, an API client, and the mark of a drain.

use std::sync::Arc;
use std::time::Duration;

use curator_client::clock::Clock;
use model::kubernetes::bundle_manifest::KubernetesDuty;
use proto::curator::v1::ServiceStatus;
use reconciler::objects::api_client::{ApiServerConnection, ClientIdentity, ReloadingClient};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;

use crate::child::lifecycle::ChildContext;
use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::bundle_install::InstalledBundle;
use crate::cluster::kubernetes::component_revisions::RevisionHistory;
use crate::cluster::kubernetes::key_material::{SERVER_CAS, role_directory};
use crate::cluster::kubernetes::startup::KubernetesStartup;
use crate::cluster::node_facts::node_id_of_key;

/// Interval between two checks during a drain, or while the object does not exist.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// File with the start time of the current drain.
pub(super) const DRAIN_FILE: &str = "kubernetes-leaving.json";
/// Annotation of a node that was cordoned for a drain.
pub(super) const CORDON_ANNOTATION: &str = "shepherd.dev/handing-over";

/// What the runnable needs from the node.
#[derive(Clone)]
pub struct NodeContext {
    /// Cluster files of this node.
    pub files: ClusterFiles,
    /// Where children of the role server are recorded.
    pub children: Arc<ChildContext>,
    /// Clock for the start time of a drain.
    pub clock: Clock,
    /// URL of the node's load balancer.
    pub url: String,
    /// Which Kubernetes roles run here.
    pub startup: WatchCell<KubernetesStartup>,
    /// The installed bundle, if there is one.
    pub bundle: WatchCell<InstalledBundle>,
    /// Status of every component.
    pub statuses: WatchCell<Vec<ServiceStatus>>,
    /// Revisions that components were started with.
    pub revisions: WatchCell<RevisionHistory>,
}

/// A client for the API servers, and the name of this node.
pub(super) fn api_client(context: &NodeContext) -> Result<(ReloadingClient, String), RunnableError> {
    let directory = context.files.kubernetes_directory().join(role_directory(KubernetesDuty::Worker));
    let identity = ClientIdentity {
        authority: directory.join(SERVER_CAS),
        certificate: directory.join("kubelet.crt"),
        key: directory.join("kubelet.key"),
    };
    let kubernetes =
        ReloadingClient::new(ApiServerConnection { url: context.url.clone(), identity: Some(identity) });
    let key = context.files.read_key()?.ok_or_else(|| RunnableError::msg("this node has no key"))?;
    Ok((kubernetes, node_id_of_key(&key).to_string()))
}
