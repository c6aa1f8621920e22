//! Certificates of people for a cluster: what becomes of each, and what is to be done about it.
//!
//! A person has a key, and asks for a certificate for its public half. Whoever holds the cluster's lease has the curators
//! sign it. What nobody could have signed within an hour has lapsed: a certificate that its asker has long given up on
//! would be good for whoever finds the key. A certificate ends by itself, or is revoked: then the curators refuse every
//! certificate for that key.

use std::time::Duration;

use serde::Serialize;
use uuid::Uuid;

use crate::model::time::{Span, Timestamp, after, between};

/// How long one may be good.
pub const LONGEST_LIFETIME: Span = Span::hours(30 * 24);
/// How long one is good where nobody says how long.
pub const DEFAULT_LIFETIME: Span = Span::hours(8);
/// The shortest time that is worth the way.
pub const SHORTEST_LIFETIME: Span = Span::minutes(1);
/// Most of one cluster that are remembered.
pub const MOST: usize = 100;
/// How long the curators may take to sign what was asked for.
const LAPSES: Duration = Duration::from_hours(1);
/// How long one that is over is shown.
const SHOWN: Duration = Duration::from_hours(24);
const LONGEST_HOLDER: usize = 63;

/// A certificate that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// Which.
    pub id: Uuid,
    /// The key, Ed25519.
    pub public_key: [u8; 32],
    /// Whose it is, as curators call them.
    pub holder: String,
    /// How long it is to be good.
    pub lifetime: Span,
    /// When it was asked for.
    pub asked_at: Timestamp,
    /// By whom.
    pub asked_by: String,
    /// What the curators signed.
    pub issued: Option<Issued>,
    /// Why they did not.
    pub refused: Option<String>,
    /// Who wants it refused.
    pub revoked_by: Option<String>,
    /// When its curators were told.
    pub revoked_at: Option<Timestamp>,
}

/// A certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// DER.
    pub certificate: Vec<u8>,
    /// Its number, 32 hexadecimal digits.
    pub serial: String,
    /// When it ends.
    pub expires_at: Timestamp,
}

/// A certificate as people see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CredentialView {
    /// UUID.
    pub id: String,
    /// Whose.
    pub holder: String,
    /// The key, 64 hexadecimal digits.
    pub public_key: String,
    /// `asked`, `lapsed`, `refused`, `good`, `expired`, `revoking` or `revoked`.
    pub state: String,
    /// When it was asked for.
    pub asked_at: Timestamp,
    /// By whom.
    pub asked_by: String,
    /// Its number, 32 hexadecimal digits.
    pub serial: Option<String>,
    /// When it ends.
    pub expires_at: Option<Timestamp>,
    /// Why its curators did not sign it.
    pub refused: Option<String>,
    /// Who ended it.
    pub revoked_by: Option<String>,
    /// DER, in hexadecimal digits.
    pub certificate: Option<String>,
}

/// What is to be done about one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Have it signed.
    Issue,
    /// Have it refused.
    Revoke,
}

/// What becomes of one.
#[must_use]
pub fn state(credential: &Credential, now: Timestamp) -> &'static str {
    let expired = credential.issued.as_ref().is_some_and(|issued| issued.expires_at <= now);
    match (&credential.issued, &credential.revoked_by) {
        _ if credential.revoked_at.is_some() => "revoked",
        (Some(_), _) if expired => "expired",
        (_, Some(_)) => "revoking",
        (Some(_), None) => "good",
        (None, None) if credential.refused.is_some() => "refused",
        (None, None) if lapsed(credential, now) => "lapsed",
        (None, None) => "asked",
    }
}

fn lapsed(credential: &Credential, now: Timestamp) -> bool {
    after(credential.asked_at, LAPSES) <= now
}

/// What is to be done, oldest first.
#[must_use]
pub fn due(credentials: &[Credential], now: Timestamp) -> Vec<(&Credential, Step)> {
    let mut due: Vec<(&Credential, Step)> = credentials
        .iter()
        .filter_map(|credential| match state(credential, now) {
            "asked" => Some((credential, Step::Issue)),
            "revoking" => Some((credential, Step::Revoke)),
            _ => None,
        })
        .collect();
    due.sort_by_key(|(credential, _)| (credential.asked_at, credential.id));
    due
}

/// Those that are over for so long that they are shown no more. One that was revoked is remembered as long as it would
/// have been good: a cluster that is restored has to be told again.
#[must_use]
pub fn to_forget(credentials: &[Credential], now: Timestamp) -> Vec<Uuid> {
    let over = |credential: &&Credential| {
        let ended = match &credential.issued {
            Some(issued) => issued.expires_at,
            // Should it have been signed and nobody have heard of it, it would be good until then.
            None if credential.revoked_by.is_some() => {
                after(after(credential.asked_at, LAPSES), credential.lifetime.into())
            }
            None => after(credential.asked_at, LAPSES),
        };
        ended <= now && between(ended, now) >= SHOWN
    };
    credentials.iter().filter(over).map(|credential| credential.id).collect()
}

