//! Certificates of people for the API servers of a cluster's Kubernetes: what becomes of each.
//!
//! A person has a key, and asks for a certificate for its public half. Whoever holds the cluster's lease has the curators
//! sign it; what nobody could have signed within an hour has lapsed. Kubernetes asks nobody whether a certificate was
//! revoked, so there is no ending one: it is good for hours, and all of them end when the authority of clients is replaced.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::model::cluster::credential::SHORTEST_LIFETIME;
use crate::model::process::UnknownName;
use crate::model::time::{Span, Timestamp, after, between};

/// Most of one cluster that are remembered.
pub const MOST: usize = 100;
/// Length of a public key of ECDSA P-256 as it is asked with: what stands before the point, and the point.
pub const PUBLIC_KEY: usize = PREFIX.len() + 65;
/// What stands before the point of such a key (`SubjectPublicKeyInfo`, RFC 5480).
pub const PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// Longest lifetime of such a certificate: no API server can check whether one was revoked. Curators enforce it too.
pub const LONGEST_LIFETIME: Span = Span::hours(7 * 24);
/// How long the curators may take to sign what was asked for.
const LAPSES: Duration = Duration::from_hours(1);
/// How long one that is over is shown.
const SHOWN: Duration = Duration::from_hours(24);

/// What somebody may do in Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All.
    Owner,
    /// Look, but at no secret.
    Viewer,
}

impl Access {
    /// Both.
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

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Access {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "access to Kubernetes",
            name: name.to_owned(),
            known: "owner, viewer",
        })
    }
}

/// A certificate that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Which.
    pub id: Uuid,
    /// The key, `SubjectPublicKeyInfo`, DER.
    pub public_key: Vec<u8>,
    /// Whose it is.
    pub holder: String,
    /// What that one may do.
    pub access: Access,
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
}

/// A certificate, and where it is good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// DER.
    pub certificate: Vec<u8>,
    /// Authorities by which API servers are known, DER.
    pub servers: Vec<Vec<u8>>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
    /// When it ends.
    pub expires_at: Timestamp,
}

/// As people see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserView {
    /// UUID.
    pub id: String,
    /// Whose.
    pub holder: String,
    /// `owner` or `viewer`.
    pub access: String,
    /// The key, `SubjectPublicKeyInfo`, DER, in hexadecimal digits.
    pub public_key: String,
    /// `asked`, `lapsed`, `refused`, `good` or `expired`.
    pub state: String,
    /// When it was asked for.
    pub asked_at: Timestamp,
    /// By whom.
    pub asked_by: String,
    /// When it ends.
    pub expires_at: Option<Timestamp>,
    /// Why its curators did not sign it.
    pub refused: Option<String>,
    /// DER, in hexadecimal digits.
    pub certificate: Option<String>,
    /// Authorities by which API servers are known, DER, in hexadecimal digits.
    pub servers: Vec<String>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

/// What becomes of one.
#[must_use]
pub fn state(user: &User, now: Timestamp) -> &'static str {
    match &user.issued {
        Some(issued) if issued.expires_at <= now => "expired",
        Some(_) => "good",
        None if user.refused.is_some() => "refused",
        None if after(user.asked_at, LAPSES) <= now => "lapsed",
        None => "asked",
    }
}

/// Those that are to be signed, oldest first.
#[must_use]
pub fn due(users: &[User], now: Timestamp) -> Vec<&User> {
    let mut due: Vec<&User> = users.iter().filter(|user| state(user, now) == "asked").collect();
    due.sort_by_key(|user| (user.asked_at, user.id));
    due
}

/// Those that are over for so long that they are shown no more.
#[must_use]
pub fn to_forget(users: &[User], now: Timestamp) -> Vec<Uuid> {
    let over = |user: &&User| {
        let ended =
            user.issued.as_ref().map_or_else(|| after(user.asked_at, LAPSES), |issued| issued.expires_at);
        ended <= now && between(ended, now) >= SHOWN
    };
    users.iter().filter(over).map(|user| user.id).collect()
}

