//! How the tracker of the leader authenticates curators, and how it requests statements from them.
//!
//! A statement proves itself, so it may come from any node of the cluster, over a connection that demands no more. That
//! also holds for a node with a stale statement: it would accept no curator, and yet it needs a newer one.
//!
//! A node that was off while the authority of its cluster was replaced trusts none that signed the curators' certificates.
//! It requests the statement from any server then, without showing its certificate. The successions that come with the
//! statement lead from the authority that it trusts to the one that signed.

use std::sync::Arc;
use std::time::Duration;

use proto::curator::v1 as wire;
use proto::curator::v1::leader_client::LeaderClient;
use rustls::ClientConfig;
use rustls::sign::CertifiedKey;
use tonic::{Code, Status};

use crate::clock::Clock;
use crate::curator_channel::open_channel;
use crate::curator_refusal::{CuratorRefused, find_refusal};
use crate::leader_channel::{OwnCertificate, TlsConfigProvider};
use crate::node_id::NodeId;
use crate::peer_identity::PeerError;
use crate::statement::StatementError;
use crate::statement_trust::StatementTrust;
use crate::tls::{
    AcceptedCertificates, CuratorCheck, CuratorCheckProvider, authorities_client_config,
    recording_client_config,
};

/// How long one curator may take to send its statement.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time of a request for a statement: one that another authority answers is repeated without a certificate.
pub(super) const REQUEST_LIMIT: Duration = STATEMENT_TIMEOUT.saturating_mul(2);

/// Who may answer as a curator, and which identity this side shows.
pub(super) enum CuratorAuthentication {
    /// As the caller configures it. No statement is requested.
    Configured(TlsConfigProvider),
    /// As the newest statement of the cluster's authority demands it.
    Statements {
        trust: StatementTrust,
        /// The certificate that this side shows.
        own: OwnCertificate,
    },
}

