//! Why a curator did not lead to the leader.

use tonic::Status;

use crate::curator_authentication::FetchError;
use crate::curator_refusal::{CuratorRefused, find_refusal};
use crate::known_epoch::KnownEpoch;
use crate::leader_channel::RESPONSE_TIMEOUT;
use crate::statement::StatementError;

/// Why a curator did not lead to the leader.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    #[error("{0}")]
    Status(Status),
    #[error("it did not answer within {} s", RESPONSE_TIMEOUT.as_secs())]
    TimedOut,
    #[error("it ended the stream")]
    StreamEnded,
    #[error("its answer is invalid: {0}")]
    InvalidResponse(String),
    #[error("it belongs to epoch {received} of the cluster, which was restored since then (epoch {highest})")]
    OutdatedEpoch { received: u64, highest: u64 },
    #[error(
        "it belongs to epoch {received} of the cluster, and another node has reported epoch {highest}, which nothing proves; \
         the next statement of the cluster's authority decides; if there is none, look for the node that reported it, and \
         have this machine leave its cluster and join again"
    )]
    BelowUnprovedEpoch { received: u64, highest: u64 },
    #[error("it reports epoch {received} of the cluster, and no statement proves more than epoch {highest}")]
    UnprovedEpoch { received: u64, highest: u64 },
    #[error("a new statement of the cluster's authority ended its connections")]
    StatementChanged,
    #[error(transparent)]
    Statement(StatementError),
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Refused(CuratorRefused),
    #[error("the new epoch of the cluster could not be stored: {0}")]
    EpochNotPersisted(String),
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

impl FollowError {
    pub(super) fn from_status(status: Status) -> Self {
        match find_refusal(&status) {
            Some(refused) => Self::Refused(refused.clone()),
            None => Self::Status(status),
        }
    }

    /// Whether the curator is not followed because of the statement or of the epoch, although it answered.
    pub(super) const fn is_refusal(&self, has_statement: bool) -> bool {
        match self {
            Self::OutdatedEpoch { .. } | Self::BelowUnprovedEpoch { .. } | Self::UnprovedEpoch { .. } => true,
            Self::Refused(_)
            | Self::Statement(_)
            | Self::Fetch(FetchError::Refused(_) | FetchError::Statement(_)) => has_statement,
            _ => false,
        }
    }
}

/// Why a curator of a lower epoch than the highest one is not followed.
pub(super) const fn outdated_error(received: u64, known: KnownEpoch) -> FollowError {
    if received < known.proved {
        FollowError::OutdatedEpoch { received, highest: known.proved }
    } else {
        FollowError::BelowUnprovedEpoch { received, highest: known.highest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_to_follow_nobody_is_known_without_a_statement_if_it_is_the_epoch() {
        let known = KnownEpoch { highest: 900, proved: 2 };
        for (received, expected) in
            [(1, "which was restored since then (epoch 2)"), (2, "which nothing proves")]
        {
            let error = outdated_error(received, known);
            assert!(error.to_string().contains(expected), "{received}: {error}");
            assert!(error.is_refusal(false) && error.is_refusal(true), "{error}");
        }
        for (error, has_statement, is_refusal) in [
            (FollowError::TimedOut, true, false),
            (FollowError::Statement(StatementError::BadSignature), true, true),
            (FollowError::Statement(StatementError::BadSignature), false, false),
            (FollowError::UnprovedEpoch { received: 4, highest: 2 }, true, true),
        ] {
            assert_eq!(error.is_refusal(has_statement), is_refusal, "{error}");
        }
    }
}
