//! Client certificates of people for Kubernetes API servers.
//!
//! A person has a key and requests a certificate for its public half. The shepherd that holds the cluster's lease has
//! the curators sign it. A request that is not signed within an hour times out. API servers do not check revocation, so
//! such a certificate cannot be revoked. It is valid for a limited time, and all certificates end when the authority of
//! clients is rotated.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::cluster::credential::MIN_LIFETIME;
use crate::process::UnknownName;
use crate::time::{Span, Timestamp, after, between};

/// Most certificates stored per cluster.
pub const MAX_USERS: usize = 100;
/// Length of a requested public key (ECDSA P-256): the prefix before the point, and the point.
pub const PUBLIC_KEY_BYTES: usize = SPKI_PREFIX.len() + 65;
/// Encoding before the point of such a key (`SubjectPublicKeyInfo`, RFC 5480).
pub const SPKI_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// Longest lifetime of such a certificate: no API server can check whether one was revoked. Curators enforce it too.
pub const LONGEST_LIFETIME: Span = Span::hours(7 * 24);
/// How long the curators may take to sign a request.
const SIGNING_TIMEOUT: Duration = Duration::from_hours(1);
/// How long a certificate is listed after it ended.
const RETENTION: Duration = Duration::from_hours(24);

/// What the holder of a certificate may do in Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KubernetesAccess {
    /// Everything, as cluster administrator.
    Owner,
    /// Read everything except secrets.
    Viewer,
}

impl KubernetesAccess {
    /// Both levels of access.
    pub const ALL: [Self; 2] = [Self::Owner, Self::Viewer];

    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Viewer => "viewer",
        }
    }
}

impl fmt::Display for KubernetesAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for KubernetesAccess {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "access to Kubernetes",
            name: name.to_owned(),
            known: "owner, viewer",
        })
    }
}

/// A request for a certificate, and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesUser {
    /// Identifier of the request.
    pub id: Uuid,
    /// Public key of the holder (`SubjectPublicKeyInfo`, DER).
    pub public_key: Vec<u8>,
    /// Name of the certificate's holder.
    pub holder: String,
    /// What the holder may do.
    pub access: KubernetesAccess,
    /// Requested lifetime of the certificate.
    pub lifetime: Span,
    /// When the certificate was requested.
    pub requested_at: Timestamp,
    /// Operator who requested the certificate.
    pub requested_by: String,
    /// The certificate; `None` until the curators sign it.
    pub issued: Option<IssuedUserCertificate>,
    /// Why the curators rejected the request, if they did.
    pub rejection: Option<String>,
}

/// A signed certificate, and the API servers that accept it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedUserCertificate {
    /// The signed certificate (DER).
    pub certificate: Vec<u8>,
    /// Authorities that sign certificates of API servers, DER.
    pub server_authorities: Vec<Vec<u8>>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
    /// When the certificate expires.
    pub expires_at: Timestamp,
}

/// A certificate as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubernetesUserView {
    /// UUID of the request.
    pub id: String,
    /// Name of the certificate's holder.
    pub holder: String,
    /// Access: `owner` or `viewer`.
    pub access: String,
    /// Public key of the holder (`SubjectPublicKeyInfo`, DER) in hexadecimal digits.
    pub public_key: String,
    /// State at the time of the query, as [`user_state`] returns it.
    pub state: String,
    /// When the certificate was requested.
    pub requested_at: Timestamp,
    /// Operator who requested the certificate.
    pub requested_by: String,
    /// When the certificate expires; `None` until signed.
    pub expires_at: Option<Timestamp>,
    /// Why the curators rejected the request, if they did.
    pub rejection: Option<String>,
    /// DER in hexadecimal digits; `None` until signed.
    pub certificate: Option<String>,
    /// Authorities that sign certificates of API servers, DER in hexadecimal digits.
    pub server_authorities: Vec<String>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

/// State of a certificate at `now`, as people see it.
#[must_use]
pub fn user_state(user: &KubernetesUser, now: Timestamp) -> &'static str {
    match &user.issued {
        Some(issued) if issued.expires_at <= now => "expired",
        Some(_) => "valid",
        None if user.rejection.is_some() => "rejected",
        None if after(user.requested_at, SIGNING_TIMEOUT) <= now => "timed-out",
        None => "requested",
    }
}

/// Requests that the curators have to sign, oldest first.
#[must_use]
pub fn users_to_sign(users: &[KubernetesUser], now: Timestamp) -> Vec<&KubernetesUser> {
    let mut due: Vec<&KubernetesUser> =
        users.iter().filter(|user| user_state(user, now) == "requested").collect();
    due.sort_by_key(|user| (user.requested_at, user.id));
    due
}

