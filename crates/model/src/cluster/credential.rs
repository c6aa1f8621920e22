//! Client certificates of people for a cluster: sign, expire, revoke.
//!
//! A person has a key and requests a certificate for its public half. The shepherd that holds the cluster's lease has
//! the curators sign it. A request that is not signed within an hour times out: its author has given up on it long ago,
//! and a certificate issued late would be valid for anyone who finds the key. A certificate expires by itself, or is
//! revoked: then the curators refuse every certificate for that key.

use std::time::Duration;

use serde::Serialize;
use uuid::Uuid;

use crate::time::{Span, Timestamp, after, between};

/// Longest lifetime of a certificate.
pub const MAX_LIFETIME: Span = Span::hours(30 * 24);
/// Lifetime of a certificate if the request names none.
pub const DEFAULT_LIFETIME: Span = Span::hours(8);
/// Shortest lifetime that is worth a request.
pub const MIN_LIFETIME: Span = Span::minutes(1);
/// Most certificates stored per cluster.
pub const MAX_CREDENTIALS: usize = 100;
/// How long the curators may take to sign a request.
const SIGNING_TIMEOUT: Duration = Duration::from_hours(1);
/// How long a certificate is listed after it ended.
const RETENTION: Duration = Duration::from_hours(24);
const MAX_HOLDER_CHARS: usize = 63;

/// A request for a certificate, and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterCredential {
    /// Identifier of the request.
    pub id: Uuid,
    /// Ed25519 public key of the holder.
    pub public_key: [u8; 32],
    /// Name of the holder, as the curators know it.
    pub holder: String,
    /// Requested lifetime of the certificate.
    pub lifetime: Span,
    /// When the certificate was requested.
    pub requested_at: Timestamp,
    /// Operator who requested the certificate.
    pub requested_by: String,
    /// The certificate; `None` until the curators sign it.
    pub issued: Option<IssuedCertificate>,
    /// Why the curators rejected the request, if they did.
    pub rejection: Option<String>,
    /// Operator who revoked it, if one did.
    pub revoked_by: Option<String>,
    /// When the revocation was recorded, after the curators accepted it.
    pub revoked_at: Option<Timestamp>,
}

/// A certificate that the curators signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedCertificate {
    /// The signed certificate (DER).
    pub certificate: Vec<u8>,
    /// Serial number, 32 hexadecimal digits.
    pub serial: String,
    /// When the certificate expires.
    pub expires_at: Timestamp,
}

/// A certificate as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClusterCredentialView {
    /// UUID of the request.
    pub id: String,
    /// Name of the certificate's holder.
    pub holder: String,
    /// Public key of the holder, 64 hexadecimal digits.
    pub public_key: String,
    /// Result of [`credential_state`]: for example `timed-out`, `rejected`, `valid`, `expired`, `revoking` or
    /// `revoked`.
    pub state: String,
    /// When the certificate was requested.
    pub requested_at: Timestamp,
    /// Operator who requested the certificate.
    pub requested_by: String,
    /// Serial number, 32 hexadecimal digits; `None` until signed.
    pub serial: Option<String>,
    /// When the certificate expires; `None` until signed.
    pub expires_at: Option<Timestamp>,
    /// Why the curators rejected the request, if they did.
    pub rejection: Option<String>,
    /// Operator who revoked it, if one did.
    pub revoked_by: Option<String>,
    /// DER in hexadecimal digits; `None` until signed.
    pub certificate: Option<String>,
}

/// The next step for one credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialStep {
    /// Have the curators sign the certificate.
    Issue,
    /// Have the curators refuse the key from now on.
    Revoke,
}

