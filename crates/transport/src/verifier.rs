//! Certificate verifiers: a user's check of the certificate, with the signature check that none may omit.
//!
//! rustls calls a verifier twice in a handshake: with the certificates that the peer shows, and with the signature
//! that proves the key of the first one. [`ServerVerifier`] is a client's verifier and [`ClientVerifier`] a server's.
//! Both pass the certificates to a check, which is all that a user writes, and verify the signature themselves.
//!
//! Where Ed25519 is required, the certificate is one of ours and small. A larger one is rejected before it is parsed.

use std::fmt;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use crate::certificate::check_size;
use crate::signature::{AcceptedSignatures, SignatureVerifier};

/// A client's decision about the certificates of a server.
pub trait ServerCertificateCheck: fmt::Debug + Send + Sync {
    /// Decides whether `end_entity` is that of the intended server. Nothing has been parsed yet, and the server has not
    /// proven its key yet. `now` is the time of this host.
    fn check_server(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<(), Error>;
}

/// A server's decision about the certificates of a client.
pub trait ClientCertificateCheck: fmt::Debug + Send + Sync {
    /// Decides whether `end_entity` may be that of a client. Nothing has been parsed yet, and the client has not proven
    /// its key yet. There is no time: the clock of a host decides about no client.
    fn check_client(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), Error>;
}

/// Accepts every certificate of a server that holds its private key. For probes of a program, which compare no identity.
#[derive(Clone, Copy, Debug)]
pub struct AnyServer;

impl ServerCertificateCheck for AnyServer {
    fn check_server(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<(), Error> {
        Ok(())
    }
}

/// Verifies servers: their certificates by a check, and that they hold the key.
#[derive(Debug)]
pub struct ServerVerifier<C> {
    check: C,
    signatures: SignatureVerifier,
}

impl<C: ServerCertificateCheck> ServerVerifier<C> {
    /// Creates a verifier with this check.
    #[must_use]
    pub fn new(check: C, accepted: AcceptedSignatures) -> Self {
        Self { check, signatures: SignatureVerifier::new(accepted) }
    }
}

impl<C: ServerCertificateCheck> ServerCertVerifier for ServerVerifier<C> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.signatures.accepted() == AcceptedSignatures::Ed25519 {
            check_size(end_entity)?;
        }
        self.check.check_server(end_entity, intermediates, server_name, ocsp_response, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signatures.verify_tls12(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signatures.verify_tls13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signatures.schemes()
    }
}

/// Whether a client must have a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// A handshake without a certificate fails.
    Required,
    /// A client may have no certificate. One that shows a certificate must pass the check.
    Optional,
}

/// Verifies clients: their certificates by a check, and that they hold the key, in TLS 1.3 with Ed25519.
#[derive(Debug)]
pub struct ClientVerifier<C> {
    check: C,
    auth: ClientAuth,
    signatures: SignatureVerifier,
}

impl<C: ClientCertificateCheck> ClientVerifier<C> {
    /// Creates a verifier with this check.
    #[must_use]
    pub fn new(check: C, auth: ClientAuth) -> Self {
        Self { check, auth, signatures: SignatureVerifier::new(AcceptedSignatures::Ed25519) }
    }
}

impl<C: ClientCertificateCheck> ClientCertVerifier for ClientVerifier<C> {
    fn client_auth_mandatory(&self) -> bool {
        self.auth == ClientAuth::Required
    }

    /// None: a client has one certificate, and does not choose it by an authority.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_size(end_entity)?;
        self.check.check_client(end_entity, intermediates)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signatures.verify_tls12(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signatures.verify_tls13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signatures.schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rcgen::{PKCS_ECDSA_P256_SHA256, PKCS_ED25519};
    use rustls::version::{TLS12, TLS13};
    use rustls::{CertificateError, PeerIncompatible, SupportedProtocolVersion};

    use super::*;
    use crate::certificate::MAX_CERTIFICATE_BYTES;
    use crate::testing::{AnyCertificate, Party, client, run_handshake, server};

    const BAD_SIGNATURE: Error = Error::InvalidCertificate(CertificateError::BadSignature);
    const TOO_OLD: Error = Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic);

    /// The result of the client's check of this server.
    async fn judge_server(
        accepted: AcceptedSignatures,
        version: &'static SupportedProtocolVersion,
        shown: &Party,
    ) -> Result<(), Error> {
        let verifier = Arc::new(ServerVerifier::new(AnyCertificate, accepted));
        run_handshake(client(verifier, None), server(None, shown, version)).await.client
    }

