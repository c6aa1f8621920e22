//! What the tracker knows of curators' addresses, and from whom.

use std::collections::BTreeSet;

use crate::curator_addresses::MAX_LISTED;
use crate::leader_channel::LeaderTracker;
use crate::node_id::NodeId;
use crate::proved_curators::{ProvedAddresses, ProvedCurators};

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

    /// `host:port` of the curators that left the directory last, and are not in it again. At most 16.
    #[must_use]
    pub fn former_directory(&self) -> BTreeSet<String> {
        self.0.addresses().former()
    }

    /// Where curators have proved themselves; `None` if the caller's configuration decides alone. Trackers with the same
    /// trust share it.
    #[must_use]
    pub fn proved_curators(&self) -> Option<ProvedCurators> {
        self.0.authentication.trust().map(|trust| trust.curators().clone())
    }

    pub(super) fn proved_addresses(&self) -> ProvedAddresses {
        self.proved_curators().map_or_else(ProvedAddresses::new, |proved| proved.addresses())
    }

    /// Sets the curator on this node, or `None` if none runs any more.
    pub fn set_local(&self, local: Option<(NodeId, String)>) {
        self.0.addresses().local = local;
        self.0.address_changes.send_modify(|count| *count += 1);
    }
}
