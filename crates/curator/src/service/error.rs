//! Errors of the curator's services, with their gRPC codes.
//!
//! A transient error is UNAVAILABLE: the caller finds the leader again and repeats the call. So when a call fails with
//! it, its write may have been done, and every call may be repeated.

use curator_client::cluster::OwnerKeyError;
use curator_client::pki::PkiError;
use curator_client::statement::StatementError;
use curator_client::succession::SuccessionError;
use etcd::client::EtcdError;
use etcd::guard::{LostLeadership, WriteError};
use etcd::key_space::KeyError;
use etcd::members::MemberError;
use etcd::record::{InvalidRecord, RecordError};
use tonic::{Code, Status};

use crate::{kubernetes, membership, node_labels, node_lifecycle, permissions, role_orders, tickets};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Another curator leads, or no curator does.
    #[error(transparent)]
    LostLeadership(#[from] LostLeadership),
    /// A call to etcd failed.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// etcd did not change its members.
    #[error(transparent)]
    Members(#[from] MemberError),
    /// A record changed between read and write, too many times.
    #[error("{0} changed during each attempt to write it; try again")]
    Conflict(String),
    /// A record cannot be decoded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A record breaks a rule and must not be written.
    #[error(transparent)]
    InvalidRecord(#[from] InvalidRecord),
    /// An etcd key cannot be built.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The authority did not sign.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The stored statement of the authority is not valid, or another one was not signed.
    #[error(transparent)]
    Statement(#[from] StatementError),
    /// The authority did not name its successor.
    #[error(transparent)]
    Succession(#[from] SuccessionError),
    /// A decision rejected the call.
    #[error("{message}")]
    Rejected {
        /// The gRPC code of the response.
        code: Code,
        /// Why, and what to do.
        message: String,
    },
}

impl ServiceError {
    /// A rejection of the call.
    pub fn rejected(code: Code, sentence: impl Into<String>) -> Self {
        Self::Rejected { code, message: sentence.into() }
    }

    /// A rejection of a malformed request.
    pub fn invalid_argument(sentence: impl Into<String>) -> Self {
        Self::rejected(Code::InvalidArgument, sentence)
    }

    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::LostLeadership(_)
            | Self::Conflict(_)
            | Self::Etcd(
                EtcdError::Deadline { .. } | EtcdError::Unavailable { .. } | EtcdError::Compacted { .. },
            )
            | Self::Members(
                MemberError::TooManyLearners { .. }
                | MemberError::NotCaughtUp { .. }
                | MemberError::NotLearner { .. }
                | MemberError::Unhealthy { .. }
                | MemberError::NotFound { .. }
                | MemberError::AlreadyExists { .. }
                | MemberError::Etcd(EtcdError::Deadline { .. } | EtcdError::Unavailable { .. }),
            ) => Code::Unavailable,
            Self::Members(MemberError::WouldLoseQuorum { .. }) => Code::FailedPrecondition,
            Self::Pki(PkiError::InvalidRequest(_)) => Code::InvalidArgument,
            Self::Rejected { code, .. } => *code,
            Self::Etcd(_)
            | Self::Members(_)
            | Self::Record(_)
            | Self::InvalidRecord(_)
            | Self::Key(_)
            | Self::Pki(_)
            | Self::Statement(_)
            | Self::Succession(_) => Code::Internal,
        }
    }
}

impl From<ServiceError> for Status {
    fn from(failure: ServiceError) -> Self {
        if failure.code() == Code::Internal {
            tracing::error!(error = %failure, "a call to the curator failed");
        }
        Self::new(failure.code(), failure.to_string())
    }
}

impl From<WriteError> for ServiceError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::LostLeadership(lost) => Self::LostLeadership(lost),
            WriteError::Conflict { keys: changed, .. } => Self::Conflict(changed.join(", ")),
            WriteError::Etcd(error) => Self::Etcd(error),
        }
    }
}

impl From<OwnerKeyError> for ServiceError {
    fn from(refusal: OwnerKeyError) -> Self {
        Self::rejected(refusal.code(), refusal.to_string())
    }
}

impl From<kubernetes::error::KubernetesError> for ServiceError {
    fn from(refusal: kubernetes::error::KubernetesError) -> Self {
        Self::rejected(refusal.code(), refusal.to_string())
    }
}