    /// The result of the server's check of this client.
    async fn judge_client(
        auth: ClientAuth,
        version: &'static SupportedProtocolVersion,
        shown: Option<&Party>,
    ) -> Result<(), Error> {
        let verifier = Arc::new(ClientVerifier::new(AnyCertificate, auth));
        let own = Party::generate(&PKCS_ED25519);
        let any = Arc::new(ServerVerifier::new(AnyCertificate, AcceptedSignatures::Tls12));
        run_handshake(client(any, shown), server(Some(verifier), &own, version)).await.server
    }

    #[tokio::test]
    async fn copied_certificate_proves_nothing_without_its_key() {
        let party = Party::generate(&PKCS_ED25519);
        let impostor = party.with_key_of(&Party::generate(&PKCS_ED25519));
        for (accepted, version) in [
            (AcceptedSignatures::Ed25519, &TLS13),
            (AcceptedSignatures::Tls13, &TLS13),
            (AcceptedSignatures::Tls12, &TLS13),
            (AcceptedSignatures::Tls12, &TLS12),
        ] {
            assert_eq!(judge_server(accepted, version, &party).await, Ok(()), "{accepted:?} {version:?}");
            let outcome = judge_server(accepted, version, &impostor).await;
            assert_eq!(outcome, Err(BAD_SIGNATURE), "{accepted:?} {version:?}");
        }
        for auth in [ClientAuth::Required, ClientAuth::Optional] {
            assert_eq!(judge_client(auth, &TLS13, Some(&party)).await, Ok(()), "{auth:?}");
            assert_eq!(judge_client(auth, &TLS13, Some(&impostor)).await, Err(BAD_SIGNATURE), "{auth:?}");
        }
    }

    #[tokio::test]
    async fn other_schemes_than_ed25519_are_accepted_of_other_servers_only() {
        let party = Party::generate(&PKCS_ECDSA_P256_SHA256);
        let accepted = |accepted| judge_server(accepted, &TLS13, &party);
        assert_eq!(accepted(AcceptedSignatures::Ed25519).await, Err(BAD_SIGNATURE));
        assert_eq!(accepted(AcceptedSignatures::Tls13).await, Ok(()));
        assert_eq!(accepted(AcceptedSignatures::Tls12).await, Ok(()));
        // An Ed25519 certificate, with a signature by an ECDSA key.
        let mixed = Party::generate(&PKCS_ED25519).with_key_of(&party);
        for shown in [&party, &mixed] {
            assert_eq!(judge_client(ClientAuth::Required, &TLS13, Some(shown)).await, Err(BAD_SIGNATURE));
        }
    }

    #[tokio::test]
    async fn tls_1_2_is_rejected_even_where_a_configuration_allows_it() {
        let party = Party::generate(&PKCS_ED25519);
        for accepted in [AcceptedSignatures::Ed25519, AcceptedSignatures::Tls13] {
            assert_eq!(judge_server(accepted, &TLS12, &party).await, Err(TOO_OLD), "{accepted:?}");
        }
        assert_eq!(judge_client(ClientAuth::Required, &TLS12, Some(&party)).await, Err(TOO_OLD));
    }

    #[tokio::test]
    async fn client_without_a_certificate_passes_only_where_it_is_optional() {
        let required = judge_client(ClientAuth::Required, &TLS13, None).await;
        assert_eq!(required, Err(Error::NoCertificatesPresented));
        assert_eq!(judge_client(ClientAuth::Optional, &TLS13, None).await, Ok(()));
    }

    #[test]
    fn only_a_certificate_that_is_not_ours_may_be_large() {
        let name = ServerName::try_from("server.example").unwrap();
        let largest = CertificateDer::from(vec![0; MAX_CERTIFICATE_BYTES]);
        let larger = CertificateDer::from(vec![0; MAX_CERTIFICATE_BYTES + 1]);
        let too_large = Error::InvalidCertificate(CertificateError::BadEncoding);
        for (accepted, expected) in [
            (AcceptedSignatures::Ed25519, Err(too_large.clone())),
            (AcceptedSignatures::Tls13, Ok(())),
            (AcceptedSignatures::Tls12, Ok(())),
        ] {
            let verifier = ServerVerifier::new(AnyCertificate, accepted);
            let verify = |certificate| {
                verifier.verify_server_cert(certificate, &[], &name, &[], UnixTime::now()).map(drop)
            };
            assert_eq!((verify(&largest), verify(&larger)), (Ok(()), expected), "{accepted:?}");
        }
        let verifier = ClientVerifier::new(AnyCertificate, ClientAuth::Optional);
        let verify = |certificate| verifier.verify_client_cert(certificate, &[], UnixTime::now()).map(drop);
        assert_eq!((verify(&largest), verify(&larger)), (Ok(()), Err(too_large)));
    }
}
