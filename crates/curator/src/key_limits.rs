//! How much a key without a certificate gets: its calls, and its certificates.
//!
//! Anyone can make a key, and the gate of a curator bounds connections by their source alone. So the leader also bounds
//! what one key gets by the calls of the service Registration:
//!
//! * Calls, in the memory of the leader. A node calls once a second while it waits for approval.
//! * Certificates of a node, by their records in etcd: the next leader counts the same ones. Each certificate leaves a
//!   record there. A node needs one when it joins, and one after it was off for longer than a certificate lives.
//!
//! A certificate that a node requests with its certificate has another limit
//! ([`check_certificate_count`](crate::credential::check_certificate_count)). That one counts all certificates that have not
//! ended. This one is over after a day, because it is the way back for a node that has none.

use std::collections::BTreeMap;
use std::time::Duration;

use curator_client::certificate::CLOCK_SKEW;
use curator_client::node_id::{NodeId, PublicKey};
use model::time::{Timestamp, before};

use crate::credential::{CertificateKind, Credential, CredentialHolder};

/// Most calls of one key at once.
const BURST: u32 = 40;
/// The time after which a key may make one more call.
const INTERVAL: Duration = Duration::from_millis(500);
/// Most keys that are counted. A further one is not limited: to fill all places, its holder needs so many handshakes within
/// a moment that the limits of the gate come first.
const MAX_KEYS: usize = 4096;
/// Most certificates of a node within [`CERTIFICATE_WINDOW`] for which a further one is issued to its key.
const MAX_CERTIFICATES: usize = 32;
/// How long an issued certificate counts.
const CERTIFICATE_WINDOW: Duration = Duration::from_hours(24);

/// A key made too many calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this key has called too often: it may make {burst} calls at once and two per second. Try again in {} s",
    .retry_after.as_secs() + 1,
    burst = BURST
)]
pub(crate) struct TooManyCalls {
    /// The time after which the next call is admitted.
    pub(crate) retry_after: Duration,
}

/// A node got so many certificates within a day that its key gets no further one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no certificate was issued: {0} got {max} within a day, and needs one. If somebody else has its key, revoke its \
     credentials. If it loses what it gets, mend its disk. It gets the next one when the first of them is a day old",
    max = MAX_CERTIFICATES
)]
pub(crate) struct TooManyWithinADay(pub(crate) NodeId);

/// The calls of each key.
#[derive(Debug, Default)]
pub(crate) struct KeyLimits {
    /// Until when the calls of a key count, if it makes one per [`INTERVAL`].
    counted_until: BTreeMap<PublicKey, Duration>,
}

impl KeyLimits {
    /// Admits a call of this key, or rejects it. `now` is the time of a monotonic clock.
    pub(crate) fn admit(&mut self, key: PublicKey, now: Duration) -> Result<(), TooManyCalls> {
        let until = self.counted_until.get(&key).copied().unwrap_or_default().max(now);
        let next = until.saturating_add(INTERVAL);
        let excess = next.saturating_sub(now).saturating_sub(INTERVAL * BURST);
        if !excess.is_zero() {
            return Err(TooManyCalls { retry_after: excess });
        }
        if self.counted_until.len() >= MAX_KEYS {
            self.counted_until.retain(|_, until| *until > now);
        }
        if self.counted_until.len() < MAX_KEYS || self.counted_until.contains_key(&key) {
            self.counted_until.insert(key, next);
        }
        Ok(())
    }
}

/// Checks that the key of this node may get another certificate of the node. `credentials` are the certificates that were
/// issued.
pub(crate) fn check_certificates_of_a_day<'c>(
    credentials: impl IntoIterator<Item = &'c Credential>,
    node: NodeId,
    now: Timestamp,
) -> Result<(), TooManyWithinADay> {
    let holder = CredentialHolder::Node(node);
    // A certificate is valid from a little before it was issued.
    let begin = before(now, CERTIFICATE_WINDOW + CLOCK_SKEW);
    let counts = |credential: &&Credential| {
        credential.kind == CertificateKind::Node
            && credential.holder == holder
            && credential.validity.not_before > begin
    };
    if credentials.into_iter().filter(counts).count() < MAX_CERTIFICATES {
        Ok(())
    } else {
        Err(TooManyWithinADay(node))
    }
}

