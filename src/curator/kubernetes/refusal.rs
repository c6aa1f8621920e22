//! Why something of Kubernetes is not done, and the code it is answered with.

use tonic::Code;

use crate::curator::kubernetes::authority::KeyError;
use crate::curator::node::State;
use crate::curator::node_id::NodeId;
use crate::model::kubernetes::ranges::Range;
use crate::model::role::Role;

/// Why something of Kubernetes is not done.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is none, for whoever asks about it.
    #[error("the cluster has no Kubernetes: say what it is to be first")]
    None,
    /// There is none, for a node that would be given a part of it.
    #[error(
        "no role of {node} was changed: {role} is a role of Kubernetes, and the cluster has none; say what it is to be first"
    )]
    NoRole {
        /// Whose.
        node: NodeId,
        /// Which.
        role: Role,
    },
    /// There is none, for a node that asks for something of its own.
    #[error("{node} was given nothing: the cluster has no Kubernetes")]
    NothingToRun {
        /// Whose.
        node: NodeId,
    },
    /// What was said cannot be.
    #[error("{}", .0.join("; "))]
    Settings(Vec<String>),
    /// Nothing that runs would follow.
    #[error(
        "Kubernetes was left as it is: {field} would change from {from} to {to}, which nothing that runs would follow; \
         delete Kubernetes and put it anew to have another one"
    )]
    Fixed {
        /// What.
        field: &'static str,
        /// As it is.
        from: String,
        /// As it would be.
        to: String,
    },
    /// Somebody else was faster.
    #[error(
        "Kubernetes was left as it is: revision {in_force} is in force, and {expected} was expected; look at it and put it again"
    )]
    AnotherRevision {
        /// The one in force.
        in_force: u64,
        /// The one that was expected.
        expected: u64,
    },
    /// Nodes have roles of it.
    #[error("Kubernetes was not forgotten: {with} have roles of it; take them from them first")]
    InUse {
        /// Who.
        with: String,
    },
    /// All parts are taken.
    #[error(
        "no role of {node} was changed: all {count} parts of {pods} have a node, and a worker needs one; delete nodes that \
         are gone"
    )]
    NoPart {
        /// Whose.
        node: NodeId,
        /// How many parts there are.
        count: u32,
        /// Of which range.
        pods: Range,
    },
    /// The cluster knows no such node.
    #[error("{0} is unknown: it never registered, or was deleted")]
    Unknown(NodeId),
    /// It is out, or not in yet.
    #[error("{node} was given nothing: it is {}", state.as_str())]
    NotUp {
        /// Whose.
        node: NodeId,
        /// Where it stands.
        state: State,
    },
    /// Its certificates are refused.
    #[error("{0} was given nothing: its certificates are revoked")]
    Revoked(NodeId),
    /// It has nothing to do with it.
    #[error("{node} was given nothing: it is no {role}, and what it asks for is for those alone")]
    NotItsRole {
        /// Whose.
        node: NodeId,
        /// Which role it would need.
        role: Role,
    },
    /// Nobody knows where it is.
    #[error("{0} was given nothing: it has not reported its address yet, which the certificate names")]
    NoAddress(NodeId),
    /// No such thing.
    #[error("no certificate was issued: {0} is no component of Kubernetes that this curator knows")]
    Component(i32),
    /// No such thing.
    #[error(
        "nothing was begun: {0} is neither an authority of Kubernetes nor the keys of its service accounts"
    )]
    Which(i32),
    /// It cannot be a user.
    #[error("no certificate was issued: {0}")]
    User(String),
    /// A key or a certificate.
    #[error(transparent)]
    Key(#[from] KeyError),
}

impl Refusal {
    /// The code it is answered with.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::None | Self::Unknown(_) => Code::NotFound,
            Self::Settings(_)
            | Self::Component(_)
            | Self::Which(_)
            | Self::User(_)
            | Self::Key(KeyError::Useless(_)) => Code::InvalidArgument,
            Self::NoRole { .. }
            | Self::NothingToRun { .. }
            | Self::Fixed { .. }
            | Self::AnotherRevision { .. }
            | Self::InUse { .. }
            | Self::NoPart { .. }
            | Self::NotUp { .. }
            | Self::Revoked(_)
            | Self::NotItsRole { .. }
            | Self::NoAddress(_) => Code::FailedPrecondition,
            Self::Key(_) => Code::Internal,
        }
    }
}
