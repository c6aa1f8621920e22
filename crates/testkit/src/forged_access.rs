//! Access to the API servers of Kubernetes, forged with the keys on the disk of a consensus member.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator::kubernetes::keys::{KubernetesKeys, keys_record_key};
use curator::kubernetes::signer::{CertificateSubject, P256PublicKey, Signer, generate_key};
use curator::kubernetes::trust_bundle::TrustBundle;
use curator_client::certificate::{Serial, Validity};
use etcd::client::Client;
use model::cluster::kubernetes::KeyPurpose;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use rustls::crypto::ring::{default_provider, sign::any_ecdsa_type};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, SignatureScheme};

const TOKEN: &[u8] = b"{\"sub\":\"system:serviceaccount:kube-system:default\"}";
const SCHEME: SignatureScheme = SignatureScheme::ECDSA_NISTP256_SHA256;
/// Size of an uncompressed point of the curve P-256, at the end of a public key.
const POINT_BYTES: usize = 65;

/// The keys of Kubernetes as they lie in etcd, and so on the disk of every consensus member.
pub async fn stored_keys(client: &Client) -> Result<KubernetesKeys> {
    let key = keys_record_key()?;
    let record = client.get(&key).await?.context("no keys of Kubernetes")?;
    Ok(KubernetesKeys::decode(&key, &record.value)?)
}

/// What copied keys are good for at an API server: a client in `system:masters`, and the token of a service account.
#[derive(Debug)]
pub struct ForgedAccess {
    certificate: Vec<u8>,
    token_signature: Vec<u8>,
}

impl ForgedAccess {
    /// Signs both with these keys. The certificate is valid for a day.
    pub fn create(copied: &KubernetesKeys, now: Timestamp) -> Result<Self> {
        let subject = CertificateSubject {
            organisation: "system:masters".to_owned(),
            name: "kim".to_owned(),
            client_auth: true,
            ..CertificateSubject::default()
        };
        let validity = Validity::starting(now, Duration::from_hours(24));
        let own = Signer::without_certificate(&generate_key()?)?.public_key();
        let clients = &copied.key_ring(KeyPurpose::Clients)?.signer;
        let issued = clients.issue_certificate(&subject, &own, Serial::new(rand::random()), validity)?;
        let accounts = &copied.key_ring(KeyPurpose::ServiceAccounts)?.signer;
        let key = PrivateKeyDer::Pkcs8(accounts.pkcs8().to_vec().into());
        let signer = any_ecdsa_type(&key)?.choose_scheme(&[SCHEME]).context("another kind of key")?;
        Ok(Self { certificate: issued.certificate, token_signature: signer.sign(TOKEN)? })
    }

    /// Whether an API server that has this bundle accepts the certificate.
    pub fn is_client_accepted(&self, bundle: &TrustBundle, now: Timestamp) -> Result<bool> {
        let clients = bundle.authorities.iter().find(|one| one.keys() == wire::KubernetesKeys::Clients);
        let mut roots = RootCertStore::empty();
        for authority in &clients.context("no authority of clients")?.trusted {
            roots.add(CertificateDer::from(authority.clone()))?;
        }
        let provider = Arc::new(default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now.timestamp().try_into()?));
        let certificate = CertificateDer::from(self.certificate.clone());
        Ok(verifier.verify_client_cert(&certificate, &[], now).is_ok())
    }

    /// Whether an API server that has this bundle accepts the token.
    #[must_use]
    pub fn is_token_accepted(&self, bundle: &TrustBundle) -> bool {
        let known = default_provider().signature_verification_algorithms;
        let algorithms = known.mapping.iter().filter(|(scheme, _)| *scheme == SCHEME);
        let algorithms: Vec<_> = algorithms.flat_map(|(_, algorithms)| algorithms.iter()).collect();
        let verifies = |key: &P256PublicKey| {
            let spki = key.to_spki();
            let point = spki.get(spki.len().saturating_sub(POINT_BYTES)..).unwrap_or_default();
            algorithms.iter().any(|one| one.verify_signature(point, TOKEN, &self.token_signature).is_ok())
        };
        bundle.service_account_keys.iter().any(verifies)
    }
}
