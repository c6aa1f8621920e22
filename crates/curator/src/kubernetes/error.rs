//! Errors of the Kubernetes calls, with their gRPC codes.

use std::net::Ipv6Addr;

use curator_client::node::NodeState;
use curator_client::node_id::NodeId;
use model::kubernetes::address_ranges::Ipv4Range;
use model::node_role::NodeRole;
use tonic::Code;

use crate::kubernetes::signer::SignerError;

/// Why a Kubernetes call failed.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// The cluster has no Kubernetes settings; the response to a reader.
    #[error("the cluster has no Kubernetes: configure it first")]
    NotConfigured,
    /// The cluster has no Kubernetes settings, and the order adds a Kubernetes role.
    #[error(
        "no role of {node} was changed: {role} is a role of Kubernetes, and the cluster has none; configure it first"
    )]
    RoleNeedsKubernetes {
        /// The node whose roles would have changed.
        node: NodeId,
        /// The Kubernetes role of the order.
        role: NodeRole,
    },
    /// The cluster has no Kubernetes settings, and a node requests something of its own.
    #[error("{node} gets nothing: the cluster has no Kubernetes")]
    NotConfiguredForNode {
        /// The node that made the request.
        node: NodeId,
    },
    /// The settings are invalid; one text for each problem.
    #[error("{}", .0.join("; "))]
    InvalidSettings(Vec<String>),
    /// The field cannot be changed, since nothing that runs would follow the change.
    #[error(
        "Kubernetes was left as it is: {field} would change from {from} to {to}, which nothing that runs would follow; \
         to change it, remove Kubernetes and set it again"
    )]
    Immutable {
        /// Name of the field.
        field: &'static str,
        /// Its value in force.
        from: String,
        /// Its value in the request.
        to: String,
    },
    /// The settings were changed since the caller read them.
    #[error(
        "Kubernetes was left as it is: revision {current} is in force, and {expected} was expected; look at it and put it again"
    )]
    RevisionConflict {
        /// The revision in force.
        current: u64,
        /// The revision that the caller expected.
        expected: u64,
    },
    /// Settings cannot be deleted while nodes have Kubernetes roles.
    #[error("Kubernetes was not deleted: {nodes} have roles of it; remove these roles first")]
    InUse {
        /// Ids of these nodes, as text.
        nodes: String,
    },
    /// The addresses of pods and services are IPv4, and each node has to reach them from an address of that kind.
    #[error(
        "{role} was not added to {node}: its address is {address}, and Kubernetes of a cluster has IPv4 addresses only; let \
         the node reach its curators by IPv4"
    )]
    Ipv6Node {
        /// The node that would get the role.
        node: NodeId,
        /// The role that the order adds.
        role: NodeRole,
        /// The address at which other nodes reach it.
        address: Ipv6Addr,
    },
    /// Every part of the pod network is allocated to a node.
    #[error(
        "no role of {node} was changed: all {count} parts of {pod_range} have a node, and a worker needs one; delete nodes that \
         are gone"
    )]
    PodRangesExhausted {
        /// The node that needs a part.
        node: NodeId,
        /// How many parts the pod network has.
        count: u32,
        /// The pod network of the cluster.
        pod_range: Ipv4Range,
    },
    /// The cluster has no node with this id.
    #[error("{0} is unknown: it never registered, or was deleted")]
    UnknownNode(NodeId),
    /// The node is not up: not approved yet, or decommissioned.
    #[error("{node} gets nothing: it is {}", state.as_str())]
    NotUp {
        /// The node that made the request.
        node: NodeId,
        /// The state that it is in.
        state: NodeState,
    },
    /// The node's certificates are revoked.
    #[error("{0} gets nothing: its certificates are revoked")]
    Revoked(NodeId),
    /// The node lacks the role that the request is for.
    #[error("{node} gets nothing: it is no {role}, and only those get what it requested")]
    MissingRole {
        /// The node that made the request.
        node: NodeId,
        /// The role that it would need.
        role: NodeRole,
    },
    /// The node has not reported its address yet.
    #[error("{0} gets nothing: it has not reported its address yet, which the certificate names")]
    NoAddress(NodeId),
    /// The number is none of a Kubernetes component.
    #[error("no certificate was issued: {0} is no component of Kubernetes that this curator knows")]
    UnknownComponent(i32),
    /// The number is none of a key purpose.
    #[error("no rotation was begun: {0} is neither an authority of Kubernetes nor its service-account keys")]
    UnknownKeyPurpose(i32),
    /// Kubelets have no authority of their own yet, which could be rotated.
    #[error(
        "no rotation was begun: the authority of API servers still signs for kubelets. They get an authority of their \
         own by themselves once every consensus member runs this release"
    )]
    SharedAuthority,
    /// The name, access or lifetime of the requested user certificate is invalid.
    #[error("no certificate was issued: {0}")]
    InvalidUser(String),
    /// A key or a certificate cannot be created or loaded.
    #[error(transparent)]
    Signer(#[from] SignerError),
}

impl KubernetesError {
    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::NotConfigured | Self::UnknownNode(_) => Code::NotFound,
            Self::InvalidSettings(_)
            | Self::UnknownComponent(_)
            | Self::UnknownKeyPurpose(_)
            | Self::InvalidUser(_)
            | Self::Signer(SignerError::InvalidRequest(_)) => Code::InvalidArgument,
            Self::RoleNeedsKubernetes { .. }
            | Self::NotConfiguredForNode { .. }
            | Self::Immutable { .. }
            | Self::RevisionConflict { .. }
            | Self::InUse { .. }
            | Self::Ipv6Node { .. }
            | Self::PodRangesExhausted { .. }
            | Self::NotUp { .. }
            | Self::Revoked(_)
            | Self::SharedAuthority
            | Self::MissingRole { .. }
            | Self::NoAddress(_) => Code::FailedPrecondition,
            Self::Signer(_) => Code::Internal,
        }
    }
}
