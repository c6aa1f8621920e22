//! The life of a request for a person's certificate: sign, time out, expire, revoke.
//!
//! A person has a key and requests a certificate for its public half. The shepherd that holds the cluster's lease has
//! the curators sign it. A request that is not signed within an hour times out: its author has given up on it long ago,
//! and a certificate issued late would be valid for anyone who finds the key. A request that the curators rejected
//! stays rejected. A certificate expires by itself. It is revoked when an operator orders it, if its kind can be: then
//! the curators refuse every certificate for that key.
//!
//! There are two kinds of certificates, and this file has what they share: for the cluster's curators
//! ([`credential`](crate::cluster::credential)), and for its API servers
//! ([`kubernetes_user`](crate::cluster::kubernetes_user)). The kinds differ in their keys, in their longest lifetime,
//! in what is stored with a signed certificate, and in whether it can be revoked. A kind that cannot be revoked never
//! has a [`Revocation`].
//!
//! # A crash between two steps
//!
//! The curators may have signed a certificate without the shepherd learning of it. Until the request times out, the
//! next pass has another one signed for the same key. A revocation covers all certificates of that key, so it is due
//! for a request without a certificate too.

use std::time::Duration;

use uuid::Uuid;

use crate::time::{Span, Timestamp, after, between};

/// Lifetime of a certificate if the request names none.
pub const DEFAULT_LIFETIME: Span = Span::hours(8);
/// Shortest lifetime that is worth a request.
pub const MIN_LIFETIME: Span = Span::minutes(1);
/// Most requests of one kind stored per cluster.
pub const MAX_REQUESTS: usize = 100;
/// How long the curators may take to sign a request.
const SIGNING_TIMEOUT: Duration = Duration::from_hours(1);
/// How long a certificate is listed after it ended.
const RETENTION: Duration = Duration::from_hours(24);
const MAX_HOLDER_CHARS: usize = 63;

/// A request for a person's certificate, and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateRequest {
    /// Identifier of the request.
    pub id: Uuid,
    /// Public key of the holder, in the encoding of its kind.
    pub public_key: Vec<u8>,
    /// Name of the holder, as the curators know it.
    pub holder: String,
    /// Requested lifetime of the certificate.
    pub lifetime: Span,
    /// When the certificate was requested.
    pub requested_at: Timestamp,
    /// Operator who requested the certificate.
    pub requested_by: String,
    /// The certificate; `None` until the curators sign it.
    pub issued: Option<SignedCertificate>,
    /// Why the curators rejected the request, if they did.
    pub rejection: Option<String>,
    /// The revocation, if one is requested.
    pub revocation: Option<Revocation>,
}

/// A certificate that the curators signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedCertificate {
    /// The signed certificate (DER).
    pub certificate: Vec<u8>,
    /// When the certificate expires.
    pub expires_at: Timestamp,
}

/// An operator's request to revoke the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// Operator who requested it.
    pub requested_by: String,
    /// When it was recorded, after the curators accepted it.
    pub recorded_at: Option<Timestamp>,
}

/// State of a request, as people see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestState {
    /// Recorded; the curators may still sign it.
    Requested,
    /// Not signed in time.
    TimedOut,
    /// The curators rejected it.
    Rejected,
    /// Signed, before its end, and not revoked.
    Valid,
    /// Signed, and past its end.
    Expired,
    /// A revocation is requested, and the curators have not accepted it yet.
    Revoking,
    /// The curators refuse the key.
    Revoked,
}

impl RequestState {
    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Requested => "requested",
            Self::TimedOut => "timed-out",
            Self::Rejected => "rejected",
            Self::Valid => "valid",
            Self::Expired => "expired",
            Self::Revoking => "revoking",
            Self::Revoked => "revoked",
        }
    }
}

/// The next step for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestStep {
    /// Have the curators sign the certificate.
    Sign,
    /// Have the curators refuse the key from now on.
    Revoke,
}