/// Certificates and requests that ended at least a day ago.
#[must_use]
pub fn users_to_delete(users: &[KubernetesUser], now: Timestamp) -> Vec<Uuid> {
    let over = |user: &&KubernetesUser| {
        let ended = user
            .issued
            .as_ref()
            .map_or_else(|| after(user.requested_at, SIGNING_TIMEOUT), |issued| issued.expires_at);
        ended <= now && between(ended, now) >= RETENTION
    };
    users.iter().filter(over).map(|user| user.id).collect()
}

/// Builds the view of a certificate.
#[must_use]
pub fn user_view(user: &KubernetesUser, now: Timestamp) -> KubernetesUserView {
    let issued = user.issued.as_ref();
    KubernetesUserView {
        id: user.id.to_string(),
        holder: user.holder.clone(),
        access: user.access.to_string(),
        public_key: hex::encode(&user.public_key),
        state: user_state(user, now).to_owned(),
        requested_at: user.requested_at,
        requested_by: user.requested_by.clone(),
        expires_at: issued.map(|issued| issued.expires_at),
        rejection: user.rejection.clone(),
        certificate: issued.map(|issued| hex::encode(&issued.certificate)),
        server_authorities: issued
            .map(|issued| issued.server_authorities.iter().map(hex::encode).collect())
            .unwrap_or_default(),
        api_servers: issued.map(|issued| issued.api_servers.clone()).unwrap_or_default(),
    }
}

/// Checks that API servers accept this public key; the error is a sentence.
pub fn check_public_key(public_key: &[u8]) -> Result<(), String> {
    // An uncompressed point. The curators check that it is on the curve.
    (public_key.len() == PUBLIC_KEY_BYTES
        && public_key.starts_with(&SPKI_PREFIX)
        && public_key[SPKI_PREFIX.len()] == 4)
        .then_some(())
        .ok_or_else(|| "it is no public key of ECDSA P-256 (`SubjectPublicKeyInfo`, DER)".to_owned())
}

/// Checks the lifetime of a request; the error is a sentence.
pub fn check_lifetime(lifetime: Span) -> Result<(), String> {
    if lifetime < MIN_LIFETIME || lifetime > LONGEST_LIFETIME {
        return Err(format!(
            "a certificate for API servers is valid for {MIN_LIFETIME} to {LONGEST_LIFETIME}, not for {lifetime}: no \
             API server can check whether one was revoked"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn user(issued: Option<i64>, refused: Option<&str>) -> KubernetesUser {
        KubernetesUser {
            id: Uuid::from_u128(1),
            public_key: Vec::new(),
            holder: "kim".to_owned(),
            access: KubernetesAccess::Viewer,
            lifetime: Span::hours(8),
            requested_at: at(0),
            requested_by: "kim".to_owned(),
            issued: issued.map(|end| IssuedUserCertificate {
                certificate: vec![1],
                server_authorities: vec![vec![2]],
                api_servers: vec!["10.0.0.1:6443".to_owned()],
                expires_at: at(end),
            }),
            rejection: refused.map(str::to_owned),
        }
    }

    #[test]
    fn unsigned_requests_lapse_and_ended_ones_are_deleted_after_a_day() {
        const DAY: i64 = 24 * 3_600;
        for (user, now, expected, to_sign, forgotten) in [
            (user(None, None), 3_599, "requested", 1, 0),
            (user(None, None), 3_600, "timed-out", 0, 0),
            (user(None, None), 3_600 + DAY, "timed-out", 0, 1),
            (user(None, Some("no")), 1, "rejected", 0, 0),
            (user(Some(100), None), 99, "valid", 0, 0),
            (user(Some(100), None), 100, "expired", 0, 0),
            (user(Some(100), None), 100 + DAY, "expired", 0, 1),
        ] {
            let now = at(now);
            let users = [user];
            assert_eq!(user_state(&users[0], now), expected);
            assert_eq!(
                (users_to_sign(&users, now).len(), users_to_delete(&users, now).len()),
                (to_sign, forgotten),
                "{expected}"
            );
            assert_eq!(user_view(&users[0], now).state, expected);
        }
    }

    #[test]
    fn lifetime_is_from_a_minute_to_a_week() {
        for (lifetime, good) in [
            (Span::seconds(59), false),
            (Span::minutes(1), true),
            (Span::hours(7 * 24), true),
            (Span::seconds(7 * 24 * 3_600 + 1), false),
            (Span::hours(30 * 24), false),
        ] {
            assert_eq!(check_lifetime(lifetime).is_ok(), good, "{lifetime}");
        }
    }

    #[test]
    fn only_p256_keys_are_accepted() {
        let key = [&SPKI_PREFIX[..], &[4], &[7; 64]].concat();
        assert_eq!(check_public_key(&key), Ok(()));
        for other in [&key[..90], &[&SPKI_PREFIX[..], &[2], &[7; 64]].concat(), &[7; 91], &[][..]] {
            assert!(check_public_key(other).is_err(), "{other:?}");
        }
        assert_eq!("owner".parse::<KubernetesAccess>().unwrap(), KubernetesAccess::Owner);
        assert!("admin".parse::<KubernetesAccess>().is_err());
    }
}
