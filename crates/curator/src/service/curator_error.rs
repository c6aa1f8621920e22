//! Why a curator stopped, with what to do.

use std::net::SocketAddr;

use curator_client::node_id::NodeId;
use etcd::key_space::KeyError;
use model::time::Timestamp;

use crate::service::error::ServiceError;

/// Why a curator stopped.
#[derive(Debug, thiserror::Error)]
pub enum CuratorError {
    /// The listen address cannot be bound.
    #[error("the curator cannot listen on {address}: {source}; is another program there?")]
    Listen {
        /// The address from the settings.
        address: SocketAddr,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The TLS configuration cannot be built.
    #[error("the curator cannot be reached by TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The curator was elected, but the cluster's records cannot be used.
    #[error("the curator was elected and cannot lead: {0}")]
    CannotLead(ServiceError),
    /// The credentials of its node are revoked, so no node follows it.
    #[error(
        "the curator does not run: the credentials of its node {0} are revoked, so no node of the cluster follows it. \
         Remove the role consensus-member from the node, and let its machine register with a new key"
    )]
    NodeRevoked(NodeId),
    /// The clock of this host is wrong, so no node would follow the leader.
    #[error(
        "the curator leads no longer: it is {own} by the clock of its host, and {others} by those of most consensus \
         members, so nodes would reject what it signs. Set the clock of this host"
    )]
    WrongClock {
        /// The time by the clock of this host.
        own: Timestamp,
        /// The time by the clocks of the others.
        others: Timestamp,
    },
    /// An etcd key cannot be built.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The election task ended, which must never happen.
    #[error("the curator's election ended by itself: please report it")]
    ElectionEnded,
}
