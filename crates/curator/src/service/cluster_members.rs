//! Whether a peer is a member of the cluster, by what this curator has cached.
//!
//! This decides nothing about a call. It decides which connections the gate of the listener keeps: a call that finds the
//! leader is open to everybody, and its connection must still not give way to a flood if its peer is a node or an owner.
//! It makes no call to etcd, because every node calls a follower at once when the leader has changed. The cache
//! is a moment behind etcd: the connection of a node that was committed just now may give way until its next call.

use std::sync::Arc;

use curator_client::authority_ring::AuthorityRing;
use curator_client::clock::Clock;
use curator_client::peer_authorities::identify_peer_by_any;
use curator_client::peer_identity::Peer;
use tokio::sync::watch;

use crate::node_lifecycle::check_credentials;
use crate::service::record_cache::RecordCache;

/// The members of the cluster, as this curator has cached them.
#[derive(Clone, Debug)]
pub(super) struct ClusterMembers {
    authorities: watch::Receiver<Arc<AuthorityRing>>,
    cache: Arc<RecordCache>,
    clock: Clock,
}

impl ClusterMembers {
    /// The members of the cluster with these authorities.
    #[must_use]
    pub(super) fn new(
        authorities: watch::Receiver<Arc<AuthorityRing>>,
        cache: Arc<RecordCache>,
        clock: Clock,
    ) -> Self {
        Self { authorities, cache, clock }
    }

    /// Whether these are the certificates of a node or an owner of the cluster, which count at this moment.
    #[must_use]
    pub(super) fn include(&self, shown: &[Vec<u8>]) -> bool {
        let trusted = self.authorities.borrow().trusted();
        let seen = self.cache.records();
        match identify_peer_by_any(shown, &trusted, &seen.revocations, self.clock.now()) {
            Ok(Peer::Node { id, key, .. }) => {
                check_credentials(seen.nodes.get(&id).map(AsRef::as_ref), id, &key).is_ok()
            }
            Ok(Peer::Owner { .. }) => true,
            Ok(Peer::Registering { .. } | Peer::Unauthenticated) | Err(_) => false,
        }
    }
}
