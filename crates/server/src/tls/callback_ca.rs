//! Certificate authority of callback servers, sealed in the BMDB.
//!
//! It is used when the operator configures no certificate. The first shepherd creates an authority and seals it in the
//! BMDB, every shepherd issues itself a certificate from it, and agents receive the authority's certificate at
//! enrolment. So an agent can report to any shepherd, and a new shepherd needs only the database and the secrets key.
//!
//! The keys are ECDSA P-256, not Ed25519: browsers and many health checkers reject the latter. The authority is valid
//! for ten years, a certificate from it for two weeks. The key of such a certificate never leaves the memory of the
//! process that generated it.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, date_time_ymd,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use secrecy::{ExposeSecret as _, SecretSlice};

use crate::error::ServerError;
use bmdb::connection::Bmdb;
use bmdb::fleet::secret::SecretsKey;

/// Name under which the authority is sealed.
pub const SECRET_NAME: &str = "agent-callback-ca";

const DAY: Duration = Duration::from_hours(24);
const CA_LIFETIME: Duration = Duration::from_hours(24 * 3652);
const LEAF_LIFETIME: Duration = Duration::from_hours(24 * 14);
/// The clock of a machine without a battery starts a little in the past.
const BACKDATE: Duration = DAY;

/// The authority that issues the certificates of callback servers.
pub struct CallbackCa {
    key: KeyPair,
    certificate: CertificateDer<'static>,
}

impl std::fmt::Debug for CallbackCa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl CallbackCa {
    /// Loads the authority of a BMDB, and creates it if there is none.
    pub async fn load_or_create(
        bmdb: &Bmdb,
        secrets: &SecretsKey,
        now: SystemTime,
    ) -> Result<Self, ServerError> {
        let sealed = secrets.get_or_create(bmdb, SECRET_NAME, || generate_ca_pem(now)).await?;
        Self::from_pem(&sealed)
    }

    fn from_pem(pem: &SecretSlice<u8>) -> Result<Self, ServerError> {
        let odd = |what: &str| {
            ServerError::CallbackCa(format!(
                "the authority that is sealed in the BMDB has no readable {what}"
            ))
        };
        let certificate =
            CertificateDer::from_pem_slice(pem.expose_secret()).map_err(|_| odd("certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(pem.expose_secret()).map_err(|_| odd("key"))?;
        let key = KeyPair::try_from(&key).map_err(|_| odd("key"))?;
        Ok(Self { key, certificate })
    }

    /// The certificate with which agents verify servers, DER.
    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Issues a certificate for these host names and addresses, with a new key.
    pub fn issue_certificate(
        &self,
        names: &[String],
        now: SystemTime,
    ) -> Result<LeafCertificate, ServerError> {
        let failed = |error: rcgen::Error| ServerError::CallbackCa(error.to_string());
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let mut params = CertificateParams::new(names).map_err(failed)?;
        params.distinguished_name = distinguished_name("Shepherd callback server");
        set_validity(&mut params, now - BACKDATE, now + LEAF_LIFETIME);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let issuer = Issuer::new(ca_params(now), &self.key);
        let certificate = params.signed_by(&key, &issuer).map_err(failed)?;
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = rustls::crypto::ring::default_provider();
        let certified = CertifiedKey::from_der(vec![certificate.der().clone()], private, &provider)?;
        Ok(LeafCertificate { certified, renew_at: now + LEAF_LIFETIME / 2 })
    }
}

/// A certificate with its key, and when to replace it.
#[derive(Debug)]
pub struct LeafCertificate {
    /// Certificate and private key for TLS.
    pub certified: CertifiedKey,
    /// Half the lifetime after it was issued.
    pub renew_at: SystemTime,
}

/// Generates the authority: certificate and key as PEM, one after the other.
fn generate_ca_pem(now: SystemTime) -> Result<SecretSlice<u8>, String> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| error.to_string())?;
    let certificate = ca_params(now).self_signed(&key).map_err(|error| error.to_string())?;
    Ok(SecretSlice::from((certificate.pem() + &key.serialize_pem()).into_bytes()))
}

fn ca_params(now: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = distinguished_name("Shepherd callback authority");
    set_validity(&mut params, now - BACKDATE, now + CA_LIFETIME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn distinguished_name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

/// Sets the validity period of a certificate.
fn set_validity(params: &mut CertificateParams, from: SystemTime, until: SystemTime) {
    let since_1970 = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let start = date_time_ymd(1970, 1, 1);
    params.not_before = start + since_1970(from);
    params.not_after = start + since_1970(until);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::{ServerName, UnixTime};

    use super::*;

    /// Whether an agent with `authority` accepts `leaf` as `name` at that time.
    fn is_trusted(authority: &CallbackCa, leaf: &LeafCertificate, name: &str, at: SystemTime) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let at = UnixTime::since_unix_epoch(at.duration_since(SystemTime::UNIX_EPOCH).unwrap());
        let name = ServerName::try_from(name.to_owned()).unwrap();
        verifier.verify_server_cert(&leaf.certified.cert[0], &[], &name, &[], at).is_ok()
    }

    #[test]
    fn issued_certificate_is_trusted_for_its_names_and_lifetime() {
        let now = SystemTime::now();
        let authority = CallbackCa::from_pem(&generate_ca_pem(now).unwrap()).unwrap();
        let names = ["shepherd.example".to_owned(), "192.0.2.7".to_owned(), "::1".to_owned()];
        let leaf = authority.issue_certificate(&names, now).unwrap();
        for (name, at, expected) in [
            ("shepherd.example", now, true),
            ("192.0.2.7", now, true),
            ("::1", now, true),
            ("other.example", now, false),
            ("shepherd.example", now - DAY / 2, true),
            ("shepherd.example", now + 13 * DAY, true),
            ("shepherd.example", now + 15 * DAY, false),
            ("shepherd.example", now - 2 * DAY, false),
        ] {
            assert_eq!(is_trusted(&authority, &leaf, name, at), expected, "{name}");
        }
        assert!(leaf.renew_at < now + 8 * DAY);
        let years_on = now + 3000 * DAY;
        assert!(is_trusted(
            &authority,
            &authority.issue_certificate(&names, years_on).unwrap(),
            "::1",
            years_on
        ));
        let other = CallbackCa::from_pem(&generate_ca_pem(now).unwrap()).unwrap();
        assert!(!is_trusted(&other, &leaf, "shepherd.example", now));
    }

    #[test]
    fn malformed_ca_is_rejected_without_leaking_it() {
        let error =
            CallbackCa::from_pem(&SecretSlice::from(b"very secret".to_vec())).unwrap_err().to_string();
        assert!(error.contains("has no readable certificate") && !error.contains("secret"), "{error}");
    }
}
