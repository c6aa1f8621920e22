//! What the tracker knows of curators' addresses, and from whom.

use std::collections::BTreeSet;

use crate::curator_addresses::MAX_LISTED;
use crate::leader_channel::LeaderTracker;
use crate::node_id::NodeId;

impl LeaderTracker {
    /// Replaces the known curators by the first 16 of these. An empty list is ignored: its sender knows less than this.
    pub fn set_directory(&self, addresses: impl IntoIterator<Item = String>) {
        let addresses: BTreeSet<String> = addresses.into_iter().take(MAX_LISTED).collect();
        if !addresses.is_empty() {
            self.0.addresses().replace_directory(addresses);
            self.0.address_changes.send_modify(|count| *count += 1);
        }
    }

    /// `host:port` of the curators in the cluster's directory.
    #[must_use]
    pub fn directory(&self) -> BTreeSet<String> {
        self.0.addresses().directory().clone()
    }

    /// `host:port` of curators that were in the directory before, and are not any more. At most 16.
    #[must_use]
    pub fn former_directory(&self) -> BTreeSet<String> {
        self.0.addresses().former()
    }

    /// Sets the curator on this node, or `None` if none runs any more.
    pub fn set_local(&self, local: Option<(NodeId, String)>) {
        self.0.addresses().local = local;
        self.0.address_changes.send_modify(|count| *count += 1);
    }
}
