//! TLS certificate verification that falls back to the server's time when the machine's clock is wrong.
//!
//! A certificate is verified by this machine's clock first, as in every TLS client. Only a certificate that is expired
//! or not yet valid by that clock is verified once more, by the time that a shepherd reported (`trusted_time.rs`). So
//! either of the two suffices: a clock that is right, or a reported time. Nothing else about a certificate is checked
//! less strictly.
//!
//! After a reboot that time is only a lower bound. A certificate that is not valid *yet* by it is then accepted: an
//! authority that the machine trusts has signed that it is from a later time, so it is later. A certificate that had
//! expired by it is rejected. An attacker with a stolen key can therefore only use a certificate that expired while the
//! machine was off, until the first response reports the time.

use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier as _;
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, Error, RootCertStore};
use transport::signature::AcceptedSignatures;
use transport::verifier::{ServerCertificateCheck, ServerVerifier};

use crate::trusted_time::{TimeEstimate, TrustedTime};

/// Certificates of a chain that may each begin later than the one before.
const MAX_NOT_BEFORE_STEPS: usize = 8;

/// A verifier of callback servers, by chains to `roots` and by this machine's clock or by `time`.
pub fn callback_server_verifier(
    roots: RootCertStore,
    time: Arc<TrustedTime>,
) -> Result<ServerVerifier<CallbackServer>, VerifierBuilderError> {
    let provider = Arc::new(ring::default_provider());
    let webpki = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
    // An operator may have chosen the certificate, so its key may be of any kind.
    Ok(ServerVerifier::new(CallbackServer { webpki, time }, AcceptedSignatures::Tls13))
}

/// Accepts chains to given certificates, by the machine's clock or by a reported time.
#[derive(Debug)]
pub struct CallbackServer {
    webpki: Arc<WebPkiServerVerifier>,
    time: Arc<TrustedTime>,
}

impl ServerCertificateCheck for CallbackServer {
    fn check_server(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<(), Error> {
        let at = |time| {
            self.webpki
                .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, time)
                .map(drop)
        };
        let by_own_clock = at(now);
        let Err(refusal) = &by_own_clock else { return by_own_clock };
        if !is_time_error(refusal) {
            return by_own_clock;
        }
        match self.time.now() {
            None => by_own_clock,
            Some(TimeEstimate::Exact(time)) => at(time),
            Some(TimeEstimate::AtLeast(mut time)) => {
                for _ in 0..MAX_NOT_BEFORE_STEPS {
                    match at(time) {
                        Err(Error::InvalidCertificate(CertificateError::NotValidYetContext {
                            not_before,
                            ..
                        })) if not_before > time => time = not_before,
                        judged => return judged,
                    }
                }
                at(time)
            }
        }
    }
}

const fn is_time_error(refusal: &Error) -> bool {
    matches!(
        refusal,
        Error::InvalidCertificate(
            CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. }
        )
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use rustls::client::danger::ServerCertVerified;

    use super::*;
    use crate::trusted_time::tests::ManualClock;

    const DAY: u64 = 86_400;
    /// The day on which the certificate becomes valid, and the one on which it expires.
    const BEGINS: u64 = 20_000;
    const ENDS: u64 = 20_015;

    struct Chain {
        root: CertificateDer<'static>,
        leaf: CertificateDer<'static>,
    }

    fn chain() -> Chain {
        let root_key = KeyPair::generate().unwrap();
        let mut root = CertificateParams::default();
        root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root_certificate = root.self_signed(&root_key).unwrap();
        let mut leaf = CertificateParams::new(["shepherd.example".to_owned()]).unwrap();
        let day = |day: u64| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(day * DAY);
        (leaf.not_before, leaf.not_after) = (day(BEGINS), day(ENDS));
        let issuer = Issuer::new(root, &root_key);
        let leaf = leaf.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap();
        Chain { root: root_certificate.der().clone(), leaf: leaf.der().clone() }
    }

    fn ms(day: u64) -> i64 {
        i64::try_from(day * DAY * 1000).unwrap()
    }

    /// Verifies by a clock at day `own`, with a time that was reported in this boot or before a reboot.
    fn verify_at(
        chain: &Chain,
        name: &str,
        own: u64,
        number: Option<u64>,
        rebooted: bool,
    ) -> Result<ServerCertVerified, Error> {
        let clock = ManualClock::new();
        let time = Arc::new(TrustedTime::new(clock.clone(), None));
        if let Some(day) = number {
            time.observe(ms(day));
        }
        if rebooted {
            clock.set_time("second", 0);
        }
        let mut roots = RootCertStore::empty();
        roots.add(chain.root.clone()).unwrap();
        let verifier = callback_server_verifier(roots, time).unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let own = UnixTime::since_unix_epoch(Duration::from_secs(own * DAY));
        verifier.verify_server_cert(&chain.leaf, &[], &name, &[], own)
    }

    #[test]
    fn certificate_is_checked_by_own_clock_or_server_time() {
        let chain = chain();
        let inside = BEGINS + 1;
        for (own, number, rebooted, taken) in [
            (inside, None, false, true),
            (BEGINS - 2, None, false, false),
            (ENDS + 2, None, false, false),
            // The clock is wrong, and the time was reported in this boot.
            (BEGINS - 2, Some(inside), false, true),
            (ENDS + 7, Some(inside), false, true),
            (0, Some(inside), false, true),
            (0, Some(BEGINS - 2), false, false),
            (0, Some(ENDS + 2), false, false),
            // The reported time is wrong, and the machine's clock is right.
            (inside, Some(ENDS + 300), false, true),
            (inside, Some(1), false, true),
            // After a loss of power, with a clock that was reset.
            (0, Some(inside), true, true),
            (10_957, Some(BEGINS - 40), true, true),
            (0, Some(ENDS + 1), true, false),
            (ENDS + 9000, Some(ENDS + 1), true, false),
        ] {
            let outcome = verify_at(&chain, "shepherd.example", own, number, rebooted);
            assert_eq!(outcome.is_ok(), taken, "{own} {number:?} {rebooted}: {outcome:?}");
        }
    }

    #[test]
    fn wrong_clock_excuses_nothing_else() {
        let (ours, other) = (chain(), chain());
        let stranger = Chain { root: ours.root, leaf: other.leaf };
        for rebooted in [false, true] {
            for own in [0, BEGINS + 1] {
                let number = Some(BEGINS + 1);
                assert!(
                    verify_at(&stranger, "shepherd.example", own, number, rebooted).is_err(),
                    "a stranger"
                );
                let elsewhere = verify_at(&chain(), "else.example", own, number, rebooted);
                assert!(elsewhere.is_err(), "another name");
            }
        }
    }
}
