//! Judging a callback server's certificate on a machine whose clock may be wrong.
//!
//! By this machine's clock first, as every TLS client does. Only what that clock
//! finds expired or not yet valid is judged once more, by the time that a
//! shepherd said (`known_time.rs`): so a clock that is right is enough, and so is
//! having been told. Nothing else about a certificate is judged more mildly.
//!
//! After a reboot that time is a lower bound alone. A certificate that is not
//! valid *yet* by it is then taken: whoever the machine trusts has signed that it
//! is from a later time, so it is later. One that had expired by it is refused.
//! What is left to somebody with a stolen key is a certificate that expired while
//! the machine was off, until the first answer says what time it is.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{VerifierBuilderError, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::roleserver::known_time::{Known, KnownTime};

/// So many certificates of a chain may each begin later than the one before.
const LATER_BEGINNINGS: usize = 8;

/// Verifies chains to given certificates, at a time that is right.
#[derive(Debug)]
pub struct ServerVerifier {
    chains: Arc<WebPkiServerVerifier>,
    time: Arc<KnownTime>,
}

impl ServerVerifier {
    /// Verifies against `roots`, by this machine's clock or by `time`.
    pub fn new(
        roots: RootCertStore,
        provider: &Arc<CryptoProvider>,
        time: Arc<KnownTime>,
    ) -> Result<Self, VerifierBuilderError> {
        let chains =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build()?;
        Ok(Self { chains, time })
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let at = |time| {
            self.chains.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, time)
        };
        let by_own_clock = at(now);
        let Err(refusal) = &by_own_clock else { return by_own_clock };
        if !is_of_time(refusal) {
            return by_own_clock;
        }
        match self.time.now() {
            None => by_own_clock,
            Some(Known::Exactly(time)) => at(time),
            Some(Known::AtLeast(mut time)) => {
                for _ in 0..LATER_BEGINNINGS {
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

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

const fn is_of_time(refusal: &Error) -> bool {
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

    use super::*;
    use crate::roleserver::known_time::tests::Turned;

    const DAY: u64 = 86_400;
    /// The day on which the certificate begins, and the one on which it ends.
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

    /// Judges by a clock of this day, having been told that day, in this boot or before a reboot.
    fn judged(
        chain: &Chain,
        name: &str,
        own: u64,
        told: Option<u64>,
        rebooted: bool,
    ) -> Result<ServerCertVerified, Error> {
        let clock = Turned::new();
        let time = Arc::new(KnownTime::new(clock.clone(), None));
        if let Some(day) = told {
            time.hear(ms(day));
        }
        if rebooted {
            clock.turn("second", 0);
        }
        let mut roots = RootCertStore::empty();
        roots.add(chain.root.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = ServerVerifier::new(roots, &provider, time).unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let own = UnixTime::since_unix_epoch(Duration::from_secs(own * DAY));
        verifier.verify_server_cert(&chain.leaf, &[], &name, &[], own)
    }

    #[test]
    fn certificate_is_judged_by_the_own_clock_or_by_what_was_said() {
        let chain = chain();
        let inside = BEGINS + 1;
        for (own, told, rebooted, taken) in [
            (inside, None, false, true),
            (BEGINS - 2, None, false, false),
            (ENDS + 2, None, false, false),
            // A clock that is wrong, in the boot in which the time was said.
            (BEGINS - 2, Some(inside), false, true),
            (ENDS + 7, Some(inside), false, true),
            (0, Some(inside), false, true),
            (0, Some(BEGINS - 2), false, false),
            (0, Some(ENDS + 2), false, false),
            // What was said is wrong, and the own clock is right.
            (inside, Some(ENDS + 300), false, true),
            (inside, Some(1), false, true),
            // After a loss of power with a clock that begins anew.
            (0, Some(inside), true, true),
            (10_957, Some(BEGINS - 40), true, true),
            (0, Some(ENDS + 1), true, false),
            (ENDS + 9000, Some(ENDS + 1), true, false),
        ] {
            let outcome = judged(&chain, "shepherd.example", own, told, rebooted);
            assert_eq!(outcome.is_ok(), taken, "{own} {told:?} {rebooted}: {outcome:?}");
        }
    }

    #[test]
    fn wrong_clock_excuses_nothing_else() {
        let (ours, other) = (chain(), chain());
        let stranger = Chain { root: ours.root, leaf: other.leaf };
        for rebooted in [false, true] {
            for own in [0, BEGINS + 1] {
                let told = Some(BEGINS + 1);
                assert!(judged(&stranger, "shepherd.example", own, told, rebooted).is_err(), "a stranger");
                let elsewhere = judged(&chain(), "else.example", own, told, rebooted);
                assert!(elsewhere.is_err(), "another name");
            }
        }
    }
}