#[cfg(test)]
mod tests {
    use curator_client::certificate::Validity;
    use curator_client::pki::NODE_LIFETIME;
    use curator_client::testing::{at, key, node_id, serial};

    use super::*;

    const DAY: i64 = 24 * 60 * 60;

    #[test]
    fn key_makes_a_bounded_number_of_calls_at_once_and_then_two_per_second() {
        let (mut limits, begin) = (KeyLimits::default(), Duration::from_secs(1000));
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let admitted = |limits: &mut KeyLimits, number, now| {
            (0..100).filter(|_| limits.admit(key(number), now).is_ok()).count()
        };
        for (what, number, milliseconds, expected) in [
            ("at once", 1, 0, 40),
            ("too early", 1, 499, 0),
            ("one more", 1, 500, 1),
            ("another key", 2, 500, 40),
            ("two per second", 1, 10_500, 20),
            ("after a pause, as many as at first", 1, 100_000, 40),
        ] {
            assert_eq!(admitted(&mut limits, number, at(milliseconds)), expected, "{what}");
        }
        let error = limits.admit(key(1), at(100_000)).unwrap_err();
        assert_eq!(error.retry_after, INTERVAL);
        assert_eq!(
            error.to_string(),
            "this key has called too often: it may make 40 calls at once and two per second. Try again in 1 s"
        );
        // A node that waits to be approved calls once a second for as long as it takes.
        assert!((0..1000).all(|second| limits.admit(key(3), at(1000 * second)).is_ok()));
    }

    #[test]
    fn keys_that_are_counted_are_bounded_and_nobody_is_locked_out() {
        let key = |number: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&number.to_be_bytes());
            PublicKey(bytes)
        };
        let (mut limits, now) = (KeyLimits::default(), Duration::from_secs(1000));
        for number in 0..MAX_KEYS + 100 {
            assert!(limits.admit(key(number), now).is_ok());
        }
        assert_eq!(limits.counted_until.len(), MAX_KEYS);
        assert_eq!((1..100).filter(|_| limits.admit(key(0), now).is_ok()).count(), 39, "it is counted");
        // Those that have been silent make room.
        assert!(limits.admit(key(MAX_KEYS), now + INTERVAL).is_ok());
        assert!(limits.counted_until.len() <= 2, "{}", limits.counted_until.len());
        assert!(limits.counted_until.contains_key(&key(MAX_KEYS)));
    }

    #[test]
    fn key_gets_a_bounded_number_of_certificates_within_a_day() {
        let issued = |holder: CredentialHolder, kind, second, count| {
            let validity = Validity::starting(at(second), NODE_LIFETIME);
            vec![Credential { serial: serial(3), holder, key: key(1), validity, kind }; count]
        };
        let own =
            |second, count| issued(CredentialHolder::Node(node_id(1)), CertificateKind::Node, second, count);
        let curator = issued(CredentialHolder::Node(node_id(1)), CertificateKind::Curator, 0, 99);
        let others = issued(CredentialHolder::Node(node_id(2)), CertificateKind::Node, 0, 99);
        let owner = issued(CredentialHolder::Owner("kim".to_owned()), CertificateKind::Owner, 0, 99);
        let refused = Err(TooManyWithinADay(node_id(1)));
        for (what, credentials, second, expected) in [
            ("none", Vec::new(), 0, Ok(())),
            ("one fewer", own(0, 31), 0, Ok(())),
            ("as many", own(0, 32), 0, refused),
            ("as many within a day", [own(0, 16), own(DAY - 1, 16)].concat(), DAY - 1, refused),
            ("half of them a day ago", [own(0, 16), own(DAY - 1, 16)].concat(), DAY, Ok(())),
            ("all of them a day ago", own(0, 99), DAY, Ok(())),
            ("of a clock that was ahead", own(DAY, 32), 0, refused),
            ("of its curator", curator, 0, Ok(())),
            ("of another node", others, 0, Ok(())),
            ("of an owner", owner, 0, Ok(())),
        ] {
            assert_eq!(check_certificates_of_a_day(&credentials, node_id(1), at(second)), expected, "{what}");
        }
        let text = TooManyWithinADay(node_id(1)).to_string();
        assert!(text.contains(&node_id(1).to_string()) && text.contains("got 32 within a day"), "{text}");
    }
}
