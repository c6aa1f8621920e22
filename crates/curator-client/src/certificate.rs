//! X.509 certificates of a cluster: serial number, validity, renewal, key and signature.
//!
//! These are the properties that all certificates have, whichever key signed them. What the authority of a cluster
//! signs is in [`pki`](crate::pki), and whom a certificate identifies in [`peer_identity`](crate::peer_identity). The
//! curator's authorities for Kubernetes use these definitions, too.
//!
//! Time comes from the caller, and so do random numbers.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use model::time::{Timestamp, after, before, between};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::node_id::PublicKey;

/// How far before the issuer's clock a certificate begins, for peers whose clocks are slow.
pub const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// A certificate's serial number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Serial([u8; 16]);

impl Serial {
    /// Takes 16 random bytes. It fixes two bits, so that the number has 16 bytes and is positive.
    #[must_use]
    pub const fn new(mut random: [u8; 16]) -> Self {
        random[0] = random[0] & 0x7f | 0x40;
        Self(random)
    }

    /// The number as it is in a certificate.
    pub(super) const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Reads the serial number of a certificate; `None` if it is none of ours.
    pub(super) fn from_certificate(raw: &[u8]) -> Option<Self> {
        raw.try_into().ok().map(Self).filter(|serial| *serial == Self::new(serial.0))
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Serial({self})")
    }
}

/// A text that is no serial number of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no serial number of a certificate of this cluster: it has 32 lower-case hexadecimal digits"
)]
pub struct InvalidSerial(String);

impl FromStr for Serial {
    type Err = InvalidSerial;

    fn from_str(text: &str) -> Result<Self, InvalidSerial> {
        let refused = || InvalidSerial(text.chars().take(100).collect());
        let mut raw = [0; 16];
        hex::decode_to_slice(text, &mut raw).map_err(|_| refused())?;
        Self::from_certificate(&raw).filter(|serial| serial.to_string() == text).ok_or_else(refused)
    }
}

/// The validity of a certificate, both ends included, in whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first moment at which it is valid.
    pub not_before: Timestamp,
    /// The last moment at which it is valid.
    pub not_after: Timestamp,
}

impl Validity {
    /// Begins [`CLOCK_SKEW`] before `now` and ends `lifetime` after it.
    #[must_use]
    pub fn starting(now: Timestamp, lifetime: Duration) -> Self {
        Self { not_before: before(now, CLOCK_SKEW), not_after: after(now, lifetime) }
    }

    /// Whether the certificate is valid at `now`.
    #[must_use]
    pub fn contains(&self, now: Timestamp) -> bool {
        self.not_before <= now && now <= self.not_after
    }

    /// The validity of a certificate in DER; `None` if it cannot be parsed.
    #[must_use]
    pub fn from_der(certificate: &[u8]) -> Option<Self> {
        X509Certificate::from_der(certificate).ok().and_then(|(_, certificate)| Self::from_x509(&certificate))
    }

    /// The validity of a parsed certificate; `None` if one of its ends is out of range.
    #[must_use]
    pub fn from_x509(certificate: &X509Certificate<'_>) -> Option<Self> {
        let validity = certificate.validity();
        let moment = |seconds| Timestamp::from_timestamp(seconds, 0);
        let (from, until) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        Some(Self { not_before: moment(from)?, not_after: moment(until)? })
    }
}

/// What the holder of a certificate must do about its expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Nothing before this moment.
    NotBefore(Timestamp),
    /// Request a new one, with the present certificate.
    Due,
    /// Join again with the key alone; the certificate is rejected.
    Expired,
}

/// Decides about a renewal: it is due when a third of the lifetime is left.
#[must_use]
pub fn decide_renewal(validity: Validity, now: Timestamp) -> Renewal {
    let due = after(validity.not_before, between(validity.not_before, validity.not_after) / 3 * 2);
    if now > validity.not_after {
        Renewal::Expired
    } else if now >= due {
        Renewal::Due
    } else {
        Renewal::NotBefore(due)
    }
}

/// A certificate that was just issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedCertificate {
    /// The certificate in DER.
    pub certificate: Vec<u8>,
    /// Serial number of the certificate.
    pub serial: Serial,
    /// From when until when it is valid.
    pub validity: Validity,
}

/// The key in a certificate, if it is an Ed25519 key.
pub(super) fn ed25519_key(certificate: &X509Certificate<'_>) -> Option<PublicKey> {
    transport::certificate::ed25519_key(certificate).ok().map(PublicKey)
}

/// Whether the key signed the certificate.
pub(super) fn is_signed_by(certificate: &X509Certificate<'_>, key: &PublicKey) -> bool {
    transport::certificate::is_signed_by(certificate, &key.0)
}

/// The one common name in a distinguished name.
#[must_use]
pub fn common_name<'a>(name: &'a x509_parser::x509::X509Name<'_>) -> Option<&'a str> {
    let mut names = name.iter_common_name();
    match (names.next(), names.next()) {
        (Some(name), None) => name.as_str().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, serial};

    #[test]
    fn renewal_is_due_when_a_third_of_the_time_is_left() {
        let validity = Validity { not_before: at(0), not_after: at(900) };
        for (second, expected) in [
            (-5, Renewal::NotBefore(at(600))),
            (0, Renewal::NotBefore(at(600))),
            (599, Renewal::NotBefore(at(600))),
            (600, Renewal::Due),
            (900, Renewal::Due),
            (901, Renewal::Expired),
        ] {
            assert_eq!(decide_renewal(validity, at(second)), expected, "{second}");
        }
    }

    #[test]
    fn serial_number_round_trips_as_16_positive_bytes() {
        for random in [[0; 16], [0xff; 16], [0x80; 16]] {
            let serial = Serial::new(random);
            assert!((0x40..0x80).contains(&serial.0[0]));
            assert_eq!(serial.to_string().parse::<Serial>().unwrap(), serial);
        }
        let upper = serial(0x4a).to_string().to_uppercase();
        for wrong in ["", "00112233445566778899aabbccddeeff", &upper, "4a"] {
            assert!(wrong.parse::<Serial>().is_err(), "{wrong}");
        }
    }
}
