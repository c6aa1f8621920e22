//! Why a call is not answered as it was asked, and the code it is answered with.
//!
//! Whatever passes by itself is UNAVAILABLE: whoever called asks who leads and calls again. So every write may have been
//! done when its call fails like that, and every call may be made again.

use tonic::{Code, Status};

use crate::curator::cluster::OwnerKeyRefusal;
use crate::curator::pki::PkiError;
use crate::curator::{kubernetes, labels, life_cycle, permissions, roles, tickets};
use crate::etcd::client::EtcdError;
use crate::etcd::guard::{LostLeadership, WriteError};
use crate::etcd::key_space::KeyError;
use crate::etcd::members::MemberError;
use crate::etcd::record::{BrokenRecord, RecordError};

/// Why a call is not answered as it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Another curator leads, or nobody.
    #[error(transparent)]
    Lost(#[from] LostLeadership),
    /// etcd did not do it.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// etcd did not change its members.
    #[error(transparent)]
    Members(#[from] MemberError),
    /// A record changed between the look at it and the write.
    #[error("{0} changed while it was being written, again and again; ask again")]
    Changed(String),
    /// A record cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A record must not be written.
    #[error(transparent)]
    Broken(#[from] BrokenRecord),
    /// A key cannot be.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The authority signed nothing.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The decision was not to.
    #[error("{sentence}")]
    Refused {
        /// What it is answered with.
        code: Code,
        /// Why, and what to do.
        sentence: String,
    },
}

impl Failure {
    /// A decision against what was asked.
    pub fn refused(code: Code, sentence: impl Into<String>) -> Self {
        Self::Refused { code, sentence: sentence.into() }
    }

    /// What was asked cannot be understood.
    pub fn invalid(sentence: impl Into<String>) -> Self {
        Self::refused(Code::InvalidArgument, sentence)
    }

    /// The code it is answered with.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Lost(_)
            | Self::Changed(_)
            | Self::Etcd(EtcdError::Deadline { .. } | EtcdError::Away { .. } | EtcdError::Compacted { .. })
            | Self::Members(
                MemberError::TooManyLearners { .. }
                | MemberError::NotCaughtUp { .. }
                | MemberError::NotLearner { .. }
                | MemberError::Unhealthy { .. }
                | MemberError::NotFound { .. }
                | MemberError::AlreadyThere { .. }
                | MemberError::Etcd(EtcdError::Deadline { .. } | EtcdError::Away { .. }),
            ) => Code::Unavailable,
            Self::Members(MemberError::WouldLoseQuorum { .. }) => Code::FailedPrecondition,
            Self::Pki(PkiError::Useless(_)) => Code::InvalidArgument,
            Self::Refused { code, .. } => *code,
            Self::Etcd(_)
            | Self::Members(_)
            | Self::Record(_)
            | Self::Broken(_)
            | Self::Key(_)
            | Self::Pki(_) => Code::Internal,
        }
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        if failure.code() == Code::Internal {
            tracing::error!(error = %failure, "a call to the curator failed");
        }
        Self::new(failure.code(), failure.to_string())
    }
}

impl From<WriteError> for Failure {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::LostLeadership(lost) => Self::Lost(lost),
            WriteError::Changed { changed, .. } => Self::Changed(changed.join(", ")),
            WriteError::Etcd(error) => Self::Etcd(error),
        }
    }
}

impl From<OwnerKeyRefusal> for Failure {
    fn from(refusal: OwnerKeyRefusal) -> Self {
        Self::refused(refusal.code(), refusal.to_string())
    }
}

impl From<kubernetes::refusal::Refusal> for Failure {
    fn from(refusal: kubernetes::refusal::Refusal) -> Self {
        Self::refused(refusal.code(), refusal.to_string())
    }
}

impl From<kubernetes::authority::KeyError> for Failure {
    fn from(error: kubernetes::authority::KeyError) -> Self {
        kubernetes::refusal::Refusal::from(error).into()
    }
}

impl From<labels::Refusal> for Failure {
    fn from(refusal: labels::Refusal) -> Self {
        Self::refused(refusal.code(), refusal.to_string())
    }
}

impl From<life_cycle::Refusal> for Failure {
    fn from(refusal: life_cycle::Refusal) -> Self {
        Self::refused(refusal.code(), refusal.to_string())
    }
}

impl From<permissions::Refusal> for Failure {
    fn from(refusal: permissions::Refusal) -> Self {
        Self::refused(refusal.code(), refusal.to_string())
    }
}

impl From<roles::Refusal> for Failure {
    fn from(refusal: roles::Refusal) -> Self {
        Self::refused(refusal.code(), refusal.to_string())
    }
}

impl From<tickets::Refusal> for Failure {
    fn from(refusal: tickets::Refusal) -> Self {
        Self::refused(refusal.code(), refusal.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_by_itself_is_unavailable_and_what_does_not_is_not() {
        let away = || EtcdError::Away { doing: "reading /a".to_owned(), said: "gone".to_owned() };
        let refused = || EtcdError::Refused { doing: "reading /a".to_owned(), said: "no".to_owned() };
        let doing = || "promoting member 1".to_owned();
        for (failure, code) in [
            (Failure::Etcd(away()), Code::Unavailable),
            (Failure::Members(MemberError::Etcd(away())), Code::Unavailable),
            (Failure::Members(MemberError::Unhealthy { doing: doing() }), Code::Unavailable),
            (Failure::Changed("/a".to_owned()), Code::Unavailable),
            (Failure::Etcd(refused()), Code::Internal),
            (Failure::Members(MemberError::Etcd(refused())), Code::Internal),
            (Failure::Members(MemberError::WouldLoseQuorum { doing: doing() }), Code::FailedPrecondition),
            (Failure::Pki(PkiError::Useless("why".to_owned())), Code::InvalidArgument),
            (Failure::Pki(PkiError::NoKey), Code::Internal),
            (Failure::refused(Code::NotFound, "none"), Code::NotFound),
        ] {
            assert_eq!(failure.code(), code, "{failure}");
            assert_eq!(Status::from(failure).code(), code);
        }
    }
}