/// A certificate as people see it.
#[must_use]
pub fn view(credential: &Credential, now: Timestamp) -> CredentialView {
    let issued = credential.issued.as_ref();
    CredentialView {
        id: credential.id.to_string(),
        holder: credential.holder.clone(),
        public_key: hex::encode(credential.public_key),
        state: state(credential, now).to_owned(),
        asked_at: credential.asked_at,
        asked_by: credential.asked_by.clone(),
        serial: issued.map(|issued| issued.serial.clone()),
        expires_at: issued.map(|issued| issued.expires_at),
        refused: credential.refused.clone(),
        revoked_by: credential.revoked_by.clone(),
        certificate: issued.map(|issued| hex::encode(&issued.certificate)),
    }
}

/// Whether curators take this for somebody's name; if not, a sentence.
pub fn check_holder(holder: &str) -> Result<(), String> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    if holder.is_empty() || holder.len() > LONGEST_HOLDER || !holder.chars().all(fits) {
        return Err(format!(
            "{holder:?} names no holder of a certificate: 1 to {LONGEST_HOLDER} letters, digits, dots, dashes and \
             underscores"
        ));
    }
    Ok(())
}

/// Whether one may be good for so long; if not, a sentence.
pub fn check_lifetime(lifetime: Span) -> Result<(), String> {
    if lifetime < SHORTEST_LIFETIME || lifetime > LONGEST_LIFETIME {
        return Err(format!(
            "a certificate for a cluster is good for {SHORTEST_LIFETIME} to {LONGEST_LIFETIME}, not for {lifetime}"
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

    fn asked() -> Credential {
        Credential {
            id: Uuid::from_u128(1),
            public_key: [7; 32],
            holder: "kim".to_owned(),
            lifetime: Span::hours(8),
            asked_at: at(0),
            asked_by: "kim@ams".to_owned(),
            issued: None,
            refused: None,
            revoked_by: None,
            revoked_at: None,
        }
    }

    fn issued() -> Credential {
        let issued = Issued { certificate: vec![1], serial: "a".repeat(32), expires_at: at(8 * HOUR) };
        Credential { issued: Some(issued), ..asked() }
    }

    fn revoking(credential: Credential) -> Credential {
        Credential { revoked_by: Some("lee".to_owned()), ..credential }
    }

    fn revoked(credential: Credential) -> Credential {
        Credential { revoked_at: Some(at(2)), ..revoking(credential) }
    }

    #[test]
    fn what_becomes_of_one_and_what_is_done_about_it() {
        let refused = Credential { refused: Some("no".to_owned()), ..asked() };
        for (credential, seconds, expected, step) in [
            (asked(), 0, "asked", Some(Step::Issue)),
            (asked(), HOUR - 1, "asked", Some(Step::Issue)),
            (asked(), HOUR, "lapsed", None),
            (refused.clone(), 1, "refused", None),
            (refused, 2 * HOUR, "refused", None),
            (issued(), 1, "good", None),
            (issued(), 8 * HOUR - 1, "good", None),
            (issued(), 8 * HOUR, "expired", None),
            (revoking(issued()), 1, "revoking", Some(Step::Revoke)),
            (revoking(issued()), 8 * HOUR, "expired", None),
            // It may have been signed, and nobody have heard of it.
            (revoking(asked()), 1, "revoking", Some(Step::Revoke)),
            (revoking(asked()), 2 * HOUR, "revoking", Some(Step::Revoke)),
            (revoked(issued()), 3, "revoked", None),
            (revoked(asked()), 3, "revoked", None),
            (revoked(issued()), 9 * HOUR, "revoked", None),
        ] {
            let credentials = [credential.clone()];
            let done: Vec<Step> = due(&credentials, at(seconds)).into_iter().map(|(_, step)| step).collect();
            assert_eq!(
                (state(&credential, at(seconds)), done.first().copied()),
                (expected, step),
                "{seconds} s: {credential:?}"
            );
        }
    }

    #[test]
    fn oldest_is_served_first() {
        let later = Credential { id: Uuid::from_u128(2), asked_at: at(5), ..asked() };
        let credentials = [later, asked()];
        let served: Vec<u128> =
            due(&credentials, at(6)).into_iter().map(|(credential, _)| credential.id.as_u128()).collect();
        assert_eq!(served, [1, 2]);
    }

    #[test]
    fn what_is_over_is_shown_for_a_day_and_a_refusal_is_remembered_as_long_as_it_matters() {
        for (credential, forgotten) in [
            (asked(), 25 * HOUR),
            (issued(), 32 * HOUR),
            (revoked(issued()), 32 * HOUR),
            (revoked(asked()), 33 * HOUR),
        ] {
            assert!(
                to_forget(std::slice::from_ref(&credential), at(forgotten - 1)).is_empty(),
                "{credential:?}"
            );
            assert_eq!(
                to_forget(std::slice::from_ref(&credential), at(forgotten)),
                [credential.id],
                "{credential:?}"
            );
        }
    }

    #[test]
    fn names_and_lifetimes_that_curators_take() {
        for good in ["kim", "k.i-m_2", &"x".repeat(63)] {
            assert_eq!(check_holder(good), Ok(()), "{good}");
        }
        for bad in ["", "kim@ams", "k m", "ü", &"x".repeat(64)] {
            assert!(check_holder(bad).unwrap_err().contains("names no holder"), "{bad}");
        }
        assert_eq!(check_lifetime(SHORTEST_LIFETIME), Ok(()));
        assert_eq!(check_lifetime(LONGEST_LIFETIME), Ok(()));
        for bad in [Span::seconds(59), Span::hours(30 * 24 + 1)] {
            assert!(check_lifetime(bad).unwrap_err().contains("is good for"), "{bad}");
        }
    }
}