/// State of a credential at `now`, as people see it.
#[must_use]
pub fn credential_state(credential: &ClusterCredential, now: Timestamp) -> &'static str {
    let expired = credential.issued.as_ref().is_some_and(|issued| issued.expires_at <= now);
    match (&credential.issued, &credential.revoked_by) {
        _ if credential.revoked_at.is_some() => "revoked",
        (Some(_), _) if expired => "expired",
        (_, Some(_)) => "revoking",
        (Some(_), None) => "valid",
        (None, None) if credential.rejection.is_some() => "rejected",
        (None, None) if has_signing_lapsed(credential, now) => "timed-out",
        (None, None) => "requested",
    }
}

fn has_signing_lapsed(credential: &ClusterCredential, now: Timestamp) -> bool {
    after(credential.requested_at, SIGNING_TIMEOUT) <= now
}

/// The steps that are due, oldest request first.
#[must_use]
pub fn due_steps(
    credentials: &[ClusterCredential],
    now: Timestamp,
) -> Vec<(&ClusterCredential, CredentialStep)> {
    let mut due: Vec<(&ClusterCredential, CredentialStep)> = credentials
        .iter()
        .filter_map(|credential| match credential_state(credential, now) {
            "requested" => Some((credential, CredentialStep::Issue)),
            "revoking" => Some((credential, CredentialStep::Revoke)),
            _ => None,
        })
        .collect();
    due.sort_by_key(|(credential, _)| (credential.requested_at, credential.id));
    due
}

/// Credentials that ended at least a day ago. A revoked one is kept for as long as its certificate would have been
/// valid: a restored cluster needs the revocation again.
#[must_use]
pub fn credentials_to_delete(credentials: &[ClusterCredential], now: Timestamp) -> Vec<Uuid> {
    let over = |credential: &&ClusterCredential| {
        let ended = match &credential.issued {
            Some(issued) => issued.expires_at,
            // The curators may have signed it without the shepherd learning of it: then it is valid until here.
            None if credential.revoked_by.is_some() => {
                after(after(credential.requested_at, SIGNING_TIMEOUT), credential.lifetime.into())
            }
            None => after(credential.requested_at, SIGNING_TIMEOUT),
        };
        ended <= now && between(ended, now) >= RETENTION
    };
    credentials.iter().filter(over).map(|credential| credential.id).collect()
}