impl CertificateRequest {
    /// Its state at `now`.
    #[must_use]
    pub fn state(&self, now: Timestamp) -> RequestState {
        match (&self.issued, &self.revocation) {
            (_, Some(revocation)) if revocation.recorded_at.is_some() => RequestState::Revoked,
            (Some(issued), _) if issued.expires_at <= now => RequestState::Expired,
            (_, Some(_)) => RequestState::Revoking,
            (Some(_), None) => RequestState::Valid,
            (None, None) if self.rejection.is_some() => RequestState::Rejected,
            (None, None) if self.signing_deadline() <= now => RequestState::TimedOut,
            (None, None) => RequestState::Requested,
        }
    }

    /// The step that is due at `now`.
    #[must_use]
    pub fn next_step(&self, now: Timestamp) -> Option<RequestStep> {
        match self.state(now) {
            RequestState::Requested => Some(RequestStep::Sign),
            RequestState::Revoking => Some(RequestStep::Revoke),
            _ => None,
        }
    }

    fn signing_deadline(&self) -> Timestamp {
        after(self.requested_at, SIGNING_TIMEOUT)
    }

    /// Whether it ended at least a day ago. A revoked one is kept for as long as its certificate would have been valid:
    /// a restored cluster needs the revocation again.
    fn is_obsolete(&self, now: Timestamp) -> bool {
        let ended = match &self.issued {
            Some(issued) => issued.expires_at,
            // The curators may have signed it without the shepherd learning of it: then it is valid until here.
            None if self.revocation.is_some() => after(self.signing_deadline(), self.lifetime.into()),
            None => self.signing_deadline(),
        };
        ended <= now && between(ended, now) >= RETENTION
    }
}