impl From<kubernetes::signer::SignerError> for ServiceError {
    fn from(error: kubernetes::signer::SignerError) -> Self {
        kubernetes::error::KubernetesError::from(error).into()
    }
}

impl From<membership::LastCurator> for ServiceError {
    fn from(refusal: membership::LastCurator) -> Self {
        Self::rejected(Code::FailedPrecondition, refusal.to_string())
    }
}

impl From<membership::LastMember> for ServiceError {
    fn from(refusal: membership::LastMember) -> Self {
        Self::rejected(Code::FailedPrecondition, refusal.to_string())
    }
}

impl From<crate::credential::TooManyCertificates> for ServiceError {
    fn from(refusal: crate::credential::TooManyCertificates) -> Self {
        Self::rejected(Code::ResourceExhausted, refusal.to_string())
    }
}

impl From<crate::key_limits::TooManyCalls> for ServiceError {
    fn from(refusal: crate::key_limits::TooManyCalls) -> Self {
        Self::rejected(Code::ResourceExhausted, refusal.to_string())
    }
}

impl From<crate::key_limits::TooManyWithinADay> for ServiceError {
    fn from(refusal: crate::key_limits::TooManyWithinADay) -> Self {
        Self::rejected(Code::ResourceExhausted, refusal.to_string())
    }
}

impl From<node_labels::LabelError> for ServiceError {
    fn from(refusal: node_labels::LabelError) -> Self {
        Self::rejected(refusal.code(), refusal.to_string())
    }
}

impl From<node_lifecycle::LifecycleError> for ServiceError {
    fn from(refusal: node_lifecycle::LifecycleError) -> Self {
        Self::rejected(refusal.code(), refusal.to_string())
    }
}

impl From<permissions::PermissionError> for ServiceError {
    fn from(refusal: permissions::PermissionError) -> Self {
        Self::rejected(refusal.code(), refusal.to_string())
    }
}

impl From<role_orders::RoleOrderError> for ServiceError {
    fn from(refusal: role_orders::RoleOrderError) -> Self {
        Self::rejected(refusal.code(), refusal.to_string())
    }
}

impl From<tickets::TicketError> for ServiceError {
    fn from(refusal: tickets::TicketError) -> Self {
        Self::rejected(refusal.code(), refusal.to_string())
    }
}

impl From<crate::entitlement::EntitlementError> for ServiceError {
    fn from(fault: crate::entitlement::EntitlementError) -> Self {
        Self::rejected(Code::Internal, fault.to_string())
    }
}

impl From<crate::node_address::AddressError> for ServiceError {
    fn from(refusal: crate::node_address::AddressError) -> Self {
        Self::rejected(Code::FailedPrecondition, refusal.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_errors_are_unavailable_and_others_are_not() {
        let away =
            || EtcdError::Unavailable { operation: "reading /a".to_owned(), message: "gone".to_owned() };
        let refused = || EtcdError::Rejected { operation: "reading /a".to_owned(), message: "no".to_owned() };
        let doing = || "promoting member 1".to_owned();
        for (failure, code) in [
            (ServiceError::Etcd(away()), Code::Unavailable),
            (ServiceError::Members(MemberError::Etcd(away())), Code::Unavailable),
            (ServiceError::Members(MemberError::Unhealthy { operation: doing() }), Code::Unavailable),
            (ServiceError::Conflict("/a".to_owned()), Code::Unavailable),
            (ServiceError::Etcd(refused()), Code::Internal),
            (ServiceError::Members(MemberError::Etcd(refused())), Code::Internal),
            (
                ServiceError::Members(MemberError::WouldLoseQuorum { operation: doing() }),
                Code::FailedPrecondition,
            ),
            (ServiceError::Pki(PkiError::InvalidRequest("why".to_owned())), Code::InvalidArgument),
            (ServiceError::Pki(PkiError::InvalidKey), Code::Internal),
            (ServiceError::rejected(Code::NotFound, "none"), Code::NotFound),
        ] {
            assert_eq!(failure.code(), code, "{failure}");
            assert_eq!(Status::from(failure).code(), code);
        }
    }
}