/// Why a curator gave no statement that counts.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("requesting the statement of the cluster: {0}")]
    Status(Status),
    #[error("it sent no statement of the cluster within {} s", STATEMENT_TIMEOUT.as_secs())]
    TimedOut,
    #[error(transparent)]
    Refused(CuratorRefused),
    #[error(transparent)]
    Statement(#[from] StatementError),
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

impl FetchError {
    fn from_status(status: Status) -> Self {
        match find_refusal(&status) {
            Some(refused) => Self::Refused(refused.clone()),
            None => Self::Status(status),
        }
    }
}

impl CuratorAuthentication {
    pub(super) const fn trust(&self) -> Option<&StatementTrust> {
        match self {
            Self::Configured(_) => None,
            Self::Statements { trust, .. } => Some(trust),
        }
    }

    /// The clock by which the certificates of followed curators end; `None` if the caller's configuration decides alone.
    pub(super) fn clock(&self) -> Option<Clock> {
        self.trust().map(|trust| trust.clock().clone())
    }

    /// TLS to a curator that is followed: to this node alone, or with `None` to any curator.
    pub(super) fn tls_config(&self, expected: Option<NodeId>) -> Result<Arc<ClientConfig>, rustls::Error> {
        match self {
            Self::Configured(configure) => configure(expected),
            Self::Statements { trust, own } => {
                let (anchors, clock) = (trust.authorities(), trust.clock().clone());
                authorities_client_config(anchors, trust.check_provider(), expected, own(), clock)
            }
        }
    }

    /// Requests the newest statement from the curator at this address. `epoch` is the highest proved epoch. Returns the
    /// node of the curator, if its certificate proves by the newest statement that it is one.
    ///
    /// A curator that has none changes nothing. What else changes nothing is decided by [`is_passed_over`].
    pub(super) async fn fetch_statement(
        &self,
        address: &str,
        epoch: u64,
    ) -> Result<Option<NodeId>, FetchError> {
        let Self::Statements { trust, own } = self else { return Ok(None) };
        let accepted = AcceptedCertificates::default();
        let requested = request_statement(trust, address, CuratorCheck::AnyNode, own(), &accepted).await;
        let requested = match requested {
            Err(FetchError::Refused(refused)) if is_by_another_authority(&refused, trust) => {
                // Its own list, because nothing is proved by a certificate that was refused before.
                let other = AcceptedCertificates::default();
                let sent = request_statement(trust, address, CuratorCheck::AnyServer, None, &other).await;
                let Ok(Some(statement)) = sent else { return Err(FetchError::Refused(refused)) };
                return match trust.offer(&statement, epoch).await {
                    Ok(true) => Ok(None),
                    Ok(false) | Err(_) => Err(FetchError::Refused(refused)),
                };
            }
            requested => requested?,
        };
        if let Some(statement) = requested {
            match trust.offer(&statement, epoch).await {
                Ok(_) => {}
                Err(error) if is_passed_over(&error, trust.curator_check().is_ok()) => {
                    tracing::debug!(curator = address, %error, "a statement of the cluster changes nothing");
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(accepted.only_one().and_then(|certificate| trust.identify_proved(&certificate)))
    }
}

/// Requests the newest statement; `None` if the curator has none. `accepted` gets the certificate that it shows.
async fn request_statement(
    trust: &StatementTrust,
    address: &str,
    check: CuratorCheck,
    own: Option<Arc<CertifiedKey>>,
    accepted: &AcceptedCertificates,
) -> Result<Option<wire::SignedStatement>, FetchError> {
    let check: CuratorCheckProvider = Arc::new(move || Ok(check.clone()));
    let (anchors, clock) = (trust.authorities(), trust.clock().clone());
    let config = recording_client_config(anchors, check, accepted.clone(), own, clock)?;
    let mut client = LeaderClient::new(open_channel(address, config));
    let response = client.get_statement(wire::GetStatementRequest {});
    let response =
        tokio::time::timeout(STATEMENT_TIMEOUT, response).await.map_err(|_| FetchError::TimedOut)?;
    match response {
        Ok(response) => Ok(response.into_inner().statement),
        Err(status) if has_none(&status) => Ok(None),
        Err(status) => Err(FetchError::from_status(status)),
    }
}

/// Whether a curator was refused because its certificate names the authority of the cluster and another key signed it. It
/// may be a successor's.
fn is_by_another_authority(refused: &CuratorRefused, trust: &StatementTrust) -> bool {
    refused.reason == PeerError::Forged(trust.anchor().cluster).to_string()
}

/// Whether a rejected statement changes nothing, so that its curator is followed as far as the known statement permits.
/// `is_followed`: whether that one permits any curator at this moment.
///
/// A curator with a lower statement may not have received the newest one yet. The clock of one with a statement of the
/// future is ahead, or the one here is slow. If nobody is followed meanwhile, the two clocks are the reason.
const fn is_passed_over(error: &StatementError, is_followed: bool) -> bool {
    match error {
        StatementError::Lower { .. } => true,
        StatementError::FromTheFuture { .. } => is_followed,
        _ => false,
    }
}

/// Whether a curator has no statement. A release that knows none refuses the call as one that does not exist, after it
/// has checked who calls.
fn has_none(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::NotFound | Code::Unimplemented | Code::Unauthenticated | Code::PermissionDenied
    )
}

/// Whether a curator that names this epoch and number of its statement may have a newer one than the current one.
pub(super) fn may_have_newer(current: Option<(u64, u64)>, response: &wire::WatchLeaderResponse) -> bool {
    let named = (response.epoch, response.statement_number);
    current.map_or(response.statement_number > 0, |current| named > current)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;

    #[test]
    fn statement_of_the_future_is_the_reason_why_nobody_is_followed() {
        let lower = StatementError::Lower { offered: (0, 1), known: (0, 2) };
        let future = StatementError::FromTheFuture { issued_at: at(7_200), now: at(0) };
        for (error, is_followed, expected) in [
            (&lower, true, true),
            (&lower, false, true),
            (&future, true, true),
            (&future, false, false),
            (&StatementError::BadSignature, true, false),
            (&StatementError::BadSignature, false, false),
        ] {
            assert_eq!(is_passed_over(error, is_followed), expected, "{error} {is_followed}");
        }
    }

    #[test]
    fn statement_is_requested_if_the_curator_may_have_a_newer_one() {
        for (current, epoch, number, requested) in [
            (None, 0, 0, false),
            (None, 3, 0, false),
            (None, 0, 1, true),
            (Some((2, 7)), 2, 7, false),
            (Some((2, 7)), 2, 8, true),
            (Some((2, 7)), 2, 6, false),
            (Some((2, 7)), 1, 9, false),
            (Some((2, 7)), 3, 0, true),
        ] {
            let response =
                wire::WatchLeaderResponse { epoch, statement_number: number, ..Default::default() };
            assert_eq!(may_have_newer(current, &response), requested, "{current:?} {epoch} {number}");
        }
    }
}
