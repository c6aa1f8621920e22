//! Client certificates of people for Kubernetes API servers.
//!
//! [`certificate_request`](crate::cluster::certificate_request) decides about a request and about its certificate. API
//! servers do not check revocation, so such a certificate cannot be revoked. It is valid for a limited time, and all
//! certificates end when the authority of clients is rotated.

use std::fmt;
use std::str::FromStr;

use crate::cluster::certificate_request::{CertificateRequest, MIN_LIFETIME, SignedCertificate};
use crate::process::UnknownName;
use crate::time::Span;

/// Length of a requested public key (ECDSA P-256): the prefix before the point, and the point.
pub const PUBLIC_KEY_BYTES: usize = SPKI_PREFIX.len() + 65;
/// Encoding before the point of such a key (`SubjectPublicKeyInfo`, RFC 5480).
pub const SPKI_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// Longest lifetime of such a certificate: no API server can check whether one was revoked. Curators enforce it too.
pub const LONGEST_LIFETIME: Span = Span::hours(7 * 24);

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

/// A request for a certificate for API servers, and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesUser {
    /// The request. Its key is a `SubjectPublicKeyInfo`, DER. It is never revoked.
    pub request: CertificateRequest,
    /// What the holder may do.
    pub access: KubernetesAccess,
    /// Authorities that sign certificates of API servers, DER; empty until signed.
    pub server_authorities: Vec<Vec<u8>>,
    /// `host:port` of API servers; empty until signed.
    pub api_servers: Vec<String>,
}

impl AsRef<CertificateRequest> for KubernetesUser {
    fn as_ref(&self) -> &CertificateRequest {
        &self.request
    }
}

/// A signed certificate, and the API servers that accept it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedUserCertificate {
    /// The certificate, and when it expires.
    pub signed: SignedCertificate,
    /// Authorities that sign certificates of API servers, DER.
    pub server_authorities: Vec<Vec<u8>>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

/// Checks that API servers accept this public key; the error is a sentence.
pub fn check_public_key(public_key: &[u8]) -> Result<(), String> {
    // An uncompressed point. The curators check that it is on the curve.
    (public_key.len() == PUBLIC_KEY_BYTES
        && public_key.starts_with(&SPKI_PREFIX)
        && public_key[SPKI_PREFIX.len()] == 4)
        .then_some(())
        .ok_or_else(|| "it is not a public key of ECDSA P-256 (`SubjectPublicKeyInfo`, DER)".to_owned())
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
