//! X.509 certificates of a cluster: serial number, validity, renewal, key and signature.
//!
//! These are the properties that all certificates have, whichever key signed them. What the authority of a cluster
//! signs is in [`pki`](crate::pki), and whom a certificate identifies in [`peer_identity`](crate::peer_identity). The
//! curator's authorities for Kubernetes use these definitions, too.
//!
//! Time comes from the caller, and so do random numbers.
//!
//! # Renewal
//!
//! Five kinds of holders renew certificates, each by [`decide_renewal`]. They differ in when that is due, in what they
//! store, and in what they do after the end:
//!
//! * A node's certificate is renewed when a third of its validity is left, ten days, or a little earlier
//!   ([`renewal_spread`](crate::renewal_spread)). The key is stored first and the certificate last. After the end the node
//!   proves its key alone, or signs from its own etcd.
//! * A curator's certificate is renewed when a third of its validity is left, eight hours. It is shown first and stored
//!   last, because the member issues itself another one if it is lost or has ended.
//! * The certificate of an etcd member is renewed as early as that of its node. The key stays, and etcd reads the file for
//!   each connection. After the end the leader issues another one. If all members' certificates have ended, the shepherd
//!   does.
//! * A certificate of a component of Kubernetes is renewed when half of its validity is left. The key is stored first,
//!   then the certificate, and last a record of all of them. After the end nothing changes, because the node makes the
//!   request.
//! * A shepherd's certificate as an owner is renewed when a third of its validity is left, twenty minutes. It is in
//!   memory only, and each one is claimed with the key alone. If the curators reject that key, the shepherd tries its
//!   next or former one.
//!
//! A request that failed is repeated with the same key. A role server checks again after [`Renewal::pause`], because
//! its clock may be corrected meanwhile; a shepherd checks in each pass.

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

    /// The serial number of a certificate in DER; `None` if it cannot be parsed, or is none of ours.
    #[must_use]
    pub fn from_der(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        Self::from_certificate(certificate.raw_serial())
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

/// A text that is not a serial number of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a serial number of a certificate of this cluster: it has 32 lower-case hexadecimal digits"
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

    /// Whether the certificate is past its end at `now`.
    #[must_use]
    pub fn has_ended(&self, now: Timestamp) -> bool {
        now > self.not_after
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

/// Shortest pause between two checks of a certificate.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two checks of a certificate, because the clock may be corrected meanwhile.
pub const MAX_PAUSE: Duration = Duration::from_hours(1);

/// How much of its validity a certificate has left when its renewal is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewalPoint {
    /// A third of the validity.
    ThirdLeft,
    /// Half of the validity.
    HalfLeft,
}

impl RenewalPoint {
    fn moment(self, validity: Validity) -> Timestamp {
        let lifetime = between(validity.not_before, validity.not_after);
        let used = match self {
            Self::ThirdLeft => lifetime / 3 * 2,
            Self::HalfLeft => lifetime / 2,
        };
        after(validity.not_before, used)
    }
}

/// What the holder of a certificate must do about its expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Nothing before this moment.
    NotBefore(Timestamp),
    /// Request a new one. The present certificate is still accepted.
    Due,
    /// Request a new one without the present certificate, which is rejected.
    Expired,
}

impl Renewal {
    /// Whether another certificate must be requested now.
    #[must_use]
    pub const fn is_due(self) -> bool {
        matches!(self, Self::Due | Self::Expired)
    }

    /// Time from `now` until the next check, between a second and [`MAX_PAUSE`].
    #[must_use]
    pub fn pause(self, now: Timestamp) -> Duration {
        match self {
            Self::NotBefore(due) => between(now, due).clamp(MIN_PAUSE, MAX_PAUSE),
            Self::Due | Self::Expired => MIN_PAUSE,
        }
    }
}

/// Decides about the renewal of a certificate that is due at this point of its validity.
#[must_use]
pub fn decide_renewal(validity: Validity, point: RenewalPoint, now: Timestamp) -> Renewal {
    decide_early_renewal(validity, point, Duration::ZERO, now)
}

/// The same, if the certificate is due by `advance` earlier.
#[must_use]
pub fn decide_early_renewal(
    validity: Validity,
    point: RenewalPoint,
    advance: Duration,
    now: Timestamp,
) -> Renewal {
    let due = before(point.moment(validity), advance);
    if validity.has_ended(now) {
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
    fn renewal_is_due_when_a_third_or_half_of_the_time_is_left() {
        let validity = Validity { not_before: at(0), not_after: at(900) };
        for (point, due) in [(RenewalPoint::ThirdLeft, 600), (RenewalPoint::HalfLeft, 450)] {
            for (second, expected) in [
                // The clock was set back.
                (-5, Renewal::NotBefore(at(due))),
                (0, Renewal::NotBefore(at(due))),
                (due - 1, Renewal::NotBefore(at(due))),
                (due, Renewal::Due),
                (900, Renewal::Due),
                (901, Renewal::Expired),
            ] {
                let renewal = decide_renewal(validity, point, at(second));
                assert_eq!(renewal, expected, "{point:?} {second}");
                assert_eq!(renewal.is_due(), second >= due, "{point:?} {second}");
                assert_eq!(validity.has_ended(at(second)), second > 900, "{second}");
            }
        }
    }

    #[test]
    fn early_renewal_is_due_by_its_advance_earlier() {
        let validity = Validity { not_before: at(0), not_after: at(900) };
        for (advance, second, expected) in [
            (0, 599, Renewal::NotBefore(at(600))),
            (50, 549, Renewal::NotBefore(at(550))),
            (50, 550, Renewal::Due),
            (50, 900, Renewal::Due),
            (50, 901, Renewal::Expired),
        ] {
            let advance = Duration::from_secs(advance);
            let renewal = decide_early_renewal(validity, RenewalPoint::ThirdLeft, advance, at(second));
            assert_eq!(renewal, expected, "{advance:?} {second}");
        }
    }

    #[test]
    fn next_check_is_after_a_second_to_an_hour() {
        for (renewal, seconds) in [
            (Renewal::NotBefore(at(0)), 1),
            (Renewal::NotBefore(at(60)), 60),
            (Renewal::NotBefore(at(3_600)), 3_600),
            (Renewal::NotBefore(at(3_601)), 3_600),
            (Renewal::Due, 1),
            (Renewal::Expired, 1),
        ] {
            assert_eq!(renewal.pause(at(0)), Duration::from_secs(seconds), "{renewal:?}");
        }
        assert_eq!(Renewal::NotBefore(at(0)).pause(at(5)), MIN_PAUSE, "the clock went on");
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
