//! What the parts of a consensus member's control plane share: its files, its children, its clock.

use std::path::PathBuf;
use std::sync::Arc;

use curator::node_address::AddressRule;
use curator_client::clock::Clock;

use crate::child::lifecycle::ChildContext;
use crate::cluster::files::ClusterFiles;

/// What the control plane needs from the node.
#[derive(Clone, Debug)]
pub struct ControlPlaneContext {
    /// Cluster files of this node.
    pub files: ClusterFiles,
    /// Where children of the role server are recorded and started.
    pub children: Arc<ChildContext>,
    /// Path of the program etcd.
    pub etcd: PathBuf,
    /// Clock for validities and timestamps.
    pub clock: Clock,
    /// Where the curator takes the addresses of nodes from.
    pub address_rule: AddressRule,
}