/// Builds the view of a credential.
#[must_use]
pub fn credential_view(credential: &ClusterCredential, now: Timestamp) -> ClusterCredentialView {
    let issued = credential.issued.as_ref();
    ClusterCredentialView {
        id: credential.id.to_string(),
        holder: credential.holder.clone(),
        public_key: hex::encode(credential.public_key),
        state: credential_state(credential, now).to_owned(),
        requested_at: credential.requested_at,
        requested_by: credential.requested_by.clone(),
        serial: issued.map(|issued| issued.serial.clone()),
        expires_at: issued.map(|issued| issued.expires_at),
        rejection: credential.rejection.clone(),
        revoked_by: credential.revoked_by.clone(),
        certificate: issued.map(|issued| hex::encode(&issued.certificate)),
    }
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

/// Checks the lifetime of a request; the error is a sentence.
pub fn check_lifetime(lifetime: Span) -> Result<(), String> {
    if lifetime < MIN_LIFETIME || lifetime > MAX_LIFETIME {
        return Err(format!(
            "a certificate for a cluster is good for {MIN_LIFETIME} to {MAX_LIFETIME}, not for {lifetime}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use chrono::DateTime;

    const HOUR: i64 = 3_600;

    fn at(seconds: i64) -> Timestamp {
        DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn requested() -> ClusterCredential {
        ClusterCredential {
            id: Uuid::from_u128(1),
            public_key: [7; 32],
            holder: "kim".to_owned(),
            lifetime: Span::hours(8),
            requested_at: at(0),
            requested_by: "kim@ams".to_owned(),
            issued: None,
            rejection: None,
            revoked_by: None,
            revoked_at: None,
        }
    }

    fn issued() -> ClusterCredential {
        let issued =
            IssuedCertificate { certificate: vec![1], serial: "a".repeat(32), expires_at: at(8 * HOUR) };
        ClusterCredential { issued: Some(issued), ..requested() }
    }

    fn revoking(credential: ClusterCredential) -> ClusterCredential {
        ClusterCredential { revoked_by: Some("lee".to_owned()), ..credential }
    }

    fn revoked(credential: ClusterCredential) -> ClusterCredential {
        ClusterCredential { revoked_at: Some(at(2)), ..revoking(credential) }
    }

    #[test]
    fn credential_states_and_their_due_steps() {
        let refused = ClusterCredential { rejection: Some("no".to_owned()), ..requested() };
        for (credential, seconds, expected, step) in [
            (requested(), 0, "requested", Some(CredentialStep::Issue)),
            (requested(), HOUR - 1, "requested", Some(CredentialStep::Issue)),
            (requested(), HOUR, "timed-out", None),
            (refused.clone(), 1, "rejected", None),
            (refused, 2 * HOUR, "rejected", None),
            (issued(), 1, "valid", None),
            (issued(), 8 * HOUR - 1, "valid", None),
            (issued(), 8 * HOUR, "expired", None),
            (revoking(issued()), 1, "revoking", Some(CredentialStep::Revoke)),
            (revoking(issued()), 8 * HOUR, "expired", None),
            // The curators may have signed it without the shepherd learning of it.
            (revoking(requested()), 1, "revoking", Some(CredentialStep::Revoke)),
            (revoking(requested()), 2 * HOUR, "revoking", Some(CredentialStep::Revoke)),
            (revoked(issued()), 3, "revoked", None),
            (revoked(requested()), 3, "revoked", None),
            (revoked(issued()), 9 * HOUR, "revoked", None),
        ] {
            let credentials = [credential.clone()];
            let done: Vec<CredentialStep> =
                due_steps(&credentials, at(seconds)).into_iter().map(|(_, step)| step).collect();
            assert_eq!(
                (credential_state(&credential, at(seconds)), done.first().copied()),
                (expected, step),
                "{seconds} s: {credential:?}"
            );
        }
    }

    #[test]
    fn oldest_request_is_signed_first() {
        let later = ClusterCredential { id: Uuid::from_u128(2), requested_at: at(5), ..requested() };
        let credentials = [later, requested()];
        let served: Vec<u128> = due_steps(&credentials, at(6))
            .into_iter()
            .map(|(credential, _)| credential.id.as_u128())
            .collect();
        assert_eq!(served, [1, 2]);
    }

    #[test]
    fn ended_ones_stay_a_day_and_revocations_until_expiry() {
        for (credential, forgotten) in [
            (requested(), 25 * HOUR),
            (issued(), 32 * HOUR),
            (revoked(issued()), 32 * HOUR),
            (revoked(requested()), 33 * HOUR),
        ] {
            assert!(
                credentials_to_delete(std::slice::from_ref(&credential), at(forgotten - 1)).is_empty(),
                "{credential:?}"
            );
            assert_eq!(
                credentials_to_delete(std::slice::from_ref(&credential), at(forgotten)),
                [credential.id],
                "{credential:?}"
            );
        }
    }

    #[test]
    fn holder_names_and_lifetimes_are_bounded() {
        for good in ["kim", "k.i-m_2", &"x".repeat(63)] {
            assert_eq!(check_holder(good), Ok(()), "{good}");
        }
        for bad in ["", "kim@ams", "k m", "ü", &"x".repeat(64)] {
            assert!(check_holder(bad).unwrap_err().contains("names no holder"), "{bad}");
        }
        assert_eq!(check_lifetime(MIN_LIFETIME), Ok(()));
        assert_eq!(check_lifetime(MAX_LIFETIME), Ok(()));
        for bad in [Span::seconds(59), Span::hours(30 * 24 + 1)] {
            assert!(check_lifetime(bad).unwrap_err().contains("is good for"), "{bad}");
        }
    }
}