impl AsRef<Self> for CertificateRequest {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// The requests of one kind with a step that is due, oldest first.
#[must_use]
pub fn due_requests<R: AsRef<CertificateRequest>>(requests: &[R], now: Timestamp) -> Vec<(&R, RequestStep)> {
    let step = |request: &R| request.as_ref().next_step(now);
    let mut due: Vec<(&R, RequestStep)> =
        requests.iter().filter_map(|request| Some((request, step(request)?))).collect();
    due.sort_by_key(|(request, _)| {
        let request: &CertificateRequest = request.as_ref();
        (request.requested_at, request.id)
    });
    due
}

/// The requests of one kind that are deleted, because they ended at least a day ago.
#[must_use]
pub fn requests_to_delete<R: AsRef<CertificateRequest>>(requests: &[R], now: Timestamp) -> Vec<Uuid> {
    let all = requests.iter().map(R::as_ref);
    all.filter(|request| request.is_obsolete(now)).map(|request| request.id).collect()
}

/// Checks that curators accept this as a holder's name; the error is a sentence.
pub fn check_holder(holder: &str) -> Result<(), String> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    if holder.is_empty() || holder.len() > MAX_HOLDER_CHARS || !holder.chars().all(fits) {
        return Err(format!(
            "{holder:?} names no holder of a certificate: 1 to {MAX_HOLDER_CHARS} letters, digits, dots, dashes and \
             underscores"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use chrono::DateTime;

    const HOUR: i64 = 3_600;
    const DAY: i64 = 24 * HOUR;

    fn at(seconds: i64) -> Timestamp {
        DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn requested() -> CertificateRequest {
        CertificateRequest {
            id: Uuid::from_u128(1),
            public_key: vec![7; 32],
            holder: "kim".to_owned(),
            lifetime: Span::hours(8),
            requested_at: at(0),
            requested_by: "kim@ams".to_owned(),
            issued: None,
            rejection: None,
            revocation: None,
        }
    }

    fn issued_until(seconds: i64) -> CertificateRequest {
        let issued = SignedCertificate { certificate: vec![1], expires_at: at(seconds) };
        CertificateRequest { issued: Some(issued), ..requested() }
    }

    fn issued() -> CertificateRequest {
        issued_until(8 * HOUR)
    }

    fn revoking(request: CertificateRequest) -> CertificateRequest {
        let revocation = Revocation { requested_by: "lee".to_owned(), recorded_at: None };
        CertificateRequest { revocation: Some(revocation), ..request }
    }

    fn revoked(request: CertificateRequest) -> CertificateRequest {
        let revocation = Revocation { requested_by: "lee".to_owned(), recorded_at: Some(at(2)) };
        CertificateRequest { revocation: Some(revocation), ..request }
    }

    #[test]
    fn states_of_a_request_and_their_due_steps() {
        let refused = CertificateRequest { rejection: Some("no".to_owned()), ..requested() };
        for (request, seconds, expected, step) in [
            (requested(), 0, "requested", Some(RequestStep::Sign)),
            (requested(), HOUR - 1, "requested", Some(RequestStep::Sign)),
            (requested(), HOUR, "timed-out", None),
            (requested(), HOUR + DAY, "timed-out", None),
            // The clock was set back.
            (requested(), -HOUR, "requested", Some(RequestStep::Sign)),
            (refused.clone(), 1, "rejected", None),
            (refused, 2 * HOUR, "rejected", None),
            (issued(), 1, "valid", None),
            (issued(), 8 * HOUR - 1, "valid", None),
            (issued(), 8 * HOUR, "expired", None),
            (issued_until(100), 99, "valid", None),
            (issued_until(100), 100, "expired", None),
            (issued_until(100), 100 + DAY, "expired", None),
            (revoking(issued()), 1, "revoking", Some(RequestStep::Revoke)),
            (revoking(issued()), 8 * HOUR, "expired", None),
            // The curators may have signed it without the shepherd learning of it.
            (revoking(requested()), 1, "revoking", Some(RequestStep::Revoke)),
            (revoking(requested()), 2 * HOUR, "revoking", Some(RequestStep::Revoke)),
            (revoked(issued()), 3, "revoked", None),
            (revoked(requested()), 3, "revoked", None),
            (revoked(issued()), 9 * HOUR, "revoked", None),
        ] {
            let requests = [request.clone()];
            let due: Vec<RequestStep> =
                due_requests(&requests, at(seconds)).into_iter().map(|(_, step)| step).collect();
            assert_eq!(
                (request.state(at(seconds)).as_str(), due.first().copied()),
                (expected, step),
                "{seconds} s: {request:?}"
            );
        }
    }

    #[test]
    fn oldest_request_is_signed_first() {
        let later = CertificateRequest { id: Uuid::from_u128(2), requested_at: at(5), ..requested() };
        let requests = [later, requested()];
        let served: Vec<u128> =
            due_requests(&requests, at(6)).into_iter().map(|(request, _)| request.id.as_u128()).collect();
        assert_eq!(served, [1, 2]);
    }

    #[test]
    fn ended_ones_stay_a_day_and_revocations_until_expiry() {
        let refused = CertificateRequest { rejection: Some("no".to_owned()), ..requested() };
        for (request, forgotten) in [
            (requested(), 25 * HOUR),
            (refused, 25 * HOUR),
            (issued(), 32 * HOUR),
            (issued_until(100), 100 + DAY),
            (revoked(issued()), 32 * HOUR),
            (revoked(requested()), 33 * HOUR),
        ] {
            assert!(
                requests_to_delete(std::slice::from_ref(&request), at(forgotten - 1)).is_empty(),
                "{request:?}"
            );
            assert_eq!(
                requests_to_delete(std::slice::from_ref(&request), at(forgotten)),
                [request.id],
                "{request:?}"
            );
        }
    }

    #[test]
    fn holder_names_are_bounded() {
        for good in ["kim", "k.i-m_2", &"x".repeat(63)] {
            assert_eq!(check_holder(good), Ok(()), "{good}");
        }
        for bad in ["", "kim@ams", "k m", "ü", &"x".repeat(64)] {
            assert!(check_holder(bad).unwrap_err().contains("names no holder"), "{bad}");
        }
    }
}
