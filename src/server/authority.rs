//! The certificate authority of a BMDB's callback servers.
//!
//! Whoever gives no certificate gets one anyway: the first shepherd makes an
//! authority and seals it in the BMDB, every shepherd issues itself a
//! certificate from it, and agents are given the authority's certificate when
//! they are enrolled. So an agent may report to any shepherd, and a new shepherd
//! needs nothing but the database and the secrets key.
//!
//! ECDSA P-256, not Ed25519: browsers and many health checkers refuse the latter.
//! The authority lasts ten years, what it issues two weeks: a leaf's key never
//! leaves the memory of the process that made it.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, date_time_ymd,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use secrecy::{ExposeSecret as _, SecretSlice};

use crate::bmdb::connection::Bmdb;
use crate::bmdb::secret::SecretsKey;
use crate::server::error::ServerError;

/// Name under which the authority is sealed.
pub const SECRET_NAME: &str = "agent-callback-ca";

const DAY: Duration = Duration::from_hours(24);
const AUTHORITY_LASTS: Duration = Duration::from_hours(24 * 3652);
const LEAF_LASTS: Duration = Duration::from_hours(24 * 14);
/// Machines without a battery for their clock start a little in the past.
const BEFORE: Duration = DAY;

/// An authority that callback servers' certificates are issued from.
pub struct Authority {
    key: KeyPair,
    certificate: CertificateDer<'static>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// The authority of a BMDB, made if there is none.
    pub async fn shared(bmdb: &Bmdb, secrets: &SecretsKey, now: SystemTime) -> Result<Self, ServerError> {
        let sealed = secrets.get_or_create(bmdb, SECRET_NAME, || make(now)).await?;
        Self::from_pem(&sealed)
    }

    fn from_pem(pem: &SecretSlice<u8>) -> Result<Self, ServerError> {
        let odd = |what: &str| {
            ServerError::Authority(format!("the authority that is sealed in the BMDB has no readable {what}"))
        };
        let certificate =
            CertificateDer::from_pem_slice(pem.expose_secret()).map_err(|_| odd("certificate"))?;
        let key = PrivateKeyDer::from_pem_slice(pem.expose_secret()).map_err(|_| odd("key"))?;
        let key = KeyPair::try_from(&key).map_err(|_| odd("key"))?;
        Ok(Self { key, certificate })
    }

    /// Its certificate, DER: what agents verify servers against.
    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Issues a certificate for these host names and addresses, with a new key.
    pub fn issue(&self, names: &[String], now: SystemTime) -> Result<Leaf, ServerError> {
        let failed = |error: rcgen::Error| ServerError::Authority(error.to_string());
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let mut params = CertificateParams::new(names).map_err(failed)?;
        params.distinguished_name = name("Shepherd callback server");
        valid(&mut params, now - BEFORE, now + LEAF_LASTS);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let issuer = Issuer::new(authority_params(now), &self.key);
        let certificate = params.signed_by(&key, &issuer).map_err(failed)?;
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = rustls::crypto::ring::default_provider();
        let certified = CertifiedKey::from_der(vec![certificate.der().clone()], private, &provider)?;
        Ok(Leaf { certified, renew_at: now + LEAF_LASTS / 2 })
    }
}

/// A certificate with its key, and when to replace it.
#[derive(Debug)]
pub struct Leaf {
    /// What to show.
    pub certified: CertifiedKey,
    /// Half its life from when it was issued.
    pub renew_at: SystemTime,
}

/// Certificate and key as PEM, one after the other.
fn make(now: SystemTime) -> Result<SecretSlice<u8>, String> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| error.to_string())?;
    let certificate = authority_params(now).self_signed(&key).map_err(|error| error.to_string())?;
    Ok(SecretSlice::from((certificate.pem() + &key.serialize_pem()).into_bytes()))
}

fn authority_params(now: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = name("Shepherd callback authority");
    valid(&mut params, now - BEFORE, now + AUTHORITY_LASTS);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

/// Sets from when until when a certificate counts.
fn valid(params: &mut CertificateParams, from: SystemTime, until: SystemTime) {
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

    /// Whether an agent that was given `authority` believes `leaf` to be `name` at a time.
    fn believed(authority: &Authority, leaf: &Leaf, name: &str, at: SystemTime) -> bool {
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
    fn issued_certificate_is_believed_for_its_names_and_its_time() {
        let now = SystemTime::now();
        let authority = Authority::from_pem(&make(now).unwrap()).unwrap();
        let names = ["shepherd.example".to_owned(), "192.0.2.7".to_owned(), "::1".to_owned()];
        let leaf = authority.issue(&names, now).unwrap();
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
            assert_eq!(believed(&authority, &leaf, name, at), expected, "{name}");
        }
        assert!(leaf.renew_at < now + 8 * DAY);
        let years_on = now + 3000 * DAY;
        assert!(believed(&authority, &authority.issue(&names, years_on).unwrap(), "::1", years_on));
        let other = Authority::from_pem(&make(now).unwrap()).unwrap();
        assert!(!believed(&other, &leaf, "shepherd.example", now));
    }

    #[test]
    fn what_is_no_authority_is_refused_without_showing_it() {
        let error = Authority::from_pem(&SecretSlice::from(b"very secret".to_vec())).unwrap_err().to_string();
        assert!(error.contains("has no readable certificate") && !error.contains("secret"), "{error}");
    }
}