/// As people see it.
#[must_use]
pub fn view(user: &User, now: Timestamp) -> UserView {
    let issued = user.issued.as_ref();
    UserView {
        id: user.id.to_string(),
        holder: user.holder.clone(),
        access: user.access.to_string(),
        public_key: hex::encode(&user.public_key),
        state: state(user, now).to_owned(),
        asked_at: user.asked_at,
        asked_by: user.asked_by.clone(),
        expires_at: issued.map(|issued| issued.expires_at),
        refused: user.refused.clone(),
        certificate: issued.map(|issued| hex::encode(&issued.certificate)),
        servers: issued.map(|issued| issued.servers.iter().map(hex::encode).collect()).unwrap_or_default(),
        api_servers: issued.map(|issued| issued.api_servers.clone()).unwrap_or_default(),
    }
}

/// Whether this is a public key that API servers accept; if not, a sentence.
pub fn check_key(public_key: &[u8]) -> Result<(), String> {
    // An uncompressed point; whether it is on the curve the curators look at.
    (public_key.len() == PUBLIC_KEY && public_key.starts_with(&PREFIX) && public_key[PREFIX.len()] == 4)
        .then_some(())
        .ok_or_else(|| "it is no public key of ECDSA P-256 (`SubjectPublicKeyInfo`, DER)".to_owned())
}

/// Checks the lifetime that a request has; the error is a sentence.
pub fn check_lifetime(lifetime: Span) -> Result<(), String> {
    if lifetime < SHORTEST_LIFETIME || lifetime > LONGEST_LIFETIME {
        return Err(format!(
            "a certificate for API servers is valid for {SHORTEST_LIFETIME} to {LONGEST_LIFETIME}, not for {lifetime}: no \
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

    fn user(issued: Option<i64>, refused: Option<&str>) -> User {
        User {
            id: Uuid::from_u128(1),
            public_key: Vec::new(),
            holder: "kim".to_owned(),
            access: Access::Viewer,
            lifetime: Span::hours(8),
            asked_at: at(0),
            asked_by: "kim".to_owned(),
            issued: issued.map(|end| Issued {
                certificate: vec![1],
                servers: vec![vec![2]],
                api_servers: vec!["10.0.0.1:6443".to_owned()],
                expires_at: at(end),
            }),
            refused: refused.map(str::to_owned),
        }
    }

    #[test]
    fn what_nobody_signed_lapses_and_what_is_over_is_forgotten_a_day_later() {
        const DAY: i64 = 24 * 3_600;
        for (user, now, expected, to_sign, forgotten) in [
            (user(None, None), 3_599, "asked", 1, 0),
            (user(None, None), 3_600, "lapsed", 0, 0),
            (user(None, None), 3_600 + DAY, "lapsed", 0, 1),
            (user(None, Some("no")), 1, "refused", 0, 0),
            (user(Some(100), None), 99, "good", 0, 0),
            (user(Some(100), None), 100, "expired", 0, 0),
            (user(Some(100), None), 100 + DAY, "expired", 0, 1),
        ] {
            let now = at(now);
            let users = [user];
            assert_eq!(state(&users[0], now), expected);
            assert_eq!(
                (due(&users, now).len(), to_forget(&users, now).len()),
                (to_sign, forgotten),
                "{expected}"
            );
            assert_eq!(view(&users[0], now).state, expected);
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
    fn only_a_key_of_p_256_is_taken() {
        let key = [&PREFIX[..], &[4], &[7; 64]].concat();
        assert_eq!(check_key(&key), Ok(()));
        for other in [&key[..90], &[&PREFIX[..], &[2], &[7; 64]].concat(), &[7; 91], &[][..]] {
            assert!(check_key(other).is_err(), "{other:?}");
        }
        assert_eq!("owner".parse::<Access>().unwrap(), Access::Owner);
        assert!("admin".parse::<Access>().is_err());
    }
}
